"""A shared basis restores what it says, in the bytes that it says, and the same bits everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.errors import InputError
from fedpriv.variants._bases import read_basis
from fedpriv.variants.blocks import layout_of
from fedpriv.variants.shared_basis import (
    BasisOptions,
    Encoded,
    SharedBasis,
    affordable_rank,
    covered,
    few_bits,
    fit,
    flattened,
    restore_error,
    row_bytes,
)
from tests.variants.test_blocks import same_bits


def family(num_variants: int = 6, rank: int = 2, noise: float = 0.0) -> list[dict[str, np.ndarray]]:
    """Models on a plane of the given rank, with three tensors of floats, one of them empty, and one of integers."""
    rng = np.random.default_rng(0)
    shapes = {"a": (4, 9), "b": (7,), "none": (0, 3)}
    start = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    axes = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(rank)]
    models = []
    for number in range(num_variants):
        weights = rng.normal(size=rank)
        model: dict[str, np.ndarray] = {
            name: (
                start[name]
                + sum(w * axis[name] for w, axis in zip(weights, axes, strict=True))
                + noise * rng.normal(size=shape)
            ).astype("f4")
            for name, shape in shapes.items()
        }
        models.append({**model, "steps": np.array(number)})
    return models


def fitted(models, **options):
    layout = layout_of(models[0], 16)
    vectors = np.array([flattened(str(number), model, layout) for number, model in enumerate(models)])
    basis, coefficients = fit(vectors, layout, BasisOptions(**options))
    return layout, vectors, basis, [Encoded(own) for own in coefficients]


def errors(layout, vectors, basis, encoded) -> list[float]:
    restored = [flattened("r", basis.restore(each), layout) for each in encoded]
    return [restore_error(*pair).relative for pair in zip(vectors, restored, strict=True)]


def test_the_rank_of_the_family_is_found_and_restores_it():
    layout, vectors, basis, encoded = fitted(family(rank=2), bits=32, max_error=1e-5)
    assert basis.rank == 2
    assert max(errors(layout, vectors, basis, encoded)) <= 1e-5
    assert fitted(family(rank=3), bits=32, max_error=1e-5)[2].rank == 3


def test_restoring_is_the_formula_in_float64_value_by_value():
    _, _, basis, encoded = fitted(family(noise=0.3), bits=8, ratio=0.9)
    assert basis.rank > 1
    ends = np.cumsum(basis.mean.segments)
    for each in encoded:
        flat = np.concatenate([tensor.reshape(-1) for tensor in basis.restore(each).values()])
        for position, value in enumerate(flat):
            segment = int(np.searchsorted(ends, position, side="right"))
            total = float(basis.mean.values[0, position]) * float(basis.mean.scales[0, segment])
            for index, coefficient in enumerate(each.coefficients):
                component = float(basis.components.values[index, position])
                total += float(coefficient) * (component * float(basis.components.scales[index, segment]))
            assert np.float32(total) == value


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_more_bits_and_more_rank_restore_better_and_the_file_comes_back(bits):
    models = family(num_variants=8, noise=0.5)
    layout, vectors, full, encoded = fitted(models, bits=bits)
    assert max(errors(layout, vectors, full, encoded)) < {4: 0.2, 8: 0.02, 32: 0.7}[bits]
    *_, small, few = fitted(models, bits=bits, ratio=0.25)
    assert small.rank < full.rank
    assert max(errors(layout, vectors, small, few)) > max(errors(layout, vectors, full, encoded))
    again = read_basis(full.to_bytes(), layout)
    for each in encoded:
        assert all(np.array_equal(again.restore(each)[k], v) for k, v in full.restore(each).items())
    assert again.to_bytes() == full.to_bytes() == fitted(models, bits=bits)[2].to_bytes()


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_bytes_allowed_are_kept_and_the_next_rank_would_exceed_them(bits):
    models = family(num_variants=12, noise=1.0)
    layout = layout_of(models[0], 16)
    segments = [spec.size for spec in covered(layout)]
    for budget in (450, 700, 1000):
        *_, basis, encoded = fitted(models, bits=bits, max_bytes=budget)
        used = basis.mean.num_bytes + basis.components.num_bytes + sum(e.coefficients.nbytes for e in encoded)
        assert used <= budget
        next_rank = row_bytes(segments, bits) + 4 * len(models)
        assert basis.rank == len(models) - 1 or used + next_rank > budget
    assert affordable_rank(12, covered(layout), BasisOptions(max_bytes=10, bits=bits)) == -1


def test_an_error_asked_for_is_met_by_the_least_rank_or_refused():
    models = family(num_variants=10, noise=0.5)
    layout, vectors, basis, encoded = fitted(models, bits=8, max_error=0.2)
    assert max(errors(layout, vectors, basis, encoded)) <= 0.2
    everything = fitted(models, bits=8, ratio=50.0)[2]
    ranks = [max(errors(layout, vectors, everything.truncated(k), _refit(vectors, everything, k))) for k in range(10)]
    assert next(k for k, error in enumerate(ranks) if error <= 0.2) == basis.rank
    with pytest.raises(InputError, match=r"max_error = 1e-09: no basis of 10 variants is within it"):
        fitted(models, bits=8, max_error=1e-9)


def _refit(vectors, basis, rank):
    """Least squares by numpy on the restored components."""
    rows = np.array([basis.components.row(index) for index in range(rank)]).reshape(rank, vectors.shape[1])
    solved = np.linalg.lstsq(rows.T, (vectors - basis.mean.row(0)).T, rcond=None)[0].T
    return [Encoded(own.astype(np.float32)) for own in solved]


def test_a_residual_brings_back_what_the_basis_misses():
    layout, vectors, basis, encoded = fitted(family(num_variants=10, noise=1.0), bits=4, ratio=0.3)
    without = errors(layout, vectors, basis, encoded)
    for bits, factor in ((4, 0.25), (8, 0.02)):
        full = [basis.with_residual(each, vector, bits) for each, vector in zip(encoded, vectors, strict=True)]
        assert (np.array(errors(layout, vectors, basis, full)) < factor * np.array(without)).all()
        again = basis.tensors({**full[0].to_tensors(), "steps": np.array(3)})
        assert again.pop("steps") == 3
        assert same_bits(again, basis.restore(full[0]))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-1e30, 1e30, width=64), min_size=1, max_size=9), st.sampled_from([4, 8, 32]), st.integers(0, 3)
)
def test_rounding_is_within_half_a_scale_or_of_float32_and_zeros_stay(values, bits, num_zeros):
    row = np.array([*values, *[0.0] * num_zeros])
    rounded = few_bits(row[None], [len(row)], bits)
    restored, scale = rounded.row(0), float(rounded.scales[0, 0])
    assert rounded.mismatch() is None
    assert rounded.num_bytes == row_bytes([len(row)], bits)
    assert (restored[row == 0] == 0).all()
    tolerance = 6e-8 * np.abs(row) + 1e-44
    reach = {4: 7, 8: 127, 32: np.inf}[bits] * scale
    inside = np.abs(row) <= reach * (1 + 1e-6)
    half = scale / 2 * (1 + 1e-6) if bits < 32 else 0.0
    tiny = np.abs(row).max() < 1e-37  # scales are denormal there
    assert tiny or (np.abs(restored - row) <= half + tolerance)[inside].all()


def test_values_that_no_basis_can_hold_are_refused_by_the_variants_name():
    layout = layout_of(model := family()[0], 16)
    for value in (np.nan, np.inf, 1e31):
        with pytest.raises(InputError, match="client-3: holds values that are not finite"):
            flattened("client-3", {**model, "b": np.full(7, value, "f4")}, layout)
    with pytest.raises(InputError, match="names that begin with shared-basis/"):
        flattened("client-3", {**model, "shared-basis/coefficients": np.zeros(2)}, layout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits = 5: must be one of 4, 8, 32"),
        ({"max_error": 0.0}, r"max_error = 0\.0: must be a finite number > 0"),
        ({"ratio": float("nan")}, "ratio = nan"),
        ({"max_bytes": "many"}, "max_bytes = 'many'"),
        ({"max_bytes": 5, "max_error": 0.1}, "max_error, max_bytes: both choose the rank"),
    ],
)
def test_options_out_of_range_are_one_line(options, message):
    with pytest.raises(InputError, match=message):
        BasisOptions(**options)


def test_equal_variants_need_no_component_and_a_basis_of_another_layout_is_refused():
    layout, vectors, basis, encoded = fitted([family()[0]] * 4, bits=8)
    assert basis.rank == 0
    assert max(errors(layout, vectors, basis, encoded)) < 0.02
    with pytest.raises(ValueError, match="mean: int8"):
        read_basis(basis.to_bytes(), layout_of({"a": np.zeros(3, "f4")}, 16))
    with pytest.raises(ValueError, match="not a shared basis"):
        SharedBasis.from_tensors({"mean": np.zeros(3)}, layout)
    with pytest.raises(ValueError, match="2 coefficients for a basis of 0 components"):
        basis.restore(Encoded(np.zeros(2, np.float32)))
