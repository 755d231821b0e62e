"""Budgets and targets, on the view of each upload and on that of sums: nobody passes its budget in any round."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from fedpriv.config import BY_RECIPE
from fedpriv.errors import InputError
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.ledger.reader import holder_names, path_of, reading, verify_with_head
from fedpriv.runs import files
from tests.chats import chat_model
from tests.notes import Notes
from tests.server import parts
from tests.server.parts import summary
from tests.tiny import write_table

SIZES = [8, 10, 12, 14, 17, 20, 24, 30, 40, 60, 90, 150]
FEW_SIZES = [8, 20, 60, 150]
# With so little noise that clients retire within so few rounds.
ROUNDS = 8
TARGET = 3.0
TARGETED = {"target_epsilon": TARGET, "noise_multiplier": BY_RECIPE}


def run(values: dict[str, object], out: Path, **changes: object) -> tuple[Path, list[str]]:
    observer = Notes()
    return parts.run(values, out, observer, **changes), observer.notes


@pytest.fixture(scope="module", params=[FEW_SIZES, pytest.param(SIZES, marks=pytest.mark.slow)], ids=len)
def budgeted(request, small_run, tmp_path_factory) -> dict[str, object]:
    """Clients of very different sizes, secure noise, little training; accounting for twelve of them takes long."""
    table = write_table(tmp_path_factory.mktemp("budgeted") / "records.csv", 520)
    secure = {"simulate": False, "public_data": True, "baselines": False, "comparison": False}
    dealt = {"data": str(table), "partition": "sizes", "client_column": "", "client_sizes": request.param}
    steps = {"test_fraction": 0.05, "batch_size": 4, "local_steps": 2, "rounds": ROUNDS}
    return small_run | secure | dealt | steps | {"noise_multiplier": 1.3, "budget_epsilon": 4}


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
    told = summary(folder)
    clients = pd.read_csv(folder / "clients.csv")
    rounds = clients.groupby("client")["round"].max()
    assert told["num_rounds"] == ROUNDS
    assert 0 < sum(client["retired"] is not None for client in told["clients"]) < len(rounds)
    assert rounds.is_monotonic_increasing, "the smaller the client, the earlier it retires"
    assert rounds.iloc[0] < rounds.iloc[-1] == ROUNDS
    assert max(client[f"epsilon_{view}"] for client in told["clients"]) <= 4
    assert clients[f"epsilon_{view}"].max() <= 4, "not in any round"
    assert max(epsilons(folder / "ledger.sqlite", view).values()) <= 4
    return told


def test_clients_keep_a_budget_on_the_local_view_and_are_told_when_they_retire(on_local):
    folder, notes = on_local
    told = assert_budget_is_kept(folder, "local")
    assert notes[0].startswith(f"budget_epsilon allows fewer than the {ROUNDS} rounds")
    # Every round costs the same on this view, so the notice is exact.
    retired = {client["client"]: client["rounds"] for client in told["clients"] if client["retired"]}
    said = dict(part.rsplit(": ", 1) for part in notes[0].split(": ", 1)[1].split("; ")[0].split(", "))
    assert said == {f"client {client}": str(num) for client, num in retired.items()}
    # Another round would have passed the budget.
    with reading(folder / "ledger.sqlite") as db:
        for client, each in zip(told["clients"], db.data_sets(), strict=True):
            if client["retired"]:
                events = [release.event for release in db.releases(each.id)]
                assert epsilon_of([*events, replace(events[0], count=2)], each.delta).epsilon > 4


def test_clients_keep_a_budget_on_the_rho_view(budgeted, tmp_path):
    folder, notes = run(budgeted, tmp_path / "rho", privacy_view="rho", noise_multiplier=3.4)
    assert_budget_is_kept(folder, "rho")
    assert notes[0].startswith(f"budget_epsilon allows fewer than the {ROUNDS} rounds")


def test_spending_accumulates_over_runs_on_one_ledger(budgeted, tmp_path):
    shared = {"ledger": str(tmp_path / "shared.sqlite"), "rounds": 2}
    first, _ = run(budgeted, tmp_path / "first", **shared)
    second, notes = run(budgeted, tmp_path / "second", **shared)
    one, two = (summary(folder)["clients"] for folder in (first, second))
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


def test_a_target_above_what_is_left_is_refused_before_a_charge_and_the_target_that_is_offered_fits(budgeted, tmp_path):
    ledger = tmp_path / "shared.sqlite"
    # Equal clients have one event to account for.
    values = {**budgeted, **TARGETED, "client_sizes": [8] * 4, "min_clients": 4}
    values |= {"rounds": 3, "ledger": str(ledger)}
    with pytest.raises(InputError, match="allows 0 of 4 clients a round"):
        run(values, tmp_path / "none", budget_epsilon=0.01)
    assert not (tmp_path / "none" / "summary.json").exists()
    run(values, tmp_path / "first")
    spent = epsilons(ledger, "local")
    with pytest.raises(InputError, match=r"target_epsilon = 3: .*allows fewer than the 3 rounds") as refusal:
        run(values, tmp_path / "second")
    assert epsilons(ledger, "local") == spent
    offered = float(re.search(r"target_epsilon = ([0-9.]+) allows all", str(refusal.value))[1])
    assert 0.5 < offered < TARGET
    folder, notes = run(values, tmp_path / "third", target_epsilon=offered)
    told = summary(folder)
    assert (told["num_rounds"], told["stopped_early"]) == (3, None)
    assert not [note for note in notes if "budget_epsilon allows fewer" in note]
    assert 3.6 < max(epsilons(ledger, "local").values()) <= 4
    # Beside a ledger that runs share, its holders are known by name, whatever became of the runs' folders.
    with reading(ledger) as db:
        assert sorted(holder_names(db, ledger, None).values()) == [f"client {k}" for k in range(4)]


def test_a_run_ends_with_a_clear_message_when_too_few_remain(budgeted, tmp_path):
    least = round(0.8 * len(budgeted["client_sizes"]))
    folder, notes = run(budgeted, tmp_path / "run", min_clients=least, noise_multiplier=1.0)
    told = summary(folder)
    assert f"within their budgets, min_clients = {least}" in told["stopped_early"]
    assert told["num_rounds"] < ROUNDS
    assert notes[-1] == f"the run ended early: {told['stopped_early']}"


def test_each_client_may_have_a_budget_of_its_own(budgeted, tmp_path):
    num_clients = len(budgeted["client_sizes"])
    budgets = [4.0] * (num_clients - 1) + [0.3]
    folder, _ = run(budgeted, tmp_path / "run", budget_epsilon=budgets, rounds=2)
    clients = summary(folder)["clients"]
    assert all(client["epsilon_local"] <= budget for client, budget in zip(clients, budgets, strict=True))
    assert clients[-1]["retired"]
    with pytest.raises(InputError, match=f"2 entries for {num_clients} clients"):
        run(budgeted, tmp_path / "short", budget_epsilon=[4.0, 4.0])


# Each condition of the view itself has its test in tests/privacy/accounting/test_views.py.
@pytest.mark.parametrize("change", [{"local_steps": 2}, {"max_update_norm": 5.0}], ids=str)
def test_the_aggregate_view_is_refused_where_it_does_not_hold(budgeted, tmp_path, change):
    fine = {"local_steps": 1, "optimizer": "sgd", "secure_aggregation": True, "privacy_view": "aggregate"}
    fine |= {"min_clients": len(budgeted["client_sizes"])}
    with pytest.raises(InputError, match=next(iter(change))):
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
    told = summary(folder)
    assert told["unit"] == "client"
    assert len({client["epsilon_local"] for client in told["clients"]}) == 1, "no amplification by the batch"
    with pytest.raises(InputError, match="noise_on = gradients"):
        run(budgeted, tmp_path / "mixed", **shared)


@pytest.fixture(scope="module")
def summed(small_run, tmp_path_factory) -> dict[str, object]:
    """Five equal clients of which only sums of five uploads are seen."""
    table = write_table(tmp_path_factory.mktemp("summed") / "records.csv", 200)
    dealt = {"data": str(table), "partition": "iid", "client_column": "", "num_clients": 5}
    steps = {"recipe": "per-sample", "sampling_probability": 0.5, "local_steps": 1, "rounds": 3}
    return small_run | dealt | steps | {"secure_aggregation": True, "min_clients": 5}


def run_summed(values: dict[str, object], out: Path, **changes: object) -> tuple[float, dict]:
    """The run's noise multiplier and its summary."""
    run(values, out, **changes)
    return files.read_config(out).noise_multiplier, summary(out)


