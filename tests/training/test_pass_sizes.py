"""Which numbers of rows a pass may have, and how records are split into such passes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedpriv.training import pass_sizes
from fedpriv.training.model import TrainingModel
from fedpriv.training.pass_sizes import give_the_same_bits, powers_of_two
from fedpriv.training.shapes import split


def test_powers_of_two():
    assert [powers_of_two(n) for n in (1, 2, 3, 4, 9)] == [(1,), (2,), (2,), (2, 4), (2, 4, 8)]


@given(st.integers(0, 500), st.integers(1, 64))
def test_every_record_has_a_place_and_few_rows_are_dummies(num_records, largest):
    sizes = powers_of_two(largest)
    chosen = split(num_records, sizes)
    assert set(chosen) <= set(sizes)
    assert num_records <= sum(chosen)
    # All passes but the last are full.
    assert sum(chosen[:-1]) < num_records or not chosen
    assert sum(chosen) - num_records <= max(1, 0.25 * sizes[-1])
    assert len(chosen) <= num_records // sizes[-1] + math.log2(sizes[-1]) + 1


def test_one_size_is_filled_with_dummies():
    assert split(9, (4,)) == [4, 4, 4]


@pytest.fixture
def model(encoder):
    return TrainingModel(encoder(layers="last-1"), memory_limit=2**30, max_length=40)


class Uneven(nn.Linear):
    """Rounds otherwise for many rows."""

    def forward(self, x):
        return super().forward(x) * (1 + 1e-6 * (len(x) >= 8))


class Crooked(nn.Linear):
    """Rounds otherwise for the rows from the fifth on."""

    def forward(self, x):
        result = super().forward(x)
        return torch.cat([result[:4], result[4:] * (1 + 1e-6)])


class Backwards(nn.Linear):
    """Rounds otherwise for many rows in the backward pass alone."""

    def forward(self, x):
        scaled = x * (1 + 1e-6 * (len(x) >= 8))
        return super().forward(x.detach()) + super().forward(scaled) - super().forward(scaled.detach())


@pytest.mark.parametrize("kind", [Uneven, Crooked, Backwards])
def test_a_product_whose_bits_depend_on_the_rows_is_found(model, kind):
    if not model._free_sizes(8):
        pytest.skip("this machine's products depend on the number of rows as they are")
    dense = model.peft_model.base_model.model.bert.encoder.layer[1].output.dense
    dense.__class__ = kind
    assert not give_the_same_bits(model.peft_model, (2, 4, 8, 16), 8)


def test_passes_have_a_constant_number_of_rows_where_sizes_matter(model, make_records, monkeypatch):
    monkeypatch.setattr(TrainingModel, "_free_sizes", lambda *_: ())
    records = make_records(100, shortest=3, longest=7)
    assert len({together.shape.rows for together in model.passes(records.items())}) == 1


def test_passes_have_hardly_a_dummy_where_sizes_do_not_matter(model, make_records):
    if not model._free_sizes(8):
        pytest.skip("this machine's products depend on the number of rows")
    records = make_records(37, shortest=3, longest=7)
    passes = list(model.passes(records.items()))
    assert sum(len(together.positions) for together in passes) == 37
    assert sum(together.shape.rows for together in passes) <= 38


def test_an_architecture_that_mixes_rows_elsewhere_is_not_tried(model, monkeypatch):
    monkeypatch.setattr(pass_sizes, "LINEAR_AND_ATTENTION", frozenset())
    assert not give_the_same_bits(model.peft_model, (2, 4), 8)


def test_a_frozen_head_keeps_sizes_constant(encoder):
    peft = encoder(layers="last-1")
    assert give_the_same_bits(peft, (1,), 8)
    peft.base_model.model.classifier = nn.Linear(64, 3).requires_grad_(False)
    assert not give_the_same_bits(peft, (1,), 8)


@pytest.mark.parametrize(("num_expected", "largest"), [(1, 2), (8, 8), (9, 16), (64, 64)])
def test_no_pass_is_larger_than_a_step_needs(model, num_expected, largest):
    if not model._free_sizes(8):
        pytest.skip("this machine's products depend on the number of rows")
    assert model.sizes(8, num_expected)[-1] == largest
