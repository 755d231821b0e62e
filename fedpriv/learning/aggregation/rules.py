"""The aggregation rules: how uploads become the next global model.

To add a rule, write a file with its function, a line in `RULES`, and its facts in `fedpriv.config.rules`; or, at run
time, `RULES[name] = Rule(...)` in each process of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fedpriv.config.rules import RULE_FACTS, RuleFacts
from fedpriv.errors import InputError
from fedpriv.exports import Registry, imported

if TYPE_CHECKING:
    from fedpriv.learning.adapters import Adapter
    from fedpriv.learning.aggregation._fedavg import GlobalModel

    Aggregate = Callable[[GlobalModel, Sequence[Adapter], Sequence[float]], GlobalModel]
    Finish = Callable[[GlobalModel], GlobalModel]


@dataclass(frozen=True, kw_only=True)
class Rule(RuleFacts):
    """An aggregation rule: its facts and its functions.

    Attributes:
        aggregate: the next global model from that before the round, from the valid uploads, at least one, with equal
            names and shapes (ranks may differ where clients restart), and from their weights, which sum to one.
        finish: what is made of the model after the step of the server's optimizer, in another basis; its function stays
            the same. None makes nothing.
    """

    aggregate: Aggregate
    finish: Finish | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rebases", self.finish is not None)


class _Rules(Registry[Rule]):
    """Rules by name. One that calls itself linear and is not is refused: the `aggregate` view would not hold."""

    def __setitem__(self, name: str, rule: Rule) -> None:
        if rule.linear and not _is_linear(rule):
            raise InputError(f"aggregation = {name!r}: is not the weighted sum of the uploads; use linear=False")
        super().__setitem__(name, rule)
        RULE_FACTS[name] = rule

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del RULE_FACTS[name]


def _is_linear(rule: Rule) -> bool:
    """Whether the rule makes the weighted sum of made-up uploads, whatever the model before was."""
    import torch  # deferred: a rule that is added at run time has loaded it

    from fedpriv.learning.aggregation._fedavg import GlobalModel, weighted_average

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
        return imported(f"fedpriv.learning.aggregation.{place}")(*arguments)

    return function


def _known(name: str, aggregate: str, finish: str | None = None) -> Rule:
    """A rule of which the configuration has the facts; its functions are imported when they are first called."""
    return Rule(**asdict(RULE_FACTS[name]), aggregate=_late(aggregate), finish=_late(finish) if finish else None)


_AVERAGE = "_fedavg:average"

RULES = _Rules(
    "aggregation",
    {
        "dp-lora": _known("dp-lora", _AVERAGE),
        "fedavg": _known("fedavg", _AVERAGE),
        "t-fedavg": _known("t-fedavg", "_fedavg:t_fedavg"),
        "cmfl": _known("cmfl", "_cmfl:cmfl"),
        "ffa-lora": _known("ffa-lora", _AVERAGE),
        "rolora": _known("rolora", _AVERAGE),
        "fedsvd": _known("fedsvd", _AVERAGE, "_products:rebased"),
        "fed-sb": _known("fed-sb", _AVERAGE),
        "fedex-lora": _known("fedex-lora", "_products:fedex_lora"),
        "flora": _known("flora", "_products:flora"),
    },
)
"""{`aggregation` of a configuration: how that rule makes the next global model}."""
