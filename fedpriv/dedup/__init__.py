"""Deduplication of model variants by shared blocks, within bounds on utility and privacy."""
