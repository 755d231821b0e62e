"""What a coordinator does on its machine: make a federation, let nodes in, start runs."""
