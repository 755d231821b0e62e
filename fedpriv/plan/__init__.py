"""Look at a run before it starts: what it could learn, needs, sends and costs, and whether it may be."""
