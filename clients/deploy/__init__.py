"""What a data holder does on its machine: make a node, register its data, approve code, take part."""
