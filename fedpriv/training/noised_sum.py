"""One noised sum of clipped gradients, for who trains or weighs a model outside a federation."""

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
    """The sum of per-sample gradients, each clipped to C as a whole, with N(0, (z C)^2) added, [values]; and its event.

    Guarantee: where every record was included with the probability, adding or removing one record costs the event.

    Args:
        rows: [records, values] pieces of the included records' gradients; none at all gives noise alone.
        like: [values], on whose device the sum is.
        clip_norm: C, finite, > 0, gradient units.
        noise_multiplier: z >= 0; 0 adds nothing, and the event costs infinity.
        sampling_probability: q in [0, 1], from the sampler that drew the records.
        source: of the noise.

    Raises:
        ValueError: a value is out of range.

    Source: Abadi et al. 2016, Algorithm 1.
    """
    total = like.new_zeros((1, len(like)), dtype=torch.float32)
    everything = (slice(0, len(like)),)
    for piece in rows:
        owners = torch.zeros(len(piece), dtype=torch.int64, device=total.device)
        add_clipped(total, piece, owners, clip_norm, everything)
    request = NoiseRequest(
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        dimension=len(like),
        sampling_probabilities=(sampling_probability,),
    )
    noised, (event,) = MECHANISMS["gaussian"].add_noise(total, request, [source])
    return noised[0], event
