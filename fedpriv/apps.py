"""The programs above the library: engines, the Flower app, and the kits of nodes and coordinators.

In a clone they are the top-level folders `simulations`, `clients` and `server`. The wheel has them within
`fedpriv._apps`, where no folder of a user's has the same name (hatch_build.py). The library never imports them; what
starts them goes through `program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Unpack

from fedpriv.errors import InputError

if TYPE_CHECKING:
    from fedpriv.config import RunKeys, SweepKeys
    from fedpriv.runs.show import Run

_INSTALLED = Path(__file__).parent / "_apps"

CHECKOUT: Path | None = None if _INSTALLED.is_dir() else _INSTALLED.parents[1]
"""The clone of the repository that this is; None where fedpriv was installed from a wheel."""

FLOWER_APP: Path = CHECKOUT or _INSTALLED / "flower-app"
"""The folder of the Flower app: what `flwr build` reads. A clone and the wheel of its commit give the same bundle."""

PAGES: Path = (CHECKOUT or _INSTALLED) / "docs"
"""The folder of the documentation's pages, which `fedpriv docs` prints."""

GARBAGE_THRESHOLDS = (50_000, 20, 50)
"""When Python looks for cycles: seldom, since half a million objects of libraries stay, which took 1 s of a run."""

# {package that a program may lack: the extra that brings it}
_EXTRAS = {"flwr": "federation", "flwr_datasets": "partition", "ray": "ray"}


def program(module: str) -> ModuleType:
    """Import a module of the programs by its name in a clone, such as `simulations.api`.

    Raises:
        InputError: a package is missing, another folder of this name is found instead, or only a clone has the module.
    """
    if not CHECKOUT and module.startswith("simulations.studies"):
        raise InputError(f"{module}: is no part of an installed fedpriv; run it in a clone of the repository")
    with naming_extras():
        found = import_module(module if CHECKOUT else f"{__package__}._apps.{module}")
    if CHECKOUT and not Path(str(found.__file__)).is_relative_to(CHECKOUT):
        raise InputError(f"{found.__file__}: stands in the way of {CHECKOUT / module.replace('.', '/')}; rename it")
    return found


@contextmanager
def naming_extras() -> Iterator[None]:
    """Turn the error of an optional package that is missing into an InputError that names the extra which brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in _EXTRAS:
            raise
        raise InputError(f"{missing}: is not installed; run pip install 'fedpriv[{_EXTRAS[missing]}]'") from None


def run(
    config: str | Path | None = None,
    /,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
    **keys: Unpack[RunKeys],
) -> Run:
    """Simulate one federation on this machine, and return the finished run; its folder has tables, adapters, a report.

    Args:
        config: a TOML file; without one, the embedded default.
        out: folder for the results, new or empty; by default a new one in results/.
        resume: the folder of an interrupted run, or one of its checkpoints. It keeps its configuration, so nothing
            else may be given with it but a model of your own and its records.
        progress: whether to show the rounds, in the terminal or below the notebook's cell.
        keys: of the configuration, see docs/configuration.md; they go before the file's. `model` may also be a function
            that returns an `OwnModel`; then `data` holds the records of each holder, and `test_data` the server's, as
            docs/training.md says. To resume such a run, give these again.

    Raises:
        InputError: one line that names the key, the value and what would be right.
        LedgerError: the ledger cannot be used, so nothing was released.
        DiskFullError: the disk is full; one line with the command that resumes the run.
        TooFewClientsError: fewer clients answered a round than `min_clients`.
    """
    from fedpriv.runs.show import open_run  # deferred, as all that takes long to load

    with naming_extras():
        folder = program("simulations.api").federate(config, keys, out=out, resume=resume, progress=progress)
    return open_run(folder)


def sweep(
    config: str | Path | None = None,
    /,
    *,
    grid: Mapping[str, Iterable[Any]] | None = None,
    runs: Sequence[Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    max_parallel: int | None = None,
    progress: bool = True,
    **keys: Unpack[SweepKeys],
) -> Any:
    """Simulate one federation for each point of a grid. A run that fails does not stop the others.

    Args:
        config: a TOML file of run keys, which may have a [grid] and [[runs]] of its own.
        grid: {key: its values}; every combination is a run.
        runs: {key: value} of what varies otherwise; each is combined with the grid.
        out: folder of the sweep. Called again with the same one, it runs only what is unfinished. By default
            results/sweeps/NAME of the file, or a new one.
        max_parallel: runs at a time; by default one per core. 1 needs no Ray.
        progress: whether to show the runs, in the terminal or below the notebook's cell.
        keys: of every run, see docs/configuration.md; they go before the file's.

    Returns:
        The `FinishedSweep` of `simulations.sweeps.result`: its tables, plots, runs and spending.

    Raises:
        InputError: one line that names the key, the value and what would be right; before anything is run.
    """
    with naming_extras():
        return program("simulations.api").sweep_all(
            config, keys, grid=grid, runs=runs, out=out, max_parallel=max_parallel, progress=progress
        )