@pytest.fixture(scope="module")
def targeted(summed, tmp_path_factory) -> dict[str, tuple[float, dict]]:
    """Of a run whose target is on each view: its noise multiplier and its summary."""
    folder = tmp_path_factory.mktemp("targeted")
    return {view: run_summed(summed, folder / view, privacy_view=view, **TARGETED) for view in ("local", "aggregate")}


def test_five_equal_clients_need_root_four_times_less_noise_in_a_sum_that_one_of_them_reads(targeted):
    for view, (_, found) in targeted.items():
        assert 0.99 * TARGET < found[f"epsilon_{view}_max"] <= TARGET
        assert found["num_rounds"] == 3
    assert targeted["local"][0] / targeted["aggregate"][0] == pytest.approx(math.sqrt(4), rel=1e-3)
    assert found["epsilon_local_max"] > TARGET


def test_those_who_collude_and_a_lower_threshold_cost_noise(summed, targeted, tmp_path):
    changes = {"privacy_view": "aggregate", **TARGETED, "min_clients": 4, "colluding_clients": 1}
    local, _ = targeted["local"]
    noise, found = run_summed(summed, tmp_path / "four", **changes)
    assert local / noise == pytest.approx(math.sqrt(3), rel=1e-3)
    assert 0.99 * TARGET < found["epsilon_aggregate_max"] <= TARGET, "whoever is in the sum, four less one count"


