"""Poisson sampling: every record is included independently, with the probability that is accounted for."""

from __future__ import annotations

from typing import Self

from fedpriv.errors import InputError
from fedpriv.mechanisms.sources import RandomSource


class PoissonSampler:
    """Draws Poisson batches, and states their sampling probability.

    The probability is q = B / N_k with the *registered* number of records, which is equal in both neighbouring worlds,
    never with the number of records that are present.

    Args:
        num_registered: N_k >= 1.
        expected_batch_size: B, 0 < B <= N_k.
        source: of randomness, for inclusion.

    Raises:
        InputError: a value is out of range.
    """

    def __init__(self, *, num_registered: int, expected_batch_size: float, source: RandomSource) -> None:
        if num_registered < 1:
            raise InputError(f"num_registered = {num_registered}: a client needs at least one record")
        if not 0 < expected_batch_size <= num_registered:
            raise InputError(
                f"batch_size = {expected_batch_size}: must lie in 1..{num_registered}, the client's records"
            )
        self.num_registered = num_registered
        self.expected_batch_size = expected_batch_size
        self.sampling_probability = expected_batch_size / num_registered
        self.source = source

    @classmethod
    def with_probability(cls, probability: float, *, num_registered: int, source: RandomSource) -> Self:
        """A sampler with exactly this q in (0, 1], whose expected batch size is q N_k.

        Raises:
            InputError: a value is out of range.
        """
        if not 0 < probability <= 1:
            raise InputError(f"sampling_probability = {probability}: must lie in (0, 1]")
        sampler = cls(num_registered=num_registered, expected_batch_size=probability * num_registered, source=source)
        sampler.sampling_probability = probability
        return sampler

    def draw(self, num_records: int) -> list[int]:
        """Indices of the included records among `num_records`; their number varies around its mean and may be 0."""
        included = self.source.bernoulli(num_records, self.sampling_probability)
        return included.nonzero().squeeze(1).tolist()
