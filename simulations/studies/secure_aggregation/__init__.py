"""The worth of secure aggregation: accuracy at equal epsilon, and the cost of colluders."""
