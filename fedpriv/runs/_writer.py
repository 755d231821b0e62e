"""Writes a run's folder while the run goes on."""

import csv
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.config import RunConfig, to_toml
from fedpriv.errors import InputError
from fedpriv.files import LIBRARY, Journal, library_digest, remove_files, replace_file, replaced_file, write_new
from fedpriv.runs import files
from fedpriv.runs._rows import ClientRow, RoundRow, Sample, StoredAnswer, column_types, read_rows
from fedpriv.runs.files import write_json
from fedpriv.texts import VERSION

_PACKAGES = ("flwr", "torch", "transformers", "peft", "dp-accounting", "numpy", "datasets", "cryptography")


class ClientTotals:
    """Sums over the rows of clients.csv, and the last round that used each client's upload; rows are on disk alone."""

    def __init__(self) -> None:
        self.bytes_up, self.bytes_down = Counter[int](), Counter[int]()
        self.last_used: dict[int, int] = {}
        self.num_malformed = 0

    def add(self, rows: Iterable[ClientRow]) -> None:
        """Count further rows, of rounds in their order."""
        for row in rows:
            self.bytes_up[row.client] += row.bytes_up
            self.bytes_down[row.client] += row.bytes_down
            self.num_malformed += row.status == "malformed"
            if row.status == "ok":
                self.last_used[row.client] = row.round


