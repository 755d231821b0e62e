"""What a folder's page shows, read anew only if the folder has changed."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from fedpriv.errors import InputError
from fedpriv.live import run_page, sweep_page
from fedpriv.live.templating import rendered
from fedpriv.runs import files, presence
from fedpriv.runs.reader import read_run
from fedpriv.runs.show.page import render
from fedpriv.runs.sweeps import KEY, is_sweep

log = logging.getLogger("fedpriv")

_PIECES = tuple(dict.fromkeys([*run_page._RUN_PIECES, *sweep_page._SWEEP_PIECES]))

# What a run writes, in its folder or one level below.
_WATCHED = ("*", f"{files.CHECKPOINTS}/*", f"{files.COMPARISON}/*")
_WATCHED_OF_A_SWEEP = ("*", f"*/{files.ROUNDS}", f"*/{files.SUMMARY}", f"*/{files.PRESENCE}")

# matplotlib's settings belong to the whole process.
_drawing = threading.Lock()


class LivePage:
    """The pieces of a folder's page, whatever the folder is by now; nothing that is in it, or is not, raises.

    Args:
        folder: of a run or a sweep, which may not be there yet.

    Attributes:
        title: the folder's name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.title = folder.absolute().name
        self._seen: object = None
        self._pieces: dict[str, str] = {}
        self._report: tuple[object, str] | None = None

    def read(self) -> dict[str, str]:
        """{name: HTML} of all pieces; those that this folder has none of are empty."""
        with _drawing:
            seen = self._signature()
            if seen != self._seen:
                self._pieces, self._seen = dict.fromkeys(_PIECES, "") | self._read(), seen
            return self._pieces

    def report(self) -> str:
        """The report of a finished run, made from its tables.

        Raises:
            InputError: the run is not finished, or its folder is damaged.
        """
        with _drawing:
            seen = self._signature()
            if self._report is None or self._report[0] != seen:
                self._report = (seen, render(read_run(self._folder)))
            return self._report[1]

    def has_run(self, key: str) -> bool:
        """Whether the folder is that of a sweep with a run of this key."""
        return KEY.fullmatch(key) is not None and (self._folder / key).is_dir() and is_sweep(self._folder)

    def _read(self) -> dict[str, str]:
        now = time.time()
        try:
            if (self._folder / files.CONFIG).is_file():
                return run_page.run_pieces(self._folder, now=now)
            if is_sweep(self._folder):
                return sweep_page.sweep_pieces(self._folder, now=now)
            return self._note("Nothing here yet", "No run has begun in this folder. The page shows it once it does.")
        except (InputError, OSError) as error:
            # Also what a run is just writing; the next look may see it whole.
            return self._note("This folder cannot be read now", str(error).replace(str(self._folder), "the folder"))
        except Exception:  # what is in the folder is anybody's, and must not end the page
            log.exception("%s: cannot be shown", self._folder)
            return self._note("This folder cannot be shown", "One of its files holds what no run writes.")

    def _note(self, title: str, text: str) -> dict[str, str]:
        return rendered("note.html.j2", ("head", "notes"), name=self.title, title=title, text=text)

    def _signature(self) -> object:
        """Changes whenever the page would."""
        patterns = _WATCHED if (self._folder / files.CONFIG).is_file() else _WATCHED_OF_A_SWEEP
        found, newest = [], 0.0
        for path in (path for pattern in patterns for path in self._folder.glob(pattern)):
            try:
                stat = path.stat()
            except OSError:
                continue
            found.append((str(path), stat.st_mtime_ns, stat.st_size))
            newest = max(newest, stat.st_mtime)
        # A silent folder changes its state by itself, too.
        return sorted(found), self._lives(), int((time.time() - newest) // 60)

    def _lives(self) -> list[bool | None]:
        if (self._folder / files.CONFIG).is_file():
            return [presence.is_alive(self._folder)]
        return [presence.is_alive(path.parent) for path in sorted(self._folder.glob(f"*/{files.PRESENCE}"))]
