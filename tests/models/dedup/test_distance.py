"""The nearest block is brute force's, whatever the metric, the type, the tiles and the rounding of float32."""

import tracemalloc

import numpy as np
import pytest

from fedpriv.errors import InputError
from fedpriv.models.dedup import distance
from fedpriv.models.dedup.distance import METRICS, nearest

every_metric = pytest.mark.parametrize("metric", sorted(METRICS))


def brute_force(targets, bases, metric):
    """All distances in float64 by the plain formulas, and the first of the least."""
    a, b = targets.astype(np.float64)[:, None, :], bases.astype(np.float64)[None, :, :]
    if metric == "cosine":
        found = 1 - (a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    else:
        found = np.abs(a - b).sum(-1) if metric == "l1" else np.sqrt(((a - b) ** 2).sum(-1))
    return found.argmin(axis=1), found.min(axis=1)


def random_blocks(seed, num, block_size, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((num, block_size)).astype(dtype)


def assert_brute_force(targets, bases, metric):
    indices, distances = nearest(targets, bases, metric)
    expected, least = brute_force(targets, bases, metric)
    assert indices.tolist() == expected.tolist()
    np.testing.assert_allclose(distances, least, rtol=1e-9, atol=1e-12)


@every_metric
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("num_targets", "num_bases", "block_size"), [(1, 1, 1), (13, 7, 5), (10, 15, 3000)])
def test_nearest_is_brute_force(metric, dtype, num_targets, num_bases, block_size):
    targets, bases = random_blocks(0, num_targets, block_size, dtype), random_blocks(1, num_bases, block_size, dtype)
    assert_brute_force(targets, bases, metric)


@every_metric
def test_small_tiles_and_memory_maps_change_nothing(metric, monkeypatch, tmp_path):
    targets, bases = random_blocks(0, 17, 2500), random_blocks(1, 23, 2500)
    expected = nearest(targets, bases, metric)
    np.save(tmp_path / "targets.npy", targets)
    mapped = nearest(np.load(tmp_path / "targets.npy", mmap_mode="r"), bases, metric)
    monkeypatch.setattr(distance, "TILE", 5)
    for found in (mapped, nearest(targets, bases, metric)):
        np.testing.assert_array_equal(found, expected)


# Blocks longer than one float32 product: near ones at the same place, elsewhere, or twice, so that heads decide or not.
@every_metric
@pytest.mark.parametrize("moved", [0, 1, 20])
def test_variants_of_one_model_are_brute_force(metric, moved):
    bases = random_blocks(7, 30, 4500)
    targets = bases + np.float32(0.1) * random_blocks(8, 30, 4500)
    targets[:moved] = np.roll(targets[:moved], 1, axis=0)
    bases[25] = bases[11]
    assert_brute_force(targets, bases, metric)


# A part in 10^8 of the blocks' size: float32's norms and products round a thousand times coarser.
@every_metric
def test_differences_far_below_the_rounding_of_float32_products_are_told_apart(metric):
    base = random_blocks(2, 1, 4096, np.float64)
    steps = np.array([3, 1, 2, 1, 5])[:, None] * 1e-8 * random_blocks(3, 1, 4096, np.float64)
    indices, distances = nearest(base, base + steps, metric)
    assert indices.tolist() == [1], "of two equal ones the first"
    np.testing.assert_allclose(distances, nearest(base, base + steps[1:2], metric)[1])
    assert distances[0] > 0


@every_metric
@pytest.mark.parametrize("tile", [2, 1024])
def test_ties_go_to_the_smallest_index_across_tiles(metric, tile, monkeypatch):
    monkeypatch.setattr(distance, "TILE", tile)
    bases = np.tile(random_blocks(4, 3, 8), (30, 1))
    indices, distances = nearest(bases, bases, metric)
    assert indices.tolist() == [0, 1, 2] * 30
    assert distances.tolist() == [0.0] * 90


@every_metric
def test_zero_blocks_have_a_distance(metric):
    bases = np.array([[1, 2], [0, 0], [1, 0]], dtype=np.float32)
    indices, distances = nearest(np.zeros((1, 2), dtype=np.float32), bases, metric)
    assert (indices.tolist(), distances.tolist()) == ([1], [0.0])
    assert nearest(np.array([[0, 1]], dtype=np.float32), bases[1:2], metric)[1].tolist() == [1.0]


@every_metric
@pytest.mark.parametrize("scale", [1e-40, 1e-22, 1e22, 1e38])
def test_values_at_the_ends_of_float32_are_compared(metric, scale):
    targets, bases = (random_blocks(seed, 9, 50, np.float64) * scale for seed in (5, 6))
    indices, _ = nearest(targets, bases, metric)
    assert indices.tolist() == brute_force(targets / scale, bases / scale, metric)[0].tolist()


@pytest.mark.slow
@every_metric
def test_working_memory_is_that_of_a_tile(metric, monkeypatch):
    monkeypatch.setattr(distance, "TILE", 100)
    targets, bases = random_blocks(0, 700, 3000), random_blocks(1, 900, 3000)
    nearest(targets[:2], bases[:2], metric)
    tracemalloc.start()
    try:
        nearest(targets, bases, metric)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 48 * 100 * 100 + 16 * 100 * 3000 + 2**17


@every_metric
def test_a_value_that_is_not_finite_is_refused_by_its_block(metric):
    for value in (np.nan, np.inf):
        targets = random_blocks(0, 4, 3)
        targets[2, 1] = value
        with pytest.raises(InputError, match="block 2"):
            nearest(targets, random_blocks(1, 4, 3), metric)


def test_no_target_gives_nothing_and_what_cannot_be_compared_is_refused():
    bases = random_blocks(0, 2, 3)
    assert [len(found) for found in nearest(bases[:0], bases)] == [0, 0]
    for error, arguments, said in (
        (InputError, (bases, bases, "bogus"), "distance = 'bogus': known are l2, l1, cosine"),
        (ValueError, (bases, random_blocks(0, 2, 4)), "shape"),
        (ValueError, (bases, bases[:0]), "at least one block"),
    ):
        with pytest.raises(error, match=said):
            nearest(*arguments)
