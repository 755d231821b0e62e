"""Arithmetic on adapters, {name: tensor}, and on what aggregation has added to frozen weights.

Rules that average the products B A instead of the factors add to the frozen weights what an adapter of rank r cannot
hold: for each LoRA layer, a sum of products of low-rank factors. The sum is kept as a pair of factors as long as these
are smaller than the matrix itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Adapter = dict[str, Tensor]
"""{name of a trainable tensor: its values}."""

Factors = tuple[Tensor, Tensor]
"""(B, A) of a map: [out, n] and [k, in]."""

A_SUFFIX = ".lora_A.weight"
"""The end of the name of a matrix A, as peft stores it."""

B_SUFFIX = ".lora_B.weight"
"""The end of the name of a matrix B, as peft stores it."""

INNER_SUFFIX = ".lora_B.default.R.weight"
"""The end of the name of an R between B and A. It keeps the `default` that peft drops elsewhere."""

OUTER_SUFFIX = ".lora_B.default.B.weight"  # of the B behind that R

_LEFT = ".left"
_RIGHT = ".right"


def leading_block(adapter: Mapping[str, Tensor], rank: int) -> Adapter:
    """The adapter with the first rows and columns, at most so many, of each R; its other tensors are the same."""
    return {name: t[:rank, :rank].clone() if name.endswith(INNER_SUFFIX) else t for name, t in adapter.items()}


def difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Adapter:
    """left - right, tensor by tensor; ValueError if the names differ."""
    if left.keys() != right.keys():
        raise ValueError(f"adapters differ in {', '.join(sorted(left.keys() ^ right.keys()))}")
    return {name: left[name] - right[name] for name in left}


def norm(adapter: Mapping[str, Tensor]) -> float:
    """L2 norm over all tensors together."""
    return math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in adapter.values()))


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix [out, in], as float32 left [out, rank] @ right [rank, in], or in full as left if `right` is None."""

    left: Tensor
    right: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.left.shape[0], (self.left if self.right is None else self.right).shape[1]

    def matrix(self) -> Tensor:
        """[out, in], float32, summed in float64."""
        return self.left if self.right is None else (self.left.double() @ self.right.double()).float()

    def plus(self, terms: Iterable[tuple[Tensor, Tensor]]) -> Product:
        """The matrix plus the products of the terms (left [out, r], right [r, in]), as factors if these are smaller."""
        terms = list(terms)
        if self.right is not None:
            lefts, rights = [self.left, *(left for left, _ in terms)], [self.right, *(right for _, right in terms)]
            left, right = torch.cat(lefts, dim=1), torch.cat(rights, dim=0)
            if left.numel() + right.numel() < left.shape[0] * right.shape[1]:
                return Product(left, right)
        total = self.left.double() if self.right is None else self.left.double() @ self.right.double()
        return Product(sum((left.double() @ right.double() for left, right in terms), start=total).float())

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """(left, right); a full matrix gets the identity on its shorter side."""
        if self.right is not None:
            return self.left, self.right
        out_features, in_features = self.left.shape
        if out_features <= in_features:
            return torch.eye(out_features), self.left
        return self.left, torch.eye(in_features)


Merged = dict[str, Product]
"""{layer name: what was added to its weight, in units of B A, that is, before LoRA's scaling}"""


