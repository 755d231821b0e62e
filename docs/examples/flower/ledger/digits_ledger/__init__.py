"""A ledger and an exact epsilon for an app with Flower's LocalDpMod."""
