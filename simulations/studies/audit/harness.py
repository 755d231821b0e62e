"""The engine under audit: `training.stacked` unchanged, on a model whose per-sample gradients can be chosen freely.

The model is linear: its logit is the inner product of the parameters with the record's direction, and the other class
has logit 0. The gradient of a record's loss then points along its direction, or against it for class 0, and long rows
make clipping active: the record's contribution is C times a unit vector, the most that the guarantee covers. Sampling,
per-sample gradients, clipping, noise, step, upload and event are those of the library; only its forward pass is not
used.

An observer of all uploads scores canaries by the most powerful test of each, given the schedule. What an audit is too
weak to detect (noise scale, independent noise, one record's influence, batch sizes) has tests of its own: each returns
a p-value under the correct mechanism, or a size to compare with its bound. They have access to internals and use data
of the tester's choice; their outputs on real data must not be published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from scipy import linalg, stats
from torch import Tensor, nn

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.learning.adapters import Adapter
from fedpriv.learning.data.records import Item, Records
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask, planned_event
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import TrainableLayer
from fedpriv.learning.training.stacked import stacked_updates
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.law import Array
from fedpriv.privacy.accounting.sensitivity import clipping_parts, sensitivity_factor
from fedpriv.privacy.mechanisms.sources import RandomSource, SecureSource, SeededSource

_RECORDS_AT_ONCE = 1024
A, B, HEAD = "canary.lora_A.weight", "canary.lora_B.weight", "canary.head.weight"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The mechanism under audit.

    Attributes:
        spec: of a round's update; one step of SGD per round.
        num_registered: N_k of every client.
        rounds: number of rounds.
        sizes: {tensor name: its number of values}; the name determines which part a tensor belongs to.
        seed: of a reproducible audit; None uses the cryptographic source.
    """

    spec: UpdateSpec
    num_registered: int
    rounds: int = 1
    sizes: Mapping[str, int] = field(default_factory=lambda: {A: 512, B: 512})
    seed: int | None = None

    @property
    def dimension(self) -> int:
        """Number of values in a gradient."""
        return sum(self.sizes.values())

    @property
    def event(self) -> Event:
        """The event charged to one client for all rounds."""
        shapes = {name: torch.empty(1, size) for name, size in self.sizes.items()}
        planned = planned_event(self.spec, self.spec.probability(self.num_registered), shapes)
        return planned.with_count(self.rounds * planned.count)

    @property
    def expected_batch_size(self) -> float:
        """B = q N_k, by which the noised sum of a step is divided."""
        return self.spec.probability(self.num_registered) * self.num_registered

    def source(self, *labels: int | str) -> RandomSource:
        """A source of randomness, independent for different labels."""
        return SecureSource() if self.seed is None else SeededSource("audit", self.seed, *labels)


def update_spec(
    *, noise_multiplier: float, batch_size: int = 1, clip_norm: float = 1.0, rounds: int = 1, **changes: Any
) -> UpdateSpec:
    """The specification of one step of SGD per round, with joint clipping and Gaussian noise unless changed."""
    config = RunConfig(
        rounds=rounds,
        local_steps=1,
        batch_size=batch_size,
        learning_rate=1.0,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
    )
    return replace(UpdateSpec.of(config), **changes)


class LinearModel(TrainingModel):
    """The model described above, with the interface that `stacked_updates` needs.

    Args:
        rows: [records, values], each a record's input; its gradient is -+ half of it when the parameters are 0.
        sizes: {tensor name: its number of values}, which sum to the values of a row.
    """

    output_layer = None
    recomputed = ()
    alone, num_workers = False, 1

    def __init__(self, rows: Tensor, sizes: Mapping[str, int]) -> None:  # there is no peft model to initialise
        self._blocks = dict(zip(sizes, torch.split(rows, list(sizes.values()), dim=1), strict=True))
        self._linear = {name: nn.Linear(size, 1, bias=False) for name, size in sizes.items()}
        for layer in self._linear.values():
            nn.init.zeros_(layer.weight)
        self.device, self.cache = torch.device("cpu"), None
        self.layers = {name: TrainableLayer(module=m, weight=name, bias=None) for name, m in self._linear.items()}
        self.parameters = {name: cast(nn.Parameter, layer.weight) for name, layer in self._linear.items()}
        self.initial = {name: layer.weight.detach().clone() for name, layer in self._linear.items()}
        self.adapter_names = {name: name for name in sizes}

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Accept every shape: each tensor is a row, whichever part its name puts it in."""

    def merge(self, merged: object) -> None:
        """Do nothing, since there is no frozen base."""

    def logits(self, items: Sequence[Item], *, cached: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Two logits for each record, and the records' classes."""
        rows = torch.cat([records.features["input_ids"][index] for records, index in items])
        inner = [layer(self._blocks[name][rows]) for name, layer in self._linear.items()]
        logit = torch.stack(inner).sum(dim=0)
        labels = torch.stack([records.labels[index] for records, index in items])
        return torch.cat([logit, torch.zeros_like(logit)], dim=1), {"labels": labels}

    def passes(self, items: Sequence[Item], num_values: int | None = None) -> Iterator[list[int]]:
        """The positions of the records in order, in chunks of bounded size."""
        for begin in range(0, len(items), _RECORDS_AT_ONCE):
            yield list(range(begin, min(begin + _RECORDS_AT_ONCE, len(items))))


