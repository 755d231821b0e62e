"""Folders of runs as the server's own writers leave them, and what `fedpriv status` tells of them."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedpriv.holder.wire.kinds import Registration
from fedpriv.learning.aggregation._fedavg import GlobalModel
from fedpriv.runs._folder import RunFolder
from fedpriv.runs._rows import ClientRow, RoundRow
from fedpriv.runs._status import RunStatus, status_of
from fedpriv.runs._writer import RunWriter
from fedpriv.runs.show._terminal import show_status
from server import checkpoint
from server.checkpoint import Checkpoint
from simulations.display import TerminalObserver

NOW = 1_800_000_000.0
SIZES = {0: 1200, 1: 900, 2: 300}
NAMES = {0: "St. Anna", 1: "General", 2: "Hillside"}
INITIAL = {"A": torch.zeros(2, 3)}
WriteRun = Callable[..., Path]


def client_row(round_: int, client: int, status: str = "ok", detail: str = "", **changes: Any) -> ClientRow:
    values = {
        **{"num_records": SIZES.get(client, 100), "sampling_probability": 0.1, "steps": 3, "weight": 0.3},
        **{"noise_multiplier": 1.88, "effective_noise_multiplier": 1.88, "rho_bar": 0.6, "delta": 1e-5 / (client + 1)},
        **{"epsilon_local": 0.1 * round_ * (client + 1), "epsilon_rho": 0.2 * round_ * (client + 1)},
        **{"epsilon_aggregate": None, "bytes_up": 1000, "bytes_down": 2000, "seconds": math.nan},
    }
    return ClientRow(round=round_, client=client, status=status, detail=detail, **{**values, **changes})


def round_row(round_: int, clients: list[ClientRow], **changes: Any) -> RoundRow:
    num_failures = sum(row.status not in ("ok", "silent") for row in clients)
    values = {
        **{"num_selected": len(clients), "num_replies": len(clients) - num_failures, "num_failures": num_failures},
        **{"num_silent": 0, "num_late": 0, "num_retired": 0, "seconds": 4.0},
        **{"test_accuracy": 0.125 + 0.1 * round_, "test_loss": 2.0, "epsilon_aggregate_max": None},
        "epsilon_local_max": max((row.epsilon_local for row in clients), default=0.0),
        "epsilon_rho_max": max((row.epsilon_rho for row in clients), default=0.0),
        "bytes_up": sum(row.bytes_up for row in clients),
        "bytes_down": sum(row.bytes_down for row in clients),
    }
    return RoundRow(round=round_, **{**values, **changes})


def registrations() -> tuple[Registration, ...]:
    return tuple(Registration(client=c, num_records=n, name=NAMES[c], data_set=f"d{c}") for c, n in SIZES.items())


def write_checkpoint(folder: Path, round_: int, retired: Mapping[int, str], skipped: tuple[int, ...] = ()) -> None:
    model = GlobalModel(initial=INITIAL, adapter=INITIAL)
    made = Checkpoint(
        **{"run": "5eed", "round": round_, "digest": "d", "ledger": (1, "e"), "model": model, "uploads": {}},
        **{"registrations": registrations(), "retired": retired, "skipped": skipped},
    )
    RunWriter(folder).write_registrations({each.client: vars(each) for each in registrations()})
    checkpoint.write(folder, made)


def wrote(folder: Path, seconds_ago: float) -> None:
    """Let everything in the folder look as if it was written so long before NOW."""
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (NOW - seconds_ago, NOW - seconds_ago))


def event(name: str, **fields: Any) -> str:
    return json.dumps({"time": "2026-11-21T10:15:48.123456+00:00", "event": name, "run": "5eed", **fields}) + "\n"


def status(folder: Path) -> RunStatus:
    return status_of(RunFolder(folder, now=NOW))


def closing(folder: Path, width: int = 120, **changes: Any) -> str:
    """What a finished run ends with on a terminal."""
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    TerminalObserver(console).finished(folder, RunFolder(folder).summary | changes)
    return console.export_text()


def shown(found: RunStatus, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115, PTH123
    show_status(RunFolder(found.run_dir, now=NOW), console)
    return console.export_text()
