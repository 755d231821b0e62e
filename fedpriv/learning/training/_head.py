"""The sum of clipped gradients of a linear head, from what it reads of each record: exact, so quick for any number.

A record's gradient is r phi^T, where phi is what the head reads, with the scale of the bias as a further coordinate,
and r the softmax of the logits less the record's class. Where records share a product, a kernel may round one of them
by what the others are, unless nothing is rounded at all. So all that is multiplied here lies on grids on which every
partial sum of a product fits the 53 bits of a float64: the product then is that of the numbers themselves, in any order
and blocking, with or without fused operations. Between products stand operations of one value each that IEEE 754
rounds correctly, in a fixed order.

docs/appendices/independent_records.md derives the grids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.learning.training._coordinates import VectorLayout
from fedpriv.learning.training.private_sums import ROUNDING_MARGIN, check_clip_norm

# Bits of a record's features, below the power of two that bounds their norm; of a residual, below 1; and of a
# coefficient, below the clip norm. A record then adds less than 2^39 units, so that a float64 holds the sum of 2^14
# records, and two words of which the lower has 31 bits that of 2^30 and more.
_FEATURE_BITS = 21
_RESIDUAL_BITS = 26
_COEFFICIENT_BITS = 17

ROWS_OF_A_PRODUCT = 2**14
"""Records whose gradients one product may add."""
_LOWER_BITS = 31

# Of a float64. Weights have the bits that features leave, less one for the sum of the two parts of a product.
_PRECISION = 53
_WEIGHT_BITS = _PRECISION - 1 - _FEATURE_BITS

# exp(x) = 2^k exp(x - k ln 2): ln 2 in two parts, whose first times |k| < 2^11 is exact, and the terms of the series on
# |x| <= ln 2 / 2, of which the next one is below 2^-56.
_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
_TERMS = 14
_LEAST_EXPONENT = -700.0


@dataclass(frozen=True)
class HeadInputs:
    """The vectors that a head reads, on a grid.

    Attributes:
        steps: float64 [records, inputs], whole numbers of 2^-21; a row's norm is at most 2^21. Zeros for a record that
            cannot be used.
        scales: float64 [records], powers of two: features are scales times steps.
    """

    steps: Tensor
    scales: Tensor

    @staticmethod
    def of(features: Tensor, bias_scale: float | None, centre: Tensor | None = None) -> HeadInputs:
        """The features, cut towards zero.

        Args:
            features: float32 [records, width]; a row that is not finite is a record that cannot be used.
            bias_scale: > 0, the last coordinate; None for a head without a bias.
            centre: float32 [width] or [records, width], taken off the features; None takes nothing.
        """
        values = features.double()
        if centre is not None:
            values = values - centre.double()
        if bias_scale is not None:
            values = torch.cat([values, values.new_full((len(values), 1), bias_scale)], dim=1)
        usable = values.isfinite().all(dim=1)
        values = torch.where(usable.unsqueeze(1), values, torch.zeros_like(values))
        # The largest coordinate bounds the norm up to the root of their number; with that the norm itself is bounded,
        # in integers.
        scales = _power_above(values.abs().amax(dim=1))
        rounded_up = (values * (2.0**_FEATURE_BITS / scales).unsqueeze(1)).abs().ceil().to(torch.int64)
        norms = (rounded_up * rounded_up).sum(dim=1).double().sqrt()
        scales = scales * _power_above(norms * 2.0**-_FEATURE_BITS)
        steps = (values * (2.0**_FEATURE_BITS / scales).unsqueeze(1)).trunc()
        return HeadInputs(steps=steps, scales=scales)

    def logits(self, rows: slice, weight: Tensor) -> Tensor:
        """[rows, classes] The logits of these records; the same for a record whatever other records there are.

        Args:
            weight: [classes, inputs]; its last column belongs to the bias's coordinate, if there is one.
        """
        weight = weight.double()
        norm = weight.square().sum(dim=1).amax().sqrt()
        if not norm.isfinite():  # no power of two is above it
            return weight.new_full((len(self.steps[rows]), len(weight)), torch.nan)
        scale = _power_above(norm * (1 + 2.0**-40))
        steps = (weight * (2.0**_WEIGHT_BITS / scale)).trunc()
        product = self.steps[rows] @ steps.T
        return product * (scale * 2.0 ** -(_WEIGHT_BITS + _FEATURE_BITS)) * self.scales[rows].unsqueeze(1)

    def gradients(self, residuals: Tensor) -> Iterator[Tensor]:
        """Each record's gradient, float64 [classes, inputs], one after the other; zero for one that cannot be used."""
        for steps, scale, residual in zip(self.steps, self.scales, residuals, strict=True):
            yield (residual * (scale * 2.0**-_FEATURE_BITS)).unsqueeze(1) * steps

    def plain_sum(self, rows: slice, residuals: Tensor) -> Tensor:
        """The sum of these records' gradients, float64 [classes, inputs], rounded; `residuals` are those of all."""
        scales = (self.scales[rows] * 2.0**-_FEATURE_BITS).unsqueeze(1)
        return (residuals[rows] * scales).T @ self.steps[rows]


