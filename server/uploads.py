"""A round's updates as the server gets them: each by itself here, or in a sum, see `server/sums.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from fedpriv.config import RunConfig
from fedpriv.learning.adapters import Adapter, Merged
from fedpriv.learning.aggregation import GlobalModel
from fedpriv.learning.training.local_update import UpdateSpec
from server.exchange import ExpectedReply, Read, Vector, read_reply
from server.round import Round, RoundRequest


class Updates(Protocol):
    """The way in which the updates of a round's clients reach the server.

    Attributes:
        is_sum: whether only their sum does, which no client can join once its terms are known.
        last: {client: (its last upload, what had been added to the frozen weights)}, of those that are kept.
    """

    is_sum: bool
    last: dict[int, tuple[Adapter, Merged]]

    @property
    def among(self) -> Iterable[int] | None:
        """The clients whose noise each of them counts on; None stands for those that are asked."""

    def open(
        self, link: Grid, round_: Round, requests: Mapping[int, RoundRequest], spec: UpdateSpec, model: GlobalModel
    ) -> dict[int, RoundRequest]:
        """The requests of the clients that will be asked, with what each alone is told.

        Args:
            link: Flower's connection to the nodes.
            round_: in which nobody was asked yet, and nobody charged.
            requests: of the clients that could be asked.
            spec: of their update.
            model: that the round begins with.

        Raises:
            TooFewClientsError: too few of them are left.
        """

    def read(self, reply: Message, expected: ExpectedReply) -> Read:
        """The content of a client's reply; a MalformedError names what is wrong."""

    def close(
        self, link: Grid, round_: Round, contents: Mapping[int, Adapter | Vector], spec: UpdateSpec, model: GlobalModel
    ) -> list[Adapter]:
        """The adapters that the rule averages: the uploads or, if only a sum is known, what stands for their average.

        Raises:
            ProtocolError: there is no sum.
        """


class Uploads:
    """Each client's update by itself.

    Args:
        config: of the run; says whose uploads are kept.
        num_clients: of the run.
        kept: by an interrupted run that goes on.
    """

    is_sum = False
    among = None

    def __init__(
        self, config: RunConfig, num_clients: int, kept: Mapping[int, tuple[Adapter, Merged]] | None = None
    ) -> None:
        self.last = dict(kept or {})
        self._keeps_all = config.keeps_uploads_of(num_clients)
        self._keeps_round = config.integral_epsilon is not None

    def open(
        self, link: Grid, round_: Round, requests: Mapping[int, RoundRequest], spec: UpdateSpec, model: GlobalModel
    ) -> dict[int, RoundRequest]:
        """All requests as they are."""
        return dict(requests)

    def read(self, reply: Message, expected: ExpectedReply) -> Read:
        """See `read_reply`."""
        return read_reply(reply, expected)

    def close(
        self, link: Grid, round_: Round, contents: Mapping[int, Adapter | Vector], spec: UpdateSpec, model: GlobalModel
    ) -> list[Adapter]:
        """The uploads."""
        uploads = {client: content for client, content in contents.items() if isinstance(content, dict)}
        found = {client: (adapter, model.merged) for client, adapter in uploads.items()}
        if self._keeps_all:
            self.last |= found
        elif self._keeps_round:
            self.last = found
        return list(uploads.values())
