"""Poisson sampling: every record is included independently, with the probability that is accounted for.

Or every person, of whose records at most so many count. Which these are follows from a key that each draw makes, and
from this person's name and records alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from fedpriv.errors import InputError
from fedpriv.learning.data.persons import some_of
from fedpriv.learning.data.records import Records
from fedpriv.learning.training.clipping import MOST_ROWS
from fedpriv.privacy.mechanisms.sources import RandomSource

# Words of a key that chooses among a person's records.
_KEY_WORDS = 4

MOST_REGISTERED = 2**24
"""The largest N_k: sums have room for 64 times as many records, which a table may have come to hold."""


class PoissonSampler:
    """Draws Poisson batches, and states their sampling probability.

    The probability is q = B / N_k with the *registered* number of records, or persons, which is equal in both
    neighbouring worlds, never with the number of those that are present.

    Args:
        num_registered: N_k >= 1.
        expected_batch_size: B, 0 < B <= N_k.
        source: of randomness, for inclusion.
        choices: source of the keys that choose among a person's records; None takes that of inclusion. With one of its
            own, the coins for inclusion are those that records would get.

    Raises:
        InputError: a value is out of range.
    """

    def __init__(
        self,
        *,
        num_registered: int,
        expected_batch_size: float,
        source: RandomSource,
        choices: RandomSource | None = None,
    ) -> None:
        if num_registered < 1:
            raise InputError(f"num_registered = {num_registered}: a client needs at least one record")
        if num_registered > MOST_REGISTERED:
            raise InputError(f"num_registered = {num_registered}: at most {MOST_REGISTERED}; use several clients")
        if not 0 < expected_batch_size <= num_registered:
            raise InputError(
                f"batch_size = {expected_batch_size}: must lie in 1..{num_registered}, the client's records"
            )
        self.num_registered = num_registered
        self.expected_batch_size = expected_batch_size
        self.sampling_probability = expected_batch_size / num_registered
        self.source = source
        self.choices = choices or source

    @classmethod
    def with_probability(
        cls, probability: float, *, num_registered: int, source: RandomSource, choices: RandomSource | None = None
    ) -> Self:
        """A sampler with exactly this q in (0, 1], whose expected batch size is q N_k.

        Raises:
            InputError: a value is out of range.
        """
        if not 0 < probability <= 1:
            raise InputError(f"sampling_probability = {probability}: must lie in (0, 1]")
        size = probability * num_registered
        sampler = cls(num_registered=num_registered, expected_batch_size=size, source=source, choices=choices)
        sampler.sampling_probability = probability
        return sampler

    def draw(self, num_records: int) -> list[int]:
        """Indices of the included records among `num_records`; their number varies around its mean and may be 0.

        Raises:
            InputError: there are more than any sum may have.
        """
        if num_records > MOST_ROWS:
            raise InputError(f"records = {num_records}: sums are exact up to {MOST_ROWS}")
        included = self.source.bernoulli(num_records, self.sampling_probability)
        return included.nonzero().squeeze(1).tolist()

    def draw_persons(self, records: Records, most: int) -> list[list[int]]:
        """The records that count of each included person, at least one and at most so many, ascending.

        Args:
            records: of persons.
            most: m >= 1.
        """
        included = self.draw(records.num_units)
        return self.some_of_each(records, included, most)

    def some_of_each(self, records: Records, persons: Sequence[int], most: int) -> list[list[int]]:
        """The same of the given persons, by their place in `records.by_person`."""
        key = self.choices.words(_KEY_WORDS).tobytes()  # drawn whoever is included, so that no record decides it
        return [some_of(*records.by_person[person], most, key) for person in persons]
