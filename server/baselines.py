"""Plain classifiers without privacy: on the pooled records, and on each data holder's own, as if it had stayed alone.

They cost no privacy because they are computed for public data alone: on the training records of the clients where the
run's data are public, or on the server's own test records where the holders' never leave their nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from fedpriv.config import ON_NODES, RunConfig
from fedpriv.learning.adapters import B_SUFFIX, lora, pooling
from fedpriv.learning.data import TextData
from fedpriv.learning.data.records import Item, Records, usable
from fedpriv.learning.training.evaluation import passes_by_length
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.workbench import Workbench

MOST_RECORDS = 20_000
"""Training records of a baseline at most, drawn with the seed: more take minutes and change the third digit."""

MOST_ALONE = 50
"""Clients with a model of their own at most, drawn with the seed."""

_FOLDS = 5
"""The number of parts in the cross-validation on the server's test records."""

_FOLDS_FOR_C = 3
# Inverse strengths of the L2 penalty, the strongest first: of standardised features, and of TF-IDF rows of norm 1.
_PROBE_GRID = (1e-3, 1e-2, 1e-1, 1.0)
_TFIDF_GRID = (1.0, 4.0, 16.0)
_MAX_ITERATIONS = 10_000

_Vector = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """The accuracies of plain classifiers on the server's test records.

    Attributes:
        probe_accuracy: of a logistic regression on the frozen base's mean-pooled states.
        tfidf_accuracy: of a logistic regression on TF-IDF of words and pairs of words.
        num_trained_on: records of each fit, at most.
        num_available: of which they were drawn.
        folds: of a cross-validation on the test records themselves; None if training records were pooled.
        alone: {client: the accuracy of a linear probe on its own records}; of some where there are many clients or
            records, and empty where those are on their nodes.
        alone_on_own: {client: the accuracy of the same probe on those test records that are its own}; of those of
            `alone` that are known to have some.
    """

    probe_accuracy: float
    tfidf_accuracy: float
    num_trained_on: int
    num_available: int
    folds: int | None
    alone: Mapping[int, float]
    alone_on_own: Mapping[int, float]


@dataclass(frozen=True)
class Labelled:
    """Records as both classifiers read them: texts, features [records, hidden] and class indices [records]."""

    texts: list[str]
    features: npt.NDArray[np.float64]
    labels: _Vector

    def part(self, positions: _Vector) -> Labelled:
        return Labelled([self.texts[p] for p in positions], self.features[positions], self.labels[positions])


def compute(config: RunConfig, bench: Workbench) -> Baselines | None:
    """All baselines, the same for the same seed; None for a cross-validation of a single record.

    Args:
        config: with `computes_baselines`: nobody's privacy depends on the records that this reads.
        bench: its data and model; the model's adapter is overwritten.
    """
    rows = _rows(bench.data.test, bench.test)
    test = _labelled(bench.model, rows, cached=True)
    if config.data == ON_NODES:
        return _cross_validated(test, config.seed)
    held = [_rows(data, bench.client(client)) for client, data in enumerate(bench.data.clients)]
    pooled, ends = [row for rows in held for row in rows], np.cumsum([len(rows) for rows in held])
    generator = np.random.default_rng(config.seed)
    chosen = np.sort(generator.permutation(len(pooled))[:MOST_RECORDS])
    own = {client: np.arange(ends[client] - num, ends[client]) for client, num in _alone(held, generator).items()}
    read = np.unique(np.concatenate([chosen, *own.values()]))
    # The cache keeps whole record sets, which only pays where this process trains on them too.
    trains_here = config.engine in ("in-process", "stacked")
    known = _labelled(bench.model, [pooled[p] for p in read], cached=trains_here)
    probe, tfidf = hits(known.part(np.searchsorted(read, chosen)), test, config.seed)
    parts = {client: known.part(np.searchsorted(read, positions)) for client, positions in own.items()}
    right = {client: _probed(part, test, config.seed) for client, part in parts.items()}
    holders = np.array([bench.data.test_holders[index] for _, (_, index) in rows] if bench.data.test_holders else [])
    return Baselines(
        probe_accuracy=probe / len(test.labels),
        tfidf_accuracy=tfidf / len(test.labels),
        num_trained_on=len(chosen),
        num_available=len(pooled),
        folds=None,
        alone={client: float(hits.mean()) for client, hits in right.items()},
        alone_on_own=shares_of_own(right, holders),
    )


def shares_of_own(right: Mapping[int, npt.NDArray[np.bool_]], holders: npt.NDArray[np.int64]) -> dict[int, float]:
    """{client: the share of its own test records that its model gets right}, of those clients that have some.

    Args:
        right: {client: [records], whether its model is right}.
        holders: [records], the client of each test record; empty where that is not known.
    """
    own = {client: hits[holders == client] for client, hits in right.items() if len(holders)}
    return {client: float(hits.mean()) for client, hits in own.items() if len(hits)}


def _alone(held: Sequence[Sequence[Any]], generator: np.random.Generator) -> dict[int, int]:
    """{client: its number of records} of those that get a model of their own, each from all of its records.

    They are drawn, as long as all their records together are at most MOST_RECORDS.
    """
    found, room = {}, MOST_RECORDS
    for client in generator.permutation(len(held))[:MOST_ALONE].tolist():
        num = len(held[client])
        if 0 < num <= room:
            found[client], room = num, room - num
    return dict(sorted(found.items()))


