"""Client-level differential privacy for an app that stays as it is."""
