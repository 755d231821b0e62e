"""Noticing that the node's ledger is an old copy: what the node has signed is kept in more places than the ledger.

Its folder, the coordinator, its peers and, if its operator names one, a counter file elsewhere keep the receipts of its
charges. Before each charge, what they show is compared with the ledger. Only receipts under the node's own signature
count, by its vault's key or by one that it had before: nothing else can close the node, or charge it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fedpriv.errors import InputError, LedgerError
from fedpriv.files import replace_file, sync_folder, write_new
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.ledger.receipts import Chain, Receipt, ReceiptLog, chain_of, from_text

log = logging.getLogger(__name__)

# Enough for a holder that registers further data; what a peer signs must not fill this node's disk.
_DATA_SETS_OF_A_PEER = 4


@dataclass(frozen=True)
class ReceiptWatch:
    """A node's own receipts, and where they are kept.

    Attributes:
        key: the vault's private key, which signs them.
        kept: the log in the node's folder.
        of_peers: the file with the newest ones of its peers.
        counter_file: another log, on a disk that is not restored with the ledger; None if there is none.
        earlier_keys: the file with the public lines of the node's earlier keys; None if there is none.
        lost_key: whether the private key was gone from the start, so that only its public line is known.
    """

    key: Path
    kept: Path
    of_peers: Path
    counter_file: Path | None = None
    earlier_keys: Path | None = None
    lost_key: bool = False

    @staticmethod
    def of(settings: VaultSettings) -> ReceiptWatch | None:
        """That of a node's folder; None if its vault has no key."""
        return ReceiptWatch.in_folder(settings) if settings.key.is_file() else None

    @staticmethod
    def in_folder(settings: VaultSettings) -> ReceiptWatch:
        """That of a node's folder, whose vault may have lost its key: then it signs nothing."""
        logs = settings.receipts, settings.receipts_of_peers, settings.counter_file, settings.earlier_keys
        return ReceiptWatch(settings.key, *logs, lost_key=not settings.key.is_file())

    @staticmethod
    def beside(ledger: Path, counter_file: Path | None = None) -> ReceiptWatch:
        """That of a ledger without a node's folder: its key and its receipts are files next to it."""
        key, kept, of_peers = (Path(f"{ledger}.{name}") for name in ("key", "receipts", "receipts-of-peers"))
        return ReceiptWatch(key, kept, of_peers, counter_file)

    @cached_property
    def signer(self) -> str:
        """The public line of the vault's key, also of one that was lost."""
        return keys.read_public_line(keys.public_path(self.key)) if self.lost_key else keys.public_line(self.key)

    @cached_property
    def signers(self) -> tuple[str, ...]:
        """The public lines whose receipts are the node's own: of its vault's key, and of the keys before it."""
        return (self.signer, *(keys.read_lines(self.earlier_keys) if self.earlier_keys else ()))

    def lost(self, chains: Iterable[Chain], shown: str = "") -> Receipt | None:
        """The newest receipt of a charge that the node has signed and its ledger lacks; None if the ledger lacks none.

        A ledger that lacks the data set itself, since it was made again, has lost all that was charged to it.

        Args:
            chains: of all data sets, as the ledger has them.
            shown: a receipt that somebody claims to be the node's newest, as text; empty for none.

        Raises:
            ValueError: `shown` is malformed.
            LedgerError: the counter file is missing, cannot be written or holds no receipt of this node; the one in the
                folder cannot be read; or the key was exchanged since the start.
        """
        self._check_key()
        self._check_counter_file()
        found = [from_text(shown)] if shown else []
        try:
            for each in self._logs:
                found += each.read()
        except OSError as error:
            raise LedgerError(f"{error.filename}: {error.strerror}; nothing is released") from None
        has = frozenset[str]().union(*(chain.digests for chain in chains))
        lost = [each for each in found if each.counter and each.digest not in has and self._is_own(each)]
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
            LedgerError: it cannot be written, the counter file cannot be used, or the key was exchanged,
                so nothing may be released.
        """
        self._check_key()
        self._check_counter_file()
        newest = replace(chain.newest, signer=self.signer)
        try:
            found = [each.find(newest) for each in self._logs]
            receipt = next(filter(None, found), None) or newest.signed(self.key)
            for each, known in zip(self._logs, found, strict=True):
                if known is None:
                    each.add(receipt)
        except OSError as error:
            raise LedgerError(f"{error.filename}: {error.strerror}; nothing is released without its receipt") from None
        return receipt

    def told(self, texts: Iterable[str], peers: Collection[str]) -> None:
        """Keep what peers pass on: this node's own receipts, and the newest of each peer that has signed it.

        Args:
            texts: whatever peers sent as receipts.
            peers: public lines of those whose receipts are kept.

        Raises:
            OSError: a file cannot be written.
        """
        for text in texts:
            try:
                receipt = from_text(text)
            except ValueError:
                continue
            if self._is_own(receipt):
                self.keep(receipt)
            elif receipt.signer in peers and receipt.is_of(receipt.signer):
                self._keep_of_peer(receipt)

    def passed_on(self, own: Receipt, peers: Sequence[str], most: int) -> list[str]:
        """The receipts for the node's peers: its own newest one, and the newest of some of them, at most so many.

        Args:
            own: of the last charge.
            peers: public lines, of which the first ones count.
            most: receipts.
        """
        kept = sorted(ReceiptLog(self.of_peers).read(), key=lambda each: each.counter, reverse=True)
        return [each.text() for each in (own, *(each for peer in peers for each in kept if each.signer == peer))][:most]

    def _keep_of_peer(self, receipt: Receipt) -> None:
        """Replace the older receipt of the same data set; a peer has room for a few data sets, the last ones."""
        kept = list(ReceiptLog(self.of_peers).read())
        same = [each for each in kept if (each.signer, each.data_set) == (receipt.signer, receipt.data_set)]
        if any(each.counter >= receipt.counter for each in same):
            return
        mine = [each for each in kept if each.signer == receipt.signer and each not in same]
        dropped = [*same, *mine[: max(0, len(mine) + 1 - _DATA_SETS_OF_A_PEER)]]
        lines = [each.text() for each in (*(each for each in kept if each not in dropped), receipt)]
        replace_file(self.of_peers, "".join(f"{line}\n" for line in lines).encode(), mode=0o600)

    def make_key(self) -> None:
        """Make the key, unless there is one, or there are receipts, which one that is lost has signed."""
        if not (self.key.exists() or self.kept.exists()):
            keys.make_key_pair(self.key)

    def begin_counter_file(self, ledger: Path) -> None:
        """Make the counter file, with the receipt of the last charge in the ledger.

        Raises:
            InputError: none is named, it exists, it cannot be written, or no data are registered.
            LedgerError: the ledger cannot be read.
        """
        path = self.counter_file
        if path is None:
            raise InputError("counter_file: the settings name none")
        with reading(ledger) as db:
            data_set = db.data_set(None)
            if data_set is None:
                raise InputError(f"counter_file = {path}: {ledger} holds no data set whose charges it could count")
            receipt = chain_of(db, data_set.id).newest.signed(self.key)
        if path.exists():
            raise InputError(f"counter_file = {path}: exists; a new one would forget what it has counted")
        try:
            write_new(path, f"{receipt.text()}\n".encode(), mode=0o600)
            sync_folder(path)
        except OSError as error:
            raise InputError(f"counter_file = {path}: {error.strerror}") from None

    @property
    def _logs(self) -> list[ReceiptLog]:
        counter = [ReceiptLog(self.counter_file, may_create=False)] if self.counter_file else []
        return [ReceiptLog(self.kept), *counter]

    def _is_own(self, receipt: Receipt) -> bool:
        return any(receipt.is_of(signer) for signer in self.signers)

    def _check_key(self) -> None:
        if self.lost_key:
            return
        try:
            newest = keys.public_line(self.key)
        except InputError as error:
            raise LedgerError(f"{error}; nothing is released") from None
        if newest != self.signer:
            raise LedgerError(
                f"key = {self.key}: was exchanged since the vault's start; restart it; nothing is released"
            )

    def _check_counter_file(self) -> None:
        path = self.counter_file
        if path is None:
            return
        if not path.is_file():
            reason = "is missing; put it back, or begin one, as `fedpriv node begin-counter` does"
        elif not os.access(path, os.R_OK | os.W_OK):
            reason = "cannot be written"
        elif not any(map(self._is_own, ReceiptLog(path).read())):
            reason = "holds no receipt of this node"
        else:
            return
        raise LedgerError(f"counter_file = {path}: {reason}; nothing is released")
