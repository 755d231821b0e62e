"""The cells of the study: one federation each, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from simulations.studies.utility.corpora import CORPORA

DELTA = 1e-5
SEEDS = (0, 1, 2)
EPSILONS: tuple[float | None, ...] = (2.0, 8.0, 1.0, None)
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)

BASELINES, RECIPE, AUTO, PROBES = "baselines", "recipe", "auto", "averaged probes"
INNER, INNER_OF_TWO = "auto, R alone", "auto, R of two layers"
CENTRAL, LOCAL_STEPS = "central", "3 local steps"

# A test after every round would take most of the time of a run that trains A and B.
_TESTED_AT_THE_END: Mapping[str, Any] = {"evaluate_every": 1000}

_HEAD: Mapping[str, Any] = {**_TESTED_AT_THE_END, "train": "head", "prefix_cache": False}

_AUTO: Mapping[str, Any] = {**_TESTED_AT_THE_END, "train": "auto"}

_INNER: Mapping[str, Any] = {**_AUTO, "aggregation": "fed-sb", "rank": 16, "alpha": 64}

# Steps of a client's own head, all of them before anything is averaged.
PROBE_STEPS = 40

METHODS: Mapping[str, Mapping[str, Any]] = {
    "head": _HEAD,
    RECIPE: _TESTED_AT_THE_END,
    AUTO: _AUTO,
    INNER: _INNER,
    INNER_OF_TWO: {**_INNER, "layers": "last-2"},
    "paper": {**_TESTED_AT_THE_END, "recipe": "dp-lora-paper"},
    CENTRAL: _HEAD,
    # recipe is given, since several local steps would stand for the other one; their learning rate is derived.
    PROBES: {
        **_HEAD,
        "recipe": "fedpriv",
        "rounds": 1,
        "local_steps": PROBE_STEPS,
        "head_start": False,
        "server_optimizer": "sgd",
        "client_weights": "records",
    },
}

INGREDIENTS: Mapping[str, Mapping[str, Any]] = {
    "no start": {**_HEAD, "head_start": False},
    "no normalised features, no start": {**_HEAD, "head_start": False, "normalize_features": False},
    "learning rate 0.5": {**_HEAD, "learning_rate": 0.5},
    "clip norm 1": {**_HEAD, "clip_norm": 1.0},
    "no momentum": {**_HEAD, "server_optimizer": "sgd"},
    "weights by records": {**_HEAD, "client_weights": "records"},
    LOCAL_STEPS: {**_HEAD, "recipe": "fedpriv", "local_steps": 3, "rounds": 14},
    "10 rounds": {**_HEAD, "rounds": 10},
    "sampling probability 0.1": {**_HEAD, "sampling_probability": 0.1},
}

# The server's learning rate multiplies every step, so it is the rule's rate times a factor.
RATES = {f"rate x {factor:g}": {**_HEAD, "server_learning_rate": factor} for factor in FACTORS}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One federation.

    Attributes:
        corpus: by name.
        method: a key of `METHODS`, `INGREDIENTS` or `RATES`, or the baselines, which are no federation.
        epsilon: of every client on the view, or None for a run without noise.
        view: `local`, or `sum` where only the sum of all uploads is seen.
        seed: of the split, the clients' records and the noise.
    """

    corpus: str
    method: str
    epsilon: float | None
    view: str = "local"
    seed: int = 0

    @property
    def key(self) -> str:
        """Unique among the cells."""
        return "/".join((self.corpus, self.method, self.shown_epsilon, self.view, str(self.seed)))

    @property
    def shown_epsilon(self) -> str:
        """`none` without noise."""
        return "none" if self.epsilon is None else f"{self.epsilon:g}"

    @property
    def is_validated(self) -> bool:
        """Whether it is tested on training records that are set aside, since something is chosen by it."""
        return self.method in RATES


NAMED = [name for name, corpus in CORPORA.items() if corpus.named]
UNNAMED = [name for name, corpus in CORPORA.items() if not corpus.named]


def cells(seeds: Sequence[int] = SEEDS) -> Iterator[Cell]:
    """All cells, each once, the most telling first; those that share data, model and features are neighbours."""
    yield from dict.fromkeys(_in_order(seeds))


def _in_order(seeds: Sequence[int]) -> Iterator[Cell]:
    private, rest, small, embedded = (2.0, 8.0), (1.0, None), NAMED[:-1], NAMED[:1]
    yield from _all(small, ["head"], private, seeds=seeds)
    first, others = seeds[:1], seeds[1:]
    yield from _all(UNNAMED[:-1], ["head", BASELINES], (8.0,), seeds=first)
    yield from _all(embedded, [PROBES, RECIPE], private, seeds=first)
    yield from _all(small[1:], [PROBES], private, seeds=first)
    yield from _all(UNNAMED[-1:], ["head", BASELINES], (8.0,), seeds=first)
    yield from _all(embedded, [PROBES, RECIPE], private, seeds=others)
    yield from _all(small[1:], [PROBES], private, seeds=others)
    yield from _all(embedded, list(INGREDIENTS), (2.0,), seeds=seeds)
    yield from _all(small, ["head"], private, ("sum",), seeds=seeds)
    yield from _all(UNNAMED, ["head", BASELINES], (8.0,), seeds=others)
    yield from _all(embedded, [CENTRAL], private, seeds=seeds)
    yield from _all(small, [BASELINES], (None,), seeds=seeds)
    for seed in seeds:
        yield from _all(small, list(RATES), private, seeds=(seed,))
    yield from _all(embedded, [AUTO, "paper"], private, seeds=seeds)
    yield from _all(NAMED[-1:], ["head"], private, ("local", "sum"), seeds=seeds)
    yield from _all(small, [CENTRAL], private, seeds=seeds)
    yield from _all(NAMED[-1:], [PROBES, CENTRAL], private, seeds=seeds)
    yield from _all(NAMED[-1:], [BASELINES], (None,), seeds=seeds)
    yield from _all(NAMED[-1:], list(RATES), private, seeds=seeds)
    yield from _all(NAMED[1:], [INNER], (8.0,), seeds=seeds)
    yield from _all(NAMED[-1:], [INNER_OF_TWO], (8.0,), seeds=seeds)
    yield from _all(UNNAMED, [RECIPE], (8.0,), seeds=seeds)
    yield from _all(NAMED, ["head", CENTRAL], rest, seeds=seeds)
    yield from _all(NAMED, ["head"], (1.0,), ("sum",), seeds=seeds)
    yield from _all(NAMED, [PROBES], (1.0,), seeds=seeds)
    yield from _all(NAMED, list(RATES), (1.0,), seeds=seeds)
    yield from _all(NAMED[1:], [RECIPE, AUTO, "paper"], private, seeds=seeds)
    yield from _all(NAMED, [RECIPE], private, ("sum",), seeds=seeds)
    yield from _all(NAMED, [RECIPE, "paper"], rest, seeds=seeds)


def _all(
    corpora: list[str],
    methods: list[str],
    epsilons: tuple[float | None, ...],
    views: tuple[str, ...] = ("local",),
    *,
    seeds: Sequence[int],
) -> Iterator[Cell]:
    for corpus, seed, view, method, epsilon in product(corpora, seeds, views, methods, epsilons):
        epsilon = None if method == BASELINES else epsilon
        yield Cell(corpus=corpus, method=method, epsilon=epsilon, view=view, seed=seed)
