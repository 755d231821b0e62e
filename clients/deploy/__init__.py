"""What a data holder does on its machine: make a node, approve models and code, take part."""
