"""Runs and sweeps on this machine, as `fedpriv.run`, `fedpriv.sweep` and the command line start them."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from rich.console import Console

# Set before flwr and transformers are imported: no telemetry, and no warning when a process with tokenizers forks.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from fedpriv import config as configuration
from fedpriv.apps import CHECKOUT
from fedpriv.config import RunConfig
from fedpriv.errors import DiskFullError, InputError
from fedpriv.plan import preflight
from fedpriv.runs.files import CONFIG, checkpoints, is_finished, run_folder_of

if TYPE_CHECKING:
    from simulations.sweeps.result import FinishedSweep

RESULTS = (CHECKOUT or Path.cwd()) / "results"


def federate(
    config: str | Path | None,
    keys: Mapping[str, Any],
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
) -> Path:
    """Run what `fedpriv.run` describes, and return the run's folder."""
    console = _console(progress)
    if resume is None:
        resolved = _resolved(config, keys, out)
    elif config is not None or out is not None or keys:
        raise InputError(f"resume = {str(resume)!r}: a run keeps the configuration it began with; give nothing else")
    else:
        resolved = _resumed(Path(resume).expanduser().absolute())
    _check_simulated(resolved)
    preflight.check(resolved)  # before the imports below, which take longer
    if not console.is_terminal:
        console.print("starting")
    with console.status("starting"):  # which takes seconds, and on a cold disk many
        from simulations.display import TerminalObserver
        from simulations.engines import federation, flower_private

    flower_private.leave_output_to_display()
    folder = run_folder_of(Path(resolved.resume)) if resolved.resume else Path(resolved.out)
    with _ends_in_one_line(folder, resolved.engine), TerminalObserver(console) as observer:
        federation.run(resolved, observer)
    return Path(resolved.out)


@contextmanager
def _ends_in_one_line(folder: Path, engine: str) -> Iterator[None]:
    """Say of a run that is interrupted, or that a full disk ends, where it is and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {_how_to_go_on(folder, engine)}") from None
    except Exception as error:
        if not _is_for_want_of_space(error):
            raise
        reason = " ".join(str(error).split())
        raise DiskFullError(f"the disk is full ({reason}); make room, then: {_how_to_go_on(folder, engine)}") from None


def _how_to_go_on(folder: Path, engine: str) -> str:
    """The folder of a run that ended too early, and the command that resumes it."""
    from fedpriv.runs import resume_command

    if is_finished(folder):
        return f"{folder} holds the finished run; fedpriv report {shlex.quote(str(folder))} writes its page"
    if not folder.exists():
        return "nothing was written"
    if not checkpoints(folder):
        return f"{folder} holds no finished round; remove it, and start again"
    return f"{folder} holds the run up to its last finished round; resume it: {resume_command(folder, engine)}"


def _is_for_want_of_space(error: Exception) -> bool:
    """Whether an error says that a disk or a quota is full, of the system, SQLite, safetensors or a ledger."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(words in str(error).lower() for words in ("no space left", "disk is full", "quota exceeded"))


def sweep_all(
    config: str | Path | None,
    keys: Mapping[str, Any],
    *,
    grid: Mapping[str, Iterable[Any]] | None = None,
    runs: Sequence[Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    max_parallel: int | None = None,
    progress: bool = True,
) -> FinishedSweep:
    """Run what `fedpriv.sweep` describes."""
    console = _console(progress)
    from simulations.sweeps import command, plan

    path = None if config is None else Path(config)
    given = {"grid": None if grid is None else _listed(grid), "runs": None if runs is None else list(map(_plain, runs))}
    varied = {name: value for name, value in given.items() if value is not None}
    values = configuration.read(path) if path is not None else {}
    for name in varied.keys() & values.keys():
        raise InputError(f"{name}: {path} has its own; change it there")
    title = path.stem if path is not None else Path(out or "sweep").name
    planned = plan.expand(
        {**values, **varied}, source=str(path or " and ".join(varied) or "grid"), title=title, overrides=_plain(keys)
    )
    for each in planned.runs:
        _check_simulated(each.config)
    folder = out or RESULTS / "sweeps" / (title if path is not None else f"{datetime.now():%Y%m%d-%H%M%S}-sweep")
    return command.sweep(planned, Path(folder).expanduser().absolute(), max_parallel=max_parallel, console=console)


def _resolved(path: str | Path | None, keys: Mapping[str, Any], out: str | Path | None) -> RunConfig:
    """The configuration: defaults, then the file, then the keys."""
    values = configuration.read(Path(path)) if path is not None else {}
    values = configuration.with_overrides(values, _plain(keys))
    name = Path(path).stem if path is not None else "embedded"
    if values.get("ledger"):
        values["ledger"] = str(Path(str(values["ledger"])).expanduser().absolute())
    folder = out or values.get("out") or RESULTS / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    return configuration.parse(values | {"out": str(Path(folder).expanduser().absolute())})


def _check_simulated(config: RunConfig) -> None:
    """Refuse what only a deployment can run."""
    if config.engine == "flower":
        raise InputError("engine = 'flower': is for `flwr run .`; here it must be stacked, in-process or ray")
    if config.data == configuration.ON_NODES:
        raise InputError(f"data = {config.data!r}: is for deployments; a simulation needs the records, in a file")


def _resumed(path: Path) -> RunConfig:
    """The configuration that a run began with, set to resume."""
    values = configuration.read(run_folder_of(path) / CONFIG)
    return configuration.parse(values | {"resume": str(path)})


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as a file would hold them."""
    return {key: _value(value) for key, value in values.items()}


def _value(value: Any) -> Any:
    """A path as text, numbers and arrays of NumPy or pandas as Python's own, in lists too; else as it is."""
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(map(_value, value)) if isinstance(value, (list, tuple)) else value


def _listed(grid: Mapping[str, Iterable[Any]]) -> dict[str, Any]:
    """The grid with a list for each key; what is none, such as one number, is left to the plan, which refuses it."""
    return {
        key: values
        if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable)
        else list(map(_value, values))
        for key, values in grid.items()
    }


def _console(progress: bool) -> Console:
    """Where the display writes: the terminal, or the output of a notebook's cell as one text, or nowhere."""
    if not progress:
        return Console(quiet=True, force_terminal=False)
    console = Console()
    # By itself rich would make an output of its own for every line.
    if console.is_jupyter:
        return Console(force_jupyter=False, force_terminal=False, color_system="standard", width=100)
    return console
