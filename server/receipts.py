"""The receipts of charges that nodes have signed: kept over runs, and the newest shown to its node in every request.

So a node whose ledger was restored from an old copy learns it from the coordinator, and refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from flwr.app import Message

from fedpriv import protocol
from fedpriv.config import RunConfig
from fedpriv.deployment import keys
from fedpriv.errors import InputError, LedgerError
from fedpriv.ledger.receipts import ReceiptLog, from_text
from server.registration import Nodes

log = logging.getLogger("flwr")


class Receipts:
    """The newest receipt of each node's data set; only what a node's registered key has signed counts.

    Args:
        path: of the log, to which every new receipt is added.
        signers: {client: public lines of its registered key, and of those before it}; of a client without any nothing
            is kept.
        nodes: {client: (node id, registration)}.
    """

    def __init__(self, path: Path, signers: Mapping[int, Sequence[str]], nodes: Nodes) -> None:
        self._log, self._signers = ReceiptLog(path), signers
        self._data_sets = {client: registration.data_set for client, (_, registration) in nodes.items()}
        kept = self._log.newest()
        # Of several with one counter the first, that of the key which is registered now.
        self._newest = {
            client: max(
                filter(None, (kept.get((line, self._data_sets[client])) for line in lines)),
                key=lambda receipt: receipt.counter,
                default=None,
            )
            for client, lines in signers.items()
        }
        for client, (_, registration) in nodes.items():
            self._add(client, registration.receipt)

    @staticmethod
    def of(config: RunConfig, run_folder: Path, nodes: Nodes) -> Receipts:
        """Those beside the ledger of several runs; where each run has its own, beside their folders."""
        path = Path(f"{config.ledger}.receipts") if config.ledger else run_folder.parent / "receipts.jsonl"
        return Receipts(path, _signers(config, nodes), nodes)

    def shown_to(self, client: int) -> dict[str, str]:
        """What a request to the client holds beside its instruction; empty for a node that has sent no receipt."""
        newest = self._newest.get(client)
        return {} if newest is None else {protocol.RECEIPT: newest.text()}

    def take(self, client: int, reply: Message) -> None:
        """Keep the receipt in a client's sound reply, if it is newer than the one that is known.

        Raises:
            LedgerError: it cannot be written.
        """
        self._add(client, str(reply.content.config_records[protocol.RELEASE].get(protocol.RECEIPT, "")))

    def _add(self, client: int, text: str) -> None:
        if not text or client not in self._signers:
            return
        receipt, known = from_text(text), self._newest.get(client)
        if receipt.data_set != self._data_sets[client] or not receipt.is_of(self._signers[client][0]):
            log.warning("client %s: its receipt is not of its data set and key, and is not kept", client)
            return
        if known is not None and receipt.counter <= known.counter:
            if receipt.digest != known.digest and receipt.counter == known.counter:
                log.warning("client %s: signed two different charges as number %s", client, receipt.counter)
            if receipt.digest != known.digest or receipt.signer == known.signer:
                return
        self._newest[client] = receipt
        try:
            self._log.add(receipt)
        except OSError as error:
            raise LedgerError(f"{self._log.path}: {error.strerror}; the receipts of nodes cannot be kept") from None


def _signers(config: RunConfig, nodes: Nodes) -> dict[int, tuple[str, ...]]:
    """{client: the public lines of its registered key, and of those before it}; without `node_keys` nobody's."""
    if not config.node_keys:
        return {}
    signers = {}
    for client in nodes:
        try:
            file = Path(config.node_keys) / f"{client}.pub"
            signers[client] = (keys.read_public_line(file), *keys.read_lines(file.with_suffix(keys.EARLIER)))
        except InputError as error:
            log.warning("client %s: its receipts are not kept: %s", client, error)
    return signers
