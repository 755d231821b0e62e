"""Clipping bounds what one record can do, whatever its gradient is, by every rule."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.training.clipping import clipped_parts, clipped_sum, finite_sum, part_norms

JOINT = (("a", "b"),)


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def random_gradients(num: int, seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": scale * torch.randn(num, 3, 40, generator=generator),
        "b": scale * torch.randn(num, 50, generator=generator),
    }


@settings(deadline=None, max_examples=60)
@given(
    num=st.integers(1, 6),
    seed=st.integers(0, 2**20),
    scale=st.sampled_from([1e-6, 0.01, 1.0, 100.0, 1e12]),
    clip_norm=st.sampled_from([1e-3, 1.0, 7.5]),
)
def test_one_record_moves_the_sum_by_at_most_the_clip_norm(num, seed, scale, clip_norm):
    gradients = random_gradients(num, seed, scale)
    without_last = {name: g[:-1] for name, g in gradients.items()}
    full, rest = clipped_sum(gradients, clip_norm, JOINT), clipped_sum(without_last, clip_norm, JOINT)
    last = clipped_sum({name: g[-1:] for name, g in gradients.items()}, clip_norm, JOINT)
    assert norm(last) <= clip_norm
    difference = {name: full[name].double() - rest[name].double() for name in full}
    assert norm(difference) <= clip_norm * (1 + 1e-5 * num)  # float32 sums round


def test_small_gradients_pass_unchanged_and_large_ones_keep_their_direction():
    small = random_gradients(1, seed=0, scale=1e-3)
    assert all(torch.equal(clipped_sum(small, 1.0, JOINT)[name], small[name][0]) for name in small)
    large = random_gradients(1, seed=0, scale=10.0)
    clipped = clipped_sum(large, 1.0, JOINT)
    assert norm(clipped) == pytest.approx(1.0, abs=1e-5)
    length = float(part_norms(large, JOINT)[0, 0])
    assert all(torch.allclose(clipped[name] * length, large[name][0], rtol=1e-4) for name in large)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_non_finite_record_counts_as_zero_and_spares_the_others(bad):
    gradients = random_gradients(3, seed=1)
    gradients["a"][1, 0, :3] = bad
    others = {name: g[[0, 2]] for name, g in gradients.items()}
    expected = clipped_sum(others, 1.0, JOINT)
    assert all(torch.allclose(clipped_sum(gradients, 1.0, JOINT)[name], expected[name]) for name in expected)


def test_no_record_gives_zero():
    assert norm(clipped_sum(random_gradients(0, seed=0), 1.0, JOINT)) == 0


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.inf, math.nan])
def test_clip_norm_out_of_range_is_refused(clip_norm):
    with pytest.raises(ValueError, match="clip_norm"):
        clipped_sum(random_gradients(1, seed=0), clip_norm, JOINT)


def test_each_part_is_clipped_apart():
    gradients = random_gradients(1, seed=0, scale=10.0)
    gradients["b"] = gradients["b"] * 1e-3
    result = clipped_sum(gradients, 1.0, (("a",), ("b",)))
    assert norm({"a": result["a"]}) == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(result["b"], gradients["b"][0]), "a small part is not scaled by a large one"


def test_a_non_finite_part_drops_the_whole_record():
    gradients = random_gradients(2, seed=1)
    gradients["a"][0, 0, 0] = math.nan
    second = {name: g[1:] for name, g in gradients.items()}
    parts = (("a",), ("b",))
    clipped = clipped_sum(gradients, 1.0, parts)
    assert all(torch.equal(clipped[name], clipped_sum(second, 1.0, parts)[name]) for name in clipped)
    assert all(torch.equal(finite_sum(gradients, JOINT)[name], second[name][0]) for name in second)


@pytest.mark.parametrize("parts", [(("a",),), (("a", "b"), ("b",)), (("a", "c"),)])
def test_parts_must_hold_every_tensor_once(parts):
    with pytest.raises(ValueError, match="every tensor once"):
        clipped_sum(random_gradients(1, seed=0), 1.0, parts)


def test_clipped_mean_of_two_batches_differs_by_at_most_two_c_a_part():
    big, opposite = ({name: sign * g[0] for name, g in random_gradients(1, 0, 50.0).items()} for sign in (1, -1))
    parts = (("a",), ("b",))
    one, other = (clipped_parts(gradient, 1.0, parts) for gradient in (big, opposite))
    gap = norm({name: one[name] - other[name] for name in one})
    assert 0.99 * 2 * math.sqrt(2) <= gap <= 2 * math.sqrt(2)
