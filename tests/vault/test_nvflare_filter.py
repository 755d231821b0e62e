"""The example's filter under NVFLARE, where it is installed: the vault's answer leaves a site, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from fedpriv.vault.settings import VaultSettings
from tests.vault.running import ROOT, Running
from tests.vault.test_updates import charges, make

pytest.importorskip("nvflare", reason="NVFLARE is not installed")

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants

UPDATE = {"fc.weight": np.float32([[3000.0, 0.0]]), "fc.bias": np.float32([0.0])}


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Iterator[VaultSettings]:
    own = make(tmp_path_factory.mktemp("n") / "node")
    running = Running(own)
    yield own
    running.stop()


@pytest.fixture
def filter_(settings, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples" / "nvflare"))
    yield import_module("vault_filter").VaultFilter(str(settings.updates_socket))
    del sys.modules["vault_filter"]


@pytest.fixture
def context() -> FLContext:
    """That of a job, as NVFLARE's client runner has it when it filters a result."""
    made = FLContext()
    made.set_prop(ReservedKey.RUN_NUM, "job-1", private=False, sticky=True)
    assert made.get_job_id() == "job-1"
    return made


def result(kind: str = DataKind.WEIGHT_DIFF, data: object = UPDATE) -> Shareable:
    meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: 77, "first record": "a rash on the knee"}
    made = DXO(kind, data=data, meta=meta).to_shareable()
    made.set_header("loss", 0.25)
    return made


def test_what_leaves_is_the_vaults_answer_alone(filter_, settings, context):
    before = charges(settings)
    dxo = from_shareable(made := filter_.process(result(), context))
    assert dxo.data_kind == DataKind.WEIGHT_DIFF
    kinds = [{name: (a.shape, a.dtype) for name, a in each.items()} for each in (dxo.data, UPDATE)]
    assert kinds[0] == kinds[1]
    assert dxo.data["fc.weight"][0, 0] == pytest.approx(1000, abs=20)
    assert not dxo.meta
    assert not {"loss", "first record"} & {*made, *made["__headers__"]}
    assert charges(settings) == before + 1


def test_a_result_that_tells_its_round_gets_the_same_bytes_for_one_charge(filter_, settings, context):
    before, told = charges(settings), result()
    told.set_header(AppConstants.CURRENT_ROUND, 40)
    one, other = (from_shareable(filter_.process(told, context)).data for _ in range(2))
    assert one["fc.weight"].tobytes() == other["fc.weight"].tobytes()
    assert charges(settings) == before + 1


@pytest.mark.parametrize(
    "made",
    [
        result(DataKind.WEIGHTS),
        result(DataKind.METRICS, {"loss": 0.25}),
        result(DataKind.COLLECTION, {"a": DXO(DataKind.WEIGHT_DIFF, data=UPDATE)}),
        result(data={"fc.weight": np.int64([1])}),
        Shareable({"first record": "a rash on the knee"}),
    ],
)
def test_anything_else_becomes_an_error_without_content(filter_, settings, context, made):
    before = charges(settings)
    answer = filter_.process(made, context)
    assert answer.get_return_code() == ReturnCode.EXECUTION_RESULT_ERROR
    assert {*answer} == {"__headers__"}
    assert charges(settings) == before


TRAINER = """
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.executor import Executor


class Trainer(Executor):
    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        moved = {name: 0 * array + 3000.0 for name, array in from_shareable(shareable).data.items()}
        return DXO(DataKind.WEIGHT_DIFF, data=moved, meta={MetaKey.NUM_STEPS_CURRENT_ROUND: 7}).to_shareable()
"""


def write_job(folder: Path, socket: Path, rounds: int) -> None:
    """A job of plain scatter and gather, whose trainer moves every value by 3000."""
    common = "nvflare.app_common"
    gather = {"min_clients": 1, "num_rounds": rounds, "wait_time_after_min_received": 0, "persistor_id": "persistor"}
    parts = {
        "persistor": ("np.np_model_persistor.NPModelPersistor", {"model": [[0.0, 0.0]]}),
        "shareable_generator": (
            "shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator",
            {},
        ),
        "aggregator": (
            "aggregators.intime_accumulate_model_aggregator.InTimeAccumulateWeightedAggregator",
            {"expected_data_kind": "WEIGHT_DIFF"},
        ),
    }
    controller = f"{common}.workflows.scatter_and_gather.ScatterAndGather"
    server = {
        "workflows": [{"id": "fedavg", "path": controller, "args": gather}],
        "components": [{"id": id_, "path": f"{common}.{path}", "args": args} for id_, (path, args) in parts.items()],
    }
    vault = {"path": "vault_filter.VaultFilter", "args": {"socket": str(socket)}}
    client = {
        "executors": [{"tasks": ["train"], "executor": {"path": "trainer.Trainer", "args": {}}}],
        "task_result_filters": [{"tasks": ["train"], "filters": [vault]}],
        "components": [],
    }
    for name, content in (("server", server), ("client", client)):
        path = folder / "app" / "config" / f"config_fed_{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format_version": 2, **content}))
    custom = folder / "app" / "custom"
    custom.mkdir()
    (custom / "trainer.py").write_text(TRAINER)
    shutil.copy(ROOT / "docs" / "examples" / "nvflare" / "vault_filter.py", custom)
    deploy = {"app": ["@ALL"]}
    (folder / "meta.json").write_text(
        json.dumps({"name": "job", "min_clients": 1, "resource_spec": {}, "deploy_map": deploy})
    )


@pytest.mark.slow
def test_a_job_in_nvflares_simulator_learns_the_noised_updates(settings, tmp_path):
    write_job(tmp_path / "job", settings.updates_socket, rounds=2)
    before = charges(settings)
    simulator = "nvflare.private.fed.app.simulator.simulator"
    command = [sys.executable, "-m", simulator, str(tmp_path / "job"), "-w", str(tmp_path / "w"), "-n", "1", "-t", "1"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400, check=False)
    assert charges(settings) == before + 2, done.stdout[-4000:] + done.stderr[-4000:]
    (model,) = (tmp_path / "w").rglob("server.npy")
    # Each round's update, (3000, 3000), is clipped to norm 1000; its noise has a deviation of 1.
    np.testing.assert_allclose(np.load(model), [[2000 / 2**0.5] * 2], atol=20)
