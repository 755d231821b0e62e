"""The average of the products B A, exactly: FedEx-LoRA by a residual, FLoRA by adapters that start afresh each round.

The average of products is not the product of averages. What of it an adapter of rank r cannot hold is added to the
frozen weights, which all clients learn. Under differential privacy the products contain the noise of both factors, and
their cross term is averaged as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

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
