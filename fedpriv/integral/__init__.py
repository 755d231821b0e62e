"""Integrally private models: those that many disjoint data sets could have produced (Varshney and Torra 2023)."""
