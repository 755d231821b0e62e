"""Cells that are federations: each a whole run, with the features of its records kept beyond it.

Features depend on the tokens alone while A and B have not been trained. Partitions, seeds and splits of one corpus
share their records, and what the head reads of them is by far the largest part of a run that trains the head alone.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch import Tensor

from fedpriv.config import RunConfig
from fedpriv.files import replaced_file
from fedpriv.holder.wire.kinds import Registration
from fedpriv.learning.adapters import B_SUFFIX, INNER_SUFFIX
from fedpriv.learning.data.records import Item
from fedpriv.learning.training import Body, FeatureCache
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.accounting.recipe import LearningRate
from fedpriv.runs import RoundRow, RunFolder
from fedpriv.runs.show import run_name
from server.observer import RunProgress
from simulations.engines import federation
from simulations.studies.corpora import missing_file
from simulations.studies.harness import Line, append, is_asked, lines, run_missing, software
from simulations.sweeps import plan
from simulations.sweeps.command import sweep

# Of a run's summary.
_KEPT = (
    "accuracy", "accuracy_initial", "accuracy_standard_error", "macro_f1", "majority_accuracy", "epsilon_local_max",
    "epsilon_aggregate_max", "delta_max", "num_clients", "num_rounds", "seconds", "bytes_up", "bytes_down",
)  # fmt: skip

# Of runs on the LMO-DP paper's own terms; None in others.
_UNPROVEN = ("epsilon_as_published_max", "epsilon_sound_max")

SWEEPS = Path(__file__).parents[1] / "configs" / "sweeps"


class FederatedCell(Protocol):
    """A cell of any study that uses these corpora."""

    @property
    def key(self) -> str:
        """Unique among the study's cells."""

    @property
    def corpus(self) -> str:
        """A corpus by name."""


C = TypeVar("C", bound=FederatedCell)


class SilentObserver:
    """Keeps what a run was calibrated to and how its accuracy went."""

    def __init__(self) -> None:
        self.noise: dict[str, float | None] = {}
        self.accuracies: list[float] = []
        self.summary: dict[str, Any] = {}

    def started(
        self, config: RunConfig, registrations: Sequence[Registration], learning_rate: LearningRate | None
    ) -> None:
        """Keep the noise multipliers and the terms of the learning rate."""
        self.noise = {
            "noise_multiplier": config.noise_multiplier,
            "start_noise_multiplier": config.start_noise_multiplier,
            "learning_rate": learning_rate.learning_rate if learning_rate else float(config.learning_rate),
        }

    def notice(self, text: str) -> None:
        """Show it: a study of many runs has nobody to ask."""
        print(text, flush=True)

    def progressed(self, progress: RunProgress) -> None:
        """Do nothing."""

    def round_done(self, row: RoundRow) -> None:
        """Keep the accuracy of a tested round."""
        if row.test_accuracy is not None:
            self.accuracies.append(row.test_accuracy)

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Keep the summary."""
        self.summary = summary


def federated(config: RunConfig) -> Line:
    """Run a federation; the results are its summary's figures, its noise, and its accuracy after every tested round."""
    observer = SilentObserver()
    federation.run(config, observer)
    kept = {name: observer.summary[name] for name in _KEPT}
    return {**kept, **observer.noise, "accuracies": observer.accuracies}


def results_of(folder: Path) -> Line:
    """The same results, and the versions that made them, from the folder of a finished run.

    Raises:
        InputError: it is not finished, or a file is missing or damaged.
    """
    run = RunFolder(folder).checked()
    noise = {name: run.config[name] for name in ("noise_multiplier", "start_noise_multiplier")}
    accuracies = [row["test_accuracy"] for row in run.round_rows() if row["test_accuracy"] is not None]
    results = {name: run.summary[name] for name in _KEPT} | {name: run.summary.get(name) for name in _UNPROVEN}
    return {**results, **noise, "accuracies": accuracies, "software": software(run.environment)}


def run_federations(
    runs: Path,
    out: Path,
    data: Path,
    cells: Sequence[C],
    configuration: Callable[[C, Path, Path, Path], RunConfig],
    *,
    measure: Callable[[C, RunConfig], Line] = lambda _, config: federated(config),
    until: float | None = None,
    only: Sequence[str] = (),
) -> None:
    """Run every cell of a study that has no line yet; a corpus whose files are missing is skipped, and named.

    Args:
        runs: file of the lines.
        out: folder of the records as written for the runs, and of their features.
        data: folder of the public files.
        cells: in their order.
        configuration: (cell, folder for its records, data, folder of the run) -> the run's configuration.
        measure: (cell, configuration) -> results.
        until: `time.time()` after which no cell is begun.
        only: patterns of the keys of the cells that count; all by default.
    """
    out.mkdir(parents=True, exist_ok=True)
    store = FeatureStore(out / "features.npz")
    asked = [cell for cell in cells if is_asked(cell.key, only)]
    missing = {cell.corpus: missing_file(cell.corpus, data) for cell in asked}
    for corpus, file in missing.items():
        if file:
            print(f"{corpus}: skipped: data = {data}: holds no {file}", flush=True)

    def run(cell: C) -> Line:
        with tempfile.TemporaryDirectory(prefix="fedpriv-study-") as folder:
            config = configuration(cell, out / "data", data, Path(folder) / "run")
            store.serve(workbench(config).model, config)
            results = measure(cell, config)
        store.save()
        return results

    here = [cell for cell in asked if not missing[cell.corpus]]
    run_missing(runs, here, run, lambda line: f"{line.get('accuracy', line.get('near')):.4f}", until=until)