class ClippedSums:
    """The sums of several clients' clipped gradients.

    Guarantee: adding or removing one record moves each part of its client's sum by at most `clip_norm`, for up to 2^30
    records, and no other sum.

    Args:
        num_clients: >= 1.
        shape: (classes, inputs) of a gradient.
        clip_norm: C, finite, >= 1e-100.
        parts: slices of the inputs that cover each once.

    Raises:
        ValueError: clip_norm is out of range.
    """

    def __init__(self, num_clients: int, shape: tuple[int, int], clip_norm: float, parts: Sequence[slice]) -> None:
        check_clip_norm(clip_norm)
        # Two words, of which the second counts 2^31 of the first.
        self._words = torch.zeros(2, num_clients, *shape, dtype=torch.int64)
        self._parts = parts
        self._step = 2.0 ** (math.frexp(clip_norm)[1] - 1 - _COEFFICIENT_BITS)
        self._unit = self._step * 2.0**-_FEATURE_BITS
        self._most = clip_norm / self._unit * ROUNDING_MARGIN

    def add(self, inputs: HeadInputs, residuals: Tensor, runs: Sequence[tuple[int, slice]]) -> None:
        """Add at most `ROWS_OF_A_PRODUCT` records, with residuals [records, classes] and the rows of each client."""
        lengths, scales = _in_turn(residuals.square()).sqrt(), inputs.scales / self._step
        for part in self._parts:
            steps = inputs.steps[:, part]
            norms = steps.square().sum(dim=1).sqrt()  # of whole numbers below 2^53, which no order of addition rounds
            in_units = lengths * scales * norms
            shrunk = torch.where(in_units > self._most, self._most / in_units, torch.ones_like(in_units))
            coefficients = (residuals * (shrunk * scales).unsqueeze(1)).trunc()
            # The sensitivity rests on this line, not on how the factor was found.
            fits = _in_turn(coefficients.square()).sqrt() * norms <= self._most * (1 + 2.0**-40)
            coefficients = torch.where(fits.unsqueeze(1), coefficients, torch.zeros_like(coefficients))
            for client, rows in runs:
                self._words[0, client, :, part] += (coefficients[rows].T @ steps[rows]).to(torch.int64)
        self._words[1] += self._words[0] >> _LOWER_BITS
        self._words[0] &= 2**_LOWER_BITS - 1

    def totals(self) -> Tensor:
        """The sums, float64 [clients, classes, inputs], rounded once."""
        words = self._words.double()
        return (words[0] + words[1] * 2.0**_LOWER_BITS) * self._unit


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Several clients' heads, on the CPU.

    Attributes:
        weights: [clients, classes, inputs], with the bias as the weight of a further input.
        bias_scale: this input; None for a head without a bias.
        centres: [clients, width], taken off the features; None takes nothing.
        names: of the weight, and of the bias if there is one, in adapters.
        objective: `loss` or `class-sums`.
    """

    weights: Tensor
    bias_scale: float | None
    centres: Tensor | None
    layout: VectorLayout
    names: tuple[str, ...]
    objective: str

    @property
    def shape(self) -> tuple[int, int]:
        """Classes and inputs."""
        _, classes, inputs = self.weights.shape
        return classes, inputs

    @property
    def parts(self) -> list[slice]:
        """The inputs of each part that is clipped."""
        width = self.shape[1] - (self.bias_scale is not None)
        of_names = dict(zip(self.names, (slice(0, width), slice(width, width + 1)), strict=False))
        found = []
        for part in self.layout.parts:
            own = [at for name, at in of_names.items() if part.start <= self.layout.columns[name].start < part.stop]
            found.append(slice(min(at.start for at in own), max(at.stop for at in own)))
        return found

    def of_records(
        self, features: Tensor, labels: Tensor, owners: Tensor
    ) -> tuple[HeadInputs, Tensor, list[tuple[int, slice]]]:
        """The inputs and residuals of records, and each client's rows among them.

        Args:
            features: [records, width].
            labels: int64 [records].
            owners: int64 [records], their clients, those of a client one after the other.
        """
        inputs = HeadInputs.of(features, self.bias_scale, None if self.centres is None else self.centres[owners])
        of_clients, numbers = torch.unique_consecutive(owners, return_counts=True)
        ends = numbers.cumsum(dim=0).tolist()
        rows = [slice(end - number, end) for number, end in zip(numbers.tolist(), ends, strict=True)]
        runs = list(zip(of_clients.tolist(), rows, strict=True))
        if self.objective == "class-sums":
            return inputs, minus_classes(labels, self.shape[0]), runs
        logits = [inputs.logits(at, self.weights[client]) for client, at in runs]
        return inputs, residuals(torch.cat(logits), labels), runs

    def flat(self, matrix: Tensor) -> Tensor:
        """The row of a gradient [classes, inputs]."""
        width = self.shape[1] - (self.bias_scale is not None)
        by_name = dict(zip(self.names, (matrix[:, :width], matrix[:, -1]), strict=False))
        return self.layout.flatten_one({name: by_name[name] for name in self.layout.shapes})


def residuals(logits: Tensor, labels: Tensor) -> Tensor:
    """[records, classes] The softmax of the logits less the class, cut towards zero to multiples of 2^-26.

    Zeros for a record whose logits are not finite. Operations are + - x / of one value each, which IEEE 754 rounds
    correctly, so a record's residual is the same whatever other records there are.

    Args:
        logits: float64 [records, classes].
        labels: int64 [records].
    """
    usable = logits.isfinite().all(dim=1, keepdim=True)
    logits = torch.where(usable, logits, torch.zeros_like(logits))
    powers = _exp(logits - logits.amax(dim=1, keepdim=True))
    shares = powers / _in_turn(powers).unsqueeze(1)
    found = shares + minus_classes(labels, logits.shape[1])
    return torch.where(usable, (found * 2.0**_RESIDUAL_BITS).trunc() * 2.0**-_RESIDUAL_BITS, torch.zeros_like(found))


def minus_classes(labels: Tensor, num_classes: int) -> Tensor:
    """[records, classes] The residuals of class sums: -1 in each record's class, else 0."""
    return torch.zeros(len(labels), num_classes, dtype=torch.float64).scatter_(1, labels.unsqueeze(1), -1.0)


def _in_turn(values: Tensor) -> Tensor:
    """[records] The sum of each row's values, added one after the other."""
    total = values[:, 0].clone()
    for column in range(1, values.shape[1]):
        total += values[:, column]
    return total


def _power_above(values: Tensor) -> Tensor:
    """The least power of two above each value, >= 0; 1 for 0."""
    return _power(torch.frexp(values).exponent)


def _power(exponents: Tensor) -> Tensor:
    """2^k of each whole number, -1022 to 1023, by its bits: a library's power need not be exact."""
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)


def _exp(values: Tensor) -> Tensor:
    """The exponentials of values <= 0, to a few units of the last place; those of less than -700 count as that."""
    values = values.clamp_min(_LEAST_EXPONENT)
    powers = (values * (1 / math.log(2)) + 0.5).floor()
    rest = values - powers * _LN2_HIGH
    rest -= powers * _LN2_LOW
    series = torch.ones_like(rest)
    for term in range(_TERMS, 0, -1):
        series *= rest
        series *= 1 / term
        series += 1
    return series * _power(powers)
