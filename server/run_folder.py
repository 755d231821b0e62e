"""The run's folder: what a run leaves behind, written as it goes."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fedpriv
from fedpriv.config import RunConfig, to_toml
from fedpriv.errors import InputError
from server.history import ClientRow, RoundRow

_PACKAGES = ("flwr", "torch", "transformers", "peft", "dp-accounting", "numpy", "datasets", "cryptography")


class RunFolder:
    """Writes a run's files; tables grow by a row at a time, so that a stopped run keeps what it did.

    Args:
        path: a folder that does not exist yet or is empty.
        config: of the run.

    Raises:
        InputError: the folder already holds something.
    """

    def __init__(self, path: Path, config: RunConfig) -> None:
        if path.exists() and any(path.iterdir()):
            raise InputError(f"out = {str(path)!r}: already holds a run; name another folder")
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        (path / "config.toml").write_text(to_toml(config))
        write_json(path / "environment.json", environment())
        for name, row in (("rounds.csv", RoundRow), ("clients.csv", ClientRow)):
            with (path / name).open("w", newline="") as file:
                csv.writer(file).writerow(field.name for field in fields(row))

    def add(self, round_: RoundRow, clients: Sequence[ClientRow]) -> None:
        """Append a finished round."""
        _append(self.path / "rounds.csv", [round_])
        _append(self.path / "clients.csv", clients)

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


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write atomically; infinities become null, since JSON has none."""
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(finite, indent=2) + "\n")
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
