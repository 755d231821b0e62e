"""Poisson sampling: every record is included independently, with the probability that is accounted for."""

from __future__ import annotations

from fedpriv.errors import InputError
from fedpriv.mechanisms.sources import RandomSource


class PoissonSampler:
    """Draws Poisson batches, and states their sampling probability.

    The probability is q = B / N_k with the *registered* number of records, which is equal in both neighbouring worlds,
    never with the number of records that are present.

    Args:
        num_registered: N_k >= 1.
        expected_batch_size: B, 1 <= B <= N_k.
        source: of randomness, for inclusion.

    Raises:
        InputError: B > N_k, or either is below 1.
    """

    def __init__(self, *, num_registered: int, expected_batch_size: int, source: RandomSource) -> None:
        if num_registered < 1:
            raise InputError(f"num_registered = {num_registered}: a client needs at least one record")
        if not 1 <= expected_batch_size <= num_registered:
            raise InputError(
                f"batch_size = {expected_batch_size}: must lie in 1..{num_registered}, the client's records"
            )
        self.num_registered = num_registered
        self.expected_batch_size = expected_batch_size
        self.source = source

    @property
    def sampling_probability(self) -> float:
        """q = B / N_k."""
        return self.expected_batch_size / self.num_registered

    def draw(self, num_records: int) -> list[int]:
        """Indices of the included records among `num_records`; their number varies around its mean and may be 0."""
        included = self.source.bernoulli(num_records, self.sampling_probability)
        return included.nonzero().squeeze(1).tolist()
