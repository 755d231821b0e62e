"""One noised sum of clipped gradients, for training or scoring a model outside a federation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedpriv.accounting.events import Event
from fedpriv.mechanisms.registry import MECHANISMS
from fedpriv.mechanisms.request import NoiseRequest
from fedpriv.mechanisms.sources import RandomSource
from fedpriv.training.clipping import add_clipped


def noised_sum(
    rows: Iterable[Tensor],
    like: Tensor,
    *,
    clip_norm: float,
    noise_multiplier: float,
    sampling_probability: float,
    source: RandomSource,
) -> tuple[Tensor, Event]:
    """The sum of per-sample gradients, each clipped to C as a whole, with N(0, (z C)^2) added, float32
    [values]; and its event.

    Guarantee: if every record was included independently with the given probability, the event bounds the privacy loss
    of the sum under add-or-remove adjacency.

    Args:
        rows: pieces [records, values] of the included records' gradients; without any, the result is noise alone.
        like: [values], a tensor on the device for the sum.
        clip_norm: C, finite, > 0, gradient units.
        noise_multiplier: z >= 0; 0 adds nothing, and the event costs infinity.
        sampling_probability: q in [0, 1], from the sampler that drew the records.
        source: of randomness, for the noise.

    Raises:
        ValueError: a value is out of range.

    Source: Abadi et al. 2016, Algorithm 1.
    """
    total = like.new_zeros((1, len(like)), dtype=torch.float64)
    whole_row = (slice(0, len(like)),)
    for piece in rows:
        owners = torch.zeros(len(piece), dtype=torch.int64, device=total.device)
        add_clipped(total, piece, owners, clip_norm, whole_row)
    request = NoiseRequest(
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        dimension=len(like),
        sampling_probabilities=(sampling_probability,),
    )
    noised, (event,) = MECHANISMS["gaussian"].add_noise(total, request, [source])
    return noised[0].float(), event
