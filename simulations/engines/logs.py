"""Keeps Flower's lines out of what a user sees."""

from __future__ import annotations

import logging

from simulations.engines.flower_private import colours_on_a_terminal_alone


def leave_output_to_display() -> None:
    """Show Flower's warnings alone; importing Flower, which sets a level of its own, takes seconds."""
    colours_on_a_terminal_alone()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    logging.getLogger("flwr").propagate = False
