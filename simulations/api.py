"""Runs and sweeps on this machine, as `fedpriv.run`, `fedpriv.sweep` and the command line start them."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from rich.console import Console

# Set before flwr and transformers are imported: no telemetry, and no warning when a process with tokenizers forks.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from fedpriv import config as configuration
from fedpriv.config import RunConfig
from fedpriv.errors import DiskFullError, InputError, first_line
from fedpriv.runs.files import CONFIG, checkpoints, is_finished, run_folder_of
from fedpriv.runs.plan import preflight

if TYPE_CHECKING:
    from simulations.sweeps.result import FinishedSweep


def _results() -> Path:
    """The folder of results that nobody named one for, where the command was given."""
    return Path.cwd() / "results"


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
    given, named = _in_memory(keys)
    if resume is None:
        resolved, why = _resolved(config, named, out)
        if why:
            console.print(why, markup=False, highlight=False, soft_wrap=True)
    elif config is not None or out is not None or keys.keys() - set(_GIVEN if given else ()):
        more = " but its model and records" if given else ""
        raise InputError(
            f"resume = {str(resume)!r}: a run keeps the configuration it began with; give nothing else{more}"
        )
    else:
        resolved = _resumed(Path(resume).expanduser().absolute(), named)
    _check_simulated(resolved)
    preflight.check(resolved)  # before the imports below, which take longer
    if not console.is_terminal:
        console.print("starting")
    with console.status("starting"):  # which takes seconds, and on a cold disk many
        from simulations.display import TerminalObserver
        from simulations.engines import federation, flower_private

        resolved, provided = _with_own_model(resolved, given)
    flower_private.leave_output_to_display()
    folder = run_folder_of(Path(resolved.resume)) if resolved.resume else Path(resolved.out)
    with provided, _ends_in_one_line(folder, resolved), TerminalObserver(console) as observer:
        federation.run(resolved, observer)
    return Path(resolved.out)


# Keys of which a program may give the thing itself in place of its name.
_GIVEN = ("model", "data", "test_data")


def _in_memory(keys: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """{key: the model, or the records, that a program gave}; and the keys with names in their places.

    Raises:
        InputError: they do not go together.
    """
    named = {key: value for key, value in keys.items() if key not in _GIVEN or value is not None}
    given = {key: named[key] for key in _GIVEN if not isinstance(named.get(key, ""), (str, PurePath))}
    if not given:
        return {}, dict(keys)
    if not callable(given.get("model")):
        what = type(given["model"]).__name__ if "model" in given else str(named.get("model", RunConfig.model))
        raise InputError(f"model = {what}: records in memory need a function that returns an OwnModel")
    if "data" not in given:
        raise InputError(
            f"data = {named.get('data', '')!r}: a model of your own takes a sequence with the records of each holder, "
            "or {name: records}"
        )
    if "num_clients" in keys:
        raise InputError(f"num_clients = {keys['num_clients']}: data says how many holders there are; leave it out")
    if isinstance(given["data"], Sized) and len(given["data"]):
        named["num_clients"] = len(given["data"])
    return given, {**named, **dict.fromkeys(given, configuration.IN_MEMORY), "model": configuration.OWN_MODEL}


def _with_own_model(config: RunConfig, given: Mapping[str, Any]) -> tuple[RunConfig, AbstractContextManager[None]]:
    """The configuration with the name of the model that a program gave; within the context, runs find it by that.

    Raises:
        InputError: the model or the records cannot be used, or a resumed run began with another model.
    """
    if not given:
        return config, nullcontext()
    from fedpriv.learning.training.own_federation import OwnFederation, OwnWorkbench
    from fedpriv.learning.training.workbench import providing

    federation = OwnFederation.of(given["model"], given["data"], given.get("test_data"), seed=config.seed)
    if config.resume and config.model != federation.name:
        raise InputError(
            f"resume = {config.resume!r}: the run began with model = {config.model}, and this one is "
            f"{federation.name}; give the function that built the first"
        )
    return replace(config, model=federation.name), providing(
        federation.name, lambda config: OwnWorkbench(config, federation)
    )


@contextmanager
def _ends_in_one_line(folder: Path, config: RunConfig) -> Iterator[None]:
    """Say of a run that is interrupted, or that a full disk ends, where it is and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {_how_to_go_on(folder, config)}") from None
    except Exception as error:
        if not _is_for_want_of_space(error):
            raise
        reason = " ".join(str(error).split())
        raise DiskFullError(f"the disk is full ({reason}); make room, then: {_how_to_go_on(folder, config)}") from None


