"""A run on the federation's nodes: submit it, follow it to its end, and stop it on request."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from fedpriv import config as configuration
from fedpriv.apps import FLOWER_APP
from fedpriv.errors import FlowerError
from fedpriv.files import read_text
from fedpriv.holder.sums import smallest_threshold
from fedpriv.learning.data.federated import is_natural
from fedpriv.operate import approvals
from fedpriv.operate.flower import (
    environment,
    plain,
    program_folder,
)
from fedpriv.operate.processes import signals_handled_by
from fedpriv.privacy.accounting.views import num_readers
from fedpriv.runs.figures import ABOVE_TARGET, above_target
from fedpriv.runs.files import CONFIG, SUMMARY, is_finished, run_folder_of
from fedpriv.runs.show import check_installed
from server.deploy.folder import CONNECTION, Coordinator

COMPLETED = "finished:completed"

_POLL_SECONDS = 3.0
# Nodes from which on a masked sum does without one of them.
_SPARES_ONE = 4
_MAX_FAILED_POLLS = 20


def run(coordinator: Coordinator, overrides: Sequence[str], say: Callable[[str], None]) -> int:
    """Start a run, follow it, and return 0 if it completed, 3 if it cost more than its target, else 1.

    SIGINT and SIGTERM also stop the run on the nodes.

    Args:
        coordinator: whose SuperLink is running.
        overrides: `key=value` pairs of the run's configuration.
        say: prints a line, those of the run's log too.

    Raises:
        InputError: a key or value is wrong; nothing was started.
        FlowerError: the SuperLink refused the run, or stopped answering.
    """
    values = run_values(coordinator, overrides)
    if not values.get("resume") and (why := configuration.why_recipe(coordinator.planned | given(overrides))):
        say(why)
    if values["secure_aggregation"]:
        number = len(coordinator.registered())
        say(f"a sum needs {values['min_clients']} of {number} nodes (min_clients); with fewer the run stops")
    run_id = _submit(coordinator, values, say)
    say(f"run {run_id} writes {values['out']}")
    try:
        with signals_handled_by(_interrupt):
            _follow(coordinator, run_id, say)
            status, details = _end(coordinator, run_id)
    except KeyboardInterrupt:
        say(f"stopping run {run_id}")
        coordinator.flwr("stop", run_id, CONNECTION)
        status, details = _end(coordinator, run_id)
    say(f"run {run_id}: {status}{f' ({details})' if details else ''}")
    if status != COMPLETED:
        return 1
    summary = _summary(run_folder_of(Path(str(values.get("resume") or values["out"]))))
    if reason := summary.get("stopped_early"):
        say(f"run {run_id} ended early: {reason}")
        return 1
    if excess := above_target(summary):
        say(f"run {run_id}: {excess}")
    return ABOVE_TARGET if excess else 0


def run_values(coordinator: Coordinator, overrides: Sequence[str]) -> dict[str, Any]:
    """The run's whole configuration as Flower accepts it, with a folder for its results and the nodes' keys.

    With `resume` it is based on the original configuration, else on the planned one. Paths become absolute: the server
    app has another working directory.

    Raises:
        InputError: a key or value is wrong.
    """
    defaults = {
        "engine": "flower",
        "comparison": False,  # no node with a policy would train without noise
        "out": str(coordinator.runs / f"{datetime.now():%Y%m%d-%H%M%S}"),
        "node_keys": str(coordinator.vaults),
        "ledger": str(coordinator.ledger),
    }
    values = given(overrides)
    if values.get("resume"):
        original = configuration.read(run_folder_of(Path(values["resume"])) / CONFIG)
    else:
        known, planned = coordinator.registered(), coordinator.planned
        original = ({"num_clients": max(known) + 1} if known else {}) | planned
        chosen = {**original, **values}
        config = configuration.parse({**defaults, **chosen})
        if "num_clients" not in {**planned, **values} and config.data != configuration.ON_NODES and is_natural(config):
            original.pop("num_clients", None)  # such data have holders of their own, of whom some may not have a node
        if known and chosen.get("secure_aggregation") is True and "min_clients" not in chosen:
            original["min_clients"] = _needed(coordinator, int(chosen.get("colluding_clients", 0)))
    config = configuration.parse({**defaults, **original, **values})
    check_installed(config.track)
    return configuration.to_flower(config)


def given(overrides: Sequence[str]) -> dict[str, Any]:
    """The values of `key=value` pairs, with absolute paths.

    Raises:
        InputError: a pair has no `=`.
    """
    values = configuration.parse_overrides(overrides)
    locations = configuration.RunConfig.keys_with(configuration.Fact.LOCATION)
    values |= {key: _absolute(values[key]) for key in locations if values.get(key)}
    if Path(str(values.get("test_data", ""))).expanduser().is_file():
        values["test_data"] = _absolute(values["test_data"])
    return values


def _needed(coordinator: Coordinator, colluding: int) -> int:
    """The least uploads of a masked sum, unless the operator says: all or, from four nodes on, one less.

    So one node may leave without ending the federation's runs. Where more may collude, all may be needed.
    """
    number = len(coordinator.registered())
    least = max(num_readers(colluding) + 2, smallest_threshold(number, colluding))
    return number - 1 if number >= _SPARES_ONE and number - 1 >= least else number


def _summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished run; empty of any other."""
    return dict(json.loads(read_text(folder / SUMMARY))) if is_finished(folder) else {}


