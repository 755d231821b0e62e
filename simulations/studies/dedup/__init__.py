"""Deduplication of networks that were trained under differential privacy, as in Guan et al. 2025, section 5."""