def factors_of(adapter: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """{layer name: (B, A)} of an adapter's LoRA layers."""
    names = [name.removesuffix(A_SUFFIX) for name in adapter if name.endswith(A_SUFFIX)]
    return {name: (adapter[name + B_SUFFIX], adapter[name + A_SUFFIX]) for name in names}


def of_one_rank(pairs: Mapping[str, Factors]) -> Adapter:
    """LoRA layers of these {layer name: (B, A)}, smaller factors padded with zeros to the largest rank of any."""
    rank = max((left.shape[1] for left, _ in pairs.values()), default=0)
    result = {}
    for name, (left, right) in pairs.items():
        padding = rank - left.shape[1]
        result[name + A_SUFFIX] = torch.nn.functional.pad(right, (0, 0, 0, padding))
        result[name + B_SUFFIX] = torch.nn.functional.pad(left, (0, padding))
    return result


def non_lora_tensors(adapter: Mapping[str, Tensor]) -> Adapter:
    """The tensors that are not LoRA factors: those of the head."""
    return {name: tensor for name, tensor in adapter.items() if not name.endswith((A_SUFFIX, B_SUFFIX))}


def add_products(merged: Mapping[str, Product], terms: Mapping[str, Iterable[tuple[Tensor, Tensor]]]) -> Merged:
    """The merged weights plus further products, {layer name: [(left, right), ...]}."""
    result = dict(merged)
    for name, products in terms.items():
        products = list(products)
        result[name] = (result[name] if name in result else _zero(*products[0])).plus(products)
    return result


def _zero(left: Tensor, right: Tensor) -> Product:
    """The zero matrix of the shape of left @ right, as factors of rank 0."""
    return Product(left.new_zeros(left.shape[0], 0), right.new_zeros(0, right.shape[1]))


def same_merged(one: Mapping[str, Product], other: Mapping[str, Product]) -> bool:
    """Whether both hold the same products; cheap if these are the same objects."""
    return one.keys() == other.keys() and all(_same_product(one[name], other[name]) for name in one)


def _same_product(one: Product, other: Product) -> bool:
    if one is other:
        return True
    if (one.right is None) != (other.right is None) or not torch.equal(one.left, other.left):
        return False
    return one.right is None or other.right is None or torch.equal(one.right, other.right)


def as_tensor(values: NDArray[Any]) -> Tensor:
    """Values of NumPy as a tensor; those in bfloat16, which PyTorch does not take from NumPy, in float32."""
    known = values.astype(np.float32) if values.dtype.name == "bfloat16" else values
    return torch.from_numpy(np.ascontiguousarray(known))


def merged_to_tensors(merged: Mapping[str, Product]) -> dict[str, Tensor]:
    """The merged weights as named tensors, for the wire."""
    tensors = {}
    for name, product in merged.items():
        tensors[name + _LEFT] = product.left
        if product.right is not None:
            tensors[name + _RIGHT] = product.right
    return tensors


def merged_from_tensors(tensors: Mapping[str, Tensor]) -> Merged:
    """The merged weights that `to_tensors` wrote.

    Raises:
        ValueError: a tensor has an unknown name or is not a float32 matrix, a right factor has no left one, or two
            factors do not fit.
    """
    for name, tensor in tensors.items():
        stem = name.removesuffix(_RIGHT)
        if tensor.dtype != torch.float32 or tensor.dim() != 2:
            raise ValueError(f"{name}: must be a float32 matrix")
        if not name.endswith((_LEFT, _RIGHT)) or (name.endswith(_RIGHT) and stem + _LEFT not in tensors):
            raise ValueError(f"{name}: is not part of a merged weight")
        if name.endswith(_RIGHT) and tensors[stem + _LEFT].shape[1] != tensor.shape[0]:
            raise ValueError(f"{name}: has {tensor.shape[0]} rows, its left factor {tensors[stem + _LEFT].shape[1]}")
    stems = [name.removesuffix(_LEFT) for name in tensors if name.endswith(_LEFT)]
    return {stem: Product(tensors[stem + _LEFT], tensors.get(stem + _RIGHT)) for stem in stems}


def as_ordinary(tensors: Mapping[str, Tensor]) -> Adapter:
    """An adapter's tensors by peft's names, with the product of R and a factor in its place; any other as it is.

    It is B R, or R A where R has fewer rows than columns, so that the rank is the smaller of the two.
    """
    result = dict(tensors)
    for name in tensors:
        if name.endswith(INNER_SUFFIX):
            stem = name.removesuffix(INNER_SUFFIX)
            inner = result.pop(name)
            rows, columns = inner.shape
            outer, first = result.pop(stem + OUTER_SUFFIX)[:, :rows], result[stem + A_SUFFIX][:columns]
            if rows < columns:
                first = (inner.double() @ first.double()).float()
            else:
                outer = (outer.double() @ inner.double()).float()
            result |= {stem + A_SUFFIX: first, stem + B_SUFFIX: outer}
    return result


def as_one_adapter(adapter: Mapping[str, Tensor], merged: Mapping[str, Product]) -> Adapter:
    """One adapter of higher rank that has the same effect on the pretrained base as `adapter` on the merged one.

    All LoRA layers get the same rank, the smallest that holds every sum exactly.
    """
    pairs = factors_of(adapter)
    if not merged and len({left.shape[1] for left, _ in pairs.values()}) <= 1:
        return dict(adapter)
    if merged:
        zeros = {name: _zero(b, a) for name, (b, a) in pairs.items()}
        sums = add_products(zeros | dict(merged), {name: [pair] for name, pair in pairs.items()})
        pairs = {name: product.factors for name, product in sums.items()}
    return non_lora_tensors(adapter) | of_one_rank(pairs)
