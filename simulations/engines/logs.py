"""Keeps Flower's lines out of what a user sees."""

from __future__ import annotations

import logging

from simulations.engines.flower_private import colours_on_a_terminal_alone


def leave_output_to_display() -> None:
    """Show Flower's warnings alone; it sets its level when it is imported, which takes seconds."""
    colours_on_a_terminal_alone()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    logging.getLogger("flwr").propagate = False
