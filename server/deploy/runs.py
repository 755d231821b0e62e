"""A run on the federation's nodes: submitted, followed to its end, and stopped when its starter says so."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from fedpriv import config as configuration
from fedpriv.deployment.flower import CONNECTION, FlowerError, environment, flwr, program_folder
from server.deploy.folder import Coordinator

COMPLETED = "finished:completed"

# Of this checkout, which the run bundles for the nodes.
ROOT = Path(__file__).resolve().parents[2]

_POLL_SECONDS = 3.0
_MAX_FAILED_POLLS = 20


def run(coordinator: Coordinator, overrides: Sequence[str], say: Callable[[str], None]) -> bool:
    """Whether the run completed.

    Its log goes to stdout. SIGINT and SIGTERM stop the run on the nodes, too.

    Args:
        coordinator: whose SuperLink is running.
        overrides: of the run's configuration, `key=value`.
        say: prints a line.

    Raises:
        InputError: a key or value is wrong; then nothing was started.
        FlowerError: the SuperLink refused the run, or stopped answering.
    """
    values = run_values(coordinator, overrides)
    run_id = _submit(coordinator, values)
    say(f"run {run_id} writes {values['out']}")
    try:
        with _signals_as_interrupt():
            _follow(coordinator, run_id)
            status, details = _end(coordinator, run_id)
    except KeyboardInterrupt:
        say(f"stopping run {run_id}")
        _flwr(coordinator, "stop", run_id, CONNECTION)
        status, details = _end(coordinator, run_id)
    say(f"run {run_id}: {status}{f' ({details})' if details else ''}")
    return status == COMPLETED


def run_values(coordinator: Coordinator, overrides: Sequence[str]) -> dict[str, Any]:
    """The run's whole configuration as Flower takes it, with a folder for its results and the keys of the nodes.

    With `resume` it is the one that the run began with. Paths are made absolute: the server app works elsewhere.

    Raises:
        InputError: a key or value is wrong.
    """
    defaults = {
        "engine": "flower",
        "comparison": False,  # no node with a policy would train without noise
        "out": str(coordinator.runs / f"{datetime.now():%Y%m%d-%H%M%S}"),
        "node_keys": str(coordinator.nodes),
    }
    asked = configuration.parse_overrides(overrides)
    asked |= {key: _absolute(asked[key]) for key in configuration.PLACES if asked.get(key)}
    if Path(str(asked.get("test_data", ""))).expanduser().is_file():
        asked["test_data"] = _absolute(asked["test_data"])
    began = _began(Path(asked["resume"])) if asked.get("resume") else {}
    return configuration.to_flower(configuration.parse({**defaults, **began, **asked}))


def _absolute(path: object) -> str:
    return str(Path(str(path)).expanduser().absolute())


def _began(path: Path) -> dict[str, Any]:
    """The configuration that a run began with."""
    from server.checkpoint import run_folder_of  # takes seconds to import

    return configuration.read(run_folder_of(path) / "config.toml")


def _submit(coordinator: Coordinator, values: dict[str, Any]) -> str:
    """The run's id. The values go by a file, since Flower's own `key=value` pairs know no quotes within quotes."""
    with tempfile.TemporaryDirectory(prefix="fedpriv-run-") as folder:
        file = Path(folder) / "run.toml"
        file.write_text(tomli_w.dumps(values))
        return str(_flwr(coordinator, "run", ".", CONNECTION, "--run-config", str(file))["run-id"])


def _follow(coordinator: Coordinator, run_id: str) -> None:
    """Show the run's log until it ends."""
    subprocess.run(
        [str(program_folder() / "flwr"), "log", run_id, CONNECTION, "--stream"],
        cwd=ROOT,
        env=environment(coordinator.flower_home),
        check=False,
    )


def _end(coordinator: Coordinator, run_id: str) -> tuple[str, str]:
    """Status and details of the run once it is over."""
    failures = 0
    while True:
        try:
            found = _flwr(coordinator, "ls", CONNECTION, "--run-id", run_id)["runs"][0]
            failures = 0
        except FlowerError:
            failures += 1
            if failures == _MAX_FAILED_POLLS:
                raise
        else:
            if found["status"].startswith("finished"):
                details = " ".join(found["status-details"].split())
                return found["status"], "" if details == "N/A" else details
        time.sleep(_POLL_SECONDS)


def _flwr(coordinator: Coordinator, *arguments: str) -> dict[str, Any]:
    return flwr(coordinator.flower_home, arguments, folder=ROOT)


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """SIGTERM as Ctrl-C, and SIGINT also where the starting shell had it ignored."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    former = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
