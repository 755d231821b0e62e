"""The HTTP side of a server of variants: who may ask what, in which shape, and how much of it."""
