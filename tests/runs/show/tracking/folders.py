"""A run's folder as a finished run leaves it, without a run: five rounds, two clients, one comparison."""

import math
from pathlib import Path
from typing import Any

from fedpriv.config import RunConfig
from fedpriv.runs import files
from fedpriv.runs._rows import ClientRow, RoundRow
from fedpriv.runs._writer import RunWriter

NUM_ROUNDS = 5
SECRET = "secret-project"


def config(folder: Path, **changes: Any) -> RunConfig:
    """Of a run whose paths, all below a folder of a telling name, must not be told."""
    values = {"out": str(folder), "data": f"/home/{SECRET}/letters.csv", "model": f"/home/{SECRET}/my-model"}
    values |= {"ledger": f"/home/{SECRET}/ledger.sqlite", "ray_address": f"ray://{SECRET}:10001", "num_clients": 2}
    return RunConfig(**{**values, **changes})


def round_row(round_: int, *, epsilon: float = 0.5) -> RoundRow:
    """A row with a different value in every column."""
    return RoundRow(
        **{"round": round_, "num_selected": 2, "num_replies": 2, "num_silent": 0, "num_failures": 0, "num_late": 1},
        **{"num_retired": 0, "test_accuracy": 0.5 + round_ / 100, "test_loss": 1 / (1 + round_), "seconds": 0.125},
        **{"epsilon_local_max": epsilon * round_, "epsilon_rho_max": math.inf, "epsilon_aggregate_max": None},
        **{"bytes_up": 1000 + round_, "bytes_down": 2000 + round_},
    )


def client_row(round_: int, client: int) -> ClientRow:
    """A row of one of the clients."""
    return ClientRow(
        **{"round": round_, "client": client, "num_records": 77, "status": "ok", "detail": f"/home/{SECRET}"},
        **{"sampling_probability": 1.0, "noise_multiplier": 1.0, "effective_noise_multiplier": 1.0, "steps": 1},
        **{"weight": 0.5, "rho_bar": 0.7, "epsilon_local": 0.25 * round_ + client, "epsilon_rho": 0.5 * round_},
        **{"epsilon_aggregate": None, "delta": 1e-5, "bytes_up": 500, "bytes_down": 1000, "seconds": 0.1},
    )


def begun(folder: Path, *, checkpoint: int, rounds: int, **changes: Any) -> RunWriter:
    """A run's folder with rows of rounds 0 to `rounds`, of which a checkpoint holds those up to `checkpoint`."""
    writer = RunWriter.created(folder, config(folder, **changes))
    files.write_json(folder / files.REGISTRATIONS, {"0": {"client": 0}, "1": {"client": 1}})
    for round_ in range(rounds + 1):
        writer.add(round_row(round_), [client_row(round_, client) for client in (0, 1)] if round_ else [])
    (folder / files.CHECKPOINTS / files.checkpoint_name(checkpoint)).mkdir(parents=True)
    return writer


def summary() -> dict[str, Any]:
    """The figures of a finished run: numbers, words, what is empty, and lists."""
    clients = [
        {"client": k, "name": f"St. {SECRET}", "num_records": 77, "epsilon_local": 1.0 + k, "epsilon_rho": None}
        for k in (0, 1)
    ]
    return {
        **{"accuracy": 0.625, "accuracy_non_private": None, "private": True, "labels": ["a", "b"]},
        **{"epsilon_local_max": 2.0, "num_rounds": NUM_ROUNDS, "caveat": "", "noise_source": "secure"},
        **{"audit": {"epsilon_lower": 0.25, "claim": "holds"}, "clients": clients, "ledger_head": "abc"},
    }