def _how_to_go_on(folder: Path, config: RunConfig) -> str:
    """The folder of a run that ended too early, and the command that resumes it."""
    from fedpriv.runs import resume_command

    if is_finished(folder):
        return f"{folder} holds the finished run; fedpriv report {shlex.quote(str(folder))} writes its page"
    if not folder.exists():
        return "nothing was written"
    if not checkpoints(folder):
        return f"{folder} holds no finished round; remove it, and start again"
    command = resume_command(folder, config.engine, config.model)
    return f"{folder} holds the run up to its last finished round; resume it: {command}"


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
    if _in_memory(keys)[0]:
        raise InputError(
            "model: a sweep's runs are processes of their own; call fedpriv.run(model=...) for each of them"
        )
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
    folder = out or _results() / "sweeps" / (title if path is not None else f"{datetime.now():%Y%m%d-%H%M%S}-sweep")
    return command.sweep(planned, Path(folder).expanduser().absolute(), max_parallel=max_parallel, console=console)


def _resolved(path: str | Path | None, keys: Mapping[str, Any], out: str | Path | None) -> tuple[RunConfig, str]:
    """The configuration, of defaults, then the file, then the keys; and what implies its recipe, if anything does."""
    values = configuration.read(Path(path)) if path is not None else {}
    if configuration.is_sweep(values):
        raise InputError(f"{path}: is a sweep, with [grid] or [[runs]]; fedpriv sweep {shlex.quote(str(path))} runs it")
    values = configuration.with_overrides(values, _plain(keys))
    name = Path(path).stem if path is not None else "embedded"
    if values.get("ledger"):
        values["ledger"] = str(Path(str(values["ledger"])).expanduser().absolute())
    folder = out or values.get("out") or _results() / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    values["out"] = str(Path(folder).expanduser().absolute())
    if callable(own := values.get("noise_schedule")):
        values["noise_schedule"] = _of_rounds(own, configuration.parse({**values, "noise_schedule": ()}).rounds)
    return configuration.parse(values), configuration.why_recipe(values)


def _of_rounds(schedule: Callable[[int], Any], rounds: int) -> list[Any]:
    """A program's function as its values for every round, from 1: from here on the run has these numbers alone.

    Raises:
        InputError: it fails.
    """
    try:
        return [_value(schedule(round_)) for round_ in range(1, rounds + 1)]
    except Exception as error:  # a stranger's function raises anything
        raise InputError(f"noise_schedule: the function fails ({first_line(error)})") from error


def _check_simulated(config: RunConfig) -> None:
    """Refuse what only a deployment can run."""
    if config.engine == "flower":
        raise InputError("engine = 'flower': is for `flwr run .`; here it must be stacked, in-process or ray")
    if config.data == configuration.ON_NODES:
        raise InputError(f"data = {config.data!r}: is for deployments; a simulation needs the records, in a file")


def _resumed(path: Path, named: Mapping[str, Any]) -> RunConfig:
    """The configuration that a run began with, set to resume.

    Args:
        path: of the run, or of a checkpoint.
        named: from `_in_memory`.

    Raises:
        InputError: records are given that the run did not begin with, or the other way round.
    """
    values = configuration.read(run_folder_of(path) / CONFIG)
    config = configuration.parse(values | {"resume": str(path)})
    began = {key for key in ("data", "test_data") if getattr(config, key) == configuration.IN_MEMORY}
    if named and began != (differing := named.keys() & {"data", "test_data"}):
        raise InputError(
            f"resume = {str(path)!r}: the run began with {_listed_keys(began)} in memory, not {_listed_keys(differing)}"
        )
    return config


def _listed_keys(keys: Iterable[str]) -> str:
    return " and ".join(sorted(keys)) or "nothing"


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
