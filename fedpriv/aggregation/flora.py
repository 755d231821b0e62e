"""Stacking instead of averaging: clients of different rank, and a global model that is their exact sum.

Under differential privacy the products contain the noise of both factors, and their cross term is averaged as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedpriv.adapters.arithmetic import Adapter
from fedpriv.adapters.merged import A_SUFFIX, B_SUFFIX, add, factors_of, rest_of
from fedpriv.aggregation.fedavg import weighted_average
from fedpriv.aggregation.global_model import GlobalModel


def flora(model: GlobalModel, uploads: Sequence[Adapter], weights: Sequence[float]) -> GlobalModel:
    """The products sum_k w_k B_k A_k, of whatever ranks, added to the frozen weights; heads averaged.

    Clients begin each round with a fresh adapter whose product is zero, from `fresh_start`.

    Args:
        model: before the round.
        uploads: of equal names; ranks may differ.
        weights: summing to one.

    Raises:
        ValueError: as `weighted_average`.

    Source: Wang et al. 2024 (FLoRA), Eqs. 5 and 6.
    """
    heads = weighted_average([rest_of(upload) for upload in uploads], weights)
    products = [factors_of(upload) for upload in uploads]
    terms = {
        name: [(weight * own[name][0], own[name][1]) for own, weight in zip(products, weights, strict=True)]
        for name in products[0]
    }
    return replace(model, adapter={**model.adapter, **heads}, merged=add(model.merged, terms))


def fresh_start(model: GlobalModel, *, rank: int, seed: int, round_: int) -> Adapter:
    """The adapter that a client of this rank begins a round with: A drawn anew as peft draws it, B zero, and the head.

    Args:
        model: before the round.
        rank: r_k >= 1.
        seed: of the run; nothing private depends on it.
        round_: from 1.
    """
    adapter = rest_of(model.adapter)
    generator = np.random.default_rng((seed, round_))
    for name, (left, right) in factors_of(model.initial).items():
        # torch's kaiming_uniform_ with a = sqrt(5), which peft calls: uniform within 1 / sqrt(in).
        bound = 1 / math.sqrt(right.shape[1])
        rows = generator.uniform(-bound, bound, size=(rank, right.shape[1]))
        adapter[name + A_SUFFIX] = torch.from_numpy(rows).float()
        adapter[name + B_SUFFIX] = torch.zeros(left.shape[0], rank)
    return {name: adapter[name] for name in model.adapter}
