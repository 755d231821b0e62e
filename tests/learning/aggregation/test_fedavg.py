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


def test_one_client_is_the_identity():
    assert all(torch.equal(weighted_average([adapter(0)], [1.0])[name], adapter(0)[name]) for name in "AB")


def test_equal_adapters_are_a_fixed_point():
    average = weighted_average([adapter(0)] * 3, [0.5, 0.25, 0.25])
    assert all(torch.equal(average[name], adapter(0)[name]) for name in "AB")


def test_order_of_clients_does_not_matter():
    parts, weights = [adapter(seed) for seed in range(3)], [0.5, 0.3, 0.2]
    forward, backward = weighted_average(parts, weights), weighted_average(parts[::-1], weights[::-1])
    assert all(torch.equal(forward[name], backward[name]) for name in "AB")


def test_equals_a_plain_sum_in_double_precision():
    parts, weights = [adapter(seed) for seed in range(4)], [0.1, 0.2, 0.3, 0.4]
    average = weighted_average(parts, weights)
    for name in "AB":
        expected = sum(w * part[name].double() for w, part in zip(weights, parts, strict=True))
        assert torch.equal(average[name], expected.float())
        assert average[name].dtype == torch.float32


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


# 1 + 2^-24 + 2^-24: float32 loses both small parts, float64 keeps them. Worked by hand; times 1/4, exact.
def test_sum_keeps_what_float32_would_lose():
    parts = [{"A": torch.tensor([value])} for value in (1.0, 2.0**-24, 2.0**-24, 0.0)]
    assert weighted_average(parts, [0.25] * 4)["A"].item() == 0.25 * (1 + 2.0**-23)


def test_inputs_are_unchanged_and_the_result_is_a_copy():
    parts = [adapter(0), adapter(1)]
    average = weighted_average(parts, [1.0, 0.0])
    average["A"].zero_()
    assert all(torch.equal(part[name], adapter(seed)[name]) for seed, part in enumerate(parts) for name in "AB")


def test_average_lies_between_the_smallest_and_the_largest():
    parts = [adapter(seed) for seed in range(3)]
    average = weighted_average(parts, [0.2, 0.3, 0.5])
    for name in "AB":
        stacked = torch.stack([part[name] for part in parts])
        assert (average[name] <= stacked.amax(0)).all()
        assert (average[name] >= stacked.amin(0)).all()


def test_order_of_names_does_not_matter():
    turned = {name: adapter(1)[name] for name in "BA"}
    one, other = (
        weighted_average([adapter(0), turned], [0.5, 0.5]),
        weighted_average([adapter(0), adapter(1)], [0.5, 0.5]),
    )
    assert all(torch.equal(one[name], other[name]) for name in "AB")
