"""What became of each variant, and what its manifest keeps of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result for one variant.

    Attributes:
        name: of the variant.
        bases: whose blocks it may hold; empty if it stays as it was.
        untouched: why it stays as it was; None if it has bases.
        num_blocks: in the variant.
        num_replaced: blocks that were replaced.
        num_validations: counted by the search.
        correct_before, correct_after: out of `num_records` validation records; None if these are private.
        epsilon_before, epsilon_after, delta: against a reader of this variant alone; `epsilon_after` includes the
            cost of private validation.
        epsilons: {method: epsilon} after deduplication, the largest over data sets.
    """

    name: str
    bases: tuple[str, ...]
    untouched: str | None
    num_blocks: int
    num_replaced: int
    num_validations: int
    correct_before: int | None
    correct_after: int | None
    num_records: int
    epsilon_before: float
    epsilon_after: float
    delta: float
    epsilons: Mapping[str, float]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Outcome:
        """The outcome that a manifest keeps."""
        return cls(**{**fields, "bases": tuple(fields["bases"])})

    def as_records(self, **provenance: Any) -> dict[str, Any]:
        """What a manifest keeps: the arguments `privacy` and `provenance` of `Store.add`.

        Args:
            provenance: further plain values.
        """
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {
            "privacy": {"epsilon": self.epsilon_after, "delta": self.delta, "epsilons": dict(self.epsilons)},
            "provenance": {"bases": list(self.bases), "outcome": plain, **provenance},
        }
