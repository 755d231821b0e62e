"""Texts of many requests in shared passes: the oldest of the client whose turn it is, with others of its length.

A pass gives classes or vectors; those who ask for the one and for the other take turns like clients do.
"""

import math
from collections import Counter as Counts
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedpriv.models.serving._engine import Weights
from fedpriv.models.serving._jobs import PassCounter, ServingJob, checked, failure, tell
from fedpriv.models.serving.requests import Classified, Embed, Embedded, Failed, ServingError, Tokens

# Texts of a request that get a place at a time, and places for each row of a pass, among which it is chosen.
_TEXTS_OF_A_TURN = 16
_PLACES = 2

# Texts whose lengths differ by no more than this factor share a pass; fewer rows than `_FEW` take others along.
_PADDING = 1.25
_FEW = 8


@dataclass(eq=False)
class _Open:
    """A request whose texts are being read: logits or vectors by the text's number, and how many texts have a place."""

    job: ServingJob
    weights: Weights
    outputs: dict[int, Tensor] = field(default_factory=dict)
    placed: int = 0

    @property
    def embeds(self) -> bool:
        return isinstance(self.job.request, Embed)


@dataclass(frozen=True, eq=False)
class _Row:
    """A text in a place."""

    of: _Open
    number: int

    @property
    def text(self) -> Tokens:
        return self.of.job.texts[self.number]

    @property
    def client(self) -> str:
        return self.of.job.request.client


class Classification:
    """Works on `Classify` and `Embed`, in one thread."""

    def __init__(self, counter: PassCounter) -> None:
        self._counter = counter
        self._open: list[_Open] = []
        self._rows: list[_Row] = []
        # {client with texts in places: number of the last pass with one of them}.
        self._last: dict[str, int] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, apart from what waits."""
        return not self._open

    def step(self) -> None:
        """Take in what there is room for and go one pass further with as much as one holds."""
        for gone in [found for found in self._open if found.job.over]:
            self._close(gone)
        self._take_in()
        if not self._rows:
            return
        rows = self._chosen()
        self._rows = [row for row in self._rows if row not in rows]
        for row, output in zip(rows, self._outputs(rows), strict=True):
            if isinstance(output, ServingError):
                tell(row.of.job, Failed(error=output))
            else:
                row.of.outputs[row.number] = output
        for found in {id(row.of): row.of for row in rows}.values():
            self._settle(found)
        if self.is_idle:
            self._counter.base.forget()

    def give_up(self, error: ServingError) -> None:
        """Fail everything under way."""
        self._open, self._rows = [], []
        self._counter.fail(error)

    def _chosen(self) -> list[_Row]:
        """The texts of the next pass, those first whose client has been in none for longest."""
        number, present = self._counter.num_passes, {row.client for row in self._rows}
        self._last = {client: last for client, last in self._last.items() if client in present}
        order = sorted(self._rows, key=lambda row: self._last.get(row.client, -1))
        order = [row for row in order if row.of.embeds == order[0].of.embeds]
        limits, lengths = self._counter.limits, [len(row.text) for row in order]
        clients = [row.client for row in order]
        chosen = together(lengths, clients, self._counter.rows, limits.pass_tokens, limits.client_tokens)
        rows = [order[place] for place in chosen]
        self._last |= {row.client: number for row in rows}
        return rows

    def _take_in(self) -> None:
        """Give places to texts while there are some: to a new request and to one that has had a turn, by turns."""
        places = _PLACES * self._counter.rows
        while len(self._rows) < places:
            earlier = next((found for found in self._open if found.placed < len(found.job.texts)), None)
            begun = self._counter.next() if len(self._open) < places else None
            if begun is not None:
                self._place(_Open(*begun))
            if earlier is not None:
                self._open.remove(earlier)
                self._place(earlier)
            if begun is None and earlier is None:
                return
        # However many places others have taken, a client without one gets one.
        while (begun := self._counter.next(but_of={row.client for row in self._rows})) is not None:
            self._place(_Open(*begun))

    def _place(self, found: _Open) -> None:
        """Give a request its turn, and put it behind the others."""
        further = range(found.placed, min(found.placed + _TEXTS_OF_A_TURN, len(found.job.texts)))
        self._rows += [_Row(found, number) for number in further]
        found.placed = further.stop
        self._open.append(found)

    def _settle(self, found: _Open) -> None:
        job = found.job
        if not job.over and len(found.outputs) == len(job.texts):
            outputs, num_tokens = [found.outputs[number] for number in range(len(job.texts))], sum(map(len, job.texts))
            if found.embeds:
                tell(job, Embedded(vectors=np.stack([output.numpy() for output in outputs]), num_tokens=num_tokens))
            else:
                probabilities = tuple(tuple(output.double().softmax(dim=0).tolist()) for output in outputs)
                tell(job, Classified(probabilities=probabilities, num_tokens=num_tokens))
        if job.over:
            self._close(found)

    def _close(self, found: _Open) -> None:
        self._open.remove(found)
        self._rows = [row for row in self._rows if row.of is not found]
        self._counter.give_back(found.job)

    def _outputs(self, rows: Sequence[_Row]) -> list[Tensor | ServingError]:
        """The logits or the vector of each row, or why there are none; rows of a pass that fails run alone."""
        weights = [row.of.weights for row in rows]
        self._counter.count(weights)
        base = self._counter.base
        read = base.embed if rows[0].of.embeds else base.classify
        try:
            outputs = list(read(weights, [row.text for row in rows]))
        except Exception as error:
            if len(rows) > 1:
                return [output for row in rows for output in self._outputs([row])]
            return [failure(rows[0].of.job.variant, error)]
        return [checked(row.of.job.variant, own) for row, own in zip(rows, outputs, strict=True)]


def together(
    lengths: Sequence[int], clients: Sequence[str], most_rows: int, most_tokens: int, most_of_client: int
) -> list[int]:
    """Positions of the texts of the next pass: the first one's, and those of others that are about as long.

    Args:
        lengths: of the texts, the one first that must be in the pass; at least one.
        clients: of the texts; one without a name stands for all, and is not bounded.
        most_rows: of a pass, >= 1.
        most_tokens: of a pass, with padding; the first text is in it, however long it is.
        most_of_client: tokens of one client among them.
    """
    first = _size(lengths[0])
    order = sorted(range(len(lengths)), key=lambda place: (abs(_size(lengths[place]) - first), place))
    chosen = order[:1]
    longest = lengths[0]
    num_rows = Counts(clients[:1])
    for place in order[1:]:
        padded, client = max(longest, lengths[place]), clients[place]
        is_other = _size(lengths[place]) != first
        if client and padded * (num_rows[client] + 1) > most_of_client:
            continue
        if client != clients[0] and padded > _PADDING * lengths[0]:
            continue  # nobody's long text makes another's pass longer
        if len(chosen) == most_rows or padded * (len(chosen) + 1) > most_tokens or (is_other and len(chosen) >= _FEW):
            break
        chosen.append(place)
        longest = padded
        num_rows[client] += 1
    return chosen


def _size(length: int) -> int:
    """Texts of one size differ in length by `_PADDING` at most."""
    return math.floor(math.log(max(length, 8), _PADDING))
