"""Runs what a sweep still lacks, in this process or in parallel on Ray; a run that fails does not stop the others."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedpriv.config import RunConfig
from fedpriv.errors import InputError, LedgerError, TooFewClientsError
from fedpriv.holder.wire.kinds import Registration
from fedpriv.learning.data.identity import DataDigests
from fedpriv.learning.training.workbench import forget_changed, workbench
from fedpriv.privacy.accounting.recipe import LearningRate
from fedpriv.runs import RoundRow, files, refuse_second
from server.observer import RunProgress
from simulations.engines import federation, ray_actors
from simulations.sweeps.plan import PlannedRun, Sweep

_POLL_SECONDS = 0.5

# Called at every change with {run's key: `waiting`, `left out`, `running`, `done` or `failed`}.
_OnChange = Callable[[Mapping[str, str]], None]


def _is_finished(run: PlannedRun, out: Path) -> bool:
    """Whether the run is finished."""
    return files.is_finished(out / run.key)


def attempts(sweep: Sweep, out: Path) -> list[Path]:
    """The folders of all runs, of earlier plans too, and of earlier attempts: each may have released something."""
    planned = {run.key for run in sweep.runs}
    named = (path for path in sorted(out.glob("*")) if path.name in planned or files.SWEEP_KEY.fullmatch(path.name))
    own = [path for path in named if path.is_dir()]
    return own + sorted(path for path in (out / files.UNFINISHED).glob("*") if path.is_dir())


# Called with a run in this process and what it does just now.
_OnProgress = Callable[[PlannedRun, str], None]


def run_all(sweep: Sweep, out: Path, *, at_once: int, on_change: _OnChange, on_progress: _OnProgress) -> dict[str, str]:
    """Run all chosen ones that are not finished, and return {run's key: why it failed}.

    Args:
        sweep: the plan.
        out: the sweep's folder; each run has a folder in it, named by its key.
        at_once: how many runs to execute at a time; 1 stays in this process, more need Ray.
        on_change: called at every change.
        on_progress: called within the rounds of a run, where runs stay in this process.

    Raises:
        InputError: another process runs one of them, or Ray is needed and not installed.
    """
    states = {
        run.key: "done" if _is_finished(run, out) else "waiting" if run.is_chosen else "left out" for run in sweep.runs
    }
    on_change(states)
    missing = [run for run in sweep.runs if states[run.key] == "waiting"]
    for run in missing:  # all are looked at before one is moved
        refuse_second(out / run.key)
    for run in missing:
        _set_aside(out / run.key, out / files.UNFINISHED)
    if not missing:
        return {}
    if at_once == 1:
        return _in_this_process(missing, out, states, on_change, on_progress)
    return _on_ray(missing, out, at_once, states, on_change)


def _run_one(
    run: PlannedRun,
    folder: Path,
    on_round: Callable[[], None] = lambda: None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> str | None:
    """Why the run failed, in one line; None once it is finished. The traceback is in FOLDER.txt."""
    try:
        forget_changed(run.config)
        config = run.placed(folder)
        _check_data(config, folder)
        federation.run(config, _Silent(on_round, on_progress))
    except Exception as error:  # one run must not end the sweep
        folder.with_suffix(".txt").write_text(traceback.format_exc(), encoding="utf-8")
        if isinstance(error, (InputError, LedgerError, TooFewClientsError)):
            return str(error)
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def _check_data(config: RunConfig, folder: Path) -> None:
    """Refuse data that are not those of the sweep's other runs, or of an earlier attempt.

    Raises:
        InputError: names what differs.
    """
    digests, places = workbench(config).digests, (folder.parent, folder.parent / files.UNFINISHED)
    assert digests is not None, "a sweep's runs are simulations"
    for path in (path for place in places for path in sorted(place.glob(f"*/{files.DIGESTS}"))):
        then = DataDigests.from_json(files.read_values(path))
        digests.check_same_files(then, f"data = {config.data!r}: since run {path.parent.name} of this sweep")


class _Silent:
    """An observer that shows nothing: the sweep's display reads what each run writes."""

    def __init__(self, on_round: Callable[[], None], on_progress: Callable[[str], None]) -> None:
        self._on_round, self._on_progress = on_round, on_progress

    def started(
        self, config: RunConfig, registrations: Sequence[Registration], learning_rate: LearningRate | None
    ) -> None:
        """A series begins."""

    def notice(self, text: str) -> None:
        """Into the log."""
        logging.getLogger("flwr").info("%s", text)

    def progressed(self, progress: RunProgress) -> None:
        """Something is going on."""
        self._on_progress(progress.text if progress.round is None else f"round {progress.round}, {progress.text}")

    def round_done(self, row: RoundRow) -> None:
        """A round is over."""
        self._on_round()

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Everything is written."""


def _set_aside(folder: Path, unfinished: Path) -> None:
    """Keep the folder of an unfinished attempt: its ledger counts in the sweep's sum."""
    if not folder.is_dir():
        return
    unfinished.mkdir(exist_ok=True)
    number = 1
    while (target := unfinished / f"{folder.name}-{number}").exists():
        number += 1
    folder.rename(target)


def _in_this_process(
    runs: Sequence[PlannedRun], out: Path, states: dict[str, str], on_change: _OnChange, on_progress: _OnProgress
) -> dict[str, str]:
    errors: dict[str, str] = {}
    for run in runs:
        states[run.key] = "running"
        on_change(states)
        error = _run_one(run, out / run.key, partial(on_change, states), partial(on_progress, run))
        if error is not None:
            errors[run.key] = error
        states[run.key] = "failed" if error else "done"
        on_change(states)
    return errors


def _on_ray(
    runs: Sequence[PlannedRun], out: Path, at_once: int, states: dict[str, str], on_change: _OnChange
) -> dict[str, str]:
    ray = ray_actors.connect(runs[0].config.ray_address, num_cpus=at_once)
    remote = ray.remote(num_cpus=1, max_retries=0)(_on_one_core)
    waiting, errors = list(runs), dict[str, str]()
    active: dict[Any, PlannedRun] = {}
    try:
        while waiting or active:
            while waiting and len(active) < at_once:
                run = waiting.pop(0)
                active[remote.remote(run, out / run.key)] = run
                states[run.key] = "running"
            on_change(states)
            done, _ = ray.wait(list(active), timeout=_POLL_SECONDS)
            for reference in done:
                run = active.pop(reference)
                try:
                    error = ray.get(reference)
                except ray.exceptions.RayError as failure:
                    error = f"its worker died: {str(failure).splitlines()[0]}"
                if error is None and not _is_finished(run, out):
                    error = (
                        f"it finished on another node, whose {out} is not this one; give --out a folder of all nodes"
                    )
                if error is not None:
                    errors[run.key] = error
                states[run.key] = "failed" if error else "done"
        on_change(states)
    finally:
        ray.shutdown()
    return errors


def _on_one_core(run: PlannedRun, folder: Path) -> str | None:
    torch.set_num_threads(1)
    return _run_one(run, folder)
