"""The facts of the aggregation rules, by which a configuration is checked without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fedpriv.exports import Registry

Trains = Literal["lora", "lora-b", "lora-r", "head", "weights"]


@dataclass(frozen=True, kw_only=True)
class RuleFacts:
    """The facts of an aggregation rule that a configuration has to know.

    Attributes:
        trains: `lora`: A, B and a head; `lora-b`: B and a head; `lora-r`: a matrix R between frozen B and A, and a
            head; `weights`: full weight matrices and a head.
        turns: the tensors that each round trains, in turn, where it trains more than the head; the others are
            broadcast and uploaded as they are.
        orthonormal: whether the rows of A are orthonormal at the start.
        rebases: whether the model gets another basis after the step of the server's optimizer.
        linear: whether the new model is the weighted sum of the uploads, as the `aggregate` view requires.
        merges: whether the frozen weights are added to, so that the global model is more than one adapter.
        restarts: whether clients start each round with a fresh adapter; their ranks may then differ.
        ternary: whether tensors are ternary differences to the start, in training and on the wire in both directions.
        selective: whether a client may withhold its upload.
    """

    trains: Trains = "lora"
    turns: tuple[str, ...] = ("all",)
    orthonormal: bool = False
    rebases: bool = False
    linear: bool = False
    merges: bool = False
    restarts: bool = False
    ternary: bool = False
    selective: bool = False

    @property
    def is_partial(self) -> bool:
        """Whether some of its rounds leave tensors as they are."""
        return self.turns != ("all",)

    @property
    def is_plain(self) -> bool:
        """Whether it makes the weighted sum of whatever tensors are trained, and asks nothing of them."""
        asks = self.is_partial or self.has_one_factor or self.orthonormal or self.rebases
        return self.linear and not asks

    @property
    def has_one_factor(self) -> bool:
        """Whether its uploads hold one factor of the map alone; the others are frozen in every model."""
        return self.trains in ("lora-b", "lora-r")

    @property
    def keeps_frozen_weights(self) -> bool:
        """Whether it neither trains, decomposes nor adds to the frozen weights, which may then be in 4 bits."""
        return self.trains in ("lora", "lora-b") and not self.merges

    @property
    def sums_lora(self) -> bool:
        """Whether the new model is a weighted sum of LoRA's factors."""
        return self.linear and self.trains != "weights"


class _RuleFacts(Registry[RuleFacts]):
    def names_of(self, fact: Callable[[RuleFacts], bool]) -> str:
        """The names of the rules of which the fact holds, for messages."""
        return ", ".join(name for name, rule in self.items() if fact(rule))


RULE_FACTS = _RuleFacts(
    "aggregation",
    {
        "dp-lora": RuleFacts(linear=True),
        "fedavg": RuleFacts(trains="weights", linear=True),
        "t-fedavg": RuleFacts(trains="weights", ternary=True),
        "cmfl": RuleFacts(trains="weights", selective=True),
        "ffa-lora": RuleFacts(trains="lora-b", linear=True),
        "rolora": RuleFacts(turns=("lora-b", "lora-a"), linear=True),
        "fedsvd": RuleFacts(turns=("lora-b",), orthonormal=True, rebases=True, linear=True),
        "fed-sb": RuleFacts(trains="lora-r", linear=True),
        "fedex-lora": RuleFacts(merges=True),
        "flora": RuleFacts(merges=True, restarts=True),
    },
)
"""{`aggregation` of a configuration: the facts of that rule}."""
