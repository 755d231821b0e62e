"""A data holder's kit for its machine: make a node, approve models and code, take part."""
