"""How folders are shown: as seen from here, where that is shorter and says nothing of the machine."""

from __future__ import annotations

from pathlib import Path


def from_here(path: Path) -> Path:
    """The path relative to the working directory if it lies in there, else as it is."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
