"""A coordinator that asks the vaults of this process for a sum, honestly or not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.config import ON_NODES, RunConfig, to_flower
from fedpriv.holder.sums import Participant, Terms
from fedpriv.holder.sums import server as sums
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import ADVERTISE, CHECK, CONFIRM, REVEAL, SHARE, TRAIN, Request, Response
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.rounds import grid_of
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.entries import Entry
from fedpriv.privacy.ledger.reader import reading
from tests.tiny import LABELS, WORDS
from tests.vaults import make_vault, write_records
from tests.wire import arrays_of

VALUES = {
    **{"data": ON_NODES, "labels": ",".join(LABELS), "num_clients": 4, "layers": "last-1", "rank": 2, "rounds": 5},
    **{"local_steps": 1, "optimizer": "sgd", "learning_rate": 0.1, "batch_size": 6, "clip_norm": 1.0},
    **{"noise_multiplier": 4.0, "max_length": 32, "secure_aggregation": True, "min_clients": 3, "comparison": False},
}


def make_vaults(
    folder: Path,
    model: Path,
    sizes: Mapping[int, int],
    *,
    of_persons: bool = False,
    own: Callable[[int], Mapping[str, object]] = lambda client: {},
    **settings: object,
) -> dict[int, VaultSettings]:
    """{client: its vault} of vaults, of these N_k, that have approved each other, with settings of their own or of all.

    A vault of persons has two records of each.
    """
    vaults = {}
    for client, size in sizes.items():
        rows = [
            (f"{WORDS[i % 13]} {WORDS[(i + client) % 7]} {LABELS[i % 3]}", LABELS[i % 3], f"P{i % size}")
            for i in range(size * (1 + of_persons))
        ]
        data = write_records(folder / f"own-{client}.csv", [row if of_persons else row[:2] for row in rows])
        values = {"partition_id": client, "budget_view": "aggregate", **settings, **own(client)}
        values |= {"person_column": "patient"} if of_persons else {}
        vaults[client] = make_vault(folder / f"node-{client}", data, model, num_records=size, **values)
    for client, vault in vaults.items():
        vault.peers.mkdir()
        for peer, other in vaults.items():
            if peer != client:
                (vault.peers / f"{peer}.pub").write_text(keys.public_line(other.key))
    return vaults


@dataclass(frozen=True, eq=False)
class Coordinator:
    """Asks these vaults; every `changes` are lies about the run's configuration.

    Attributes:
        config: of the run.
        vaults: {client: settings of its vault}.
    """

    config: RunConfig
    vaults: Mapping[int, VaultSettings]

    @property
    def spec(self) -> UpdateSpec:
        return UpdateSpec.of(self.config)

    def terms(self, run: str, round_: int = 1, *, spec: UpdateSpec | None = None, **changes: Any) -> Terms:
        """Terms that fit this run, but for the changes; each call is another attempt."""
        spec = spec or self.spec
        sizes = {client: self.size(client) for client in self.vaults}
        grid = grid_of(self.config, self.spec, sizes)
        participants = []
        for client, vault in self.vaults.items():
            facts = {"num_records": sizes[client], "sampling_probability": spec.probability(sizes[client])}
            facts |= {"identity": keys.public_line(vault.key), "scale": grid.scales[client]}
            participants.append(Participant(client=client, **facts))
        values = {"run": run, "round": round_, "attempt": np.random.default_rng().bytes(16).hex(), "colluding": 0}
        values |= {"participants": tuple(participants), "threshold": self.config.min_clients}
        values |= {"clip_norm": spec.clip_norm, "noise_multiplier": spec.noise_multiplier}
        values |= {"modulus_bits": grid.modulus_bits, "grid_exponent": grid.exponent}
        values["dimension"] = sum(tensor.numel() for tensor in self.initial.values())
        values["request"] = self.request(run, round_, spec).digest
        return replace(Terms(**values), **changes)

    @property
    def initial(self):
        return workbench(self.config).initial

    def request(self, run: str, round_: int, spec: UpdateSpec) -> Request:
        """For an update of the initial adapter."""
        fields = kinds.pack_instruction(run, round_, spec)
        return Request.of(TRAIN, fields=fields, arrays={kinds.ADAPTER: arrays_of(self.initial)})

    def ask(self, client: int, request: Request, **changes: Any) -> Response:
        """A vault's answer; it reads its folder anew, as after a restart, but for its sessions."""
        values = {**to_flower(self.config), **changes}
        return answer(replace(request, run_config=values), Holder.of(self.vaults[client]))

    def advertise(self, client: int, terms: Terms) -> Response:
        return self.ask(client, Request.of(ADVERTISE, own={kinds.TERMS: terms.text()}))

    def step(self, client: int, kind: str, terms: Terms, message: str) -> Response:
        step = kinds.Step(run=terms.run, attempt=terms.attempt, message=message)
        return self.ask(client, Request.of(kind, fields=kinds.pack(step)))

    def open(self, terms: Terms) -> sums.Dealt:
        """Keys and shares of all participants, and that all can use them."""
        shown = sums.collect_advertisements(terms, {c: text(self.advertise(c, terms)) for c in terms.by_client})
        dealt = sums.collect_shares(shown, {c: text(self.step(c, SHARE, terms, shown.message())) for c in shown.shown})
        checks = {c: text(self.step(c, CHECK, terms, dealt.message(c))) for c in dealt.dealt}
        return sums.collect_checks(dealt, checks)

    def train(
        self, client: int, terms: Terms, sealed: str, *, spec: UpdateSpec | None = None, round_: int = 0, **changes: Any
    ) -> Response:
        """The answer to a train request; without a text of sealed shares or terms, it holds none."""
        request = self.request(terms.run, round_ or terms.round, spec or self.spec)
        return self.ask(client, replace(request, own={kinds.TERMS: terms.text(), kinds.SEALED: sealed}), **changes)

    def upload(self, terms: Terms, *, client: int = 1, **options: Any) -> Response:
        """A vault's answer to a train request, in an attempt that all begin."""
        return self.train(client, terms, self.open(terms).message(client), **options)

    def close(self, dealt: sums.Dealt, answers: Mapping[int, Response]) -> sums.Recovered:
        """The sum of these answers to train requests."""
        terms = dealt.before.terms
        masked = sums.collect_masked(dealt, {client: vector(answer_) for client, answer_ in answers.items()})
        confirmed = {c: text(self.step(c, CONFIRM, terms, masked.message())) for c in masked.survivors}
        signed = sums.collect_signatures(masked, confirmed)
        return sums.recover(signed, {c: text(self.step(c, REVEAL, terms, signed.message())) for c in signed.signatures})

    def size(self, client: int) -> int:
        return next(entry.num_records for entry in self.entries(client) if entry.num_records)

    def entries(self, client: int) -> list[Entry]:
        """The vault's ledger."""
        with reading(self.vaults[client].ledger) as db:
            return list(db.entries())

    def charges(self, client: int, run: str) -> list[Entry]:
        """What a run was charged in the vault's ledger."""
        return [entry for entry in self.entries(client) if entry.phase == "charged" and entry.run == run]


class Refused(Exception):  # noqa: N818
    """A vault refused, in these words."""


def check_allowed(response: Response) -> None:
    if response.code:
        raise Refused(response.reason)


def text(response: Response) -> str:
    """The text of an exchange's answer."""
    check_allowed(response)
    return str(response.fields["message"])


def vector(response: Response) -> np.ndarray:
    """The masked vector in the answer to a train request."""
    check_allowed(response)
    words = response.arrays[kinds.ADAPTER][kinds.SUM]
    return words.view(words.dtype.str.replace("i", "u"))
