"""A federation's sum under secure aggregation: its grid, which public numbers give, and what the server makes of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import lru_cache

from torch import Tensor

from fedpriv.adapters.arithmetic import Adapter
from fedpriv.config import RunConfig
from fedpriv.secure_aggregation.grid import SumGrid, largest_number_included, sum_grid
from fedpriv.training.client_weights import client_masses, record_weights
from fedpriv.training.coordinates import Coordinates, scaled
from fedpriv.training.local_update import UpdateSpec
from fedpriv.training.weights import trained_weights


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
