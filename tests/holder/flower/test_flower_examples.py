"""The examples in docs/examples/flower give plain Flower's numbers with noise off, in process and under `flwr run`."""

import re
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from safetensors.numpy import load_file

from simulations.engines.flower_private import task_identity
from simulations.engines.grid import LocalGrid
from tests.holder.flower.nodes import charges, contexts
from tests.integration.test_flower_engine import flower_environment, flwr, status

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "docs" / "examples" / "flower"
ROUNDS, NUM_CLIENTS = 2, 4

# {example: what is edited so that there is next to no noise}. A ledger takes no release without any.
NOISE_OFF = {
    "ledger": {"CLIPPING_NORM": 10.0, "EPSILON": 2e6, "BUDGET_EPSILON": None},
    "records": {"CLIP_NORM": 100.0, "NOISE_MULTIPLIER": 1e-5, "SAMPLING_PROBABILITY": 1.0, "BUDGET_EPSILON": None},
    "updates": {"CLIP_NORM": 10.0, "NOISE_MULTIPLIER": 1e-5, "BUDGET_EPSILON": None},
}

__all__ = ["flower_environment"]


@pytest.fixture(params=NOISE_OFF)
def example(request, tmp_path) -> Path:
    """A copy of an example with ledgers of its own and next to no noise."""
    folder = tmp_path / request.param
    shutil.copytree(EXAMPLES / folder.name, folder, ignore=shutil.ignore_patterns("__pycache__"))
    edit(folder, {"LEDGERS": tmp_path / "ledgers", **NOISE_OFF[folder.name]})
    return folder


def edit(folder: Path, constants: dict[str, object]) -> None:
    """Set constants of the client's app, as its operator would."""
    (path,) = folder.glob("*/client_app.py")
    text = path.read_text()
    for constant, value in constants.items():
        written = f'Path("{value}")' if isinstance(value, Path) else repr(value)
        text, found = re.subn(rf"^{constant} = [^#\n]*", f"{constant} = {written}", text, flags=re.M)
        assert found == 1, constant
    path.write_text(text)


@pytest.fixture
def apps(example, monkeypatch) -> Iterator[tuple]:
    """(client's app, server's app, task) of an example."""
    package = f"digits_{example.name}"
    monkeypatch.syspath_prepend(str(example))
    yield tuple(import_module(f"{package}.{module}") for module in ("client_app", "server_app", "task"))
    for loaded in [each for each in sys.modules if each.split(".")[0] == package]:
        del sys.modules[loaded]


def plain_weights(task) -> dict[str, np.ndarray]:
    """What Flower's FedAvg makes of the same task without fedpriv."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = task.make_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        images, labels = task.records_of(context.node_config["partition-id"], NUM_CLIENTS)
        task.train(model, images, labels)
        metrics = MetricRecord({"num-examples": len(images)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=NUM_CLIENTS, min_available_nodes=NUM_CLIENTS)
    with task_identity(1):
        grid = LocalGrid(contexts(NUM_CLIENTS), None, app)
        result = strategy.start(grid, ArrayRecord(task.make_model().state_dict()), num_rounds=ROUNDS)
    return {key: array.numpy() for key, array in result.arrays.items()}


def check_same(out: Path, task) -> None:
    """The model is that of plain Flower, and each node's ledger was charged for each round."""
    assert [charges(path) for path in (out.parent / "ledgers").glob("*.sqlite")] == [ROUNDS] * NUM_CLIENTS
    made, plain = load_file(out), plain_weights(task)
    assert made.keys() == plain.keys()
    assert max(np.abs(array).max() for array in plain.values()) > 0.1, "the check would be blind"
    for key, array in plain.items():
        np.testing.assert_allclose(made[key], array, atol=1e-3)


def test_an_example_gives_what_plain_flower_gives(apps, tmp_path):
    client, server, task = apps
    run_config = {"num-server-rounds": ROUNDS, "out": str(tmp_path / "model.safetensors")}
    with task_identity(1):
        grid = LocalGrid(contexts(NUM_CLIENTS, run_config=run_config), None, client.app)
        server.app(grid, Context(1, 1, {}, RecordDict(), run_config))
    check_same(tmp_path / "model.safetensors", task)


def test_all_examples_have_one_task():
    tasks = {path.read_text() for path in EXAMPLES.glob("*/*/task.py")}
    assert len(tasks) == 1
    assert {path.parent.name for path in EXAMPLES.glob("*/pyproject.toml")} == set(NOISE_OFF)


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Flower's own simulation engine needs the extra ray")
def test_an_example_gives_the_same_under_flwr_run(flower_environment, apps, example, tmp_path):
    out = tmp_path / "model.safetensors"
    # One process answers all nodes: loading torch in a second one takes longer.
    federation = f"num-supernodes={NUM_CLIENTS} client-resources-num-cpus=2 init-args-num-cpus=2"
    output = flwr(
        flower_environment, "run", str(example), "--stream", "--federation-config", federation,
        "-c", f'num-server-rounds={ROUNDS} out="{out}"',
    )  # fmt: skip
    run_id = re.search(r"Successfully started run (\d+)", output)
    assert run_id, output
    deadline = time.monotonic() + 300
    while not (state := status(flower_environment, run_id[1])).startswith("finished") and time.monotonic() < deadline:
        time.sleep(1)
    assert state == "finished:completed", output
    check_same(out, apps[2])
