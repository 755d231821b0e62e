"""How uploads become the next global model: the aggregation rules, and the server's step towards what they make.

To add a rule, write a file with its function, a line in `RULES`, and its facts in `fedpriv.config`; or, at run time,
`RULES[name] = Rule(...)` in each process of the run.

With theta the global model, the pseudo-gradient of the server's optimizer is D = average - theta. All of this is
post-processing of the average, so no optimizer here changes what a round costs on any view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fedpriv.config import RULE_FACTS, RuleFacts
from fedpriv.errors import InputError
from fedpriv.exports import Registry, imported

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.learning.adapters import Adapter
    from fedpriv.learning.aggregation._fedavg import GlobalModel

    Aggregate = Callable[[GlobalModel, Sequence[Adapter], Sequence[float]], GlobalModel]
    Finish = Callable[[GlobalModel], GlobalModel]
    Withholds = Callable[[Adapter, Adapter, float, int], bool]

    # (D, {moment: its value before}, beta) -> (the direction of the step, {moment: its value after}), all float64.
    Direction = Callable[[Tensor, Mapping[str, Tensor], float], tuple[Tensor, dict[str, Tensor]]]

_AVERAGE = "_fedavg:average"

# As in the experiments of Reddi et al. 2021, and Flower's defaults; the second moment starts at tau^2, the least that
# Algorithm 2 allows.
_BETA_2 = 0.99
_TAU = 1e-3


@dataclass(frozen=True, kw_only=True)
class Rule(RuleFacts):
    """An aggregation rule: its facts and its functions.

    Attributes:
        aggregate: the next global model from that before the round, from the valid uploads, at least one, with equal
            names and shapes (ranks may differ where clients restart), and from their weights, which sum to one.
        finish: what is made of the model after the step of the server's optimizer, in another basis; its function stays
            the same. None makes nothing.
        withholds: whether a client keeps its noised update to itself, from that, the signs of the last global update,
            `relevance_threshold` and the round; it costs as much all the same. None sends every update.
    """

    aggregate: Aggregate
    finish: Finish | None = None
    withholds: Withholds | None = None

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


def _known(name: str, *, aggregate: str = _AVERAGE, **hooks: str) -> Rule:
    """A rule of which the configuration has the facts; its functions are imported when they are first called."""
    late: Any = {hook: _late(place) for hook, place in hooks.items()}
    return Rule(**asdict(RULE_FACTS[name]), aggregate=_late(aggregate), **late)


def _sgd(change: Tensor, moments: Mapping[str, Tensor], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    return change, {}


def _momentum(change: Tensor, moments: Mapping[str, Tensor], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    first = _first_moment(change, moments, beta)
    return first, {"first": first}


def _adam(change: Tensor, moments: Mapping[str, Tensor], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    second = _BETA_2 * _second_before(change, moments) + (1 - _BETA_2) * change.square()
    return _adaptive(_first_moment(change, moments, beta), second)


def _yogi(change: Tensor, moments: Mapping[str, Tensor], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    before, square = _second_before(change, moments), change.square()
    second = before - (1 - _BETA_2) * square * (before - square).sign()
    return _adaptive(_first_moment(change, moments, beta), second)


def _first_moment(change: Tensor, moments: Mapping[str, Tensor], beta: float) -> Tensor:
    return beta * moments.get("first", change.new_zeros(())) + (1 - beta) * change


def _second_before(change: Tensor, moments: Mapping[str, Tensor]) -> Tensor:
    return moments.get("second", change.new_full(change.shape, _TAU**2))


def _adaptive(first: Tensor, second: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return first / (second.sqrt() + _TAU), {"first": first, "second": second}


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """The server's steps towards the aggregated model.

    Attributes:
        name: in `SERVER_OPTIMIZERS`.
        learning_rate: eta > 0.
        momentum: beta in [0, 1).
        of_lora: what takes its place for A and B; None for the same.
    """

    name: str
    learning_rate: float
    momentum: float
    of_lora: ServerOptimizer | None = None

    def for_tensor(self, name: str) -> ServerOptimizer:
        """The one for the tensor of this name."""
        return self.of_lora if self.of_lora and ".lora_" in name else self


def server_step(
    model: GlobalModel,
    aggregated: GlobalModel,
    optimizer: ServerOptimizer,
    *,
    trained: Collection[str] | None = None,
) -> GlobalModel:
    """The global model after a step towards the aggregated one, with the optimizer's moments for the next round.

    With D = average - theta, eta the learning rate and beta the momentum, tensor by tensor and without bias correction:
    `sgd`: theta + eta D; `momentum`: V <- beta V + (1 - beta) D, theta + eta V; `adam` and `yogi`: V as for `momentum`,
    and theta + eta V / (sqrt(S) + tau), where S <- 0.99 S + 0.01 D^2, or S <- S - 0.01 D^2 sign(S - D^2).
    `sgd` with learning rate 1 is the aggregated model itself.

    Args:
        aggregated: what the aggregation rule makes of it; for all but `sgd` with learning rate 1, of a linear rule.
        trained: names of the tensors that the round trained, None for all; the others rest, and so do their moments.

    Source: Reddi et al. 2021, Algorithm 2; `momentum`: Hsu et al. 2019, whose V is this one over 1 - beta.
    """
    plain = optimizer.name == "sgd" and optimizer.learning_rate == 1 and optimizer.of_lora is None
    if plain:  # theta + D rounds, where the two differ much in size
        return aggregated
    adapter = dict(model.adapter)
    state = {moment: dict(tensors) for moment, tensors in model.optimizer_state.items()}
    for name in model.adapter if trained is None else trained:
        own, before = optimizer.for_tensor(name), model.adapter[name]
        change = aggregated.adapter[name].double() - before.double()
        moments = {moment: tensors[name].double() for moment, tensors in state.items() if name in tensors}
        direction, moments = SERVER_OPTIMIZERS[own.name](change, moments, own.momentum)
        adapter[name] = (before.double() + own.learning_rate * direction).float()
        for moment, value in moments.items():
            state.setdefault(moment, {})[name] = value.float()
    return replace(aggregated, adapter=adapter, optimizer_state=state)


# Where the functions are of rules that do more than average.
_FUNCTIONS: Mapping[str, Mapping[str, str]] = {
    "t-fedavg": {"aggregate": "_fedavg:t_fedavg"},
    "cmfl": {"aggregate": "_cmfl:cmfl", "withholds": "_cmfl:is_irrelevant"},
    "fedsvd": {"finish": "_products:rebased"},
    "fedex-lora": {"aggregate": "_products:fedex_lora"},
    "flora": {"aggregate": "_products:flora"},
}

RULES = _Rules("aggregation", {name: _known(name, **_FUNCTIONS.get(name, {})) for name in RULE_FACTS})
"""{`aggregation` of a configuration: how that rule makes the next global model}."""

SERVER_OPTIMIZERS: Mapping[str, Direction] = {"sgd": _sgd, "momentum": _momentum, "adam": _adam, "yogi": _yogi}