def _cross_validated(records: Labelled, seed: int) -> Baselines | None:
    num = len(records.labels)
    if num < 2:
        return None
    order = np.random.default_rng(seed).permutation(num)[:MOST_RECORDS]
    records, folds = records.part(order), min(_FOLDS, num)
    parts = list(KFold(folds).split(order))
    counts = np.array([hits(records.part(rest), records.part(held_out), seed) for rest, held_out in parts])
    probe, tfidf = counts.sum(axis=0) / len(order)
    return Baselines(
        probe_accuracy=float(probe),
        tfidf_accuracy=float(tfidf),
        num_trained_on=max(len(rest) for rest, _ in parts),
        num_available=num,
        folds=folds,
        alone={},
        alone_on_own={},
    )


def _rows(data: TextData, records: Records) -> list[tuple[str, Item]]:
    """The text and the tokens of each record that a model can read."""
    pairs = data.pairs or ("",) * len(data)
    texts = (f"{text}\n{pair}" for text, pair in zip(data.texts, pairs, strict=True))
    return [(text, item) for text, item in zip(texts, records.items(), strict=True) if usable(item)]


def _labelled(model: TrainingModel, rows: Sequence[tuple[str, Item]], *, cached: bool) -> Labelled:
    items = [item for _, item in rows]
    labels = np.array([int(records.labels[index]) for records, index in items], dtype=np.int64)
    return Labelled([text for text, _ in rows], _features(model, items, cached=cached), labels)


@torch.no_grad()
def _features(model: TrainingModel, items: Sequence[Item], *, cached: bool) -> npt.NDArray[np.float64]:
    """The mean over tokens of the frozen base's last hidden states, [records, hidden].

    The model's adapter and what is merged into it are replaced by nothing. With `cached` the prefix cache may keep
    states of the whole sets that the records are from.
    """
    model.merge({})
    without = {n: torch.zeros_like(t) if n.endswith(B_SUFFIX) else t for n, t in model.initial.items()}
    lora.write_parameters(model.parameters, without)
    encoder = model.peft_model.get_base_model().base_model
    states: list[torch.Tensor] = []
    handle = encoder.register_forward_hook(lambda *call: states.append(call[-1][0]))
    pooled = np.zeros((len(items), model.peft_model.config.hidden_size))
    try:
        for positions in passes_by_length(items):
            _, batch = model.logits([items[position] for position in positions], cached=cached)
            means = pooling.masked_mean(states.pop().float(), batch["attention_mask"])
            pooled[positions] = means.double().cpu().numpy()
    finally:
        handle.remove()
    # A record that the base fails on is at the origin: it must not spoil the fit for the others.
    return np.where(np.isfinite(pooled), pooled, 0.0)


def hits(train: Labelled, test: Labelled, seed: int) -> tuple[int, int]:
    """The numbers of test records that the linear probe and TF-IDF get right.

    Args:
        train, test: public records: nothing adds noise.
    """
    probe = int(_probed(train, test, seed).sum())
    if any(re.search(r"\w", text) for text in train.texts):
        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
        tfidf = _predicted(words, train.texts, train.labels, test.texts, _TFIDF_GRID, seed)
    else:
        tfidf = np.full_like(test.labels, np.bincount(train.labels).argmax())
    return probe, int((tfidf == test.labels).sum())


def _probed(train: Labelled, test: Labelled, seed: int) -> npt.NDArray[np.bool_]:
    """[records] The test records that the linear probe gets right; as for `hits`."""
    predicted = _predicted(StandardScaler(), train.features, train.labels, test.features, _PROBE_GRID, seed)
    right: npt.NDArray[np.bool_] = predicted == test.labels
    return right


def _predicted(transform: Any, inputs: Any, labels: _Vector, others: Any, grid: Sequence[float], seed: int) -> _Vector:
    """The classes that a logistic regression on the transformed inputs predicts for the others.

    The transform is fitted to the inputs alone; cross-validation on them chooses C from the grid.
    """
    # Each of a fit's many small products would wait for another thread, and on a busy machine for that to get a core.
    with threadpool_limits(1, user_api="blas"):
        rows = transform.fit_transform(inputs)
        fit = _path(rows, labels)
        return fit(_best(rows, labels, grid, seed), transform.transform(others))


def _best(rows: Any, labels: _Vector, grid: Sequence[float], seed: int) -> float:
    """The C with the most hits in cross-validation, the smallest of several."""
    if len(np.unique(labels)) < 2:
        return grid[0]
    hits = np.zeros(len(grid), dtype=np.int64)
    folds = KFold(min(_FOLDS_FOR_C, len(labels)), shuffle=True, random_state=seed)
    for rest, held_out in folds.split(labels):
        fit = _path(rows[rest], labels[rest])
        hits += [int((fit(c, rows[held_out]) == labels[held_out]).sum()) for c in grid]
    return grid[int(hits.argmax())]


def _path(rows: Any, labels: _Vector) -> Callable[[float, Any], _Vector]:
    """(C, others) -> their predicted classes, each fit starting from the one before."""
    if len(np.unique(labels)) < 2:  # which a logistic regression refuses
        return lambda _, others: np.full(others.shape[0], labels[0])
    model = LogisticRegression(warm_start=True, max_iter=_MAX_ITERATIONS)

    def fit(c: float, others: Any) -> _Vector:
        predicted: _Vector = model.set_params(C=c).fit(rows, labels).predict(others)
        return predicted

    return fit
