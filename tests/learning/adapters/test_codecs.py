"""Codecs: exact where they say so, without bias, as small as promised, and strict in reading."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.learning.adapters import codecs
from fedpriv.learning.adapters.codecs import CODECS, CODES, SCALES, decode, encode, pack_ternary, unpack_ternary
from fedpriv.privacy.mechanisms.sources import SeededSource

SHAPES = {"b.weight": (16, 31), "a.weight": (7,), "c.bias": (1, 1)}


def tensors(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def carried(adapter, reference, codec, source=None) -> dict[str, torch.Tensor]:
    return decode(encode(adapter, reference, codec, source or SeededSource(1)), reference, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_the_reference_itself_is_carried_exactly_and_float32_carries_all(codec):
    reference = tensors(0)
    for adapter in (reference, tensors(1))[: 2 if codec == "float32" else 1]:
        found = carried(adapter, reference, codec)
        assert list(found) == list(reference)
        assert all(torch.equal(found[name], adapter[name]) for name in adapter)


@pytest.mark.parametrize(("codec", "steps"), [("int8", 127), ("ternary", 1)])
def test_error_is_below_one_step_of_each_tensor(codec, steps):
    reference, moved = tensors(0), tensors(1)
    adapter = {name: tensor + moved[name] for name, tensor in reference.items()}
    found = carried(adapter, reference, codec)
    for name, tensor in adapter.items():
        step = (tensor - reference[name]).abs().max() / steps
        assert (found[name] - tensor).abs().max() <= step * 1.001


def test_bfloat16_keeps_eight_bits_of_the_difference():
    reference, moved = tensors(0, 100.0), tensors(1, 1e-3)
    adapter = {name: (reference[name].double() + moved[name]).float() for name in reference}
    found = carried(adapter, reference, "bfloat16")
    for name in adapter:
        assert ((found[name] - adapter[name]).abs() <= 2.0**-8 * moved[name].abs() + 1e-5).all()


@pytest.mark.parametrize("codec", ["int8", "ternary"])
def test_the_mean_over_many_draws_is_the_value(codec):
    """At 4 standard errors one of 504 values errs by chance in 3 % of all seeds; the seed is fixed."""
    zero, adapter, draws = {n: torch.zeros(s) for n, s in SHAPES.items()}, tensors(1), 400
    source, total = SeededSource(7, "unbiased"), {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    for _ in range(draws):
        for name, tensor in carried(adapter, zero, codec, source).items():
            total[name] += tensor
    for name, tensor in adapter.items():
        step = float(tensor.abs().max()) / (127 if codec == "int8" else 1)
        assert (total[name] / draws - tensor).abs().max() <= 4.5 * 0.5 * step / draws**0.5


def test_a_bias_of_rounding_to_the_nearest_would_be_seen(monkeypatch):
    """The power of the test above: half a step is many standard errors."""
    monkeypatch.setattr(codecs, "_rounded", lambda values, scale, *_: np.rint(values / scale).astype(np.int8))
    with pytest.raises(AssertionError):
        test_the_mean_over_many_draws_is_the_value("ternary")


@given(st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_three_values_are_carried_exactly_by_ternary(seed):
    generator = torch.Generator().manual_seed(seed)
    zero = {n: torch.zeros(s) for n, s in SHAPES.items()}
    adapter = {n: 0.3 * torch.randint(-1, 2, s, generator=generator).float() for n, s in SHAPES.items()}
    found = carried(adapter, zero, "ternary", SeededSource(seed))
    assert all(torch.equal(found[name], adapter[name]) for name in adapter)


@given(st.lists(st.sampled_from([-1, 0, 1]), max_size=64))
def test_packing_reads_back_and_takes_a_fifth_of_a_byte_each(codes):
    packed = pack_ternary(np.array(codes, dtype=np.int8))
    assert len(packed) == -(-len(codes) // 5)
    assert unpack_ternary(packed, len(codes)).tolist() == codes


@pytest.mark.parametrize(("codec", "at_most"), [("float32", 4.0), ("bfloat16", 2.0), ("int8", 1.0), ("ternary", 0.2)])
def test_bytes_for_each_value(codec, at_most):
    with pytest.raises(ValueError, match="codec = 'zip': must be one of float32, bfloat16, int8, ternary"):
        encode({}, {}, "zip", SeededSource(0))
    big = {"w": torch.randn(1000, 100, generator=torch.Generator().manual_seed(0))}
    encoded = encode(big, {"w": torch.zeros(1000, 100)}, codec, SeededSource(0))
    scales = 0 if codec in ("float32", "bfloat16") else 4
    assert sum(t.numel() * t.element_size() for t in encoded.values()) == 100_000 * at_most + scales


HARMS = {
    "missing": (lambda encoded: encoded.pop(CODES), CODES),
    "extra": (lambda encoded: encoded.update(more=torch.zeros(1)), "more"),
    "dtype": (lambda encoded: encoded.update({CODES: encoded[CODES].float()}), CODES),
    "length": (lambda encoded: encoded.update({CODES: encoded[CODES][:-1]}), CODES),
    "no five codes": (lambda encoded: encoded[CODES].__setitem__(3, 243), "byte 243"),
    "no scales": (lambda encoded: encoded.pop(SCALES), "missing tensors: scales"),
}


@pytest.mark.parametrize(
    ("codec", "harm"),
    [
        *[(codec, harm) for codec in CODECS if codec != "float32" for harm in ("missing", "extra", "dtype", "length")],
        ("ternary", "no five codes"),
        ("int8", "no scales"),
    ],
)
def test_malformed_arrays_are_refused_by_name(codec, harm):
    encoded, (damage, message) = encode(tensors(1), tensors(0), codec, SeededSource(0)), HARMS[harm]
    damage(encoded)
    with pytest.raises(ValueError, match=message):
        decode(encoded, tensors(0), codec)
