"""Mechanisms broken on purpose, each by replacing one piece of the engine; only the audit's self-check runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fedpriv.accounting.events import Event
from fedpriv.mechanisms.registry import MECHANISMS, NoiseRequest
from fedpriv.mechanisms.sources import RandomSource
from fedpriv.training import PoissonSampler, stacked
from fedpriv.training.clipping import Parts, add_clipped, clipped_rows
from simulations.studies.audit.harness import A

Broken = AbstractContextManager[Any]


def _noise_changed(change: Callable[[Tensor, Tensor, float], Tensor]) -> Broken:
    """Gaussian noise whose events claim what they should, but whose result is `change(sums, noised, clip_norm)`."""
    gaussian = MECHANISMS["gaussian"]
    add_noise = gaussian.add_noise

    def changed(sums: Tensor, request: NoiseRequest, sources: Sequence[RandomSource]) -> tuple[Tensor, list[Event]]:
        noised, events = add_noise(sums, request, sources)
        return change(sums, noised, request.clip_norm), events

    return patch.object(gaussian, "add_noise", changed)


def no_noise() -> Broken:
    """The sums are released as they are."""
    return _noise_changed(lambda sums, noised, clip_norm: sums.clone())


def noise_on_a_only(sizes: Mapping[str, int]) -> Broken:
    """B and a head get no noise."""
    names = list(sizes)
    start = sum(sizes[name] for name in names[: names.index(A)])
    columns = slice(start, start + sizes[A])

    def change(sums: Tensor, noised: Tensor, clip_norm: float) -> Tensor:
        result = sums.clone()
        result[:, columns] = noised[:, columns]
        return result

    return _noise_changed(change)


def noise_not_scaled() -> Broken:
    """The standard deviation is z, whatever C is."""
    return _noise_changed(lambda sums, noised, clip_norm: sums + (noised - sums) / clip_norm)


def half_the_noise() -> Broken:
    """The noise multiplier is half of what is claimed."""
    return _noise_changed(lambda sums, noised, clip_norm: sums + (noised - sums) / 2)


def same_noise_every_round() -> Broken:
    """Every round adds the noise of the first."""
    first: list[Tensor] = []

    def change(sums: Tensor, noised: Tensor, clip_norm: float) -> Tensor:
        if not first:
            first.append(noised - sums)
        return sums + first[0]

    return _noise_changed(change)


def mean_clipped() -> Broken:
    """The mean of the batch is clipped, then multiplied by the batch size to give the sum."""

    def add(totals: Tensor, rows: Tensor, owners: Tensor, clip_norm: float, parts: Parts) -> None:
        for owner in owners.unique().tolist():
            own = rows[owners == owner]
            totals[owner] += len(own) * clipped_rows(own.mean(dim=0, keepdim=True), clip_norm, parts)[0]

    return patch.object(stacked, "add_clipped", add)


def head_unclipped(head_size: int) -> Broken:
    """The last values, those of a head, bypass the clipping."""

    def add(totals: Tensor, rows: Tensor, owners: Tensor, clip_norm: float, parts: Parts) -> None:
        body = rows.clone()
        body[:, -head_size:] = 0
        add_clipped(totals, body, owners, clip_norm, parts)
        totals[:, -head_size:].index_add_(0, owners, rows[:, -head_size:].double())

    return patch.object(stacked, "add_clipped", add)


def fixed_batches() -> Broken:
    """Every batch has the expected size: shuffled, not Poisson."""

    def draw(self: PoissonSampler, num_records: int) -> list[int]:
        size = min(num_records, self.expected_batch_size)
        order = torch.argsort(self.source.normal(num_records))
        chosen: list[int] = order[:size].tolist()
        return chosen

    return patch.object(PoissonSampler, "draw", draw)
