"""Encodings of a client's trained tensors for the wire: exact, or in fewer bits by rounding.

A codec works on tensors that are already noised, so it is post-processing and costs no privacy. All but `float32`
encode the difference to a reference that both sides hold: it is smaller than the tensors, so less is lost.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedpriv.learning.adapters._arithmetic import Adapter
from fedpriv.privacy.mechanisms.sources import RandomSource

CODECS = ("float32", "bfloat16", "int8", "ternary")

Encoded = dict[str, Tensor]

# Names of the arrays that the codecs other than float32 write.
CODES = "codes"
SCALES = "scales"

_LARGEST_INT8 = 127.0
# Five base-3 digits fit into a byte, 243 <= 256: 1.6 bits per code.
_DIGITS = 5
_POWERS = np.array([3**digit for digit in range(_DIGITS)], dtype=np.uint8)


def encode(adapter: Mapping[str, Tensor], reference: Mapping[str, Tensor], codec: str, source: RandomSource) -> Encoded:
    """The arrays that encode an adapter.

    `float32` keeps the tensors as they are; `bfloat16` rounds the difference to nearest; `int8` rounds it, at random
    and without bias, to one of the two neighbours among 255 evenly spaced values per tensor; `ternary` replaces each
    value, at random and without bias, by 0 or plus or minus the largest magnitude in its tensor. `ternary` is exact
    for a difference that takes only the values -s, 0 and s.

    Args:
        adapter: float32 tensors.
        reference: tensors with the same names and shapes, which the receiver holds too.
        codec: one of `CODECS`.

    Raises:
        ValueError: the codec is unknown, or the names differ.

    Source: Alistarh et al. 2017 (QSGD) for int8; Wen et al. 2017 (TernGrad) for ternary.
    """
    _check(codec)
    if adapter.keys() != reference.keys():
        raise ValueError(
            f"adapter: tensors {', '.join(sorted(adapter.keys() ^ reference.keys()))} are on one side only"
        )
    if codec == "float32":
        return dict(adapter)
    differences = [(adapter[name].double() - reference[name].double()).flatten() for name in sorted(reference)]
    if codec == "bfloat16":
        return {CODES: torch.cat(differences).to(torch.bfloat16).view(torch.int16)}
    largest = [float(part.abs().max()) if len(part) else 0.0 for part in differences]
    steps = _LARGEST_INT8 if codec == "int8" else 1.0
    scales = np.array([size / steps for size in largest], dtype=np.float32)
    codes = np.concatenate(
        [_rounded(part.numpy(), float(scale), steps, source) for part, scale in zip(differences, scales, strict=True)]
    )
    packed = codes if codec == "int8" else pack_ternary(codes)
    return {CODES: torch.from_numpy(packed), SCALES: torch.from_numpy(scales)}


def decode(encoded: Mapping[str, Tensor], reference: Mapping[str, Tensor], codec: str) -> Adapter:
    """The adapter that the arrays encode, float32, in the reference's order.

    Raises:
        ValueError: an array is missing, superfluous, or of another type or length than the codec writes for this
            reference; one line that names it.
    """
    _check(codec)
    if codec == "float32":
        _check_arrays(encoded, {name: (torch.float32, tuple(tensor.shape)) for name, tensor in reference.items()})
        return {name: encoded[name] for name in reference}
    sizes = {name: reference[name].numel() for name in sorted(reference)}
    total = sum(sizes.values())
    length = -(-total // _DIGITS) if codec == "ternary" else total
    dtype = {"bfloat16": torch.int16, "int8": torch.int8, "ternary": torch.uint8}[codec]
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {CODES: (dtype, (length,))}
    if codec != "bfloat16":
        expected[SCALES] = (torch.float32, (len(sizes),))
    _check_arrays(encoded, expected)
    if codec == "bfloat16":
        values = encoded[CODES].view(torch.bfloat16).double()
        scales = torch.ones(len(sizes))
    else:
        codes = unpack_ternary(encoded[CODES].numpy(), total) if codec == "ternary" else encoded[CODES].numpy()
        values, scales = torch.from_numpy(codes).double(), encoded[SCALES]
    parts = dict(zip(sizes, zip(torch.split(values, list(sizes.values())), scales, strict=True), strict=True))
    return {
        name: (tensor.double() + (parts[name][0] * parts[name][1].double()).view(tensor.shape)).float()
        for name, tensor in reference.items()
    }


def pack_ternary(codes: np.ndarray) -> np.ndarray:
    """Codes -1, 0, 1, int8 [values], packed five per byte, uint8 [ceil(values / 5)]; the last is padded with zeros."""
    digits = np.zeros(-(-len(codes) // _DIGITS) * _DIGITS, dtype=np.uint8)
    digits[: len(codes)] = codes + 1
    packed: np.ndarray = (digits.reshape(-1, _DIGITS) * _POWERS).sum(axis=1, dtype=np.uint8)
    return packed


def unpack_ternary(packed: np.ndarray, num_codes: int) -> np.ndarray:
    """The first `num_codes` codes, int8, that `pack_ternary` packed; ValueError for a byte that does not hold five."""
    if len(packed) and packed.max() >= 3**_DIGITS:
        raise ValueError(f"{CODES}: byte {packed.max()}: must be below {3**_DIGITS}, five ternary codes")
    digits = packed[:, None] // _POWERS % 3
    return digits.reshape(-1)[:num_codes].astype(np.int8) - 1


def _rounded(values: np.ndarray, scale: float, steps: float, source: RandomSource) -> np.ndarray:
    """values / scale as int8, rounded up with probability equal to the fractional part, so without bias."""
    if scale == 0.0:
        return np.zeros(len(values), dtype=np.int8)
    exact = np.clip(values / scale, -steps, steps)
    below = np.floor(exact)
    up = source.words(len(values)) * 2.0**-64 < exact - below
    return (below + up).astype(np.int8)


def _check(codec: str) -> None:
    if codec not in CODECS:
        raise ValueError(f"codec = {codec!r}: must be one of {', '.join(CODECS)}")


def _check_arrays(arrays: Mapping[str, Tensor], expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    if missing := sorted(expected.keys() - arrays.keys()):
        raise ValueError(f"missing tensors: {', '.join(missing)}")
    if extra := sorted(arrays.keys() - expected.keys()):
        raise ValueError(f"extra tensors: {', '.join(extra)}")
    for name, (dtype, shape) in expected.items():
        array = arrays[name]
        if array.dtype != dtype or tuple(array.shape) != shape:
            actual, wanted = f"{_short(array.dtype)} {tuple(array.shape)}", f"{_short(dtype)} {shape}"
            raise ValueError(f"{name}: {actual}, not {wanted}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
