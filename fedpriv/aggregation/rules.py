"""The registry of aggregation rules: what each one trains, and how uploads become the next global model.

To add a rule, write a file with its function and a line in `RULES`; or, at run time, `RULES[name] = Rule(...)` in each
process of the run. A rule's facts are known without torch, so a configuration is checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedpriv.errors import InputError
from fedpriv.exports import Registry, imported

if TYPE_CHECKING:
    from fedpriv.adapters import Adapter
    from fedpriv.adapters.lora import Trains
    from fedpriv.aggregation._fedavg import GlobalModel

    Aggregate = Callable[[GlobalModel, Sequence[Adapter], Sequence[float]], GlobalModel]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An aggregation rule.

    Attributes:
        aggregate: the next global model from that before the round, from the valid uploads, at least one, with equal
            names and shapes (ranks may differ where clients restart), and from their weights, which sum to one.
        trains: `lora`: A, B and a head; `lora-b`: B and a head; `lora-r`: a matrix R between frozen B and A, and a
            head; `weights`: full weight matrices and a head.
        turns: the tensors that each round trains, in turn, where it trains more than the head; the others are
            broadcast and uploaded as they are.
        orthonormal: whether the rows of A are orthonormal at the start.
        finish: what is made of the model after the step of the server's optimizer, in another basis; its function stays
            the same.
        linear: whether the new model is the weighted sum of the uploads, as the `aggregate` view requires.
        merges: whether the frozen weights are added to, so that the global model is more than one adapter.
        restarts: whether clients start each round with a fresh adapter; their ranks may then differ.
        ternary: whether tensors are ternary differences to the start, in training and on the wire in both directions.
        selective: whether a client may withhold its upload.
    """

    aggregate: Aggregate
    trains: Trains = "lora"
    turns: tuple[str, ...] = ("all",)
    orthonormal: bool = False
    finish: Callable[[GlobalModel], GlobalModel] | None = None
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
        asks = self.is_partial or self.has_one_factor or self.orthonormal or self.finish is not None
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


class _Rules(Registry[Rule]):
    """Rules by name. One that calls itself linear and is not is refused: the `aggregate` view would not hold."""

    def __setitem__(self, name: str, rule: Rule) -> None:
        if rule.linear and not _is_linear(rule):
            raise InputError(f"aggregation = {name!r}: is not the weighted sum of the uploads; use linear=False")
        super().__setitem__(name, rule)

    def names_of(self, fact: Callable[[Rule], bool]) -> str:
        """The names of the rules of which the fact holds, for messages."""
        return ", ".join(name for name, rule in self.items() if fact(rule))


def _is_linear(rule: Rule) -> bool:
    """Whether the rule makes the weighted sum of made-up uploads, whatever the model before was."""
    import torch  # deferred: a rule that is added at run time has loaded it

    from fedpriv.aggregation._fedavg import GlobalModel, weighted_average

    generator = torch.Generator().manual_seed(0)
    shapes = {"layer.lora_A.weight": (2, 5), "layer.lora_B.weight": (4, 2), "head.weight": (3, 4), "head.bias": (3,)}
    before, *uploads = ({n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(5))
    weights = [0.1, 0.4, 0.3, 0.2]
    found = rule.aggregate(GlobalModel(initial=before, adapter=before), uploads, weights)
    expected = weighted_average(uploads, weights)
    return not found.merged and all(
        name in found.adapter and torch.allclose(found.adapter[name], tensor, atol=1e-5)
        for name, tensor in expected.items()
    )


def _late(place: str) -> Callable[..., Any]:
    """The function at `file:name` of this room, which is imported when it is first called."""

    def function(*arguments: Any) -> Any:
        return imported(f"fedpriv.aggregation.{place}")(*arguments)

    return function


_AVERAGE = _late("_fedavg:average")

RULES = _Rules(
    "aggregation",
    {
        "dp-lora": Rule(aggregate=_AVERAGE, linear=True),
        "fedavg": Rule(aggregate=_AVERAGE, trains="weights", linear=True),
        "t-fedavg": Rule(aggregate=_late("_t_fedavg:t_fedavg"), trains="weights", ternary=True),
        "cmfl": Rule(aggregate=_late("_cmfl:cmfl"), trains="weights", selective=True),
        "ffa-lora": Rule(aggregate=_AVERAGE, trains="lora-b", linear=True),
        "rolora": Rule(aggregate=_AVERAGE, turns=("lora-b", "lora-a"), linear=True),
        "fedsvd": Rule(
            aggregate=_AVERAGE, turns=("lora-b",), orthonormal=True, finish=_late("_fedsvd:rebased"), linear=True
        ),
        "fed-sb": Rule(aggregate=_AVERAGE, trains="lora-r", linear=True),
        "fedex-lora": Rule(aggregate=_late("_fedex_lora:fedex_lora"), merges=True),
        "flora": Rule(aggregate=_late("_flora:flora"), merges=True, restarts=True),
    },
)
"""{`aggregation` of a configuration: how that rule makes the next global model}."""