def coordinate_directions(num: int, coordinates: Sequence[int] | range, dimension: int) -> Tensor:
    """Unit vectors [num, dimension] along the given coordinates in turn; orthogonal if there are enough of these.

    Args:
        num: number of canaries.
        coordinates: each in 0..dimension - 1.
        dimension: of a gradient.
    """
    directions = torch.zeros(num, dimension)
    directions[torch.arange(num), torch.tensor([coordinates[i % len(coordinates)] for i in range(num)])] = 1.0
    return directions


def _random_directions(num: int, dimension: int, source: RandomSource) -> Tensor:
    """Random unit vectors [num, dimension], uniform on the sphere."""
    values = source.normal(num * dimension).view(num, dimension)
    directions: Tensor = values / values.square().sum(dim=1, keepdim=True).sqrt()
    return directions.float()


def dense_directions(num: int, dimension: int, source: RandomSource) -> Tensor:
    """Orthogonal unit vectors [num, dimension] with all coordinates +-dimension^-1/2: rows of a Hadamard matrix whose
    columns have random signs.

    They reveal noise that suffices for a scalar but not for a vector, which no single coordinate does.

    Args:
        num: number of canaries, 1..dimension.
        dimension: of a gradient, a power of two.
        source: of the signs.

    Raises:
        InputError: dimension is not a power of two, or there are more canaries than orthogonal directions.
    """
    if dimension < 1 or dimension & (dimension - 1):
        raise InputError(f"dimension = {dimension}: must be a power of two")
    if not 1 <= num <= dimension:
        raise InputError(f"num_canaries = {num}: must lie in 1..{dimension}, the orthogonal directions")
    rows = torch.from_numpy(linalg.hadamard(dimension, dtype=np.int8)[:num]).float()
    signs = 1 - 2 * source.bernoulli(dimension, 0.5).float()
    return rows * signs / math.sqrt(dimension)


def records_of(rows: Sequence[int], classes: Sequence[int] | None = None) -> Records:
    """Records of a `LinearModel`, by row index; class 0 moves the upload along the row, class 1 against it."""
    labels = torch.tensor(classes if classes is not None else [0] * len(rows), dtype=torch.int64)
    return Records({"input_ids": tuple(torch.tensor([row]) for row in rows)}, labels, pad_token_id=0)


def observed(setup: Setup, model: LinearModel, data: Sequence[Records], round_: int) -> Tensor:
    """[clients, values] Noised sums of clipped gradients, recovered from the uploads by an observer, in units of C.

    Every client starts at zero. The observer knows the step: upload - broadcast = lr / B * (sum + noise), without B
    under `batch` and for noise on the upload, where the sum is the clipped update itself.
    """
    spec = setup.spec
    broadcast: Adapter = {name: torch.zeros(1, size) for name, size in setup.sizes.items()}
    tasks = [
        UpdateTask(
            adapter=broadcast,
            data=records,
            spec=spec,
            round=round_,
            sampler=spec.sampler(setup.num_registered, setup.source("inclusion", client, round_)),
            noise=setup.source("noise", client, round_),
        )
        for client, records in enumerate(data)
    ]
    updates = stacked_updates(cast(TrainingModel, model), tasks)
    uploads = torch.stack([torch.cat([t.flatten() for t in update.adapter.values()]) for update in updates])
    if spec.noise_on == "upload":
        return uploads / spec.clip_norm
    divisor = 1 if spec.clipping == "batch" else setup.expected_batch_size
    return uploads * divisor / (spec.learning_rate * spec.clip_norm)


