"""Federations of real processes: nodes that play the embedded corpus, and nodes with records of their own."""

import csv
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from simulations.sites import ROOT, DeployedFederation
from tests.tiny import LABELS, write_rows

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
        site = [row for row in rows if row["site"] == f"site-{client % 3}"]
        own = [[row["text"], row["label"], f"N{place // OF_A_PERSON:03}"] for place, row in enumerate(site)]
        path = write_rows(folder / f"records-{client}.csv", [["note", "ward", "number"], *own])
        columns = ["--text-column", "note", "--label-column", "ward", "--labels", ",".join(LABELS)]
        columns += ["--person-column", "number"] if persons else []
        options[client] = ["--data", str(path), *columns, "--budget-epsilon", "1e6", *more]
    return options


@contextmanager
def deployed(
    folder: Path, table: Path, model: Path, *more: str, num_nodes: int = 3, persons: bool = False, **made: object
) -> Iterator[DeployedFederation]:
    """A SuperLink and nodes with a file of records each, which run this model, until the block ends."""
    own = holdings(folder, table, *more, num_nodes=num_nodes, persons=persons)
    federation = DeployedFederation(
        folder / "federation", num_nodes=num_nodes, holdings=own, model=model, **{"settings": QUICK, **made}
    )
    try:
        yield federation
    finally:
        federation.stop()


def copied_checkout(folder: Path) -> Path:
    """A new folder with a copy of what is bundled, to be changed."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("clients", "server"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "fedpriv").symlink_to(ROOT / "fedpriv")  # for the command line, which runs here
    return folder


# Replies that take a while without work for the machine: a node that is killed then has not answered yet.
SLOW = f"reply_seconds = 5\n{LITTLE_MEMORY}"


@pytest.fixture(scope="module", params=[QUICK], ids=["quick"])
def holders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, table: Path, tiny_bert: Path
) -> Iterator[DeployedFederation]:
    """A SuperLink and nodes with a file of records each, which run the tiny BERT."""
    folder = tmp_path_factory.mktemp("holders")
    with deployed(folder, table, tiny_bert, num_nodes=NUM_NODES, settings=request.param) as federation:
        yield federation


# Each has a ledger of its own, in its folder.
SMALL = {"layers": "last-1", "rank": 4, "num_clients": NUM_NODES, "rounds": 2, "memory_limit_mb": MEMORY_LIMIT_MB}
SMALL |= {"comparison": False, "baselines": False, "ledger": ""}


@pytest.fixture(scope="session")
def corpus_run(tiny_bert: Path) -> dict[str, object]:
    """A small run on the embedded corpus, shared out among the nodes, that repeats to the bit."""
    return {**SMALL, "model": str(tiny_bert), "partition": "iid", "local_steps": 1, "simulate": True}


@pytest.fixture(scope="session")
def holders_run(tiny_bert: Path, table: Path) -> dict[str, object]:
    """A small run on what the nodes have."""
    records = {"data": "on-nodes", "test_data": str(table), "labels": ",".join(LABELS)}
    steps = {"local_steps": 2, "batch_size": 4, "noise_multiplier": 1.0}
    return {**SMALL, "model": str(tiny_bert), **records, **steps}


@pytest.fixture(scope="module")
def slow_pair(tmp_path_factory: pytest.TempPathFactory, table: Path, tiny_bert: Path) -> Iterator[DeployedFederation]:
    """Two nodes that take seconds to reply, so that their processes can be killed before."""
    with deployed(tmp_path_factory.mktemp("killed"), table, tiny_bert, num_nodes=2, settings=SLOW) as made:
        yield made


@pytest.fixture(scope="module")
def slow_run(holders_run: dict[str, object]) -> dict[str, object]:
    """A run whose rounds end without a node that was killed; its steps take longer than it takes to kill a process."""
    return {**holders_run, "num_clients": 2, "min_clients": 1, "local_steps": 60, "round_seconds": 75}
