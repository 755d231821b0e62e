"""The searches on made-up validations: how many they take, and which blocks they leave, for each choice of L.

    python -m simulations.studies.min_batch [--oracles 200]

Two families of validations over 130 to 900 blocks. In `margins` a model answers 600 records; each block shifts the
margin of every record, by an amount with a heavy tail over blocks and with a bias that is mostly, but not always,
harmful. The order of saliency is the order of these amounts under noise. Up to 4 to 15 records may be lost, and the
shifts are scaled so that this is what replacing the 20 to 90 % least harmful blocks costs. In `failures` the shifts are
smaller, and single blocks, more of them towards the salient end, fail whatever they are replaced with.

Validations of which Greedy-20 keeps less than 20 % or more than 80 % of the blocks are left out. The rule for L was
chosen on the first half of the seeds alone. Both halves are printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedpriv.models.dedup import ALGORITHMS, BlockSearchResult
from simulations.studies.harness import parser, table

NUM_RECORDS = 600
TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True, eq=False)
class Oracle:
    """A made-up validation of one target.

    Attributes:
        shifts: [blocks, records], what replacing a block adds to each record's margin.
        margins: [records], positive where the original answers correctly.
        max_drop: records that may be lost, >= 0.
        fatal: [blocks], whether replacing the block alone fails.
    """

    shifts: NDArray[np.float32]
    margins: NDArray[np.float32]
    max_drop: int
    fatal: NDArray[np.bool_]

    @property
    def num_blocks(self) -> int:
        return len(self.shifts)

    def __call__(self, positions: frozenset[int]) -> bool:
        """Whether the model with these positions replaced passes."""
        rows = np.array(sorted(positions), dtype=int)
        return not self.fatal[rows].any() and self.drop(rows) <= self.max_drop

    def drop(self, rows: NDArray[np.int64], scale: float = 1.0) -> int:
        """Records that are lost if these blocks are replaced, with shifts multiplied by `scale`."""
        shifted = self.margins + np.float32(scale) * self.shifts[rows].sum(axis=0)
        return int((self.margins > 0).sum() - (shifted > 0).sum())


def margins(seed: int) -> Oracle:
    """Shifts that add up until too many records are lost."""
    generator = np.random.default_rng(seed)
    num_blocks = int(generator.integers(130, 901))
    sizes = np.exp(generator.uniform(0.8, 1.8) * generator.standard_normal(num_blocks))
    noise = np.exp(generator.uniform(0.2, 1.5) * generator.standard_normal(num_blocks))
    sizes = sizes[np.argsort(sizes * noise)]
    spread = 0.3 * generator.uniform() * generator.standard_normal((num_blocks, 1))
    bias = generator.uniform(0, 0.15) + spread
    oracle = Oracle(
        shifts=(sizes[:, None] * (generator.standard_normal((num_blocks, NUM_RECORDS)) - bias)).astype(np.float32),
        margins=(generator.standard_normal(NUM_RECORDS) + generator.uniform(0.9, 1.6)).astype(np.float32),
        max_drop=int(generator.integers(4, 16)),
        fatal=np.zeros(num_blocks, dtype=np.bool_),
    )
    harmless = np.argsort(sizes)[: int(generator.uniform(0.2, 0.9) * num_blocks)]
    low, high = 0.0, 10.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if oracle.drop(harmless, middle) <= oracle.max_drop else (low, middle)
    return replace(oracle, shifts=np.float32(low) * oracle.shifts)


def failures(seed: int) -> Oracle:
    """Smaller shifts, and single blocks that fail, up to 1.8 in 20."""
    oracle, generator = margins(seed + 10**6), np.random.default_rng([seed, 1])
    weights = ((np.arange(oracle.num_blocks) + 0.5) / oracle.num_blocks) ** generator.uniform(0, 3)
    num_fatal = max(1, int(generator.uniform(0.2, 1.8) * oracle.num_blocks / 20))
    fatal = np.zeros(oracle.num_blocks, dtype=np.bool_)
    fatal[generator.choice(oracle.num_blocks, num_fatal, replace=False, p=weights / weights.sum())] = True
    return replace(oracle, shifts=np.float32(generator.uniform(0.1, 0.8)) * oracle.shifts, fatal=fatal)


FAMILIES = {"margins": margins, "failures": failures}


def by_size(name: str, smallest: int, num_blocks: int, accept: Oracle) -> BlockSearchResult:
    """With L from the number of blocks alone: the last halves that are tried have about `smallest` blocks."""
    depth = max(1, round(math.log2(num_blocks / smallest)))
    return ALGORITHMS[name](num_blocks, accept, min_batch=math.ceil(1.8 * num_blocks / 2**depth))


Search = Callable[[int, Oracle], BlockSearchResult]
GREEDY_20: Search = partial(ALGORITHMS["greedy"], batch=20)


def all_searches() -> dict[str, Search]:
    """{label: a search}, with every choice of L."""
    found: dict[str, Search] = {"greedy-20": GREEDY_20, "greedy-30": partial(ALGORITHMS["greedy"], batch=30)}
    for name in ("drd", "dred"):
        for stopping in ("listing", "published"):
            search = partial(ALGORITHMS[name], stopping=stopping)
            label = name if stopping == "listing" else f"{name}, {stopping}"
            found |= {f"{label}, L = {least}": partial(search, min_batch=least) for least in (10, 15, 20, 30, 40, 60)}
            found[f"{label}, rule"] = search
        found |= {f"{name}, halves of {smallest}": partial(by_size, name, smallest) for smallest in (10, 15, 20)}
    return found


SEARCHES = all_searches()


@dataclass(frozen=True, kw_only=True)
class Score:
    """A search over several oracles, next to Greedy-20.

    Attributes:
        validations, left: means, the latter a share of the blocks.
        ratio: mean of validations over those of Greedy-20.
        worse: mean of the share left less Greedy-20's.
        met: share of oracles with fewer validations, and at most `TOLERANCE` more blocks left.
    """

    validations: float
    left: float
    ratio: float
    worse: float
    met: float


def scores(family: Callable[[int], Oracle], seeds: Iterable[int], searches: Mapping[str, Search]) -> dict[str, Score]:
    """{search: its score on the oracles of these seeds of which Greedy-20 keeps 20 to 80 %}."""
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in searches}
    for oracle in map(family, seeds):
        greedy, kept = _measured(GREEDY_20, oracle)
        if 0.2 <= kept <= 0.8:
            for name, search in searches.items():
                num, left = _measured(search, oracle)
                met = num < greedy and left <= kept + TOLERANCE
                rows[name].append((num, left, num / greedy, left - kept, met))
    fields = ("validations", "left", "ratio", "worse", "met")
    return {name: Score(**dict(zip(fields, np.mean(found, axis=0), strict=True))) for name, found in rows.items()}


def _measured(search: Search, oracle: Oracle) -> tuple[int, float]:
    """Validations, and the share of blocks left."""
    result = search(oracle.num_blocks, oracle)
    return result.num_validations, 1 - len(result.replaced) / oracle.num_blocks


def main() -> None:
    """Print a table for each family and half of the seeds."""
    own = parser(__doc__)
    own.add_argument("--oracles", type=int, default=200, help="of each family and half")
    num = own.parse_args().oracles
    headers = ("search", "validations", "/ greedy-20's", "blocks left %", "points worse", "met %")
    for half, seeds in {"chosen on": range(num), "reported on": range(num, 2 * num)}.items():
        for name, family in FAMILIES.items():
            rows = (
                (
                    search, f"{score.validations:.0f}", f"{score.ratio:.2f}", f"{100 * score.left:.1f}",
                    f"{100 * score.worse:+.1f}", f"{100 * score.met:.0f}",
                )
                for search, score in scores(family, seeds, SEARCHES).items()
            )  # fmt: skip
            print(f"\n{name}, {half} seeds {seeds.start} to {seeds.stop - 1}\n\n{table(headers, rows)}", flush=True)


if __name__ == "__main__":
    main()
