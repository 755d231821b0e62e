"""Budgets: small clients retire earlier, nobody passes its budget in any round, and the run says so beforehand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.ledger.reader import path_of, reading, verify_with_head
from simulations.engines import federation
from tests.notes import Notes
from tests.tiny import write_table

SIZES = [8, 10, 12, 14, 17, 20, 24, 30, 40, 60, 90, 150]
FEW_SIZES = [8, 20, 60, 150]
# With so little noise that clients retire within so few rounds.
ROUNDS = 8


def run(values: dict[str, object], out: Path, **changes: object) -> tuple[Path, list[str]]:
    observer = Notes()
    federation.run(parse({**values, **changes, "out": str(out)}), observer)
    return out, observer.notes


@pytest.fixture(scope="module", params=[FEW_SIZES, pytest.param(SIZES, marks=pytest.mark.slow)], ids=len)
def budgeted(request, small_run, tmp_path_factory) -> dict[str, object]:
    """Clients of very different sizes, secure noise, little training; accounting for twelve of them takes long."""
    return small_run | {
        "data": str(write_table(tmp_path_factory.mktemp("budgeted") / "records.csv", 520)),
        "simulate": False,
        "public_data": True,
        "baselines": False,
        "comparison": False,
        "partition": "sizes",
        "client_column": "",
        "client_sizes": request.param,
        "test_fraction": 0.05,
        "batch_size": 4,
        "local_steps": 2,
        "rounds": ROUNDS,
        "noise_multiplier": 1.3,
        "budget_epsilon": 4,
    }


def epsilons(ledger: Path, view: str) -> dict[str, float]:
    with reading(ledger) as db:
        verify_with_head(db, ledger)
        return {
            each.client: epsilon_of([r.seen_by(view) for r in db.releases(each.id)], each.delta).epsilon
            for each in db.data_sets()
        }


@pytest.fixture(scope="module")
def on_local(budgeted, tmp_path_factory) -> tuple[Path, list[str]]:
    """A run on the local view and what it said."""
    return run(budgeted, tmp_path_factory.mktemp("runs") / "local", privacy_view="local")


def assert_budget_is_kept(folder: Path, view: str) -> dict:
    """Nobody passes an epsilon of 4 in any round, and the smaller a client, the earlier it retires; the summary."""
    summary = json.loads((folder / "summary.json").read_text())
    clients = pd.read_csv(folder / "clients.csv")
    rounds = clients.groupby("client")["round"].max()
    assert summary["num_rounds"] == ROUNDS
    assert 0 < sum(client["retired"] is not None for client in summary["clients"]) < len(rounds)
    assert rounds.is_monotonic_increasing, "the smaller the client, the earlier it retires"
    assert rounds.iloc[0] < rounds.iloc[-1] == ROUNDS
    assert max(client[f"epsilon_{view}"] for client in summary["clients"]) <= 4
    assert clients[f"epsilon_{view}"].max() <= 4, "not in any round"
    assert max(epsilons(folder / "ledger.sqlite", view).values()) <= 4
    return summary


def test_clients_keep_a_budget_on_the_local_view_and_are_told_when_they_retire(on_local):
    folder, notes = on_local
    summary = assert_budget_is_kept(folder, "local")
    assert notes[0].startswith(f"budget_epsilon allows fewer than the {ROUNDS} rounds")
    # Every round costs the same on this view, so the notice is exact.
    retired = {client["client"]: client["rounds"] for client in summary["clients"] if client["retired"]}
    said = dict(part.rsplit(": ", 1) for part in notes[0].split(": ", 1)[1].split("; ")[0].split(", "))
    assert said == {f"client {client}": str(num) for client, num in retired.items()}


def test_clients_keep_a_budget_on_the_rho_view(budgeted, tmp_path):
    folder, notes = run(budgeted, tmp_path / "rho", privacy_view="rho", noise_multiplier=3.4)
    assert_budget_is_kept(folder, "rho")
    assert notes[0].startswith(f"budget_epsilon allows fewer than the {ROUNDS} rounds")


def test_another_round_would_have_passed_the_budget(on_local):
    folder, _ = on_local
    summary = json.loads((folder / "summary.json").read_text())
    with reading(folder / "ledger.sqlite") as db:
        for client, each in zip(summary["clients"], db.data_sets(), strict=True):
            if client["retired"]:
                events = [release.event for release in db.releases(each.id)]
                assert epsilon_of(events, each.delta).epsilon <= 4
                assert epsilon_of([*events, replace(events[0], count=2)], each.delta).epsilon > 4


def test_spending_accumulates_over_runs_on_one_ledger(budgeted, tmp_path):
    shared = {"ledger": str(tmp_path / "shared.sqlite"), "rounds": 2}
    first, _ = run(budgeted, tmp_path / "first", **shared)
    second, notes = run(budgeted, tmp_path / "second", **shared)
    one, two = (json.loads((folder / "summary.json").read_text())["clients"] for folder in (first, second))
    assert [client["earlier_runs"] for client in two] == [1] * len(one)
    assert sum(c["rounds"] for c in two) < sum(c["rounds"] for c in one), "the second run starts from what is left"
    assert all(b["epsilon_local"] > a["epsilon_local"] for a, b in zip(one, two, strict=True) if b["rounds"])
    assert max(client["epsilon_local"] for client in two) <= 4
    assert notes
    # Every node kept its own account, and it says the same as the server's on the view that it knows.
    server = epsilons(tmp_path / "shared.sqlite", "local")
    assert len(server) == len(one)
    for account, spent in server.items():
        assert epsilons(path_of(tmp_path / "shared.sqlite", account), "local") == {account: pytest.approx(spent)}


def test_a_run_whose_budget_allows_nothing_is_refused_before_it_starts(budgeted, tmp_path):
    with pytest.raises(InputError, match=f"allows 0 of {len(budgeted['client_sizes'])} clients a round"):
        run(budgeted, tmp_path / "run", budget_epsilon=0.01)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_run_ends_with_a_clear_message_when_too_few_remain(budgeted, tmp_path):
    least = round(0.8 * len(budgeted["client_sizes"]))
    folder, notes = run(budgeted, tmp_path / "run", min_clients=least, noise_multiplier=1.0)
    summary = json.loads((folder / "summary.json").read_text())
    assert f"within their budgets, min_clients = {least}" in summary["stopped_early"]
    assert summary["num_rounds"] < ROUNDS
    assert notes[-1] == f"the run ended early: {summary['stopped_early']}"


def test_each_client_may_have_a_budget_of_its_own(budgeted, tmp_path):
    num_clients = len(budgeted["client_sizes"])
    budgets = [4.0] * (num_clients - 1) + [0.3]
    folder, _ = run(budgeted, tmp_path / "run", budget_epsilon=budgets, rounds=4)
    clients = json.loads((folder / "summary.json").read_text())["clients"]
    assert all(client["epsilon_local"] <= budget for client, budget in zip(clients, budgets, strict=True))
    assert clients[-1]["retired"]
    with pytest.raises(InputError, match=f"3 entries for {num_clients} clients"):
        run(budgeted, tmp_path / "short", budget_epsilon=[4.0, 4.0, 4.0])


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        ({"local_steps": 2}, "local_steps = 2"),
        ({"optimizer": "adamw"}, "optimizer = adamw"),
        ({"secure_aggregation": False, "mechanism": "gaussian"}, "secure_aggregation = false"),
        ({"max_update_norm": 5.0}, "max_update_norm"),
    ],
)
def test_the_aggregate_view_is_refused_where_it_does_not_hold(budgeted, tmp_path, change, condition):
    fine = {"local_steps": 1, "optimizer": "sgd", "secure_aggregation": True, "privacy_view": "aggregate"}
    fine |= {"min_clients": len(budgeted["client_sizes"])}
    with pytest.raises(InputError, match=condition):
        run(budgeted, tmp_path / "run", **fine | change)


def test_the_aggregate_view_is_tracked_where_it_holds(budgeted, on_local, tmp_path):
    changes = {"local_steps": 1, "optimizer": "sgd", "secure_aggregation": True, "rounds": 1}
    changes |= {"min_clients": len(budgeted["client_sizes"])}
    folder, _ = run(budgeted, tmp_path / "run", **changes, colluding_clients=1)
    clients = pd.read_csv(folder / "clients.csv")
    assert (clients["epsilon_aggregate"] < clients["epsilon_local"]).all()
    assert sorted(path.name for path in (folder / "variants").iterdir()) == ["global"]
    hidden = pd.read_csv(on_local[0] / "clients.csv")
    assert hidden["epsilon_aggregate"].isna().all()


def test_noise_on_the_upload_is_accounted_for_a_client(budgeted, tmp_path):
    changes = {"noise_on": "upload", "noise_multiplier": 20.0, "rounds": 1, "clip_norm": 0.5, "budget_epsilon": ""}
    shared = {"ledger": str(tmp_path / "shared.sqlite")}
    folder, _ = run(budgeted, tmp_path / "run", **changes, **shared)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["unit"] == "client"
    assert len({client["epsilon_local"] for client in summary["clients"]}) == 1, "no amplification by the batch"
    with pytest.raises(InputError, match="noise_on = gradients"):
        run(budgeted, tmp_path / "mixed", **shared)
