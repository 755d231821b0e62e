"""Whether the records of a pass touch each other: they are permuted, joined, replaced and dropped, and one is watched.

One list of changes asks every model. A model of one's own is also told where the dependence arises: the states of a
record are compared layer by layer, in the order of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Record = TypeVar("Record")

LOSSES = "losses"
"""Stands for the name of a layer where it is the losses that couple records."""


@dataclass(frozen=True, kw_only=True)
class Change(Generic[Record]):
    """A change to what else is in a pass.

    Attributes:
        name: of the change, as `replaced`.
        items: the records of the changed pass.
        positions: where the records stand that are watched, in their order.
    """

    name: str
    items: Sequence[Record]
    positions: Sequence[int]


def watched(records: Sequence[Record]) -> Sequence[Record]:
    """The records whose results are watched; the others may be replaced."""
    return records[::2]


def changes(records: Sequence[Record], others: Sequence[Record]) -> list[Change[Record]]:
    """The changes of a pass of the `watched` records that must leave their results as they are.

    Args:
        records: at least two.
        others: as many, which take the places of those that are not watched.
    """
    kept, everyone = watched(records), range(len(records))
    replaced = [records[i] if i % 2 == 0 else others[i] for i in everyone]
    return [
        Change(name="repeated", items=kept, positions=range(len(kept))),
        Change(name="permuted", items=kept[::-1], positions=range(len(kept))[::-1]),
        Change(name="joined", items=records, positions=everyone[::2]),
        Change(name="replaced", items=replaced, positions=everyone[::2]),
        Change(name="dropped", items=kept[:1], positions=(0,)),
    ]


def dependence(
    results: Callable[[Sequence[Record]], Tensor],
    records: Sequence[Record],
    others: Sequence[Record],
    equal: Callable[[Tensor, Tensor], bool],
) -> Change[Record] | None:
    """The first change that alters a watched record's result; None if none does.

    Args:
        results: [records, values] of the records, in their order.
        records, others: as for `changes`.
        equal: whether two results count as the same, to the bit or up to rounding.
    """
    expected = results(watched(records))
    for change in changes(records, others):
        found = results(change.items)[list(change.positions)]
        if not equal(found, expected[: len(found)]):
            return change
    return None


def culprit(
    module: nn.Module,
    losses: Callable[[Sequence[Record]], Tensor],
    records: Sequence[Record],
    others: Sequence[Record],
    change: Change[Record],
    *,
    close: Callable[[Tensor, Tensor], bool],
) -> str | None:
    """The layer, by its name, in which a watched record's state first differs; None if it is the backward pass.

    It is `LOSSES` if no layer's states differ, and empty for the module itself, which computes between its layers.

    Args:
        module: of which the layers are.
        losses: runs the pass of the records, with one loss for each.
        records, others: as for `changes`.
        change: from `dependence`.
        close: whether states count as the same.
    """
    by_name = {each.name: each for each in changes(records, others)}
    joined, replaced, kept = by_name["joined"], by_name["replaced"], by_name["repeated"]
    for one, other in ((joined, replaced), (kept, change)):
        found = _first_difference(module, losses, one, other, close)
        if found is not None:
            return found
    return None


def _first_difference(
    module: nn.Module,
    losses: Callable[[Sequence[Record]], Tensor],
    one: Change[Record],
    other: Change[Record],
    same: Callable[[Tensor, Tensor], bool],
) -> str | None:
    before, after = (_states(module, losses, each.items) for each in (one, other))
    num = min(len(one.positions), len(other.positions))
    places = [list(each.positions)[:num] for each in (one, other)]
    for first, second in zip(before, after, strict=False):
        values = (first.value, second.value)
        if [len(value) if value.dim() else 0 for value in values] != [len(one.items), len(other.items)]:
            continue  # its rows are no records
        if not same(*(value[at].reshape(num, -1) for value, at in zip(values, places, strict=True))):
            # An input that differs was made between layers, in the module that calls this one.
            return first.layer if first.is_output else first.layer.rpartition(".")[0]
    return None


@dataclass(frozen=True)
class _State:
    """An input or output of a layer."""

    layer: str
    is_output: bool
    value: Tensor


@torch.no_grad()
def _states(module: nn.Module, losses: Callable[[Sequence[Record]], Tensor], items: Sequence[Record]) -> list[_State]:
    """The states of a pass, the losses last."""
    with _recording(module) as states:
        values = losses(items)
    return [*states, _State(LOSSES, True, values)]


@contextmanager
def _recording(module: nn.Module) -> Iterator[list[_State]]:
    """Within this context the inputs and outputs of all layers are recorded, in the order of the pass."""
    states: list[_State] = []

    def keep(name: str, values: object, *, is_output: bool) -> None:
        leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        states.extend(_State(name, is_output, leaf.detach().clone()) for leaf in leaves)

    handles = []
    for name, layer in module.named_modules():
        before = layer.register_forward_pre_hook(lambda _, given, name=name: keep(name, given, is_output=False))
        after = layer.register_forward_hook(lambda _, __, made, name=name: keep(name, made, is_output=True))
        handles += [before, after]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
