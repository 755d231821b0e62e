"""A head's steps in centred coordinates: gradients are shorter without the features' mean, so noise weighs less.

The server knows the mean of all records' features from the released class sums, and hands it to the clients as the mean
of the head's rows (`fedpriv.aggregation.head_start`): no prediction depends on that one, since it moves the scores of
all classes alike. A client takes it off every feature, with a bias that makes up for it, and takes it back at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedpriv.adapters.arithmetic import Adapter
from fedpriv.aggregation.head_start import head_of


def centre_of(adapter: Adapter) -> Tensor:
    """[inputs] The mean of the head's rows; zeros for a head without a bias, which could not make up for it.

    Raises:
        ValueError: the head is not a single linear layer.
    """
    weight, bias = head_of(adapter)
    mean = adapter[weight].double().mean(dim=0).float()
    return mean if bias is not None else torch.zeros_like(mean)


def shifted(adapter: Adapter, by: Tensor) -> Adapter:
    """The adapter whose head scores features less `by` as the given one scores the features themselves.

    Args:
        adapter: with a head of one linear layer.
        by: [inputs].
    """
    weight, bias = head_of(adapter)
    if bias is None:
        return adapter
    scores = adapter[weight].double() @ by.double()
    return {**adapter, bias: (adapter[bias].double() + scores).float()}
