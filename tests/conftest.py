"""Small real models and data, made on the spot, so that no test needs a network."""

from __future__ import annotations

import copy
import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before any test imports torch, transformers or flwr. One thread for each worker: two of them share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
from peft import PeftModel

from fedpriv.config import ON_NODES
from fedpriv.learning.adapters import BaseModel, LoraSettings, attach, load_base
from fedpriv.learning.data.records import Records
from simulations.tiny_bert import make_tiny_bert
from tests.pages import without_plots
from tests.tiny import LABELS, WORDS, move, random_records, tiny_causal, write_table

if TYPE_CHECKING:
    from fedpriv.learning.training.model import TrainingModel

TESTS = Path(__file__).parent
# Their files take longest: their tests are whole runs, start processes of their own, or try many models.
WHOLE_RUNS = {"contracts", "integration", "simulations", "cli", "server", "adversary", "vault", "training"}
# Most of an hour each in the long series: the first one's answers wait for their times, the second tries all models.
HOURS = ("adversary/test_clocks.py", "learning/training/test_independence.py")
# Of the tests of deployed federations, of 1 to 9 minutes each. Each of four workers takes one of the first four files
# and one of the next four before any takes a third, so the longest are paired with the shortest of these.
DEPLOYMENT = (
    *("walkthrough", "killed_coordinator", "killed", "life_cycle"),
    *("budgets", "secure_aggregation", "who_gets_in", "seeing"),
    *("rogue_coordinator", "kits"),
)
LONGEST = [*HOURS, *(f"deployment/test_{name}.py" for name in DEPLOYMENT)]

# Tests of the plots, and runs whose pages have them.
WITH_PLOTS = Path("runs/show")

MEMORY = Path("/dev/shm")


def pytest_configure() -> None:
    """Write in memory, if it has room for what all workers write and lets programs run.

    Ledgers and checkpoints wait for a disk after each write.
    """
    if "TMPDIR" not in os.environ and MEMORY.is_dir():
        found = os.statvfs(MEMORY)
        if found.f_bavail * found.f_frsize > 4 * 2**30 and not found.f_flag & os.ST_NOEXEC:
            os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def pytest_collection() -> None:
    """Search for no garbage until all tests are collected: what modules make while they are imported stays."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes longest first, so that workers that take one file at a time end together."""

    def turn(item: pytest.Item) -> tuple[int, bool]:
        path = item.path.relative_to(TESTS)
        place = LONGEST.index(path.as_posix()) if path.as_posix() in LONGEST else len(LONGEST)
        return place, not WHOLE_RUNS.intersection(path.parts[:-1])

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """Keep modules and items, which stay to the end, out of every search for garbage."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _pages_without_plots(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if request.path.is_relative_to(TESTS / WITH_PLOTS) else without_plots():
        yield


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny BERT."""
    return make_tiny_bert(tmp_path_factory.mktemp("models") / "tiny-bert", [*WORDS, *LABELS])


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CSV with columns text, label and site."""
    return write_table(tmp_path_factory.mktemp("data") / "records.csv")


@pytest.fixture(scope="session")
def small_run(tiny_bert: Path, table: Path) -> dict[str, object]:
    """Configuration values of a federation that runs in seconds, as a simulation on the small table."""
    return {
        **{"model": str(tiny_bert), "data": str(table), "client_column": "site", "layers": "last-1", "rank": 4},
        **{"rounds": 2, "local_steps": 2, "batch_size": 8, "noise_multiplier": 1.0},
        **{"simulate": True, "comparison": False},
        "memory_limit_mb": 8,  # a model tries all numbers of rows that its memory allows
    }


@pytest.fixture(scope="session")
def run_on_nodes(small_run: dict[str, object], table: Path) -> dict[str, object]:
    """The same for a run of three nodes with records of their own, which is no simulation."""
    values = {key: value for key, value in small_run.items() if key != "client_column"}
    own = {"data": ON_NODES, "test_data": str(table), "labels": ",".join(LABELS), "num_clients": 3, "simulate": False}
    return {**values, **own}


@pytest.fixture(scope="module")
def quick_nodes() -> Iterator[None]:
    """Nodes of this process get a copy of a model that was read once, and know what was rehearsed on it.

    Both take longer than a request. A node that was asked before has them too.
    """
    # Deferred: few modules need them.
    from fedpriv.holder.vault import _reply_times
    from fedpriv.learning.training import rehearsal, workbench

    read, rehearse, models, rehearsed = workbench.load_base, _reply_times.rehearse, {}, {}

    def load_base(name: str, **options: Any) -> BaseModel:
        key = (name, *sorted(options.items()))
        if key not in models:
            models[key] = read(name, **options)
        return copy.deepcopy(models[key])

    def rehearse_once(model: TrainingModel, **options: Any) -> rehearsal.Pace:
        key = (model.peft_model.name_or_path, model.peft_model.dtype)
        rehearsal._rehearsed.setdefault(model, rehearsed.setdefault(key, {}))
        return rehearse(model, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workbench, "num_cores", lambda: 1)  # a large process is slow to fork
        patch.setattr(workbench, "load_base", load_base)
        patch.setattr(_reply_times, "rehearse", rehearse_once)
        yield


@pytest.fixture
def base(tiny_bert: Path) -> BaseModel:
    """The tiny BERT as a frozen base of classifiers."""
    return load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3)


@pytest.fixture
def as_a_task() -> Iterator[None]:
    """Lets a test make messages, which only a task of Flower's may."""
    from simulations.engines.flower_private import task_identity  # deferred: few modules need it

    with task_identity(1):
        yield


@pytest.fixture
def encoder(tiny_bert: Path) -> Callable[..., PeftModel]:
    """Builds the tiny BERT classifier with an adapter that is not at its start."""

    def build(**settings: object) -> PeftModel:
        base = load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3)
        return move(attach(base, LoraSettings(rank=4, **settings)))

    return build


@pytest.fixture
def causal() -> Callable[..., PeftModel]:
    """Builds a tiny causal model with an adapter that is not at its start."""

    def build(kind: str, **settings: object) -> PeftModel:
        return move(attach(tiny_causal(kind), LoraSettings(rank=4, task="CAUSAL_LM", **settings)))

    return build


@pytest.fixture
def tiny_causal_base() -> Callable[[str], BaseModel]:
    """Builds a tiny causal model without an adapter."""
    return tiny_causal


@pytest.fixture
def make_records() -> Callable[..., Records]:
    """Builds random records."""
    return random_records


@pytest.fixture
def move_adapter() -> Callable[..., PeftModel]:
    """Moves an adapter away from its start."""
    return move


@pytest.fixture
def quiet_absl() -> Iterator[None]:
    """Silence dp-accounting's warning for each order that it abandons."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    yield
    logging.getLogger("absl").setLevel(logging.NOTSET)
