"""Exact averaging: the global model gets the weighted average of the products B A, not the product of averages.

The part of that average that an adapter of rank r cannot hold is added to the frozen weights, which all clients learn.
Under differential privacy the products contain the noise of both factors, and their cross term is averaged as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedpriv.learning.adapters import Adapter, add_products, factors_of
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
