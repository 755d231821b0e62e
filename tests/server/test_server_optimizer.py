"""A server optimizer moves the global model otherwise, and costs nobody anything."""

import pandas as pd
import pytest

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.privacy.ledger.reader import reading
from fedpriv.runs.plan.preflight import objections_to_aggregate
from server.observer import LogObserver
from simulations.engines import federation

OPTIMIZERS = ("sgd", "momentum", "adam", "yogi")
COST = ("phase", "client", "round", "event", "rho_bar", "aggregate_scale", "delta", "noise_source")


@pytest.fixture(scope="module")
def folders(small_run, tmp_path_factory):
    """{optimizer: a run's folder}, of runs on the sum of three clients that differ in nothing else."""
    folders = {}
    for optimizer in OPTIMIZERS:
        folders[optimizer] = tmp_path_factory.mktemp("runs") / optimizer
        hidden = {
            "local_steps": 1,
            "secure_aggregation": True,
            "min_clients": 3,
            "privacy_view": "aggregate",
            "rounds": 3,
        }
        values = small_run | hidden | {"server_optimizer": optimizer, "out": str(folders[optimizer])}
        federation.run(parse(values), LogObserver())
    return folders


def costs(folder) -> list[tuple]:
    with reading(folder / "ledger.sqlite") as db:
        return [tuple(getattr(entry, name) for name in COST) for entry in db.entries()]


def test_the_ledgers_entries_are_the_same_whatever_the_server_optimizer_is(folders):
    plain = costs(folders["sgd"])
    assert sum(cost[0] == "released" for cost in plain) == 3 * 3
    assert all(costs(folder) == plain for folder in folders.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_aggregate_view_objects_to_the_clients_optimizer_alone(small_run, optimizer):
    sums = {"local_steps": 1, "secure_aggregation": True, "min_clients": 3}
    values = small_run | sums | {"server_optimizer": optimizer}
    assert objections_to_aggregate(parse(values)) == ()
    with pytest.raises(InputError, match="optimizer = adamw: secure_aggregation = true"):
        parse(values | {"optimizer": "adamw"})


def test_the_server_optimizer_decides_the_model_and_no_epsilon(folders):
    rounds = {optimizer: pd.read_csv(folder / "rounds.csv") for optimizer, folder in folders.items()}
    assert len({each["test_loss"].iloc[-1] for each in rounds.values()}) == len(OPTIMIZERS)
    for view in ("local", "rho", "aggregate"):
        column = f"epsilon_{view}_max"
        assert all(each[column].equals(rounds["sgd"][column]) for each in rounds.values())
        assert rounds["sgd"][column].notna().all(), "the view holds with every one of them"
