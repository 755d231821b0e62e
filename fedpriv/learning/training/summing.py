"""Noised sums: of one set's clipped gradients, and of a federation's clients under secure aggregation.

Public numbers give a federation's grid and the weight of each client's upload, and of each of its records, in the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from fedpriv.config import RunConfig
from fedpriv.learning.adapters import Adapter
from fedpriv.learning.training._coordinates import Coordinates, scaled, trained_weights
from fedpriv.learning.training.clipping import add_clipped, clipped_sums
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.recipe import client_weight
from fedpriv.privacy.mechanisms.discrete_gaussian import SumGrid, largest_number_included, sum_grid
from fedpriv.privacy.mechanisms.registry import MECHANISMS, NoiseRequest
from fedpriv.privacy.mechanisms.sources import RandomSource


def grid_of(config: RunConfig, spec: UpdateSpec, sizes: Mapping[int, int]) -> SumGrid | None:
    """The grid of a round's sum; None without secure aggregation.

    It is that of all clients of the run, whichever of them take part in a round.

    Args:
        config: of the run.
        spec: of the round.
        sizes: {client: registered N_k} of all clients of the run.
    """
    return _grid_of(config, spec, tuple(sorted(sizes.items()))) if config.secure_aggregation else None


@lru_cache(maxsize=64)
def _grid_of(config: RunConfig, spec: UpdateSpec, sizes: tuple[tuple[int, int], ...]) -> SumGrid:
    return sum_grid(
        clip_norm=spec.clip_norm,
        noise_multiplier=spec.noise_multiplier,
        weights=record_weights(config, spec, dict(sizes)),
        num_included={client: num_included(spec, size) for client, size in sizes},
    )


def num_included(spec: UpdateSpec, num_registered: int) -> float:
    """n_k: how many vectors of norm C a client's sum has at most; one under `batch`, and with noise on the upload."""
    if spec.noise_on == "upload" or spec.clipping == "batch":
        return 1.0
    return largest_number_included(num_registered, spec.probability(num_registered))


def mean_of_sum(
    config: RunConfig, spec: UpdateSpec, sizes: Mapping[int, int], total: Tensor, survivors: Collection[int]
) -> Tensor:
    """The weighted average of what uploads are made of, sum_k rho_k s_k / B_k, float64 [values]; with noise.

    With v_k in proportion to rho_k / B_k and c_k = v_k / max v, the total is gamma sum_k c_k s_k.

    Args:
        config: of the run.
        spec: of the round.
        sizes: {client: registered N_k} of all clients of the run.
        total: int64 [values], the sum of the survivors' integers.
        survivors: the clients in it, at least one.
    """
    grid = grid_of(config, spec, sizes)
    if grid is None:
        raise ValueError("secure_aggregation = false: there is no sum")
    masses = client_masses(config, sizes)
    unit = max(record_weights(config, spec, sizes).values()) / math.fsum(masses[client] for client in survivors)
    return total.double().mul_(unit / grid.gamma)


def mean_upload(adapter: Adapter, spec: UpdateSpec, mean: Tensor) -> Adapter:
    """The weighted average of the uploads of an update from its step's, or its updates', average.

    Equal to rounding errors to the average of the adapters that the clients would have uploaded one by one.

    Args:
        adapter: that the clients received.
        spec: of the update; one step of sgd, or noise on the upload.
        mean: float64 [values], the weighted average of the clients' noised gradients or updates.
    """
    coordinates = Coordinates.of(spec, {name: tensor.shape for name, tensor in adapter.items()})
    start, centre = coordinates.start(adapter)
    if spec.noise_on == "upload":
        moved = (start + scaled(mean, coordinates.scales)).float()
    else:
        weights = trained_weights(spec, start.unsqueeze(0), adapter, coordinates.layout)
        weights.step(coordinates.step_of(mean.float()).unsqueeze(0))
        moved = weights.values()[0]
    return coordinates.moved(adapter, moved, centre)


def client_masses(config: RunConfig, sizes: Mapping[int, int]) -> dict[int, float]:
    """{client: w_k N_k}, to which its weight rho_k in a round's sum is in proportion.

    Args:
        config: of the run; `client_weights` decides w_k.
        sizes: {client: registered N_k}, never what a reply claims.
    """
    return {client: client_weight(size, equal=config.weighs_records) * size for client, size in sizes.items()}


def record_weights(config: RunConfig, spec: UpdateSpec, sizes: Mapping[int, int]) -> dict[int, float]:
    """{client: rho_k / B_k}, up to a common factor: what one of its clipped gradients counts for in a round's sum.

    Its noise of scale z C counts for the same. B_k is the expected batch size; rho_k alone where the clipped vector and
    its noise are not divided by it: under the clipping rule `batch`, and with noise on the upload.

    Args:
        config: of the run.
        spec: of the round.
        sizes: {client: registered N_k}.
    """
    masses = client_masses(config, sizes)
    if spec.clipping == "batch" or spec.noise_on == "upload":
        return masses
    return {client: mass / (spec.probability(sizes[client]) * sizes[client]) for client, mass in masses.items()}


def noised_sum(
    rows: Iterable[Tensor],
    like: Tensor,
    *,
    clip_norm: float,
    noise_multiplier: float,
    sampling_probability: float,
    source: RandomSource,
    charge: Callable[[Event], object] | None = None,
) -> tuple[Tensor, Event]:
    """The sum of per-sample gradients, each clipped to C as a whole, with N(0, (z C)^2) added, float32
    [values]; and its event.

    Guarantee: if every record was included independently with the given probability, the event bounds the privacy loss
    of the sum under add-or-remove adjacency.

    Args:
        rows: pieces [records, values] of the included records' gradients, of 2^30 records at most; without any, the
            result is noise alone.
        like: [values], a tensor on the device for the sum.
        clip_norm: C, finite, > 0, gradient units.
        noise_multiplier: z >= 0; 0 adds nothing, and the event costs infinity.
        sampling_probability: q in [0, 1], from the sampler that drew the records.
        source: of randomness, for the noise.
        charge: is given the event before the first piece is computed; what it raises ends the call.

    Raises:
        ValueError: a value is out of range.

    Source: Abadi et al. 2016, Algorithm 1.
    """
    request = NoiseRequest(
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        dimension=len(like),
        sampling_probabilities=(sampling_probability,),
    )
    mechanism = MECHANISMS["gaussian"]
    if charge is not None:
        charge(*mechanism.planned_events(request))
    total = like.new_zeros((1, len(like)), dtype=torch.int64)
    whole_row = (slice(0, len(like)),)
    for piece in rows:
        owners = torch.zeros(len(piece), dtype=torch.int64, device=total.device)
        add_clipped(total, piece, owners, clip_norm, whole_row)
    noised, (event,) = mechanism.add_noise(clipped_sums(total, clip_norm), request, [source])
    return noised[0].float(), event
