"""Poisson sampling: every record is included independently, with the probability that is accounted."""

from __future__ import annotations

from fedpriv.errors import InputError
from fedpriv.mechanisms.sources import RandomSource


class PoissonSampler:
    """Draws batches and knows the probability with which it draws them.

    The probability is q = B / N_k of the *registered* number of records, equal in both neighbouring worlds,
    never of the number of records that happen to be there.

    Args:
        num_registered: N_k >= 1.
        expected_batch_size: B, 1 <= B <= N_k.
        source: where inclusion comes from.

    Raises:
        InputError: B > N_k, or one is below 1.
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
        """Indices of the included ones among `num_records` records; often another number than B, at times none."""
        included = self.source.bernoulli(num_records, self.sampling_probability)
        return included.nonzero().squeeze(1).tolist()
