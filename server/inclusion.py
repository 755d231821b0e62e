"""The coordinator's signed records of what each round's sum was made of, and the part that it shows each node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedpriv.config import RunConfig
from fedpriv.errors import LedgerError
from fedpriv.holder.wire import kinds
from fedpriv.learning.adapters import Adapter
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.entries import Queries
from fedpriv.privacy.ledger.inclusion import Leaf, Sum, digest_of_sum, kept_in
from fedpriv.privacy.ledger.receipts import append_line
from fedpriv.runs import USABLE, files
from fedpriv.texts import printable
from server.exchange import Vector
from server.round import Round

# After these a node may not have seen what it was shown with the request.
_MAY_BE_UNSEEN = ("no reply", "failed", "left out", "not asked")
_LONGEST_REASON = 120


class Inclusions:
    """A run's records of sums, and which of them each client's node is still to see.

    Args:
        config: of the run.
        run: its random id.
        path: of the records, one a line; those of an interrupted run are read, and of one round the last counts.
        ledger: of the coordinator, which knows the rounds that every client was charged for.
    """

    def __init__(self, config: RunConfig, run: str, path: Path, ledger: Queries) -> None:
        self._config, self._run, self._path = config, run, path
        self._key = keys.coordinators(Path(config.node_keys))
        self._sums = {each.record.round: each for each in kept_in(path, Sum)}
        self._charged: defaultdict[int, set[int]] = defaultdict(set)
        for key, _ in ledger.releases_of(None, run):
            self._charged[int(key.client)].add(key.round)

    @staticmethod
    def of(config: RunConfig, run: str, run_folder: Path, ledger: Queries | None) -> Inclusions | None:
        """Those of a run whose coordinator has a key beside `node_keys`; None of any other."""
        if ledger is None or not config.node_keys or not keys.coordinators(Path(config.node_keys)).is_file():
            return None
        return Inclusions(config, run, run_folder / files.INCLUSIONS, ledger)

    def shown_to(self, client: int) -> dict[str, str]:
        """The proofs that the client alone is told: of the last round in which its node answered, and of those since.

        Where it answered the last one, as nearly always, that is one proof.
        """
        rounds = sorted(self._charged[client] & self._sums.keys(), reverse=True)
        shown: list[str] = []
        for round_ in rounds:
            proof = self._sums[round_].proof(client)
            shown.insert(0, proof.text())
            if not proof.leaf.reason.startswith(_MAY_BE_UNSEEN):
                break
        return {kinds.INCLUDED: "\n".join(shown)} if shown else {}

    def note(
        self, round_: Round, weights: Mapping[int, float], contents: Mapping[int, Adapter | Vector], objection: str
    ) -> None:
        """Sign and keep the record of a round that is settled.

        Args:
            round_: of which everything was collected.
            weights: {client: to which its share of the sum is in proportion}, of every client of the run.
            contents: {client: its upload} of those in the sum, in order.
            objection: why there is no sum; empty if there is one.

        Raises:
            LedgerError: it cannot be written, so nobody is asked again.
        """
        leaves = [self._leaf(p, round_, weights, objection) for p in range(self._config.num_clients)]
        arrays = [(_arrays(content), weights[client]) for client, content in contents.items() if not objection]
        made = Sum.of(
            leaves,
            run=self._run,
            round=round_.number,
            asked={request.digest for request in round_.requests.values()},
            sum=digest_of_sum(arrays),
            key=self._key,
        )
        try:
            append_line(self._path, made.text())
        except OSError as error:
            raise LedgerError(f"{self._path}: {error.strerror}; the record of a round cannot be kept") from None
        self._sums[round_.number] = made
        for client in round_.messages:
            self._charged[client].add(round_.number)

    def _leaf(self, position: int, round_: Round, weights: Mapping[int, float], objection: str) -> Leaf:
        upload, status = round_.uploads.get(position), round_.statuses.get(position)
        if upload is not None and not objection:
            return Leaf(position=position, reply=upload.digest, weight=weights[position])
        if status is None:
            reason = "not asked"
        elif status.name in USABLE and objection:
            reason = f"no sum: {objection}"
        elif status.name == "no reply":
            reason = f"no reply within {self._config.round_seconds:g} s"
        else:
            reason = f"{status.name}: {status.detail}" if status.detail else status.name
        return Leaf(position=position, reason=printable(reason)[:_LONGEST_REASON])


def _arrays(content: Adapter | Vector) -> dict[str, np.ndarray]:
    """An upload as its frame has it where no codec made it smaller."""
    if isinstance(content, np.ndarray):
        return {kinds.SUM: content}
    return {name: tensor.numpy() for name, tensor in content.items()}
