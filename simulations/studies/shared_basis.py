"""A federation's LoRA variants by shared bases of several sizes, and by `drd` and plain files: a table and a plot.

    python -m simulations.studies.shared_basis RUN OUT

RUN is a run's folder; under OUT each way gets a store, which is made again if it is there, and curve.png. Every store
is verified, and every variant restored from it is counted again. A second table compares bases of other kinds at equal
bytes, on the variants that share the first basis, without validation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedpriv.adapter_variants import AdapterEvaluator
from fedpriv.dedup.pipeline import deduplicate
from fedpriv.dedup.planning import DedupSettings
from fedpriv.dedup.validation import PrivateRecords, Utilities
from fedpriv.variants import folders
from fedpriv.variants.blocks import layout_of
from fedpriv.variants.shared_basis import BasisOptions, Encoded, few_bits, fit, flattened, restore_error
from fedpriv.variants.store import Store
from simulations.studies.harness import parser, table

UTILITY_BOUND = 0.01
BLOCK_SIZE = 64

WAYS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "shared basis, 4 bits, any rank": ("shared-basis", {}),
    "4 bits, 1/20": ("shared-basis", {"ratio": 0.05}),
    "8 bits, any rank": ("shared-basis", {"bits": 8}),
    "8 bits, 1/10": ("shared-basis", {"bits": 8, "ratio": 0.1}),
    "float32, 1/4": ("shared-basis", {"bits": 32, "ratio": 0.25}),
    "drd": ("drd", {}),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way to store all variants: shares of their bytes, changes of accuracy, and the largest relative error."""

    name: str
    ratio: float = 1.0
    num_bare: int = 0
    num_with_residual: int = 0
    num_plain: int = 0
    largest_drop: float = 0.0
    mean_change: float = 0.0
    error: float = 0.0

    @property
    def row(self) -> tuple[str, ...]:
        """A row of the table."""
        counts = f"{self.num_bare}, {self.num_with_residual}, {self.num_plain}"
        changes = f"{self.largest_drop:.4f}", f"{self.mean_change:+.4f}", f"{self.error:.3f}"
        return self.name, f"{100 * self.ratio:.1f}", counts, *changes


def main() -> None:
    """Make the stores, and print and draw what they hold."""
    own = parser(__doc__)
    own.add_argument("run", type=Path)
    own.add_argument("out", type=Path)
    arguments = own.parse_args()
    evaluator = _Counted(AdapterEvaluator.of_run(arguments.run))
    paths = sorted(path.parent for path in arguments.run.glob("variants/*/variant.json"))
    models = {folder.name: folders.read_tensors(folder) for folder in paths}
    described = [replace(folders.read(folder), utility_bound=UTILITY_BOUND) for folder in paths]
    points = []
    for name, (algorithm, options) in WAYS.items():
        settings = DedupSettings(block_size=BLOCK_SIZE, algorithm=algorithm, options=options, fairness="outcome")
        path = arguments.out / name.replace(", ", "-").replace(" ", "-").replace("/", "-")
        with Store(path, empty=True) as store:
            deduplicate(described, models.__getitem__, dict.fromkeys(models, evaluator), store, settings)
            points.append(_point(name, store, models, evaluator))
    headers = ("bytes %", "bare, with residual, plain", "largest drop", "mean change", "largest error")
    print(table(("stored as", *headers), (point.row for point in points)), flush=True)
    draw(points, arguments.out / "curve.png")
    with Store(arguments.out / "shared-basis-4-bits-any-rank", read_only=True) as store:
        largest = max((store.manifest(name) for name in store.names), key=lambda each: len(each.provenance["bases"]))
    members = sorted([largest.name, *largest.provenance["bases"]])
    rows = alternatives([models[name] for name in members], evaluator)
    headers = ("basis, without validation", "bytes %", "largest error", "largest drop", "mean change")
    print(f"\n{table(headers, rows)}")


class _Counted:
    """A public evaluator that remembers what it found."""

    private: PrivateRecords | None = None

    def __init__(self, evaluator: AdapterEvaluator) -> None:
        self._evaluator, self.num_records, self.utility = evaluator, evaluator.num_records, evaluator.utility
        self.saliency = evaluator.saliency
        self._found: dict[int, Utilities] = {}

    def utilities(self, tensors: Mapping[str, NDArray[Any]], records: NDArray[np.int64]) -> Utilities:
        key = hash(b"".join(tensors[name].tobytes() for name in sorted(tensors)))
        if key not in self._found:
            self._found[key] = self._evaluator.utilities(tensors, np.arange(self.num_records))
        return self._found[key][records]

    def change(self, before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]) -> float:
        """By how much the mean utility over all records grows."""
        everyone = np.arange(self.num_records)
        return float((self.utilities(after, everyone) - self.utilities(before, everyone)).mean())


