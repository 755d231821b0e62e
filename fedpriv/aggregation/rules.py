"""The registry of aggregation rules: what each one trains, and how uploads become the next global model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedpriv.adapters import Adapter
from fedpriv.adapters.lora import Trains
from fedpriv.aggregation._cmfl import cmfl
from fedpriv.aggregation._fedavg import GlobalModel, average
from fedpriv.aggregation._fedex_lora import fedex_lora
from fedpriv.aggregation._fedsvd import rebased
from fedpriv.aggregation._flora import flora
from fedpriv.aggregation._t_fedavg import t_fedavg

Aggregate = Callable[[GlobalModel, Sequence[Adapter], Sequence[float]], GlobalModel]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An aggregation rule.

    Attributes:
        aggregate: the next global model from the valid uploads and their weights.
        trains: `lora`: A, B and a head; `lora-b`: B and a head; `lora-r`: a matrix R between frozen B and A, and a
            head; `weights`: full weight matrices and a head.
        turns: the tensors that each round trains, in turn, where it trains more than the head; the others are
            broadcast and uploaded as they are.
        orthonormal: whether the rows of A are orthonormal at the start.
        finish: what is made of the model after the step of the server's optimizer; its function stays the same.
        linear: whether the new model is the weighted sum of the uploads, as the `aggregate` view requires.
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
    restarts: bool = False
    ternary: bool = False
    selective: bool = False


RULES = {
    "dp-lora": Rule(aggregate=average, linear=True),
    "fedavg": Rule(aggregate=average, trains="weights", linear=True),
    "t-fedavg": Rule(aggregate=t_fedavg, trains="weights", ternary=True),
    "cmfl": Rule(aggregate=cmfl, trains="weights", selective=True),
    "ffa-lora": Rule(aggregate=average, trains="lora-b", linear=True),
    "rolora": Rule(aggregate=average, turns=("lora-b", "lora-a"), linear=True),
    "fedsvd": Rule(aggregate=average, turns=("lora-b",), orthonormal=True, finish=rebased, linear=True),
    "fed-sb": Rule(aggregate=average, trains="lora-r", linear=True),
    "fedex-lora": Rule(aggregate=fedex_lora),
    "flora": Rule(aggregate=flora, restarts=True),
}
"""{`aggregation` of a configuration: how that rule makes the next global model}."""
