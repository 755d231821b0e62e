"""Which numbers of rows a pass may have, and how records are split into such passes."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedpriv.training._kernels import Watched
from fedpriv.training._pass_sizes import bits_of_pass, candidates, chosen, found_once, structure, with_equal_bits
from fedpriv.training._shapes import split
from fedpriv.training.model import TrainingModel
from tests.threads import with_threads


@pytest.mark.parametrize(
    ("threads", "largest", "expected"),
    [
        (1, 1, ()),
        (1, 9, (2, 4, 8)),
        (8, 9, (2, 4, 8)),
        (3, 12, (2, 3, 4, 6, 8, 12)),
        (6, 7, (2, 3, 4, 6)),
        (7, 20, (2, 4, 7, 8, 14, 16)),
    ],
)
def test_sizes_suit_the_number_of_threads(threads, largest, expected):
    with with_threads(threads):
        assert candidates(largest) == expected


def test_sizes_are_mixed_only_where_all_give_the_same_bits():
    bits = {2: "a", 4: "b", 8: None, 16: "b"}
    assert with_equal_bits(bits.get, (2, 4, 8, 16)) == [(2,), (4, 16)]
    assert chosen([(2,), (4, 16)], constant=2) == (4, 16)
    assert chosen([(2,), (4,), (16,)], constant=8) == (4,)
    assert chosen([(2,)], constant=1) == chosen([], constant=8) == (1,)


@given(st.integers(0, 500), st.integers(2, 64))
def test_every_record_has_a_place_and_few_rows_are_dummies(num_records, largest):
    sizes = tuple(1 << power for power in range(1, largest.bit_length()))
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
    if len(model.sizes(8)) < 5:
        pytest.skip("this machine's kernels depend on the number of rows as they are")
    dense = model.peft_model.base_model.model.bert.encoder.layer[1].output.dense
    dense.__class__ = kind
    del model._structure
    assert model.sizes(8) in [(2, 4), (8, 16, 32, 64)]


def test_passes_have_a_constant_number_of_rows_where_sizes_matter(model, make_records, monkeypatch):
    monkeypatch.setattr("fedpriv.training.model.found_once", lambda _, __, sizes: [(size,) for size in sizes])
    records = make_records(100, shortest=3, longest=7)
    assert len({together.shape.rows for together in model.passes(records.items())}) == 1


def test_passes_have_hardly_a_dummy_where_sizes_do_not_matter(model, make_records):
    if len(model.sizes(8)) < 5:
        pytest.skip("this machine's products depend on the number of rows")
    records = make_records(37, shortest=3, longest=7)
    passes = list(model.passes(records.items()))
    assert sum(len(together.positions) for together in passes) == 37
    assert sum(together.shape.rows for together in passes) <= 38


class Bent(nn.Module):
    """An activation that rounds otherwise at a tensor's end, for a few values."""

    def forward(self, x):
        return BENT(x)


@torch.library.custom_op("fedpriv_tests::bent", mutates_args=(), tags=torch.Tag.pointwise)
def BENT(x: torch.Tensor) -> torch.Tensor:  # noqa: N802
    result, flat = x.clone(), x.reshape(-1)
    end = len(flat) - len(flat) % 64 if len(flat) > 64 else 0
    result.view(-1)[end:] *= torch.where(flat[end:].abs() < 1e-4, 1 + 1e-6, 1.0)
    return result


BENT.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize(("rows", "same"), [(8, True), (3, False)])
def test_an_activation_that_rounds_few_values_otherwise_at_a_chunks_end_is_found(rows, same):
    """Seven of a hundred thousand values tell it from one that does not, and none of these states."""
    states = torch.full((rows, 8, 12), 0.5)
    with Watched(rows) as watched:
        output = BENT(states)
    assert watched.equal
    assert torch.equal(output, states)
    assert (watched.of_telling_values() is not None) == same


@pytest.mark.parametrize("activation", [F.silu, partial(F.gelu, approximate="tanh")])
def test_an_activation_that_threads_cut_within_vectors_is_found_whatever_the_states(activation):
    values = torch.randn(2**14, generator=torch.Generator().manual_seed(0))
    if torch.equal(torch.cat([activation(few) for few in values.split(7)]), activation(values)):
        pytest.skip("this machine's vectors round like single values")
    with with_threads(3):
        with Watched(8) as watched:
            activation(torch.zeros(8, 8, 1088))
        of_telling = watched.of_telling_values()
    assert watched.equal
    assert of_telling is None


def test_a_frozen_head_is_tried_too(encoder):
    peft = encoder(layers="last-1")
    peft.base_model.model.classifier = head = nn.Linear(64, 3).requires_grad_(False)
    model = TrainingModel(peft, memory_limit=2**30, max_length=40)
    if bits_of_pass(model, 8, 8, full=False, rank=4) is None:
        pytest.skip("this machine's product of a vector depends on the row")
    head.__class__ = Crooked
    assert bits_of_pass(model, 8, 8, full=False, rank=4) is None


def test_the_more_records_a_step_has_the_less_it_pads_and_a_rehearsal_meets_each_length(model):
    steps = (1, 64, 1000, 10**4, 10**5, math.inf)
    padded = [[model.lengths(num).padded(tokens)[0] for tokens in range(1, 41)] for num in steps]
    assert padded[0] == padded[1]  # a rehearsal is of 64 records at least
    assert all(sum(after) <= sum(before) for before, after in pairwise(padded))
    assert padded[-1] == [min(8 * (tokens // 8 + 1), 40) for tokens in range(1, 41)] != padded[0]
    assert set(padded[1]) < set(padded[-1])  # so do the caches of larger steps


def test_a_record_has_its_length_whatever_is_drawn_beside_it(model, make_records):
    items = make_records(1, shortest=9, longest=9).items()
    for num_expected in (64, 10**5):
        lengths = {p.shape.tokens for n in (1, 10**4) for p in model.passes(items * n, num_expected)}
        assert lengths == {model.lengths(num_expected).padded(9)[0]}
    assert model.lengths(64).padded(9) != model.lengths(10**5).padded(9), "no drawn number could have told"


def test_what_is_found_is_remembered_for_a_number_of_threads():
    tried = []

    def trial(size):
        tried.append(size)
        return size < 16

    for threads in (1, 2):
        with with_threads(threads):
            assert found_once("remembered", trial, (2, 4, 8, 16)) == [(2, 4, 8), (16,)]
            assert found_once("remembered", trial, (2, 4)) == [(2, 4)]
            assert found_once("remembered", trial, (2, 32)) == [(2,), (32,)]
    assert tried == 2 * [2, 4, 8, 16, 2, 32]


def test_models_have_one_structure_whatever_their_weights_and_another_with_another_kernel(encoder):
    one, other = encoder(layers="last-1"), encoder(layers="last-1")
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    other.base_model.model.name_or_path = "elsewhere"
    assert structure(one) == structure(other)
    assert structure(encoder(layers="all")) != structure(one)
    other.base_model.model.bert.encoder.layer[1].intermediate.intermediate_act_fn = nn.SiLU()
    assert structure(other) != structure(one)


@pytest.mark.parametrize(("num_expected", "largest"), [(1, 2), (8, 8), (9, 16), (64, 64)])
def test_no_pass_is_larger_than_a_step_needs(model, num_expected, largest):
    if len(model.sizes(8)) < 5:
        pytest.skip("this machine's products depend on the number of rows")
    assert model.sizes(8, num_expected)[-1] == largest
