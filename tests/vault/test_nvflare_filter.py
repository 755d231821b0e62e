"""The example's filter under NVFLARE, where it is installed: the vault's answer leaves a site, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module

import numpy as np
import pytest

from fedpriv.vault.settings import VaultSettings
from tests.vault.running import ROOT, Running
from tests.vault.test_updates import charges, make

pytest.importorskip("nvflare", reason="NVFLARE is not installed")

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
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


def context(round_: int) -> FLContext:
    """That of a task of this round, as NVFLARE's client runner has it when it filters the result."""
    task, made = Shareable(), FLContext()
    task.set_header(AppConstants.CURRENT_ROUND, round_)
    made.set_prop(FLContextKey.TASK_DATA, task, private=True, sticky=False)
    made.set_prop(ReservedKey.RUN_NUM, "job-1", private=False, sticky=True)
    assert made.get_job_id() == "job-1"
    return made


def result(kind: str = DataKind.WEIGHT_DIFF, data: object = UPDATE) -> Shareable:
    meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: 77, "first record": "a rash on the knee"}
    made = DXO(kind, data=data, meta=meta).to_shareable()
    made.set_header("loss", 0.25)
    return made


def test_what_leaves_is_the_vaults_answer_alone(filter_, settings):
    before = charges(settings)
    made = [filter_.process(result(), context(1)) for _ in range(2)]
    for each in made:
        dxo = from_shareable(each)
        assert dxo.data_kind == DataKind.WEIGHT_DIFF
        assert {n: (a.shape, a.dtype) for n, a in dxo.data.items()} == {
            n: (a.shape, a.dtype) for n, a in UPDATE.items()
        }
        assert dxo.data["fc.weight"][0, 0] == pytest.approx(1000, abs=20)
        assert not dxo.meta
        assert not {"loss", "first record"} & {*each, *each.get("__headers__", {})}
    assert from_shareable(made[0]).data["fc.bias"] == from_shareable(made[1]).data["fc.bias"]
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
def test_anything_else_becomes_an_error_without_content(filter_, settings, made):
    before = charges(settings)
    answer = filter_.process(made, context(2))
    assert answer.get_return_code() == ReturnCode.EXECUTION_RESULT_ERROR
    assert {*answer} == {"__headers__"}
    assert charges(settings) == before
