"""A node runs only the bundles whose bytes its operator approved, and loses little time with Flower's processes."""

import hashlib
import inspect
import json
import os
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from flwr.cli.install import install_from_fab
from flwr.common.constant import ErrorCode
from flwr.supercore.error import FlowerError
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supernode import start_client_internal
from flwr.supernode.runtime.run_clientapp import run_clientapp
from flwr.supernode.servicer.runtime import runtime_handlers

from clients.deploy import approved_supernode
from fedpriv.operate.approvals import approved, is_approved
from simulations.sites import ROOT
from tests.bundles import FILES, bundle, held, plant, task_input

CONTENT = b"a bundle"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def test_only_the_very_bytes_are_approved_and_by_an_empty_or_damaged_list_nothing(tmp_path):
    file = tmp_path / "approved-fabs"
    assert not is_approved(CONTENT, file), "missing"
    file.write_text(f"# read and approved by M. Curie\n{'0' * 64}\n{DIGEST}  # version 0.1.0\n")
    assert approved(file) == {DIGEST, "0" * 64}
    assert is_approved(CONTENT, file)
    assert not is_approved(CONTENT + b" ", file)
    for text in ("", "# nothing\n", f"{DIGEST}\nyes\n", f"{DIGEST.upper()}\n"):
        file.write_text(text)
        assert not is_approved(CONTENT, file)


def test_what_lies_where_flower_would_install_an_approved_bundle_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    content = bundle()
    folder, answers = plant(tmp_path, content), [task_input(content), task_input(content, fab_version="1.0.0/../x")]
    monkeypatch.setattr(runtime_handlers, "pull_task_input", lambda *_: answers.pop(0))
    approved_supernode.install_what_is_approved()
    assert runtime_handlers.pull_task_input("request", "state", "task") == task_input(content)
    assert install_from_fab(content, skip_prompt=True) == folder
    assert held(folder) == FILES
    with pytest.raises(FlowerError, match="another bundle's name"):  # Flower would execute the folder of that name
        runtime_handlers.pull_task_input("request", "state", "task")


def test_the_coordinator_reads_who_refuses_which_bundle_and_what_helps(tmp_path, monkeypatch):
    for name in ("_pull_and_store_message", "_verify_fab", "FAB_VERIFICATION_ERROR"):
        monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))
    (file := tmp_path / "approved-fabs").write_text(f"{'0' * 64}\n")
    approved_supernode.require_approval(file, "St. Anna (2)")
    assert not start_client_internal._verify_fab(SimpleNamespace(content=CONTENT), {"approved-fabs": str(file)})
    error = start_client_internal.FAB_VERIFICATION_ERROR
    assert error.code == ErrorCode.INVALID_FAB
    assert error.reason.startswith("St. Anna (2) has not approved this run's bundle; ")
    assert error.reason.endswith(f"fedpriv node approve DIR {DIGEST}")


# What is replaced, and what relies on it: whoever updates Flower reads these again, and then their digests here.
FLOWER = "1.42.0"
SOURCES = {
    start_client_internal.start_client_internal: "9e89a6eb68fbec6821e817cd2c09f7894fc7b0f5725c2365b19a7122307f11f3",
    start_client_internal._pull_and_store_message: "eaf5d0e36dc34e4cf46a490511d077ac55cc8edbbcdbe938c1f6dbcb758628be",
    start_client_internal._push_messages: "00bb86faffdec114db87e7f716af2acd901d12284e44f51f5c2a84704db05f64",
    start_client_internal._verify_fab: "dc3eb78d803b8fe9a65bc704e17da8b58e9f43020b43bf2ba0ba4812483634aa",
    run_superexec.run_superexec: "91e7a33c5b898f33249c29d2058c57637ca7668a14c27296d2506dc98ac84f9b",
    runtime_handlers.pull_task_input: "035e6c69a7cffcad980d6a38af68941151a7f6979031638d7cb28c5431df4d3d",
    install_from_fab: "481bd04cde5823220658a8a3e84e827a5ef38254223972e4e14c4cb3968e917e",
    run_clientapp: "6ce09559f3a2f5dcafb7d08f4b443585d76b9b53b9cb29ba1ec06a6982163443",
    SubprocessExecutor: "9c58435eb28cd78957a58a6db6a051c5718406cef70353bca2037015424d47e9",
    ExecutionSpec: "a52aad6399c9a5ec1e3b316148832232119eb26b56b18a38d3c74b3ef353a538",
}


def test_flower_is_what_was_read_when_its_private_names_were_replaced():
    assert version("flwr") == FLOWER
    found = {part.__qualname__: hashlib.sha256(inspect.getsource(part).encode()).hexdigest() for part in SOURCES}
    assert found == {part.__qualname__: digest for part, digest in SOURCES.items()}