def _absolute(path: object) -> str:
    return str(Path(str(path)).expanduser().absolute())


def _submit(coordinator: Coordinator, values: dict[str, Any], say: Callable[[str], None]) -> str:
    """Approve this checkout's bundle, submit a run of it, and return its id.

    A file passes the values: Flower's own `key=value` pairs cannot nest quotes.
    """
    bundle = approvals.bundle_of(FLOWER_APP)
    approvals.approve(coordinator.approved, hashlib.sha256(bundle).hexdigest())
    if note := approvals.note_on(FLOWER_APP):
        say(note)
    with tempfile.TemporaryDirectory(prefix="fedpriv-run-") as folder:
        app, file = Path(folder) / "app", Path(folder) / "run.toml"
        approvals.install(bundle, app)
        file.write_text(tomli_w.dumps(values), encoding="utf-8")
        return str(coordinator.flwr("run", str(app), CONNECTION, "--run-config", str(file))["run-id"])


def _follow(coordinator: Coordinator, run_id: str, say: Callable[[str], None]) -> None:
    """Show the run's log until it ends, in colour on a terminal alone; a stream that is lost is said, and taken up."""
    num_shown = 0
    for _ in range(_MAX_FAILED_POLLS):
        num_shown = _stream(coordinator, run_id, say, num_shown)
        with suppress(FlowerError):
            if coordinator.flwr("ls", CONNECTION, "--run-id", run_id)["runs"][0]["status"].startswith("finished"):
                return
        say(f"the log's stream was lost after {num_shown} lines; the run may go on, see {coordinator.log}; once more")
        time.sleep(_POLL_SECONDS)


def _stream(coordinator: Coordinator, run_id: str, say: Callable[[str], None], num_shown: int) -> int:
    """Show the lines of the run's log beyond so many, until its stream ends, and return how many there are."""
    shown = str if sys.stdout.isatty() else plain
    number = 0
    with subprocess.Popen(
        [str(program_folder() / "flwr"), "log", run_id, CONNECTION, "--stream"],
        cwd=coordinator.folder,
        env=environment(coordinator.flower_home, PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as following:
        try:
            for number, line in enumerate(following.stdout or (), start=1):
                if number > num_shown:
                    say(shown(line.rstrip("\n")))
        except BaseException:
            following.kill()
            raise
    return max(number, num_shown)


def _end(coordinator: Coordinator, run_id: str) -> tuple[str, str]:
    """The status and details of the run, once it has ended."""
    failures = 0
    while True:
        try:
            listed = coordinator.flwr("ls", CONNECTION, "--run-id", run_id)["runs"][0]
            failures = 0
        except FlowerError:
            failures += 1
            if failures == _MAX_FAILED_POLLS:
                raise
        else:
            if listed["status"].startswith("finished"):
                details = " ".join(listed["status-details"].split())
                return listed["status"], "" if details == "N/A" else details
        time.sleep(_POLL_SECONDS)


def _interrupt(number: int, frame: object) -> None:
    """Treat SIGTERM like Ctrl-C, and SIGINT too if the starting shell ignored it."""
    raise KeyboardInterrupt
