"""Server optimizers: the step that the server takes towards a round's weighted average of the uploads.

The pseudo-gradient is D = average - theta, with theta the global model. All of this is post-processing of the average,
so no optimizer here changes what a round costs on any view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedpriv.learning.aggregation._fedavg import GlobalModel

# As in the experiments of Reddi et al. 2021, and Flower's defaults; the second moment starts at tau^2, the least that
# Algorithm 2 allows.
_BETA_2 = 0.99
_TAU = 1e-3

# (D, {moment: its value before}, beta) -> (the direction of the step, {moment: its value after}), all float64.
Rule = Callable[[Tensor, Mapping[str, Tensor], float], tuple[Tensor, dict[str, Tensor]]]


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


SERVER_OPTIMIZERS: Mapping[str, Rule] = {"sgd": _sgd, "momentum": _momentum, "adam": _adam, "yogi": _yogi}


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
        model: before the round.
        aggregated: what the aggregation rule makes of it; for all but `sgd` with learning rate 1, of a linear rule.
        optimizer: which, and how far it steps.
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
