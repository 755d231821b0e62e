"""The study behind results/audit.md."""
