"""Rules on the products B A: FedEx-LoRA and FLoRA average them exactly, FedSVD writes each in another basis.

The average of products is not the product of averages. What of it an adapter of rank r cannot hold is added to the
frozen weights, which all clients learn. Under differential privacy the products contain the noise of both factors, and
their cross term is averaged as it is.

With FedSVD, clients train B alone. Between rounds the server writes the product in the basis of its singular vectors.
The function stays the same: only what clients train next are other coordinates of it. The rows of the new A span what
those of the old one span, so with A orthonormal from the start the new A is a rotation of the old one.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedpriv.learning.adapters import A_SUFFIX, B_SUFFIX, Adapter, add_products, factors_of, non_lora_tensors
from fedpriv.learning.aggregation._fedavg import GlobalModel, weighted_average


def fedex_lora(model: GlobalModel, uploads: Sequence[Adapter], weights: Sequence[float]) -> GlobalModel:
    """A, B and head averaged, and the residual sum_k w_k B_k A_k - B A added to the frozen weights.

    Source: Singhal et al. 2024 (FedEx-LoRA), Eqs. 8 to 11.
    """
    adapter = weighted_average(uploads, weights)
    if len(uploads) == 1:
        return replace(model, adapter=adapter)
    products = [factors_of(upload) for upload in uploads]
    terms = {
        name: [
            *((weight * own[name][0], own[name][1]) for own, weight in zip(products, weights, strict=True)),
            (-left, right),
        ]
        for name, (left, right) in factors_of(adapter).items()
    }
    return replace(model, adapter=adapter, merged=add_products(model.merged, terms))


def flora(model: GlobalModel, uploads: Sequence[Adapter], weights: Sequence[float]) -> GlobalModel:
    """The products sum_k w_k B_k A_k, of any ranks, added to the frozen weights; the heads are averaged.

    Clients start each round with a fresh adapter whose product is zero, from `fresh_start`.

    Source: Wang et al. 2024 (FLoRA), Eqs. 5 and 6.
    """
    heads = weighted_average([non_lora_tensors(upload) for upload in uploads], weights)
    products = [factors_of(upload) for upload in uploads]
    terms = {
        name: [(weight * own[name][0], own[name][1]) for own, weight in zip(products, weights, strict=True)]
        for name in products[0]
    }
    return replace(model, adapter={**model.adapter, **heads}, merged=add_products(model.merged, terms))


def fresh_start(model: GlobalModel, *, rank: int, seed: int, round_: int) -> Adapter:
    """The adapter with which a client of rank >= 1 starts a round: A drawn afresh as by peft, B zero, and the head."""
    adapter = non_lora_tensors(model.adapter)
    generator = np.random.default_rng((seed, round_))
    for name, (left, right) in factors_of(model.initial).items():
        # What torch's kaiming_uniform_ with a = sqrt(5), which peft calls, amounts to: uniform within 1 / sqrt(in).
        bound = 1 / math.sqrt(right.shape[1])
        rows = generator.uniform(-bound, bound, size=(rank, right.shape[1]))
        adapter[name + A_SUFFIX] = torch.from_numpy(rows).float()
        adapter[name + B_SUFFIX] = torch.zeros(left.shape[0], rank)
    return {name: adapter[name] for name in model.adapter}


def rebased(model: GlobalModel) -> GlobalModel:
    """The same model, each product B A = U S V^T as B = U S and A = V^T, and the moments of B in the same coordinates.

    The rows of A are orthonormal, by falling singular value. Where the product has a lower rank than A, the last rows
    complete the row space of the old A. While B is zero, A stays as it is.

    Args:
        model: with ranks of at most each layer's number of inputs; its optimizer's moments are linear in the uploads.

    Source: Lee et al. 2025, Algorithm 1; that moments follow the basis is ours.
    """
    adapter = dict(model.adapter)
    state = {moment: dict(tensors) for moment, tensors in model.optimizer_state.items()}
    for layer, (b, a) in factors_of(model.adapter).items():
        if not b.any():
            continue
        change, adapter[layer + A_SUFFIX] = _new_basis(b, a)
        for tensors in (adapter, *state.values()):
            if layer + B_SUFFIX in tensors:
                tensors[layer + B_SUFFIX] = (tensors[layer + B_SUFFIX].double() @ change).float()
    return replace(model, adapter=adapter, optimizer_state=state)


def _new_basis(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """The factor of B from the right, float64 [r, r], and the new A, [r, in]."""
    rows, triangle = torch.linalg.qr(a.double().T)
    # The small factor of a QR has the product's singular values, and all r right vectors however few its rows are.
    small = torch.linalg.qr(b.double() @ triangle.T).R
    vectors = torch.linalg.svd(small).Vh
    return triangle.T @ vectors.T, (vectors @ rows.T).float()
