"""The cells of the study of utility: one federation each, in the order in which they are run, and its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedpriv.config import RunConfig, parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters import BUNDLED_ENCODER, MPNET
from fedpriv.learning.data import TextData
from fedpriv.learning.data.records import Records
from fedpriv.learning.training import Body
from fedpriv.learning.training.noise_plan import calibrated, derived_learning_rate
from fedpriv.learning.training.workbench import Workbench, workbench
from fedpriv.privacy.accounting.recipe import START_SHARE, WeightedClients, learning_rate, start_noise_multiplier
from server import baselines
from simulations.studies import corpora
from simulations.studies.corpora import CORPORA
from simulations.studies.federations import federated, run_federations
from simulations.studies.harness import Line
from simulations.studies.plain_lora import PlainTraining
from simulations.studies.plain_lora import configured as plain_configured
from simulations.studies.plain_lora import measure as plain_measure

DELTA = 1e-5
SEEDS = (0, 1, 2)
EPSILONS: tuple[float | None, ...] = (2.0, 8.0, 1.0, None)

# More budget must never hurt: the head alone, over these.
BUDGETS: tuple[float | None, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, None)
BUDGET_CORPORA = ["SST-2 6,000 iid", "Adult in sentences", "embedded"]

# On which another encoder is compared.
LARGER = ["embedded", "SST-2 6,000 iid", "MedQuAD type of question", "SST-2 all rows", "MedQuAD by source"]

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)

OVERLAP, BASELINES, RECIPE, AUTO, PROBES = "overlap", "baselines", "recipe", "auto", "averaged probes"
CENTRAL, LOCAL_STEPS = "central", "3 local steps"
CURVE = "head, tested every round"
PLAIN_LORA, PLAIN_WEIGHTS = "LoRA, AdamW in one place", "all weights, AdamW in one place"
# Of which there is one at every epsilon, since nothing in it is private.
NOT_PRIVATE = (OVERLAP, BASELINES, PLAIN_LORA, PLAIN_WEIGHTS)

# Largest rates of AdamW, which fall to 0 over the one epoch.
_PLAIN_RATES = {PLAIN_LORA: 1e-3, PLAIN_WEIGHTS: 5e-5}

# How many records LoRA needs.
SIZES = ["SST-2 5,000", "SST-2 15,000", "SST-2 30,000"]

# A test after every round would take most of the time of a run that trains A and B.
_TESTED_AT_THE_END: Mapping[str, Any] = {"evaluate_every": 1000}

_HEAD: Mapping[str, Any] = {**_TESTED_AT_THE_END, "train": "head", "prefix_cache": False}

_AUTO: Mapping[str, Any] = {**_TESTED_AT_THE_END, "train": "auto"}

# Steps of a client's own head, all of them before anything is averaged.
PROBE_STEPS = 40

METHODS: Mapping[str, Mapping[str, Any]] = {
    "head": _HEAD,
    RECIPE: _TESTED_AT_THE_END,
    AUTO: _AUTO,
    CENTRAL: _HEAD,
    CURVE: {**_HEAD, "evaluate_every": 1},
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
class UtilityCell:
    """One federation.

    Attributes:
        corpus: by name.
        method: a key of `METHODS`, `INGREDIENTS` or `RATES`, or one of `NOT_PRIVATE`, which are no federation.
        epsilon: of every client on the view, or None for a run without noise.
        view: `local`, or `sum` where only the sum of all uploads is seen.
        seed: of the split, the clients' records and the noise.
        encoder: the base model.
    """

    corpus: str
    method: str
    epsilon: float | None
    view: str = "local"
    seed: int = 0
    encoder: str = BUNDLED_ENCODER

    @property
    def key(self) -> str:
        """Unique among the cells."""
        epsilon = "none" if self.epsilon is None else f"{self.epsilon:g}"
        other = [] if self.encoder == BUNDLED_ENCODER else [self.encoder]
        return "/".join((self.corpus, self.method, epsilon, self.view, str(self.seed), *other))

    @property
    def is_validated(self) -> bool:
        """Whether it is tested on training records that are set aside, since something is chosen by it."""
        return self.method in RATES


NAMED = [name for name, corpus in CORPORA.items() if corpus.named and name not in SIZES]
UNNAMED = [name for name, corpus in CORPORA.items() if not corpus.named]


def cells(seeds: Sequence[int] = SEEDS) -> Iterator[UtilityCell]:
    """All cells, each once, the most telling first; those that share data, model and features are neighbours."""
    yield from dict.fromkeys(_in_order(seeds))


def _in_order(seeds: Sequence[int]) -> Iterator[UtilityCell]:
    private, rest, small, embedded = (2.0, 8.0), (1.0, None), NAMED[:-1], NAMED[:1]
    yield from _all([*NAMED, *UNNAMED], [OVERLAP], (None,), seeds=seeds)
    yield from _all(small, ["head"], private, ("local", "sum"), seeds=seeds)
    yield from _all(UNNAMED, ["head", BASELINES], (8.0,), seeds=seeds)
    yield from _all(NAMED, [BASELINES, PROBES], private, seeds=seeds)
    yield from _all(embedded, [RECIPE, CENTRAL], private, seeds=seeds)
    yield from _all(embedded, list(INGREDIENTS), (2.0,), seeds=seeds)
    yield from _all(SIZES, ["head", AUTO], (8.0,), ("sum",), seeds=seeds)
    yield from _all([*small, *UNNAMED[-1:]], ["head", AUTO], private, ("local", "sum"), seeds=seeds)
    yield from _all(small, list(RATES), private, seeds=seeds)
    yield from _all(NAMED[-1:], ["head"], private, ("local", "sum"), seeds=seeds)
    yield from _all(NAMED[1:], [CENTRAL], private, seeds=seeds)
    yield from _all(NAMED[-1:], list(RATES), private, seeds=seeds)
    yield from _all(NAMED[-1:], [AUTO], (8.0,), ("local", "sum"), seeds=seeds)
    yield from _all(NAMED[-1:], [AUTO], (2.0,), ("sum",), seeds=seeds)
    yield from _all(NAMED[-1:], [PLAIN_LORA, PLAIN_WEIGHTS], (None,), seeds=seeds)
    yield from _all(UNNAMED, [RECIPE], (8.0,), seeds=seeds)
    yield from _all(NAMED, ["head", CENTRAL], rest, seeds=seeds)
    yield from _all(NAMED, ["head"], (1.0,), ("sum",), seeds=seeds)
    yield from _all(NAMED, [PROBES, *RATES], (1.0,), seeds=seeds)
    yield from _all(NAMED[1:], [RECIPE, AUTO], private, seeds=seeds)
    yield from _all(NAMED, [RECIPE], private, ("sum",), seeds=seeds)
    yield from _all(NAMED, [RECIPE], rest, seeds=seeds)
    for corpus in LARGER:
        yield from _all([corpus], [BASELINES], (None,), seeds=seeds, encoder=MPNET)
        yield from _all([corpus], ["head"], private, ("local", "sum"), seeds=seeds, encoder=MPNET)
    for corpus in BUDGET_CORPORA:
        yield from _all([corpus], ["head"], BUDGETS, seeds=seeds)
        yield from _all([corpus], ["head"], BUDGETS[:-1], ("sum",), seeds=seeds)
        yield from _all([corpus], [CURVE], (8.0,), ("local", "sum"), seeds=seeds)


def _all(
    corpora: list[str],
    methods: list[str],
    epsilons: tuple[float | None, ...],
    views: tuple[str, ...] = ("local",),
    *,
    seeds: Sequence[int],
    encoder: str = BUNDLED_ENCODER,
) -> Iterator[UtilityCell]:
    for corpus, seed, view, method, epsilon in product(corpora, seeds, views, methods, epsilons):
        epsilon = None if method in NOT_PRIVATE else epsilon
        yield UtilityCell(corpus=corpus, method=method, epsilon=epsilon, view=view, seed=seed, encoder=encoder)


def run_all(runs: Path, out: Path, data: Path, chosen: Sequence[UtilityCell], **which: Any) -> None:
    """Run every cell that has no line yet; arguments as for `run_federations`."""
    run_federations(runs, out, data, chosen, configuration, measure=partial(_measured, data), **which)


def _measured(data: Path, cell: UtilityCell, config: RunConfig) -> Line:
    if cell.method == BASELINES:
        return _baselines(config)
    if cell.method == OVERLAP:
        return corpora.overlap(cell.corpus, data, cell.seed)
    if cell.method in _PLAIN_RATES:
        how = PlainTraining(rate=_PLAIN_RATES[cell.method], batch=64, epochs=1)
        return plain_measure(config, how)
    return federated(config)


def _baselines(config: RunConfig) -> dict[str, Any]:
    """Linear probe and TF-IDF on the pooled training records; the probe reads what the private head reads."""
    bench = workbench(config)
    clients = enumerate(bench.data.clients)
    train = _joined([_labelled(bench, data, bench.client(client)) for client, data in clients])
    chosen = np.random.default_rng(config.seed).permutation(len(train.labels))[: baselines.MOST_RECORDS]
    test = _labelled(bench, bench.data.test, bench.test)
    probe, tfidf = baselines.hits(train.part(np.sort(chosen)), test, config.seed)
    num_test = len(test.labels)
    majority = float(np.bincount(test.labels).max()) / num_test
    return {"accuracy": probe / num_test, "tfidf_accuracy": tfidf / num_test, "majority_accuracy": majority}


def _labelled(bench: Workbench, data: TextData, records: Records) -> baselines.Labelled:
    features = bench.model.features
    if features is None:
        raise InputError("baselines: need a model whose head is one linear layer")
    states = features.features([(records, torch.arange(len(records)))], Body({}, {}), keep=True)
    return baselines.Labelled(list(data.texts), states.double().numpy(), records.labels.numpy())


def _joined(parts: Sequence[baselines.Labelled]) -> baselines.Labelled:
    return baselines.Labelled(
        [text for part in parts for text in part.texts],
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


def configuration(cell: UtilityCell, written: Path, data: Path, out: Path) -> RunConfig:
    """The configuration of a cell.

    Args:
        cell: to be run.
        written: folder for the corpus's records.
        data: folder of the public files.
        out: of the run.

    Raises:
        InputError: the data folder lacks the corpus.
    """
    pooled = cell.method == CENTRAL
    where = corpora.keys(cell.corpus, cell.seed, data=data, folder=written, validation=cell.is_validated, pooled=pooled)
    common: dict[str, Any] = {"delta": DELTA, "comparison": False, "baselines": False, "simulate": True}
    common |= {"seed": cell.seed, "model": cell.encoder}
    if cell.method in _PLAIN_RATES:
        plain = {**common, **where, "layers": "all", "rank": 16, "alpha": 32, "out": str(out)}
        return plain_configured(plain, weights=cell.method == PLAIN_WEIGHTS)
    method = {**METHODS, **INGREDIENTS, **RATES}.get(cell.method, METHODS["head"])
    values = {**common, **where, **method, "out": str(out), **_privacy(cell)}
    if cell.view == "sum":
        num_clients = len(workbench(parse(values)).data.clients)
        values |= {"privacy_view": "aggregate", "secure_aggregation": True, "min_clients": num_clients}
    if cell.method == PROBES:
        values["learning_rate"] = probe_learning_rate(parse({**values, "learning_rate": 1.0}))
    if cell.method == LOCAL_STEPS:
        values["learning_rate"] = local_learning_rate(parse({**values, "learning_rate": 1.0}))
    return parse(values)


def _privacy(cell: UtilityCell) -> dict[str, Any]:
    if cell.epsilon is not None:
        return {"target_epsilon": cell.epsilon}
    return dict.fromkeys(("noise_multiplier", "start_noise_multiplier", "lora_noise_multiplier"), 0.0) | {
        "target_epsilon": ""
    }


def probe_learning_rate(config: RunConfig) -> float:
    """The rule's learning rate for one client of the average size that trains alone, with all of its budget.

    It is that of as many rounds with the server's momentum, 0.6 / nu, although local steps have none.
    """
    sizes = [len(client) for client in workbench(config).data.clients]
    alone = start_noise_multiplier(_target(config), DELTA) * sqrt(START_SHARE)
    rate = learning_rate(
        WeightedClients(sizes=[round(sum(sizes) / len(sizes))], weights=[1.0]),
        noise_stddev=alone * sqrt(PROBE_STEPS) * config.clip_norm,
        sampling_probability=1.0,
        num_steps=PROBE_STEPS,
        momentum=config.server_momentum,
    )
    return rate.learning_rate


def local_learning_rate(config: RunConfig) -> float:
    """The rule's learning rate for as many steps as the configuration takes at its clients, one in each round."""
    bench = workbench(config)
    sizes = [len(client) for client in bench.data.clients]
    num_steps = config.local_steps * (config.rounds - config.head_start)
    single = parse({**asdict(config), "local_steps": 1, "rounds": num_steps + 1, "learning_rate": "auto"})
    rate = derived_learning_rate(calibrated(single, sizes, bench.initial), sizes, bench.initial)
    assert rate is not None  # the configuration asks for it
    return rate.learning_rate


def _target(config: RunConfig) -> float:
    if config.target_epsilon is None:
        raise ValueError("target_epsilon: averaged probes are private")
    return config.target_epsilon
