"""A small finished run, in the tables that a run writes."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fedpriv.runs._folder import LANGUAGE_KEYS, QUALITY_KEYS
from fedpriv.runs._rows import ClientRow, RoundRow
from fedpriv.runs._writer import _write_table
from tests.pages import without_plots
from tests.runs import written

BYTES = 307_232  # one adapter of 76,808 values in float32
WriteRun = Callable[..., Path]


@pytest.fixture
def plots() -> None:
    """Has the pages of a test drawn with their plots."""


@pytest.fixture(autouse=True)
def _pages_without_other_plots(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if "plots" in request.fixturenames else without_plots():
        yield


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a finished run; keyword arguments replace keys of its summary."""

    def write(name: str = "run", *, num_clients: int = 5, num_rounds: int = 10, **summary: Any) -> Path:
        run_dir = tmp_path / name
        write_finished_run(run_dir, num_clients=num_clients, num_rounds=num_rounds, changes=summary)
        return run_dir

    return write


def change_summary(run_dir: Path, **changes: Any) -> None:
    """Replace keys of a run's summary."""
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps(summary | changes))


def write_finished_run(run_dir: Path, *, num_clients: int, num_rounds: int, changes: dict[str, Any]) -> None:
    """A run in which the second client's reply fails in round 3, and its comparison without noise."""
    (run_dir / "comparison").mkdir(parents=True)
    (run_dir / "config.toml").write_text('model = "all-MiniLM-L6-v2"\nclip_norm = 1.0\nlabels = ["a", "b"]\n')
    (run_dir / "environment.json").write_text(json.dumps({"version": 1, "python": "3.11.9", "commit": "0123abc"}))
    clients = [_client_row(k, t, num_clients) for t in range(1, num_rounds + 1) for k in range(num_clients)]
    _write_table(run_dir / "clients.csv", ClientRow, clients)
    for folder, final in ((run_dir, 0.871), (run_dir / "comparison", 0.924)):
        rounds = [_round_row(t, num_clients, final) for t in range(num_rounds + 1)]
        _write_table(folder / "rounds.csv", RoundRow, rounds)
    summary = _summary(clients, num_clients, num_rounds) | changes
    (run_dir / "summary.json").write_text(json.dumps(summary))
    (run_dir / "comparison" / "summary.json").write_text(json.dumps({"accuracy": 0.924}))


def _round_row(t: int, num_clients: int, final: float) -> RoundRow:
    selected = num_clients if t else 0
    replies = selected - (t == 3)
    return written.round_row(
        t,
        [],
        **{"num_selected": selected, "num_replies": replies, "num_failures": int(t == 3), "seconds": 4.2},
        test_accuracy=0.131 + (final - 0.131) * (1 - math.exp(-0.6 * t)),
        test_loss=2.08 * math.exp(-0.4 * t) + (1.2 - final) * (1 - math.exp(-t)),
        **{"epsilon_local_max": 0.9 * math.sqrt(t), "epsilon_rho_max": 2.4 * math.sqrt(t)},
        **{"bytes_up": BYTES * replies, "bytes_down": BYTES * selected},
    )


def _client_row(client: int, t: int, num_clients: int) -> ClientRow:
    num_records = 1200 - 900 * client // num_clients
    failed = client == 1 and t == 3
    epsilon = 340 / num_records * math.sqrt(t)
    return written.client_row(
        t,
        client,
        "timeout" if failed else "ok",
        **{"num_records": num_records, "sampling_probability": 64 / num_records, "delta": 1e-5, "seconds": 0.8},
        **{"weight": 1 / num_clients, "rho_bar": 1 / math.sqrt(num_clients)},
        **{"epsilon_local": epsilon, "epsilon_rho": 2.7 * epsilon},
        **{"bytes_up": 0 if failed else BYTES, "bytes_down": BYTES},
    )


def _summary(spent: list[ClientRow], num_clients: int, num_rounds: int) -> dict[str, Any]:
    # The final figures come from another accountant than the live ones: a little lower.
    clients = [
        {
            **{"client": last.client, "num_records": last.num_records, "rounds": num_rounds, "delta": 1e-5},
            **dict.fromkeys(("epsilon_local", "epsilon_local_this_run"), 0.87 * last.epsilon_local),
            **{"epsilon_rho": 0.87 * last.epsilon_rho, "earlier_runs": 0, "retired": None},
            **{"bytes_up": BYTES * num_rounds, "bytes_down": BYTES * num_rounds},
        }
        for last in spent[-num_clients:]
    ]
    return {
        **dict.fromkeys((*QUALITY_KEYS, *LANGUAGE_KEYS)),
        **{"accuracy": 0.871, "accuracy_initial": 0.131, "accuracy_non_private": 0.924, "chance_accuracy": 0.125},
        **{key: max(client[key[:-4]] for client in clients) for key in ("epsilon_local_max", "epsilon_rho_max")},
        **{"delta_max": 1e-5, "num_clients": num_clients, "num_rounds": num_rounds, "seconds": 125.0},
        **{"bytes_up": BYTES * num_clients * num_rounds, "bytes_down": BYTES * num_clients * num_rounds},
        **{"noise_source": "secure", "unit": "record", "privacy_view": "local", "accountant": "pld"},
        **{"budget_epsilon": [], "stopped_early": None, "private": True, "adapters_moved": True, "warnings": []},
        "aggregate_objections": ["local_steps = 3: needs 1, since later steps depend on the client's own noise"],
        **{"ledger_head": "0123456789abcdef" * 4, "engine": "in-process", "clients": clients},
    }
