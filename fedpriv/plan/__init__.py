"""What a run could learn, needs, sends and costs, and whether it may be, before it starts."""
