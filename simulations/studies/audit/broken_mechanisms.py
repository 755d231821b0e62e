"""Mechanisms that are broken on purpose, each by one replaced piece of the engine. Only the audit's self-check runs them."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch

from fedpriv.audit.harness import A
from fedpriv.mechanisms.registry import MECHANISMS
from fedpriv.training import stacked
from fedpriv.training.clipping import add_clipped, clipped_rows
from fedpriv.training.sampling import PoissonSampler


def _noise(change: Callable[..., torch.Tensor]):
    """Gaussian noise whose events claim what they should, and whose sums are changed."""
    gaussian = MECHANISMS["gaussian"]
    add_noise = gaussian.add_noise

    def changed(sums, request, sources):
        noised, events = add_noise(sums, request, sources)
        return change(sums, noised, clip_norm=request.clip_norm), events

    return patch.object(gaussian, "add_noise", changed)


def no_noise():
    """The sums leave as they are."""
    return _noise(lambda sums, noised, **_: sums.clone())


def noise_on_a_only(sizes):
    """B and a head get none."""
    start, place = 0, {}
    for name, size in sizes.items():
        place[name], start = slice(start, start + size), start + size

    def change(sums, noised, **_):
        result = sums.clone()
        result[:, place[A]] = noised[:, place[A]]
        return result

    return _noise(change)


def noise_not_scaled():
    """The standard deviation is z, whatever C is."""
    return _noise(lambda sums, noised, clip_norm, **_: sums + (noised - sums) / clip_norm)


def half_the_noise():
    """The noise multiplier is half of what is claimed."""
    return _noise(lambda sums, noised, **_: sums + (noised - sums) / 2)


def same_noise_every_round():
    """Every round's source starts anew."""
    made = {}

    def change(sums, noised, **_):
        return sums + made.setdefault("noise", noised - sums)

    return _noise(change)


def mean_clipped():
    """The batch's mean is clipped, and taken times the batch's size for the sum."""

    def add(totals, rows, owners, clip_norm, parts):
        for owner in owners.unique().tolist():
            mine = rows[owners == owner]
            totals[owner] += len(mine) * clipped_rows(mine.mean(dim=0, keepdim=True), clip_norm, parts)[0]

    return patch.object(stacked, "add_clipped", add)


def head_unclipped(head_size):
    """The last values, a head's, go past the clipping."""

    def add(totals, rows, owners, clip_norm, parts):
        body = rows.clone()
        body[:, -head_size:] = 0
        add_clipped(totals, body, owners, clip_norm, parts)
        totals[:, -head_size:].index_add_(0, owners, rows[:, -head_size:])

    return patch.object(stacked, "add_clipped", add)


def fixed_batches():
    """Every batch has the expected size: shuffled, not Poisson."""

    def draw(self, num_records):
        size = min(num_records, self.expected_batch_size)
        order = torch.argsort(self.source.normal(num_records))
        return order[:size].tolist()

    return patch.object(PoissonSampler, "draw", draw)
