"""Noticing that the node's ledger is an old copy: what the node has signed is kept in more places than the ledger.

Its folder, the coordinator, its peers and, if its operator names one, a counter file elsewhere keep the receipts of its
charges. Before each charge, what they show is compared with the ledger. Only receipts under the node's own signature
count: nothing else can close the node, or charge it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fedpriv.deployment import keys
from fedpriv.errors import InputError, LedgerError
from fedpriv.ledger import entries
from fedpriv.ledger.reader import reading
from fedpriv.ledger.receipts import Chain, Receipt, ReceiptLog, chain_of, from_text
from fedpriv.vault.settings import VaultSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Watch:
    """A node's own receipts, and where they are kept.

    Attributes:
        key: the node's private key, which signs them.
        kept: the log in the node's folder, which also holds those of its peers.
        counter_file: another log, on a disk that is not restored with the ledger; None if there is none.
    """

    key: Path
    kept: Path
    counter_file: Path | None = None

    @staticmethod
    def of(settings: VaultSettings) -> Watch | None:
        """That of a node's folder; None if it has no key."""
        if not settings.key.is_file():
            return None
        return Watch(settings.key, settings.receipts, settings.counter_file)

    @cached_property
    def signer(self) -> str:
        """The public line of the node's key."""
        return keys.public_line(self.key)

    def lost(self, chain: Chain, shown: str = "") -> Receipt | None:
        """The newest receipt that the node has signed and its ledger lacks; None if the ledger lacks none.

        Args:
            chain: of the data set in question, as the ledger has it.
            shown: a receipt that somebody claims to be the node's newest, as text; empty for none.

        Raises:
            ValueError: `shown` is malformed.
            LedgerError: the counter file is missing, cannot be written or holds no receipt of this node.
        """
        self._check_counter_file()
        found = [from_text(shown)] if shown else []
        for path in self._paths:
            found += ReceiptLog(path).read()
        data_set, digests = chain.newest.data_set, chain.digests
        lost = [
            each
            for each in found
            if each.data_set == data_set and each.digest not in digests and each.is_of(self.signer)
        ]
        return max(lost, key=lambda each: each.counter, default=None)

    def keep(self, receipt: Receipt) -> None:
        """Keep a receipt in the node's folder, if it is not there yet.

        Raises:
            OSError: the file cannot be written.
        """
        kept = ReceiptLog(self.kept)
        if kept.find(receipt) is None:
            kept.add(receipt)

    def sign(self, chain: Chain) -> Receipt:
        """The receipt of the last charge; it is wherever the node keeps its receipts when this returns.

        Raises:
            LedgerError: it cannot be written, so nothing may be released.
        """
        newest = replace(chain.newest, signer=self.signer)
        try:
            found = [ReceiptLog(path).find(newest) for path in self._paths]
            receipt = next(filter(None, found), None) or newest.signed(self.key)
            for path, known in zip(self._paths, found, strict=True):
                if known is None:
                    ReceiptLog(path).add(receipt)
        except OSError as error:
            raise LedgerError(f"{error.filename}: {error.strerror}; nothing is released without its receipt") from None
        return receipt

    def begin_counter_file(self, ledger: Path) -> None:
        """Make the counter file, with the receipt of the last charge in the ledger.

        Raises:
            InputError: none is named, it exists, it cannot be written, or no data are registered.
            LedgerError: the ledger cannot be read.
        """
        path = self.counter_file
        if path is None:
            raise InputError("counter_file: vault.toml names none")
        with reading(ledger) as db:
            data_set = entries.data_set(db, None)
            if data_set is None:
                raise InputError(f"counter_file = {path}: {ledger} holds no data set whose charges it could count")
            chain = chain_of(db, data_set.id)
        try:
            path.touch(mode=0o600, exist_ok=False)
            ReceiptLog(path).add(chain.newest.signed(self.key))
        except FileExistsError:
            raise InputError(f"counter_file = {path}: exists; a new one would forget what it has counted") from None
        except OSError as error:
            raise InputError(f"counter_file = {path}: {error.strerror}") from None

    @property
    def _paths(self) -> list[Path]:
        return [self.kept, *([self.counter_file] if self.counter_file else [])]

    def _check_counter_file(self) -> None:
        path = self.counter_file
        if path is None:
            return
        if not path.is_file():
            reason = "is missing; put it back, or see `python -m clients.deploy begin-counter`"
        elif not os.access(path, os.R_OK | os.W_OK):
            reason = "cannot be written"
        elif not any(each.is_of(self.signer) for each in ReceiptLog(path).read()):
            reason = "holds no receipt of this node"
        else:
            return
        raise LedgerError(f"counter_file = {path}: {reason}; nothing is released")
