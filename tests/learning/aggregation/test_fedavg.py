"""The weighted average of Eq. 8."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.learning.aggregation._fedavg import weighted_average, weights_by_size


def adapter(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return {"A": torch.randn(3, 5, generator=generator), "B": torch.randn(4, generator=generator)}


@given(st.dictionaries(st.integers(0, 99), st.integers(1, 10**9), min_size=1, max_size=20))
def test_weights_sum_to_one_and_follow_the_sizes(sizes):
    weights = weights_by_size(sizes)
    assert sum(weights.values()) == pytest.approx(1.0, abs=1e-12)
    total = sum(sizes.values())
    assert all(weights[client] == sizes[client] / total for client in sizes)


def test_it_is_the_plain_sum_in_double_precision_whatever_the_order_of_clients_and_names():
    parts, even = [adapter(seed) for seed in range(4)], [0.125, 0.25, 0.125, 0.5]  # exact in any order
    turned = [parts[0], *({name: part[name] for name in "BA"} for part in parts[1:])]
    for clients, weights in ((parts, [0.1, 0.2, 0.3, 0.4]), (parts[::-1], even[::-1]), (turned, even)):
        average = weighted_average(clients, weights)
        for name in "AB":
            expected = sum(w * part[name].double() for w, part in zip(weights, clients, strict=True))
            assert torch.equal(average[name], expected.float())
            assert average[name].dtype == torch.float32
    one, other = weighted_average(parts, even), weighted_average(parts[::-1], even[::-1])
    assert all(torch.equal(one[name], other[name]) for name in "AB")


@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [
        ([], [], ">= 1"),
        ([adapter(0)], [0.5, 0.5], "equally many"),
        ([adapter(0), adapter(1)], [0.5, 0.4], "sum to"),
        ([adapter(0), {"A": torch.zeros(3, 5)}], [0.5, 0.5], "names or shapes"),
        ([adapter(0), {"A": torch.zeros(5, 3), "B": torch.zeros(4)}], [0.5, 0.5], "names or shapes"),
    ],
)
def test_what_does_not_fit_is_refused(parts, weights, message):
    with pytest.raises(ValueError, match=message):
        weighted_average(parts, weights)


@pytest.mark.parametrize("sizes", [{}, {0: 0}, {0: 5, 1: -1}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="size"):
        weights_by_size(sizes)


def test_inputs_are_unchanged_and_the_result_is_a_copy():
    parts = [adapter(0), adapter(1)]
    average = weighted_average(parts, [1.0, 0.0])
    average["A"].zero_()
    assert all(torch.equal(part[name], adapter(seed)[name]) for seed, part in enumerate(parts) for name in "AB")
