"""The run's folder: what a run leaves behind, written as it goes."""

from __future__ import annotations

import csv
import io
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self, TypeVar

import fedpriv
from fedpriv import strict_json
from fedpriv.config import RunConfig, to_toml
from fedpriv.errors import InputError
from fedpriv.journal import Journal
from fedpriv.protocol import Registration
from fedpriv.runs.rows import ClientRow, RoundRow

Row = TypeVar("Row", RoundRow, ClientRow)

_PACKAGES = ("flwr", "torch", "transformers", "peft", "dp-accounting", "numpy", "datasets", "cryptography")


class RunFolder:
    """Writes a run's files; tables grow by a row at a time, so that a stopped run keeps what it did.

    Args:
        path: the folder; `created` and `reopened` make it ready.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds: list[RoundRow] = []
        self.clients: list[ClientRow] = []
        self.journal = Journal(path / "events.jsonl")

    @classmethod
    def created(cls, path: Path, config: RunConfig) -> Self:
        """A new run's folder.

        Raises:
            InputError: the folder already holds something.
        """
        if path.exists() and any(path.iterdir()):
            raise InputError(f"out = {str(path)!r}: already holds a run; name another folder, or resume it")
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.toml").write_text(to_toml(config))
        write_json(path / "environment.json", environment())
        folder = cls(path)
        folder._write_tables()
        return folder

    @classmethod
    def reopened(cls, path: Path, *, round_: int) -> Self:
        """The folder of a run that goes on after this round; what its tables say of later ones is dropped.

        Raises:
            InputError: a table is missing or damaged.
        """
        folder = cls(path)
        try:
            folder.rounds = [row for row in _read(path / "rounds.csv", RoundRow) if row.round <= round_]
            folder.clients = [row for row in _read(path / "clients.csv", ClientRow) if row.round <= round_]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"resume = {str(path)!r}: its tables cannot be read ({error})") from None
        if [row.round for row in folder.rounds] != list(range(round_ + 1)):
            raise InputError(f"resume = {str(path)!r}: rounds.csv does not hold rounds 0 to {round_}")
        folder._write_tables()
        return folder

    def _write_tables(self) -> None:
        for name, kind, rows in (("rounds.csv", RoundRow, self.rounds), ("clients.csv", ClientRow, self.clients)):
            temporary = self.path / f"{name}.tmp"
            with temporary.open("w", newline="") as file:
                csv.writer(file).writerow(field.name for field in fields(kind))
            _append(temporary, rows)
            temporary.replace(self.path / name)

    def keep(self, registrations: Sequence[Registration]) -> None:
        """Write down what the nodes registered, with their signatures, so that anybody can check them later."""
        write_json(self.path / "registrations.json", {str(r.client): asdict(r) for r in registrations})

    def add(self, round_: RoundRow, clients: Sequence[ClientRow]) -> None:
        """Append a finished round."""
        self.rounds.append(round_)
        self.clients.extend(clients)
        _append(self.path / "rounds.csv", [round_])
        _append(self.path / "clients.csv", clients)
        for row in clients:
            place = {"round": row.round, "client": row.client}
            self.journal.write("reply", **place, status=row.status, detail=row.detail, bytes_up=row.bytes_up)
        names = ("num_selected", "num_replies", "num_failures", "num_late", "test_accuracy", "epsilon_local_max")
        self.journal.write("round_done", round=round_.round, **{name: getattr(round_, name) for name in names})

    @property
    def ledger(self) -> Path:
        """Where the run's ledger stands, or a copy of it as it was at the end."""
        return self.path / "ledger.sqlite"

    def variant(self, name: str) -> Path:
        """The folder of a model variant."""
        path = self.path / "variants" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which marks the run as complete."""
        write_json(self.path / "summary.json", summary)


def _append(path: Path, rows: Sequence[RoundRow | ClientRow]) -> None:
    with path.open("a", newline="") as file:
        csv.writer(file).writerows(asdict(row).values() for row in rows)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a table, as they were written."""
    types = {field.name: str(field.type) for field in fields(kind)}
    with path.open(newline="") as file:
        text = file.read()
    whole = io.StringIO(text[: text.rfind("\n") + 1], newline="")  # a crash may have cut the last line
    return [kind(**{n: _parsed(v, types[n]) for n, v in row.items()}) for row in csv.DictReader(whole)]


def _parsed(text: str, kind: str) -> Any:
    if kind == "str":
        return text
    if kind == "int":
        return int(text)
    return None if not text and kind == "float | None" else float(text)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write atomically; infinities become null, since JSON has none."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(strict_json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def environment() -> dict[str, Any]:
    """Versions and machine, so that a figure can be traced to what made it."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "fedpriv": fedpriv.__version__,
        "fedpriv_file": fedpriv.__file__,
        "commit": _commit(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        **versions,
    }


def _commit() -> str | None:
    """The commit of the checkout that fedpriv comes from, or None."""
    command = ["git", "-C", str(Path(fedpriv.__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
