"""The study's part of results/dedup.md: each table and figure of Guan et al. 2025, and the same made here."""
