"""What tests of the server share: nodes with keys, strategies with their books, and whole runs of this process."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from safetensors.torch import load_file

from fedpriv.config import RunConfig, parse
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.kinds import Registration, UploadRelease
from fedpriv.learning.training.evaluation import Evaluation
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from server.bookkeeping import Books
from server.exchange import set_message_id
from server.observer import LogObserver
from server.registration import Nodes
from server.strategy import RuleStrategy
from simulations.engines import federation
from tests.wire import answered, arrays_of, request_in

ADAPTER = {"A": torch.zeros(2, 3), "B": torch.zeros(4)}


def registered(sizes: Mapping[int, int], **stated: Any) -> list[Registration]:
    """The registrations of clients that hold so many records."""
    return [Registration(client=c, num_records=n, name="", data_set=f"d{c}", **stated) for c, n in sizes.items()]


def signed(registration: Registration, key: Path, **changes: Any) -> Registration:
    """The registration with changes, as the node of this key states it."""
    stated = replace(registration, **{"identity": keys.public_line(key), **changes})
    return replace(stated, signature=keys.sign(key, stated.signed))


def nodes_of(registrations: list[Registration]) -> Nodes:
    """Nodes 100 + k of clients k."""
    return {each.client: (100 + each.client, each) for each in registrations}


def strategy_of(
    config: RunConfig, nodes: Nodes, ledger: Ledger | None = None, resumed_after: int | None = None, **options: Any
) -> RuleStrategy:
    """The real strategy over these nodes, with books of its own."""
    initial = options.setdefault("initial", ADAPTER)
    registrations = [each for _, each in nodes.values()]
    books = Books(config, "run", registrations, initial=initial, ledger=ledger, resumed_after=resumed_after)
    own = {"evaluate": lambda _: Evaluation(accuracy=0.5, loss=1.0), "on_round": lambda *_: None, **options}
    return RuleStrategy(config, nodes, books=books, run="run", **own)


def answer(
    strategy: RuleStrategy, message: Message, value: float = 1.0, *, client: int = -1, adapter=None, **claims: Any
) -> Message:
    """What a client's node answers that has set all values of the adapter to this one, true but for the claims."""
    client = client if client >= 0 else message.metadata.dst_node_id - 100
    adapter = adapter or {name: torch.full_like(tensor, value) for name, tensor in ADAPTER.items()}
    honest = {"round": request_in(message).fields["round"], "event": strategy.event(client)}
    honest["num_records"] = strategy.books.sizes[client]
    arrays = {} if claims.get("silent") else {kinds.ADAPTER: arrays_of(adapter)}
    return answered(message, kinds.pack(UploadRelease(**{**honest, **claims})), arrays=arrays)


def released(books: Books, rounds: Iterable[int], clients: Iterable[int] = (0,)) -> Books:
    """The books after these rounds, of which each asked these clients, and all of them replied."""
    for round_ in rounds:
        books.charge(round_, dict.fromkeys(clients, f"request {round_}"))
        books.settle(dict.fromkeys(clients, "reply"))
    return books


def rounds_charged(ledger: Path, client: int) -> list[int]:
    """The rounds that a ledger has charged a client."""
    with reading(ledger) as db:
        return [entry.round for entry in db.entries() if entry.phase == "charged" and entry.client == str(client)]


def events_charged(ledger: Path) -> dict[str, list[Event]]:
    """{client: the events that a ledger has charged it}."""
    with reading(ledger) as db:
        return {known.client: [release.event for release in db.releases(known.id)] for known in db.data_sets()}


def run(values: Mapping[str, object], out: Path, observer: LogObserver | None = None, **changes: object) -> Path:
    """The folder of a run that is carried out here."""
    federation.run(parse({**values, **changes, "out": str(out)}), observer or LogObserver())
    return out


def summary(folder: Path) -> dict[str, Any]:
    """A finished run's summary."""
    return json.loads((folder / "summary.json").read_text())


def global_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the global model that a run ended with."""
    return load_file(folder / "variants" / "global" / "adapter_model.safetensors")


class SlowGrid:
    """A link on which replies come when they come; `answers` says what a message gets, and after how many pulls.

    Attributes:
        asked: the clients whose nodes, 100 + k, were sent a message, in order.
    """

    def __init__(self, answers: Callable[[Message], tuple[Message, int] | None] = lambda message: None) -> None:
        self.asked: list[int] = []
        self._answers, self._on_the_way = answers, []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        for message in messages:
            set_message_id(message, f"m{len(self.asked)}")
            self.asked.append(message.metadata.dst_node_id - 100)
            if (answer := self._answers(message)) is not None:
                self._on_the_way.append(list(answer))
        return []

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        for waiting in self._on_the_way:
            waiting[1] -= 1
        arrived = [reply for reply, pulls in self._on_the_way if pulls <= 0]
        here = [reply for reply in arrived if reply.metadata.reply_to_message_id in message_ids]
        self._on_the_way = [waiting for waiting in self._on_the_way if waiting[0] not in here]
        return here


class StopsAfter(LogObserver):
    """Ends a run after this round, as Ctrl-C does."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last

    def round_done(self, row: Any) -> None:
        super().round_done(row)
        if row.round == self._last:
            raise KeyboardInterrupt
