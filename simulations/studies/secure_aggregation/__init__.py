"""What secure aggregation is worth: accuracy at equal epsilon, and what colluders cost."""