def run_sweep(
    name: str, runs: Path, out: Path, overrides: Mapping[str, Any] | None = None, *, only: Sequence[str] = ()
) -> None:
    """Run a sweep of simulations/configs/sweeps, and append a line for each of its runs that has none yet.

    Args:
        name: of its file.
        runs: file of the lines.
        out: folder of the sweeps' folders, in which finished runs are kept.
        overrides: of the file's keys, such as the place of its data.
        only: patterns of the keys of the lines that count; all by default.
    """
    planned = plan.read(SWEEPS / f"{name}.toml", overrides)
    known = {line["key"]: line["accuracy"] for line in lines(runs) if "accuracy" in line}
    asked = {f"{name}/{run_name(run.varied)}": run for run in planned.runs}
    asked = {key: run for key, run in asked.items() if run.is_chosen and is_asked(key, only)}
    left = {key: run for key, run in asked.items() if key not in known}
    if left:
        sweep(replace(planned, runs=tuple(left.values())), out / name, max_parallel=1, console=Console())
    elif asked:
        print(f"{runs}: has these lines; none is run again", *(f"{key}: {known[key]:.4f}" for key in asked), sep="\n")
    for key, run in left.items():
        append(runs, {"key": key, "sweep": name, "cell": run.varied, **results_of(out / name / run.key)})


Compute = Callable[[Sequence[Item], Body, bool], Tensor]


class FeatureStore:
    """Features by what they depend on, in memory and in a file.

    Args:
        path: of the file; read if it is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._states: dict[bytes, npt.NDArray[np.float32]] = {}
        self._num_saved = 0
        if path.is_file():
            with np.load(path) as saved:
                for width in filter(str.isdigit, saved):
                    keys = (key.tobytes() for key in saved[f"keys of {width}"])
                    self._states.update(zip(keys, saved[width], strict=True))
            self._num_saved = len(self._states)

    def serve(self, model: TrainingModel, config: RunConfig) -> None:
        """Let the model look here first; what it computes is added.

        Args:
            model: whose head reads one vector for each record.
            config: of the run.
        """
        if model.features is None or model.head is None:
            return
        base = f"{config.model} {config.max_length} {config.normalize_features} {model.base_dtype_name}".encode()
        width = model.layers[model.head].module.weight.shape[1]
        # The cache's constructor takes it, and nothing public has it.
        compute = self._remembered(model._head_inputs, base)
        model.features = FeatureCache(compute, model, width=width)

    def save(self) -> None:
        """Write what is new to the file."""
        if len(self._states) == self._num_saved:
            return
        arrays: dict[str, npt.NDArray[Any]] = {}
        for width in {len(state) for state in self._states.values()}:  # encoders differ in it
            of_width = {key: state for key, state in self._states.items() if len(state) == width}
            arrays[f"keys of {width}"] = np.frombuffer(b"".join(of_width), dtype="V16")
            arrays[f"{width}"] = np.stack(list(of_width.values()))
        with replaced_file(self._path) as file:
            np.savez(file, allow_pickle=False, **arrays)
        self._num_saved = len(self._states)

    def _remembered(self, compute: Compute, base: bytes) -> Compute:
        def states(items: Sequence[Item], body: Body, cached: bool) -> Tensor:
            if not _is_untrained(body):
                return compute(items, body, cached)
            keys = [_digest(item, base) for item in items]
            missing = [position for position, key in enumerate(keys) if key not in self._states]
            if missing:
                computed = compute([items[position] for position in missing], body, cached)
                rows = computed.float().cpu().numpy().copy()
                self._states.update(zip([keys[position] for position in missing], rows, strict=True))
            return torch.from_numpy(np.stack([self._states[key] for key in keys]))

        return states


def _is_untrained(body: Body) -> bool:
    """Whether nothing is added to the frozen base: B, or R before a frozen one, is zero before it is trained."""
    trained = (tensor for name, tensor in body.tensors.items() if name.endswith((B_SUFFIX, INNER_SUFFIX)))
    return not body.merged and not any(bool(tensor.any()) for tensor in trained)


def _digest(item: Item, base: bytes) -> bytes:
    records, index = item
    return hashlib.blake2b(base + records.features["input_ids"][index].numpy().tobytes(), digest_size=16).digest()
