"""An exchange: the same questions to two nodes whose data differ in one record, or in one or a few persons.

What a coordinator learns from the two must be the same, but for what was paid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.adversary.nodes import (
    Answer,
    Node,
    Question,
    Row,
    ask,
    make_node,
    num_charges,
    registering,
    restart,
    run_config,
)
from tests.adversary.stand_ins import Killed, StandIns, Sum, largest_excess, standing_in
from tests.tiny import LABELS, WORDS
from tests.vaults import UNTIMED

# What both nodes have; the record in which they differ comes last. Most have one label, so that their gradients add up
# to several times the clip norm: losing them all is far more than losing one.
ROWS = tuple((f"{WORDS[i % 13]} {WORDS[i % 7]} {WORDS[i % 5]}", LABELS[i % 5 == 4]) for i in range(15))
N_K = len(ROWS) + 1

# The same about five persons, with three records each.
PERSONS = tuple((*row, f"person {i % 5}") for i, row in enumerate(ROWS))

# Sums are compared in float64 and may be off by its rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """What a coordinator asks two nodes that share their rows.

    Attributes:
        one, other: a further record of either node, None if it has none; or, where persons are the unit, all records of
            the persons in which the two differ.
        questions: in their order.
        rows: that both have.
        everyone: every record, or person, is in every sample.
        killed_at: both processes end when they add noise for this time, and others get the question again; 0 for never.
        fails_on: the tokens of records on which the models fail.
        limits: of both operators, where they differ from the default.
    """

    one: Row | Sequence[Row] | None
    other: Row | Sequence[Row] | None
    questions: Sequence[Question]
    rows: Sequence[Row] = ROWS
    everyone: bool = True
    killed_at: int = 0
    fails_on: tuple[int, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def of_persons(self) -> bool:
        """Whether persons are the unit."""
        return len(self.rows[0]) > 2

    def further(self, row: Row | Sequence[Row] | None) -> list[Row]:
        """The records that one of the nodes has besides."""
        if row is None:
            return []
        return list(row) if self.of_persons else [row]

    @property
    def num_changes(self) -> int:
        """How many records, or persons, are removed and added to get from one node's data to the other's."""
        sides = (self.further(self.one), self.further(self.other))
        return sum(len({row[2:] or index for index, row in enumerate(side)}) for side in sides)

    def __str__(self) -> str:
        """What is peculiar about it."""
        asked = [(q.kind, _peculiar(q.config), dict(q.fields), _sizes(q.arrays)) for q in self.questions]
        parts = (self.one, self.other, f"everyone={self.everyone}", f"killed_at={self.killed_at}", *asked)
        return "\n".join(map(repr, parts))


def _peculiar(config: Mapping[str, Any]) -> dict[str, Any]:
    honest = registering(run_config()).config
    return {key: value for key, value in config.items() if honest.get(key) != value}


def _sizes(arrays: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {
        f"{part}/{name}": float(np.abs(np.asarray(array, dtype=float)).max(initial=0.0))
        for part, named in arrays.items()
        for name, array in named.items()
    }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a coordinator learned.

    Attributes:
        differences: in what the nodes answered, other than by the values of charged sums; empty if there are none.
        excess: the largest distance of their sums, over what was charged.
        unpaid: by how much the number of times that a node used its records exceeds that of its charges.
        num_uploads: how many questions got an upload.
    """

    differences: str
    excess: float
    unpaid: int
    num_uploads: int

    @property
    def interferes(self) -> bool:
        """Whether anything came out that nobody paid for."""
        return bool(self.differences) or not self.excess <= 1 + _ROUNDING or self.unpaid > 0


def play(exchange: Exchange, models: Mapping[str, Path], folder: Path) -> Outcome:
    """Ask two nodes the same, one after the other.

    Args:
        exchange: whom, and what.
        models: {name: folder} that both operators have approved.
        folder: for the nodes' files.
    """
    (answers, sums, unpaid), (others, other_sums, other_unpaid) = (
        _play(exchange, row, models, folder / str(side)) for side, row in enumerate((exchange.one, exchange.other))
    )
    pairs = enumerate(zip(answers, others, strict=True))
    # A record in place of another is one that was removed and one that was added; so is a person with other records.
    return Outcome(
        differences="; ".join(f"answer {index}: {a!r} against {b!r}" for index, (a, b) in pairs if a != b),
        excess=largest_excess(sums, other_sums) / exchange.num_changes,
        unpaid=max(unpaid, other_unpaid),
        num_uploads=sum(bool(answer.response.arrays) for answer in answers),
    )


def _play(
    exchange: Exchange, row: Row | None, models: Mapping[str, Path], folder: Path
) -> tuple[list[Answer], list[Sum], int]:
    """The answers of one node, the sums that it was about to noise, and by how much its use exceeds its charges."""
    rows, of_persons = [*exchange.rows, *exchange.further(row)], {"person_column": "person"}
    settings = UNTIMED | (of_persons if exchange.of_persons else {})
    node = make_node(folder, rows, num_registered=N_K, models=models, limits=exchange.limits, settings=settings)
    restart()
    stand_ins = StandIns(
        watched=len({row[2:] or index for index, row in enumerate(exchange.rows)}),
        everyone=exchange.everyone,
        killed_at=exchange.killed_at,
        fails_on=exchange.fails_on,
    )
    with standing_in(stand_ins) as seen:
        answers = [_ask_until_answered(node, question) for question in exchange.questions]
    return answers, seen.sums, seen.num_uses - num_charges(node)


def _ask_until_answered(node: Node, question: Question) -> Answer:
    """As the vault's service does it, but for closing the node, whose operator has looked and opened it again."""
    try:
        return ask(node, question)
    except Killed:
        restart()
        return ask(node, question)
