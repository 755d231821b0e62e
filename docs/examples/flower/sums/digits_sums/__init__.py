"""Secure sums for an app with plain FedAvg."""