class RunWriter:
    """Writes the folder that `created` or `reopened` made ready, row by row, so that a stopped run keeps its past."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds: list[RoundRow] = []
        self.totals = ClientTotals()
        self.journal = Journal(path / files.EVENTS)
        self._progress: dict[str, Any] = {}
        self._progress_written = -math.inf

    @classmethod
    def created(cls, path: Path, config: RunConfig) -> Self:
        """The writer of a new run's folder; InputError if the folder is not empty."""
        files.check_unused(path)
        path.mkdir(parents=True, exist_ok=True)
        return cls._begun(path, config)

    @classmethod
    def started_over(cls, path: Path, config: RunConfig) -> Self:
        """The writer of a run that keeps nothing of an interrupted attempt in its folder but the files of others."""
        if path.is_symlink() or not path.exists():
            return cls.created(path, config)
        remove_files(path, (files.CONFIG, files.EVENTS, files.PROGRESS, files.SUMMARY))
        return cls._begun(path, config)

    @classmethod
    def _begun(cls, path: Path, config: RunConfig) -> Self:
        """The writer of a folder that holds no run; of two that begin there at the same moment one is refused."""
        write_new(path / files.CONFIG, to_toml(config).encode(), mode=None)
        write_json(
            path / files.ENVIRONMENT, {"version": files.VERSION, **environment(), "base_dtype": config.base_dtype}
        )
        writer = cls(path)
        writer._write_tables()
        return writer

    @classmethod
    def reopened(cls, path: Path, *, round_: int) -> Self:
        """The writer of a run that resumes after this round: its tables, to be sound, lose rows of later rounds."""
        writer = cls(path)
        try:
            rounds = [RoundRow(**row) for row in read_rows(path / files.ROUNDS, RoundRow)]
            clients = [ClientRow(**row) for row in read_rows(path / files.CLIENTS, ClientRow)]
        except (OSError, InputError) as error:
            raise InputError(f"resume = {str(path)!r}: its tables cannot be read ({error})") from None
        writer.rounds = [row for row in rounds if row.round <= round_]
        clients = [row for row in clients if row.round <= round_]
        writer.totals.add(clients)
        if [row.round for row in writer.rounds] != list(range(round_ + 1)):
            raise InputError(f"resume = {str(path)!r}: {files.ROUNDS} does not hold rounds 0 to {round_}")
        writer._write_tables(clients)
        return writer

    def _write_tables(self, clients: Sequence[ClientRow] = ()) -> None:
        _write_table(self.path / files.ROUNDS, RoundRow, self.rounds)
        _write_table(self.path / files.CLIENTS, ClientRow, clients)

    def write_registrations(self, registrations: Mapping[int, Mapping[str, Any]]) -> None:
        """Write what each client registered, with its signature, so that anyone can check them later."""
        write_json(self.path / files.REGISTRATIONS, {str(client): each for client, each in registrations.items()})

    def write_digests(self, digests: Mapping[str, Any]) -> None:
        """Write the digests of the data for this user alone, since they tell of records."""
        replace_file(self.path / files.DIGESTS, json.dumps(digests).encode(), mode=0o600)

    def register_audit(self, registration: Mapping[str, Any]) -> None:
        """Write what an audit has chosen, before the first round; InputError if a resumed run had chosen otherwise."""
        path = self.path / files.AUDIT
        if not path.exists():
            write_json(path, registration)
        elif files.read_values(path) != registration:
            raise InputError(f"{path}: other canaries, coins or guesses were registered before the first round")

    def write_audit_scores(self, scores: NDArray[np.float64], included: NDArray[np.bool_]) -> None:
        """Write the score of each canary, [canaries], and whether it was included, atomically."""
        rows = zip(scores.tolist(), included.astype(int).tolist(), strict=True)
        text = "score,included\n" + "".join(f"{score!r},{coin}\n" for score, coin in rows)
        replace_file(self.path / files.AUDIT_SCORES, text.encode())

    def add(self, round_: RoundRow, clients: Sequence[ClientRow]) -> None:
        """Append a finished round."""
        self.rounds.append(round_)
        self.totals.add(clients)
        _append(self.path / files.ROUNDS, [round_])
        _append(self.path / files.CLIENTS, clients)
        for row in clients:
            keys = {"round": row.round, "client": row.client}
            self.journal.write("reply", **keys, status=row.status, detail=row.detail, bytes_up=row.bytes_up)
        names = ("num_selected", "num_replies", "num_failures", "num_late", "test_accuracy", "epsilon_local_max")
        self.journal.write("round_done", round=round_.round, **{name: getattr(round_, name) for name in names})

    def note_progress(self, round_: int, clients: Mapping[int, str]) -> None:
        """Let readers know what the clients of a round do before it is over; at most once a second.

        It is for display alone, so that a file which cannot be written costs nothing.
        """
        known = {"round": round_, "clients": {str(client): doing for client, doing in clients.items()}}
        if known == self._progress or time.monotonic() - self._progress_written < 1.0:
            return
        self._progress, self._progress_written = known, time.monotonic()
        with suppress(OSError):
            write_json(self.path / files.PROGRESS, known)

    @property
    def ledger(self) -> Path:
        """The run's ledger, or a copy of it from the end of the run."""
        return self.path / files.LEDGER

    def variant(self, name: str) -> Path:
        """The folder of a model variant, which is made if it is missing."""
        path = self.path / files.VARIANTS / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def write_answers(self, answers: Sequence[Sample] | Sequence[StoredAnswer], file: str = files.SAMPLES) -> None:
        """Write prompts with the models' answers to one of the run's files, atomically; without any it goes."""
        path = self.path / file
        if not answers:
            path.unlink(missing_ok=True)
            return
        replace_file(path, "".join(f"{json.dumps(asdict(each))}\n" for each in answers).encode(), mode=None)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which marks the run as finished."""
        write_json(self.path / files.SUMMARY, summary)


def _write_table(path: Path, kind: type[RoundRow | ClientRow], rows: Sequence[RoundRow | ClientRow]) -> None:
    """Replace a table atomically."""
    with replaced_file(path) as whole, Path(whole.name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(column_types(kind))
        csv.writer(file).writerows(asdict(row).values() for row in rows)


def _append(path: Path, rows: Sequence[RoundRow | ClientRow]) -> None:
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(asdict(row).values() for row in rows)
        file.flush()
        os.fsync(file.fileno())


def environment() -> dict[str, Any]:
    """The versions and the machine, so that a figure can be traced to what produced it."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "fedpriv": VERSION,
        "fedpriv_digest": library_digest(),
        "fedpriv_file": str(LIBRARY / "__init__.py"),
        "commit": _commit(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        **_gpu(),
        **versions,
    }


def _gpu() -> dict[str, str]:
    """The name of the first GPU, if there is one."""
    import torch  # deferred: reading a run's files takes no torch

    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _commit() -> str | None:
    """The commit of the checkout that fedpriv was imported from, or None."""
    command = ["git", "-C", str(LIBRARY), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
