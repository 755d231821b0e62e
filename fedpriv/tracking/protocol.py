"""What every tracker does, and which there are."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol, cast

from fedpriv.config import Track
from fedpriv.errors import InputError
from fedpriv.tracking.logged import Parameter, Point

Ending = Literal["finished", "failed"]

# As an organisation's tracker shows it, unless a sweep or the tracker's own variable gives a name.
EXPERIMENT = "fedpriv"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run is to be found in a tracker.

    Attributes:
        name: of the run.
        folder: of the run's files.
        sweep: the title of the sweep that it belongs to; None for a run of its own.
        sweep_folder: of that sweep.
        parent: the sweep's own id, in trackers that have one.
    """

    name: str
    folder: Path
    sweep: str | None = None
    sweep_folder: Path | None = None
    parent: str | None = None


class TrackedRun(Protocol):
    """A run in a tracker; every method raises what the tracker raises."""

    @property
    def id(self) -> str:
        """With which the run can be opened again."""

    def log_parameters(self, values: Mapping[str, Parameter]) -> None:
        """What the run was asked for; repeating it does no harm."""

    def log_points(self, points: Sequence[Point]) -> None:
        """Values by round."""

    def log_final(self, figures: Mapping[str, float], facts: Mapping[str, str], round_: int) -> None:
        """What the run reached after its last round."""

    def log_files(self, folder: Path) -> None:
        """All files of a folder."""

    def end(self, ending: Ending) -> None:
        """The run is over, or was broken off; it can be opened again."""


class Tracker(Protocol):
    """A module of this package that bears the tracker's name has these functions."""

    def open_run(self, place: Place, known: str | None) -> TrackedRun:
        """A new run, or the one with the id that is known."""

    def open_sweep(self, title: str, folder: Path, keys: Sequence[str], known: str | None) -> TrackedRun | None:
        """The run under which those of a sweep are shown; None where trackers group them by name."""


def check_installed(track: Track) -> None:
    """Refuse a tracker whose package is missing, before anything is run.

    Raises:
        InputError: names the extra to install.
    """
    if track != "none" and find_spec(track) is None:
        raise InputError(f"track = {track}: needs {track}; pip install 'fedpriv[{track}]', or use none")


def tracker_of(track: Track) -> Tracker:
    """The tracker of that name, whose package is loaded here."""
    return cast(Tracker, importlib.import_module(f"fedpriv.tracking.{track}"))