def test_a_supernode_pauses_for_shorter_while_messages_come(monkeypatch):
    """Time passes in sleep alone."""
    now, slept, told, flower, messages = 1000.0, [], [], start_client_internal, [None, 7]

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(flower, "_pull_and_store_message", lambda **_: messages.pop(0))
    monkeypatch.setattr(flower, "time", flower.time)  # both are put back
    monkeypatch.setattr(approved_supernode, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    approved_supernode.keep_pace(lambda: told.append(now))
    now += 60
    assert flower._pull_and_store_message(state="...") is None
    flower.time.sleep(3)
    assert slept == [3], "as long as Flower asks, when nothing has come for long"
    assert told == []
    assert flower._pull_and_store_message(state="...") == 7
    assert told == [now]
    flower.time.sleep(0.5)
    assert slept.pop() == 0.05
    now += 2
    flower.time.sleep(3)
    assert slept.pop() == pytest.approx(0.205)


@pytest.mark.parametrize("ends_at", [None, "pull_object", "confirm_message_received"])
def test_of_a_run_that_ends_as_a_message_comes_a_node_keeps_and_answers_it_or_does_neither(ends_at, monkeypatch):
    monkeypatch.setattr(start_client_internal, "_pull_and_store_message", start_client_internal._pull_and_store_message)
    approved_supernode.answer_each_message()
    state, store, link = Mock(), Mock(), Mock()
    store.preregister.return_value, link.pull_object.return_value = ["the object"], b"content"
    link.receive.return_value = SimpleNamespace(metadata=Mock(run_id=7, message_id="the message")), "tree"
    if ends_at:
        getattr(link, ends_at).side_effect = RunNotRunningException
    names = ("receive", "get_run", "get_fab", "pull_object", "confirm_message_received")
    calls = {"state": state, "object_store": store, "node_config": {}, "trusted_entities": None}
    calls |= {name: getattr(link, name) for name in names}
    found = start_client_internal._pull_and_store_message(**calls)
    is_kept = not state.delete_messages.called
    assert state.store_message.called
    assert (found == 7) == is_kept == (ends_at != "pull_object")
    assert store.put.called == is_kept
    assert state.finish_task.called != is_kept


# Runs in an interpreter of its own, whose main module imports `clients`, as that of the SuperExec does.
_LAUNCH = """
import os, sys, time
from pathlib import Path
from clients.deploy import approved_supernode
import probe
approved_supernode.run_clientapp = probe.report
told, tell = os.pipe()
executor = approved_supernode.WarmExecutor(told)
spec = approved_supernode.ExecutionSpec(
    task_type=approved_supernode.TaskType.CLIENT_APP, runtime_api_address="here:1", token="secret", task_id=1,
    insecure=True, root_certificates_path=None, runtime_dependency_install=False, parent_pid=os.getpid(),
    suppress_output=False,
)
for _ in range(2):
    executor.launch(spec)
approved_supernode._UNTOLD_SECONDS = 0.01
executor.reconcile()
print("untold")
approved_supernode._UNTOLD_SECONDS = 1e6
os.write(tell, b"..")
executor.reconcile()
print("told")
while len(list(Path(sys.argv[1]).glob("[0-9]*"))) < 2:
    time.sleep(0.05)
os.close(tell)
try:
    executor.reconcile()
except SystemExit as end:
    print("ended", end.code)
"""
_PROBE = """
import json, os, sys
from pathlib import Path
def report(**arguments):
    command = Path("/proc/self/cmdline").read_text()
    part = Path(os.environ["REPORTS"]) / f".{os.getpid()}"
    part.write_text(json.dumps({"arguments": arguments, "modules": sorted(sys.modules), "command": command}))
    part.rename(part.with_name(str(os.getpid())))
"""


def test_each_task_has_a_process_with_flower_and_nothing_of_the_bundle_imported(tmp_path):
    (tmp_path / "probe.py").write_text(_PROBE)
    (tmp_path / "reports").mkdir()
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    variables = {**os.environ, "PYTHONPATH": paths, "REPORTS": str(tmp_path / "reports")}
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120, "check": True}
    done = subprocess.run([sys.executable, "-c", _LAUNCH, variables["REPORTS"]], env=variables, **options)
    assert done.stdout.splitlines() == ["untold", "told", "ended 0"]
    reports = [json.loads(file.read_text()) for file in (tmp_path / "reports").iterdir()]
    assert len(reports) == 2, "a process for each"
    for report in reports:
        assert report["arguments"]["token"] == "secret"
        assert "secret" not in report["command"]
        modules = set(report["modules"])
        assert {"flwr.supernode.runtime.run_clientapp", "fedpriv.holder.wire.frame"} <= modules
        assert not {name for name in modules if name.split(".")[0] in ("clients", "server", "torch")}
