"""The terms of a sum against those of the node's operator; it loads nothing that trains.

A Flower app's process, which is started for each message, checks them as the vault does.
"""

from __future__ import annotations

from fedpriv.accounting.discrete_gaussian import MIN_STDDEV
from fedpriv.mechanisms.discrete_sampler import MAX_SIGMA
from fedpriv.secure_aggregation import Terms, smallest_threshold
from fedpriv.secure_aggregation.grid import DEVIATIONS, RANGE_BITS
from fedpriv.vault._charging import NodePolicy, RefusedError


def check_policy(terms: Terms, client: int, policy: NodePolicy) -> None:
    """Refuse terms under which less noise, or fewer honest peers, would count than the node's operator agreed to.

    Raises:
        RefusedError: one line with the name, the value and the limit.
    """
    if client not in terms.by_client:
        raise RefusedError(f"terms: client {client}, this node, is not among the participants")
    if terms.colluding < policy.colluding_clients:
        raise RefusedError(
            f"terms: colluding = {terms.colluding}: this node counts on {policy.colluding_clients} that may collude"
        )
    least = max(policy.min_survivors, smallest_threshold(len(terms.participants), terms.colluding))
    if terms.threshold < least:
        raise RefusedError(
            f"terms: threshold = {terms.threshold}: this node needs at least {least} survivors among "
            f"{len(terms.participants)} participants, of whom {terms.colluding} may collude"
        )


def check_grid(terms: Terms, client: int, bound: float) -> None:
    """Refuse a grid on which the node's noise would be too coarse, or its part no integers that add up.

    On such a grid a vector would be no sum of integers, and whether there is one at all could depend on the records.
    """
    stddev = terms.noise_stddev(client)
    steps = terms.gamma * terms.participant(client).scale * bound + DEVIATIONS * stddev
    if stddev and not MIN_STDDEV <= stddev <= MAX_SIGMA:
        raise RefusedError(
            f"terms: grid_exponent = {terms.grid_exponent}: gives this node's noise {stddev:g} steps, must be "
            f"{MIN_STDDEV:g} to {MAX_SIGMA:g}"
        )
    if steps >= 2.0 ** RANGE_BITS[terms.modulus_bits]:
        raise RefusedError(
            f"terms: grid_exponent = {terms.grid_exponent}: this node's part may have {steps:g} steps, which "
            f"modulus_bits = {terms.modulus_bits} does not hold"
        )
