"""What each client's upload counts for in a round's sum, and each of its records."""

from __future__ import annotations

from collections.abc import Mapping

from fedpriv.accounting.recipe import client_weight
from fedpriv.config import RunConfig
from fedpriv.training.local_update import UpdateSpec


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
