"""A coordinator's kit for its machine: make a federation, let nodes in, start runs."""