@dataclass(frozen=True, kw_only=True)
class _Observations:
    """The observations of an attacker in one run, for each canary.

    Attributes:
        local: [rounds, canaries] inner product of each canary's direction with its client's upload, in units of C.
        aggregate: [rounds, canaries] inner product with the sum of all uploads of the round.
        included: bool [canaries].
    """

    local: Tensor
    aggregate: Tensor
    included: np.ndarray[tuple[int], np.dtype[np.bool_]]


def observe(setup: Setup, directions: Tensor, included: np.ndarray, *, num_clients: int = 1) -> _Observations:
    """A run in which the canaries are dealt out to the clients in turn.

    Args:
        setup: of the run.
        directions: unit vectors [canaries, values]; a canary's raw gradient is 100 C times its own.
        included: bool [canaries].
        num_clients: number of clients, >= 1.
    """
    model = LinearModel(200.0 * setup.spec.clip_norm * directions, setup.sizes)
    own = torch.arange(len(directions)) % num_clients
    data = [records_of(np.flatnonzero(included & (own.numpy() == client)).tolist()) for client in range(num_clients)]
    local, total = [], []
    for round_ in range(setup.rounds):
        sums = observed(setup, model, data, round_)
        inner = torch.empty(len(directions))
        for client in range(num_clients):
            inner[own == client] = directions[own == client] @ sums[client]
        local.append(inner)
        total.append(directions @ sums.sum(dim=0))
    return _Observations(local=torch.stack(local), aggregate=torch.stack(total), included=included)


def observe_clients(setup: Setup, bits: np.ndarray) -> Tensor:
    """[clients] Inner products of client-level canaries, one for each client, for noise on the upload.

    Each client's data set is a single record, replaced by the opposite one if the client's bit is unset. This is the
    strongest pair that the client-level guarantee covers: the clipped updates are 2 S apart.

    Args:
        setup: with noise on the upload.
        bits: bool [clients].
    """
    direction = torch.full((1, setup.dimension), setup.dimension**-0.5)
    # A step of lr / B times half the row must exceed S, so that the update is clipped.
    gradient_norm = 100.0 * setup.spec.clip_norm * setup.expected_batch_size / setup.spec.learning_rate
    model = LinearModel(2 * gradient_norm * direction, setup.sizes)
    sums = observed(setup, model, [records_of([0], [0 if bit else 1]) for bit in bits], 0)
    return sums @ direction[0]


# Relative error that float32 and the grid of the noise may add to a difference that is exactly at its bound.
ROUNDING = 1e-3


def noise_scale_p_value(noise: npt.ArrayLike, stddev: float) -> float:
    """Two-sided p-value of the sum of squares of Gaussian noise, chi-squared with one degree of freedom per value.

    Args:
        noise: uploads of a client whose samples were empty, any shape.
        stddev: claimed standard deviation, > 0, in the same units.
    """
    values = np.asarray(noise, dtype=float).ravel()
    statistic = float(((values / stddev) ** 2).sum())
    return float(min(1.0, 2 * min(stats.chi2.cdf(statistic, values.size), stats.chi2.sf(statistic, values.size))))


def repeated_noise_p_value(noise: npt.ArrayLike) -> float:
    """p-value of the largest correlation between the noise of any two rounds, with Bonferroni correction over pairs.

    If two rounds share noise, their difference has less than twice the variance: its expectation is
    2 (1 - correlation) times the variance of one.

    Args:
        noise: [rounds, values], rounds >= 2, of a client whose samples were empty.
    """
    rows = np.asarray(noise, dtype=float)
    correlations = np.corrcoef(rows)[np.triu_indices(len(rows), k=1)]
    largest = min(1.0, float(np.abs(correlations).max()))
    # For independent normal rows the correlation has exactly this distribution.
    p_value = 2 * stats.beta.sf((largest + 1) / 2, rows.shape[1] / 2 - 1, rows.shape[1] / 2 - 1)
    return min(1.0, len(correlations) * float(p_value))


def batch_size_p_value(sizes: npt.ArrayLike, *, num_records: int, sampling_probability: float) -> float:
    """Two-sided p-value of the spread of batch sizes, by the normal approximation of Binomial(N, q).

    Fixed batches have no spread at all; the size of a Poisson sample has variance N q (1 - q).

    Args:
        sizes: [batches].
        num_records: N.
        sampling_probability: q, with N q (1 - q) of at least about 10.
    """
    deviations = np.asarray(sizes, dtype=float) - num_records * sampling_probability
    return noise_scale_p_value(deviations, math.sqrt(num_records * sampling_probability * (1 - sampling_probability)))


