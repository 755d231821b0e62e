"""The utility of a deduplicated variant, as its manifest has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def utilities(outcome: Mapping[str, Any]) -> tuple[float, float] | None:
    """The mean utility before and after, on the records that validated the variant; None if private."""
    before, after = outcome.get("utility_before"), outcome.get("utility_after")
    return None if before is None or after is None else (before, after)


def is_accuracy(outcome: Mapping[str, Any]) -> bool:
    """Whether its utility is accuracy; else it is minus the mean logarithm of the perplexity of responses."""
    return bool(outcome.get("utility", "accuracy") == "accuracy")


def accuracy_after(outcome: Mapping[str, Any]) -> float | None:
    """The accuracy of the variant as it is stored; None if its records are private, or it has a perplexity."""
    found = utilities(outcome)
    return found[1] if found and is_accuracy(outcome) else None


def perplexity_after(outcome: Mapping[str, Any]) -> float | None:
    """The perplexity of responses of the variant as it is stored; None if it has an accuracy, or if it is unknown."""
    found = utilities(outcome)
    return perplexity(found[1]) if found and not is_accuracy(outcome) else None


def perplexity(utility: float) -> float:
    """The perplexity of a mean log likelihood; infinite where that is none."""
    return math.exp(-utility) if utility > -700 else math.inf