def _point(name: str, store: Store, models: Mapping[str, Any], evaluator: _Counted) -> Point:
    """The description of a sound store, from the tensors that it gives back."""
    if problems := store.verify():
        raise SystemExit(f"{name}: {problems[0]}")
    bases = [store.manifest(each).provenance.get("basis") for each in models]
    has_residual = [bool(basis["residual"]) for basis in bases if basis]
    restored = {each: store.tensors(each) for each in models}
    changes = [evaluator.change(models[each], restored[each]) for each in models]
    return Point(
        name=name,
        ratio=store.compression_ratio,
        num_bare=has_residual.count(False),
        num_with_residual=has_residual.count(True),
        num_plain=bases.count(None),
        largest_drop=max(0.0, -min(changes)),
        mean_change=float(np.mean(changes)),
        error=max(_relative(models[each], restored[each]) for each in models),
    )


def _relative(original: Mapping[str, Any], restored: Mapping[str, Any]) -> float:
    before, after = (
        np.concatenate([tensors[name].astype(float).reshape(-1) for name in sorted(original)])
        for tensors in (original, restored)
    )
    return restore_error(before, after).relative


def alternatives(models: Sequence[Mapping[str, Any]], evaluator: _Counted) -> Iterator[tuple[str, ...]]:
    """Rows for whole adapters of several ranks, for joint bases of every matrix, and for each variant alone."""
    layout = layout_of(models[0], BLOCK_SIZE)
    vectors = np.array([flattened("variant", model, layout) for model in models])
    of = layout.num_bytes * len(models)

    def row(name: str, num_bytes: int, restored: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        changes = [evaluator.change(*pair) for pair in zip(models, restored, strict=True)]
        error = max(_relative(*pair) for pair in zip(models, restored, strict=True))
        return name, f"{100 * num_bytes / of:.1f}", f"{error:.3f}", f"{-min(changes):.4f}", f"{np.mean(changes):+.4f}"

    for bits, ratio in ((4, 1.0), (4, 0.09), (8, 0.18)):
        basis, coefficients = fit(vectors, layout, BasisOptions(bits=bits, ratio=ratio))
        num_bytes = basis.mean.num_bytes + basis.components.num_bytes + coefficients.nbytes
        name = f"whole adapters, rank {basis.rank}, {bits} bits"
        yield row(name, num_bytes, [basis.restore(Encoded(own)) for own in coefficients])
    yield row("joint SVD of every matrix, rank 128, 8 bits", *joint_svd(models, 128, 8))
    for bits in (4, 8):
        alone = few_bits(vectors, [spec.size for spec in layout.tensors], bits)
        parts = np.cumsum(alone.segments)[:-1]
        rows = (np.split(alone.row(index), parts) for index in range(len(models)))
        restored = [
            {s.name: part.reshape(s.shape).astype("f4") for s, part in zip(layout.tensors, each, strict=True)}
            for each in rows
        ]
        yield row(f"each alone, {bits} bits", alone.num_bytes, restored)


def joint_svd(
    models: Sequence[Mapping[str, Any]], rank: int, bits: int
) -> tuple[int, list[dict[str, NDArray[np.float32]]]]:
    """The bytes of common bases of every matrix's longer side, and the models restored from them; vectors as they are.

    Source: Gabrielsson et al. 2025, "Compress then Serve", with the coefficients of A and B apart.
    """
    num_bytes, restored = 0, [dict(model) for model in models]
    for name, first in models[0].items():
        if first.ndim != 2:
            num_bytes += len(models) * first.nbytes
            continue
        is_tall = first.shape[0] > first.shape[1]
        stacked = np.concatenate([model[name].T if is_tall else model[name] for model in models]).astype(float)
        directions = np.linalg.svd(stacked, full_matrices=False)[2][:rank]
        basis = few_bits(directions, [directions.shape[1]], bits)
        rows = np.array([basis.row(index) for index in range(len(directions))])
        solved = np.linalg.lstsq(rows.T, stacked.T, rcond=None)[0].T
        coefficients = few_bits(solved, [solved.shape[1]], bits)
        num_bytes += basis.num_bytes + coefficients.num_bytes
        back = np.array([coefficients.row(index) for index in range(len(solved))]) @ rows
        for own, part in zip(restored, np.split(back, len(models)), strict=True):
            own[name] = (part.T if is_tall else part).astype(np.float32)
    return num_bytes, restored


def draw(points: Sequence[Point], path: Path) -> None:
    """Bytes against the largest drop of accuracy, and against the largest relative error."""
    figure = Figure(figsize=(10, 4.2))
    axes = figure.subplots(1, 2, sharex=True)
    markers = {"4": "o", "8": "s", "f": "^", "d": "D", "s": "o", "p": "*"}
    for point in [*points, Point(name="plain files")]:
        for axis, value in zip(axes, (point.mean_change, point.error), strict=True):
            label = point.name if axis is axes[0] else None
            axis.scatter(100 * point.ratio, value, marker=markers[point.name[0]], s=60, label=label)
    for axis, title in zip(axes, ("mean change of accuracy", "largest relative error of a variant"), strict=True):
        axis.axvline(25, color="grey", linewidth=0.8, linestyle=":")
        axis.set_xlabel("bytes stored, % of the adapters' own")
        axis.set_title(title, fontsize=10)
        axis.set_xlim(0, 105)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.2, 1, 1))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
