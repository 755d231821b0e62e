"""Record-level differential privacy in the train function of an app."""
