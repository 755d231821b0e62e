"""Federations of real processes: nodes that play the embedded corpus, and nodes with records of their own."""

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulations.sites import DeployedFederation
from tests.tiny import LABELS

# A worker tries all numbers of rows that its memory allows when it starts, and so does the server for its test set.
MEMORY_LIMIT_MB = 8
LITTLE_MEMORY = f"memory_limit_mb = {MEMORY_LIMIT_MB}\n"

# What replies take is no matter here, and public times would be those of the largest samples.
QUICK = f"reply_seconds = 0.1\n{LITTLE_MEMORY}"

# Of the federations that many tests share: as few as say something, since a node is five processes.
NUM_NODES = 2

OF_A_PERSON = 3


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedFederation]:
    """A SuperLink and nodes of the synthetic corpus."""
    federation = DeployedFederation(
        tmp_path_factory.mktemp("hospitals") / "federation", num_nodes=NUM_NODES, settings=LITTLE_MEMORY
    )
    yield federation
    federation.stop()


def holdings(folder: Path, table: Path, *more: str, num_nodes: int = 3, persons: bool = False) -> dict[int, list[str]]:
    """{client: options of `init`} of nodes with a file of records each, and further options for all.

    With `persons`, `OF_A_PERSON` records are about each, and the node protects them.
    """
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    options = {}
    for client in range(num_nodes):
        path = folder / f"records-{client}.csv"
        site = [row for row in rows if row["site"] == f"site-{client % 3}"]
        own = [[row["text"], row["label"], f"N{place // OF_A_PERSON:03}"] for place, row in enumerate(site)]
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["note", "ward", "number"], *own])
        columns = ["--text-column", "note", "--label-column", "ward", "--labels", ",".join(LABELS)]
        options[client] = [
            "--data",
            str(path),
            *columns,
            "--budget-epsilon",
            "1e6",
            *(["--person-column", "number"] if persons else []),
            *more,
        ]
    return options


# Replies that take a while without work for the machine: a node that is killed then has not answered yet.
SLOW = f"reply_seconds = 5\n{LITTLE_MEMORY}"


@pytest.fixture(scope="module", params=[QUICK], ids=["quick"])
def holders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, table: Path, tiny_bert: Path
) -> Iterator[DeployedFederation]:
    """A SuperLink and nodes with a file of records each, which run the tiny BERT."""
    folder = tmp_path_factory.mktemp("holders")
    own = holdings(folder, table, num_nodes=NUM_NODES)
    federation = DeployedFederation(
        folder / "federation", num_nodes=NUM_NODES, holdings=own, model=tiny_bert, settings=request.param
    )
    yield federation
    federation.stop()


@pytest.fixture(scope="session")
def corpus_run(tiny_bert: Path) -> dict[str, object]:
    """A small run on the embedded corpus, shared out among the nodes, that repeats to the bit."""
    return {
        "model": str(tiny_bert),
        "layers": "last-1",
        "rank": 4,
        "partition": "iid",
        "num_clients": NUM_NODES,
        "rounds": 2,
        "local_steps": 1,
        "simulate": True,
        "memory_limit_mb": MEMORY_LIMIT_MB,
        "comparison": False,
        "baselines": False,
        "ledger": "",
    }


@pytest.fixture(scope="session")
def holders_run(tiny_bert: Path, table: Path) -> dict[str, object]:
    """A small run on what the nodes have."""
    return {
        "model": str(tiny_bert),
        "layers": "last-1",
        "rank": 4,
        "data": "on-nodes",
        "test_data": str(table),
        "labels": ",".join(LABELS),
        "num_clients": NUM_NODES,
        "rounds": 2,
        "local_steps": 2,
        "batch_size": 4,
        "noise_multiplier": 1.0,
        "memory_limit_mb": MEMORY_LIMIT_MB,
        "comparison": False,
        "baselines": False,
        "ledger": "",  # one of its own, in its folder
    }


@pytest.fixture(scope="module")
def slow_pair(tmp_path_factory: pytest.TempPathFactory, table: Path, tiny_bert: Path) -> Iterator[DeployedFederation]:
    """Two nodes that take seconds to reply, so that their processes can be killed before."""
    folder = tmp_path_factory.mktemp("killed")
    own = holdings(folder, table, num_nodes=2)
    made = DeployedFederation(folder / "federation", num_nodes=2, holdings=own, model=tiny_bert, settings=SLOW)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def slow_run(holders_run: dict[str, object]) -> dict[str, object]:
    """A run whose rounds end without a node that was killed; its steps take longer than it takes to kill a process."""
    return {**holders_run, "num_clients": 2, "min_clients": 1, "local_steps": 60, "round_seconds": 75}