def test_a_budget_on_the_sum_counts_on_the_threshold_alone(summed, targeted, tmp_path):
    noise, _ = targeted["aggregate"]
    spend = {**summed, "privacy_view": "aggregate", "noise_multiplier": noise, "budget_epsilon": TARGET}
    _, found = run_summed(spend, tmp_path / "kept")
    assert found["num_rounds"] == 3
    assert found["epsilon_aggregate_max"] <= TARGET
    assert not any(client["retired"] for client in found["clients"])
    _, found = run_summed(spend, tmp_path / "fewer", min_clients=3)
    assert found["num_rounds"] < 3, "of three the noise is less, and the budget is spent earlier"


def test_a_model_that_answers_learns_from_the_sum_of_masked_updates(small_run, tmp_path):
    rows = [{"q": f"What is flu {'rash ' * (i % 7)}?", "a": f"A {'viral ' * (i % 5)}disease."} for i in range(60)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"prompt_column": "q", "response_column": "a", "client_column": "", "max_length": 60}
    changes |= {"model": str(chat_model(tmp_path / "chat")), "data": str(tmp_path / "records.jsonl")}
    changes |= {"num_clients": 3, "rounds": 1, "local_steps": 1, "aggregation": "ffa-lora", "generated_answers": 0}
    _, found = run_summed(small_run | changes, tmp_path / "run", secure_aggregation=True, min_clients=3)
    assert found["perplexity"] != found["perplexity_initial"]
    assert found["epsilon_aggregate_max"] < found["epsilon_local_max"]
