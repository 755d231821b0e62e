"""Whether kernels give a row the same bits wherever it stands: found out on this machine, for the calls of a pass.

A thread computes its chunk of a tensor in vectors, and what is left at the chunk's end one value at a time. Some
elementwise kernels (SiLU, GELU, a sigmoid) round the two otherwise. How a tensor is cut depends on its shape and on the
number of threads, so the last bit of a record's activation may depend on its place in a pass and on the number of rows.

Few values tell the two ways apart, so random states would hardly show it. Here such values are looked for first; then
each fills tensors of the shapes in question, and all results must have the same bits. Other kernels (products,
attention, normalisations, sums) are tried on the states of the pass: equal rows must stay equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

# Values that are tried; in 16 bits, all that there are. Two ways to compute that differ in a share p of all values
# escape with probability (1 - p)^32768: 1e-7 for p = 1/2000.
_NUM_VALUES = 2**15

# So many values fill no vector on any processor: torch's loops take two vectors at a time, of four values at least.
_TOO_FEW = 7

# These copy values, and round none: rows of a block of targets are no rows of the pass.
_MOVING = frozenset({torch.ops.aten.index, torch.ops.aten.index_put_, torch.ops.aten.cat})

# Each of these tells the two ways apart, so one would do.
_MOST_TELLING = 2


class Watched(TorchDispatchMode):
    """Watches the kernels of a pass whose rows are equal.

    Args:
        rows: of the pass, >= 1.

    Attributes:
        equal: whether all kernels so far have made equal rows of equal rows.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.equal = True
        self._rows = rows
        self._calls: dict[_Call, None] = {}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The kernel's result."""
        kwargs = kwargs or {}
        if _rounds(func, args, kwargs):
            leaves, form = tree_flatten((args, kwargs))
            self._calls[_Call(func, form, tuple(map(_described, leaves)))] = None
        output = func(*args, **kwargs)
        moves = func.is_view or func.overloadpacket in _MOVING
        if self.equal and not moves and any(map(self._has_unequal_rows, tree_leaves(output))):
            given = filter(_is_matrix, tree_leaves((args, kwargs)))
            self.equal = not next(map(self._has_equal_rows, given), False)
        return output

    def _has_unequal_rows(self, leaf: object) -> bool:
        return self._has_rows(leaf) and not self._has_equal_rows(leaf)

    def _has_equal_rows(self, leaf: object) -> bool:
        return isinstance(leaf, Tensor) and self._has_rows(leaf) and are_equal(leaf.reshape(self._rows, -1))

    def _has_rows(self, leaf: object) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 0 and not len(leaf) % self._rows

    def of_telling_values(self) -> tuple[bytes, ...] | None:
        """Results of elementwise kernels on telling values, in the shapes of the pass; None if the place decides."""
        found = tuple(bits for call in self._calls for bits in call.of_telling_values(self._rows))
        return None if b"" in found else found


def _rounds(kernel: Any, args: Any, options: Mapping[str, Any]) -> bool:
    """Whether the kernel is elementwise and makes a floating-point number of others."""
    if kernel.overloadpacket is torch.ops.aten._to_copy:  # a conversion; torch does not tag these
        return bool(args[0].is_floating_point() and options.get("dtype", args[0].dtype) != args[0].dtype)
    if kernel.overloadpacket is torch.ops.aten.copy_:
        return all(x.is_floating_point() for x in args[:2]) and bool(args[0].dtype != args[1].dtype)
    tensors = (leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor))
    return torch.Tag.pointwise in kernel.tags and any(tensor.is_floating_point() for tensor in tensors)


def are_equal(rows: Tensor) -> bool:
    """Whether all rows of a matrix are equal."""
    return torch.equal(rows[1:], rows[:-1])


def _is_matrix(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1


@dataclass(frozen=True)
class _Of:
    """The description of a tensor that a kernel is told."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def full(self, value: Tensor) -> Tensor:
        """Such a tensor of one value."""
        length = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return value.to(self.dtype).repeat(length).as_strided(self.shape, self.strides)


def _described(leaf: Any) -> Any:
    return _Of(tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True)
class _Call:
    """An elementwise kernel with its arguments, tensors as `_Of`, and how these are put together."""

    kernel: Any
    form: TreeSpec
    leaves: tuple[Any, ...]

    def of_telling_values(self, rows: int) -> Iterator[bytes]:
        """A digest of what each telling value gives in a row of a pass; no bytes if that depends on the row."""
        formats = tuple(_Of((), (), leaf.dtype) if isinstance(leaf, _Of) else leaf for leaf in self.leaves)
        for values in _telling(self.kernel, self.form, formats):
            given = iter(values)
            leaves = [leaf.full(next(given)) if isinstance(leaf, _Of) else leaf for leaf in self.leaves]
            output = _bits(_run(self.kernel, self.form, leaves))
            of_rows = output.reshape(rows, -1) if output.dim() and len(output) % rows == 0 else output.reshape(-1, 1)
            yield hashlib.sha256(of_rows[0].numpy().tobytes()).digest() if are_equal(of_rows) else b""


@lru_cache(maxsize=1024)
def _telling(kernel: Any, form: TreeSpec, formats: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], ...]:
    """Values of the tensors among the arguments, [1] each, for which vectors give other bits than single values."""
    places = [place for place, leaf in enumerate(formats) if isinstance(leaf, _Of)]
    in_16_bits = any(formats[place].dtype.itemsize == 2 for place in places)
    num = 2**16 if in_16_bits else _NUM_VALUES
    tensors = [_values(formats[place].dtype, num, seed) for seed, place in enumerate(places)]

    def in_pieces(size: int) -> Tensor:
        outputs, leaves = [], list(formats)
        for pieces in zip(*(tensor.clone().split(size) for tensor in tensors), strict=True):
            for place, piece in zip(places, pieces, strict=True):
                leaves[place] = piece
            outputs.append(_run(kernel, form, leaves))
        return _bits(torch.cat(outputs))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # some libraries wake all of them for seven values
    try:
        differing = (in_pieces(_TOO_FEW) != in_pieces(2**14)).nonzero().flatten()[:_MOST_TELLING].tolist()
    finally:
        torch.set_num_threads(threads)
    return tuple(tuple(tensor[place : place + 1] for tensor in tensors) for place in differing)


def _run(kernel: Any, form: TreeSpec, leaves: list[Any]) -> Tensor:
    args, options = tree_unflatten(leaves, form)
    output: Tensor = kernel(*args, **options)
    return output


def _values(dtype: torch.dtype, num: int, seed: int) -> Tensor:
    """[num] Values of moderate size and of every magnitude; in 16 bits all that there are, in some order."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(2, (num,), generator=generator).to(dtype)
    if dtype.itemsize == 2:
        return torch.randperm(num, generator=generator).to(torch.uint16).view(dtype)
    values = torch.randn(num, generator=generator, dtype=torch.float64)
    values[::2] *= 2.0 ** torch.randint(-149, 128, (num // 2,), generator=generator)
    return values.to(dtype)


def _bits(tensor: Tensor) -> Tensor:
    """The bits as integers; those of one and the same NaN for all of them."""
    if not tensor.is_floating_point():
        return tensor
    tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])
