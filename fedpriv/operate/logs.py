"""A program's log: every line with its time, none of them blank, and in a file that does not grow for ever."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from fedpriv.operate.flower import plain

_FILE_BYTES, _NUM_OLD_FILES = 10 * 2**20, 3

# Flower structures its log by lines that hold a level and nothing else.
_BLANK = re.compile(r"(?:[A-Z]+\s*:?)?\s*")


class Log:
    """Takes lines, from any thread, shows and keeps them.

    Args:
        show: prints a line; None shows none.
        path: of the file that keeps the last 40 MB without colours; None keeps none. Where it cannot be written, lines
            are only shown.
    """

    def __init__(self, show: Callable[[str], None] | None, path: Path | None = None) -> None:
        self._show = show
        self._file = None if path is None else _File(path, maxBytes=_FILE_BYTES, backupCount=_NUM_OLD_FILES, delay=True)

    def __call__(self, line: str) -> None:
        """Take a line: it gets the time in UTC in front; a blank one is left out."""
        if _BLANK.fullmatch(plain(line)):
            return
        line = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {line}"
        if self._show is not None:
            self._show(line)
        if self._file is not None:
            self._file.handle(logging.makeLogRecord({"msg": plain(line)}))


class _File(RotatingFileHandler):
    """A file for its owner alone: what a vault tells its operator, such as when it failed, is for nobody else."""

    def _open(self) -> TextIOWrapper:
        file = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return os.fdopen(file, "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Nothing: a full disk must end no program."""
