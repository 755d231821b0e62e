"""The privacy cost of LMO noise: its parameters, the distribution that they describe, its curves and its event."""