def largest_influence(setup: Setup, *, num_records: int = 5, trials: int = 8, seed: int = 0) -> float:
    """How far one record changed the sum before noise, divided by the claimed bound: at most 1 if clipping is correct.

    Neighbouring batches are sent through the engine with the same noise, which cancels. All records are sampled. Their
    raw gradients, in random directions of all tensors or of one tensor alone, have 1e3 times the clip norm, and that
    of the last record, which the neighbouring batch lacks, has 1e6 times.

    Args:
        setup: with q = 1 and a seed, so that noise repeats.
        num_records: in the larger batch.
        trials: number of random batches over all tensors, in addition to one for each tensor alone.
        seed: of the gradients.

    Raises:
        ValueError: the setup has no seed, or does not sample every record.
    """
    if setup.seed is None or setup.spec.batch_size != setup.num_registered:
        raise ValueError("setup: needs a seed and batch_size = num_registered")
    names = list(setup.sizes)
    bound = sensitivity_factor(setup.spec.clipping, len(clipping_parts(setup.spec.clipping, names)))
    generator = torch.Generator().manual_seed(seed)
    batches = [_raw_gradients(setup, num_records, None, generator) for _ in range(trials)]
    batches += [_raw_gradients(setup, num_records, name, generator) for name in names]
    model = LinearModel(torch.cat(batches), setup.sizes)
    # Each batch belongs to one client, whose noise is the same in both calls.
    starts = range(0, len(batches) * num_records, num_records)
    with_it, without = (
        observed(setup, model, [records_of(range(start, start + num)) for start in starts], 0).double()
        for num in (num_records, num_records - 1)
    )
    return float((with_it - without).square().sum(dim=1).sqrt().max()) / bound


def _raw_gradients(setup: Setup, num_records: int, only: str | None, generator: torch.Generator) -> Tensor:
    """[records, values] Rows in random directions of all tensors, or of only one, far longer than the clip norm."""
    blocks = [
        torch.randn(num_records, size, generator=generator) * float(only in (None, name))
        for name, size in setup.sizes.items()
    ]
    rows = torch.cat(blocks, dim=1)
    rows *= 2e3 * setup.spec.clip_norm / rows.square().sum(dim=1, keepdim=True).sqrt()
    rows[-1] *= 1e3
    return rows


def matched_scores(inner_products: npt.ArrayLike, *, noise_stddev: float, sampling_probability: float) -> Array:
    """[canaries] The log likelihood ratio of in to out, from each canary's own inner products.

    Along its direction an included canary adds 1 in the rounds that sample it, so a round's inner product y has density
    (1 - q) phi(y) + q phi(y - 1) if it is in and phi(y) if it is out, with phi of variance s^2. The likelihood ratio
    is 1 - q + q exp((2 y - 1) / (2 s^2)), and its logarithms add up over rounds. This is the most powerful test if
    directions are orthogonal and the noise is Gaussian.

    Args:
        inner_products: [rounds, canaries], in units of the clip norm.
        noise_stddev: s > 0 of an inner product, in the same units: z for the observer of the `local` view, and
            sqrt(clients) z for an observer of sums only.
        sampling_probability: q in (0, 1].
    """
    ratios = (2 * np.asarray(inner_products, dtype=float) - 1) / (2 * noise_stddev**2)
    if sampling_probability == 1:
        return np.asarray(ratios.sum(axis=0))
    q = sampling_probability
    return np.asarray(np.logaddexp(np.log1p(-q), np.log(q) + ratios).sum(axis=0))


def ideal_scores(
    included: npt.NDArray[np.bool_],
    *,
    rounds: int,
    noise_stddev: float,
    sampling_probability: float,
    generator: np.random.Generator,
) -> Array:
    """[canaries] Scores of an ideal attacker who sees every canary separately under exactly the claimed noise.

    They are the best that `matched_scores` of the real engine can achieve, and are used to choose the number of
    guesses beforehand.

    Args:
        included: bool [canaries].
        rounds, noise_stddev, sampling_probability: of the schedule, as for `matched_scores`.
        generator: of sampling and noise.
    """
    drawn = included & (generator.random((rounds, len(included))) < sampling_probability)
    noise = noise_stddev * generator.standard_normal((rounds, len(included)))
    return matched_scores(drawn + noise, noise_stddev=noise_stddev, sampling_probability=sampling_probability)
