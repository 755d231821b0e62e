"""No float32 gradient, however small, large or numerous, moves a client's sum by more than the clip norm."""

from __future__ import annotations

import math

import pytest
import torch

from fedpriv.training.clipping import add_clipped, clipped_rows, clipped_sums

ONE_PART = (slice(0, 8),)


def total_of(rows: torch.Tensor, clip_norm: float) -> torch.Tensor:
    totals = torch.zeros(1, rows.shape[1], dtype=torch.int64)
    add_clipped(totals, rows, torch.zeros(len(rows), dtype=torch.int64), clip_norm, (slice(0, rows.shape[1]),))
    return clipped_sums(totals, clip_norm)[0]


@pytest.mark.parametrize("clip_norm", [1e-36, 1e-30, 1e-12, 1.0, 100.0])
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e-23, 1e-19, 1e-3, 1.0, 1e19, 1e30, 3e38])
def test_every_float32_gradient_is_clipped(size, clip_norm):
    row = torch.full((1, 8), size, dtype=torch.float32)
    true_norm = math.sqrt(8) * float(row[0, 0])
    for clipped in (total_of(row, clip_norm), clipped_rows(row, clip_norm, ONE_PART)[0]):
        assert float(clipped.norm()) <= min(clip_norm, true_norm)
        assert float(clipped.norm()) >= 0.999999 * min(clip_norm, true_norm) - 3 * clip_norm / 2**32


def test_gradients_of_1e_23_do_not_pass_a_clip_norm_of_1e_36():
    rows = torch.full((53, 8), 1e-23)
    assert float(total_of(rows, 1e-36).norm()) <= 53 * 1e-36


@pytest.mark.parametrize("place", [0, 70_000, 131_071])
def test_no_crafted_set_lets_one_record_move_the_sum_by_more_than_the_clip_norm(place):
    """Many equal rows make the sum large, so that each later addition rounds; one row decides which way."""
    generator = torch.Generator().manual_seed(place)
    rows = torch.full((131_072, 8), 0.35)
    rows[::3] *= 1 + 1e-3 * torch.rand(len(rows[::3]), 1, generator=generator)
    without = torch.cat([rows[:place], rows[place + 1 :]])
    moved = 0.0
    for batches in (1, 3):  # however the records fall into passes
        sums = [
            sum((total_of(part, 1.0) for part in some.chunk(batches)), torch.zeros(8, dtype=torch.float64))
            for some in (rows, without)
        ]
        moved = max(moved, float((sums[0] - sums[1]).norm()))
    assert 0.9 < moved <= 1 + 1e-9


def test_sums_do_not_depend_on_the_order_of_the_records():
    rows = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(total_of(rows, 0.7), total_of(rows.flip(0), 0.7))


def test_clipping_leaves_its_input_as_it_was():
    for dtype in (torch.float32, torch.float64):
        rows = torch.full((2, 8), 3.0, dtype=dtype)
        clipped_rows(rows, 1.0, ONE_PART)
        assert torch.equal(rows, torch.full((2, 8), 3.0, dtype=dtype))
