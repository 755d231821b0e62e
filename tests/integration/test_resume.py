"""Killed at random instants and resumed, a run ends as if nobody had killed it, and every release is paid for."""

from pathlib import Path

import pytest

from fedpriv.config import parse
from tests.integration.resumed_run import resumed
from tests.tiny import with_persons

IN_PROCESS = {"engine": "in-process"}
SECURE = IN_PROCESS | {"simulate": False, "public_data": True, "comparison": False}
LEDGERS = {"ledger": "yes", "budget_epsilon": [40.0]}
PERSONS = {"person_column": "patient", "max_records_per_person": 2}
FLORA = {"aggregation": "flora", "client_ranks": [2, 4, 3]}
# A rule that carries a merged base, one that carries the last update, and the plain one; seeded and not; with nodes
# that keep ledgers of their own and without; clients trained one by one and together; server optimizers with a state.
KINDS = {
    "seeded": IN_PROCESS,
    "seeded-flora": IN_PROCESS | FLORA,
    "seeded-cmfl": {
        **{"engine": "stacked", "aggregation": "cmfl", "relevance_threshold": 0.9, "learning_rate": 0.05},
        "ledger": "yes",
    },
    "seeded-ledgers": IN_PROCESS | LEDGERS,
    "seeded-momentum": IN_PROCESS | {"server_optimizer": "momentum"},
    "seeded-persons": {"engine": "stacked"} | PERSONS,
    "seeded-adam": IN_PROCESS | {"server_optimizer": "adam", "server_learning_rate": 0.1},
    "secure": SECURE,
    "secure-ledgers": SECURE | {"ledger": "yes"},
}
# Of the seeded kinds together more than fifty.
KILLS = {kind: 13 if kind.startswith("seeded") else 7 for kind in KINDS}
ALWAYS = {"charging", "computing", "aggregating", "writing tables", "writing the checkpoint", "saving the results"}
ALWAYS |= {"the whole run"}


def kill_and_resume(values: dict[str, object], folder: Path, kills: int) -> None:
    """Runs of one configuration, until so many kills hit at least, every phase among them."""
    hits = resumed(parse(values), folder, kills)
    assert sum(hits.values()) >= kills
    assert hits.keys() == ALWAYS | ({"storing the reply"} if values.get("ledger") else set())
    assert min(hits.values()) >= 1, hits


@pytest.mark.slow
def test_a_run_killed_once_in_every_phase_ends_as_if_nobody_had_killed_it(small_run, tmp_path):
    kill_and_resume({**small_run, "rounds": 4, "local_steps": 1, **IN_PROCESS, **FLORA, **LEDGERS}, tmp_path, kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_killed_at_random_instants_end_as_if_nobody_had_killed_them(small_run, table, tmp_path, kind):
    values = {**small_run, "rounds": 8, "local_steps": 1, **KINDS[kind]}
    if "person_column" in values:
        values["data"] = str(with_persons(table, tmp_path / "persons.csv", 3))
    kill_and_resume(values, tmp_path, KILLS[kind])


@pytest.mark.slow
def test_runs_of_ten_thousand_clients_end_as_if_nobody_had_killed_them(small_run, tmp_path):
    rows = [f"w{k % 97} w{k % 89} w{k % 7},{'ab'[k % 2]}" for k in range(10_200)]
    table = tmp_path / "many.csv"
    table.write_text("\n".join(["text,label", *rows, ""]))
    values = {
        **{key: value for key, value in small_run.items() if key != "client_column"},
        **{"data": str(table), "partition": "iid", "num_clients": 10_000, "test_fraction": 200 / 10_200},
        **{"clients_per_round": 50, "batch_size": 1, "rounds": 6, "local_steps": 1, "engine": "stacked"},
        "table_checks": "warn",
    }
    kill_and_resume(values, tmp_path, kills=8)
