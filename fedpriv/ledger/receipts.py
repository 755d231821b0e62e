"""Receipts: a node signs them for its charges, so that others can tell it when its ledger is an old copy.

The charges of a data set form a chain of their own. Each link is the SHA-256 of the one before and of what was charged:
the release's key, its event, its noise. It holds no hash of content, no time and no size, so two nodes whose records
differ have the same links. A ledger that was restored with its head is intact, but a link that the node has signed
since is not in its chain, or another stands in its place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from fedpriv.deployment import keys
from fedpriv.files import sync_folder
from fedpriv.ledger._head import EMPTY_CHAIN
from fedpriv.ledger.entries import RECOVERED, LedgerConnection

FIELD = "receipt"
"""The field of a message, and of a journal's event, that holds a receipt as text."""

# Keeps a signature of a receipt from standing for anything else that the vault's key signs.
_PURPOSE = "fedpriv charge 1"

_MAX_CHARACTERS = 4000
_NUMBERS = {"counter", "round"}
_TEXTS = {"data_set", "previous", "run", "client", "request", "event", "noise_source", "signer", "signature"}


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """One link of a data set's chain of charges, and who vouches for it.

    Attributes:
        data_set: that was charged.
        counter: the number of charges so far; 0 for the registration, which begins the chain.
        previous: digest of the link before, in hex; zeros for the registration.
        run, client, round, request: the key of the release; empty for the registration, and where it is unknown.
        event: that was charged, as JSON; empty for the registration, and for releases of which nothing else is known.
        aggregate_scale: as charged; None if the `aggregate` view does not hold.
        noise_source: `secure` or `seeded`.
        signer: public line of the vault's key; empty as long as nobody has signed.
        signature: of `statement`, in base64.
    """

    data_set: str
    counter: int = 0
    previous: str = EMPTY_CHAIN
    run: str = ""
    client: str = ""
    round: int = 0
    request: str = ""
    event: str = ""
    aggregate_scale: float | None = None
    noise_source: str = ""
    signer: str = ""
    signature: str = ""

    @property
    def statement(self) -> bytes:
        """The bytes that are signed: everything but who signs."""
        content = {name: getattr(self, name) for name in Receipt.__annotations__.keys() - {"signer", "signature"}}
        return json.dumps({"purpose": _PURPOSE, **content}, sort_keys=True).encode()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the statement, in hex: the head of the chain that ends here."""
        return hashlib.sha256(self.statement).hexdigest()

    def signed(self, private_key: Path) -> Self:
        """The receipt under the node's key.

        Raises:
            InputError: the key cannot be used.
        """
        return replace(self, signer=keys.public_line(private_key), signature=keys.sign(private_key, self.statement))

    def is_of(self, signer: str) -> bool:
        """Whether the holder of this public line has signed the receipt."""
        return self.signer == signer != "" and keys.verify(signer, self.statement, self.signature)

    def text(self) -> str:
        """The receipt as JSON, in one line."""
        return json.dumps(asdict(self), sort_keys=True)


def from_text(text: object) -> Receipt:
    """The receipt that `Receipt.text` wrote. Its signature is not checked here; `is_of` does that.

    Raises:
        ValueError: one line that says what is malformed.
    """
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS:
        raise ValueError(f"{FIELD}: must be a text of at most {_MAX_CHARACTERS} characters")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{FIELD}: is not JSON") from None
    if not isinstance(values, dict) or values.keys() != Receipt.__annotations__.keys():
        raise ValueError(f"{FIELD}: must be an object with {', '.join(Receipt.__annotations__)}")
    for name, value in values.items():
        if name in _NUMBERS and not (type(value) is int and 0 <= value < 2**53):
            raise ValueError(f"{FIELD}: {name}: must be an integer from 0 to 2^53 - 1")
        if name in _TEXTS and type(value) is not str:
            raise ValueError(f"{FIELD}: {name}: must be a text")
    if values["aggregate_scale"] is not None and type(values["aggregate_scale"]) is not float:
        raise ValueError(f"{FIELD}: aggregate_scale: must be a number or null")
    return Receipt(**values)


@dataclass(frozen=True)
class Chain:
    """The chain of a data set's charges, as a ledger has it.

    Attributes:
        links: in order, unsigned; the first one stands for the registration.
        replaced: digests of links that the node has signed and lost; entries of phase `recovered` stand for them.
    """

    links: tuple[Receipt, ...]
    replaced: frozenset[str]

    @property
    def newest(self) -> Receipt:
        """The last link."""
        return self.links[-1]

    @property
    def digests(self) -> frozenset[str]:
        """The digests of all links that the ledger has, or stands in for."""
        return self.replaced.union(link.digest for link in self.links)


def chain_of(db: LedgerConnection, data_set: str) -> Chain:
    """The chain of a data set's charges in an open ledger."""
    links, replaced = [Receipt(data_set=data_set)], set()
    digest = links[0].digest
    for entry in db.charges(data_set):
        note = json.loads(entry.note) if entry.phase == RECOVERED and entry.note else {}
        replaced.add(note.get("replaces", ""))
        link = Receipt(
            data_set=data_set,
            counter=len(links),
            previous=digest,
            run=entry.run or "",
            client=entry.client if entry.run else "",
            round=entry.round or 0,
            request=entry.request or note.get("request", ""),
            event=entry.event or "",
            aggregate_scale=entry.aggregate_scale,
            noise_source=entry.noise_source or "",
        )
        links.append(link)
        digest = link.digest
    return Chain(tuple(links), frozenset(replaced))


def chains_of(db: LedgerConnection) -> list[Chain]:
    """The chains of all data sets in an open ledger, in the order of their registration."""
    return [chain_of(db, data_set.id) for data_set in db.data_sets()]


class ReceiptLog:
    """A file of receipts, one a line, to which lines are only ever added, durably; what is no receipt is passed over.

    A journal is such a file too: its event `charged` holds the receipt in a field.

    Args:
        path: of the file.
        may_create: whether `add` may make a file that is missing.
    """

    def __init__(self, path: Path, *, may_create: bool = True) -> None:
        self.path, self._may_create = path, may_create

    def read(self) -> Iterator[Receipt]:
        """The receipts in their order; nothing is checked but their form.

        Raises:
            OSError: the file is there and cannot be read.
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for line in file:
                try:
                    values: Any = json.loads(line)
                    held = values.get(FIELD) if isinstance(values, dict) else None
                    yield from_text(line.decode() if held is None else held)
                except (ValueError, RecursionError):
                    continue

    def find(self, receipt: Receipt) -> Receipt | None:
        """The signed receipt of the same charge and the same signer, if the file has it."""
        for each in self.read():
            same = (each.data_set, each.counter, each.signer) == (receipt.data_set, receipt.counter, receipt.signer)
            if same and each.digest == receipt.digest and each.is_of(receipt.signer):
                return each
        return None

    def newest(self) -> dict[tuple[str, str], Receipt]:
        """{(signer, data set): its receipt with the largest counter, and of several the first}."""
        found: dict[tuple[str, str], Receipt] = {}
        for each in self.read():
            key = each.signer, each.data_set
            if key not in found or each.counter > found[key].counter:
                found[key] = each
        return found

    def add(self, receipt: Receipt) -> None:
        """Add a receipt; it is on disk when this returns.

        Raises:
            OSError: the file cannot be written.
        """
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if self._may_create else 0), 0o600)
        try:
            # A line that a crash cut short must not swallow this one.
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            line = b"\n" * torn + receipt.text().encode() + b"\n"
            while line:  # a disk that is nearly full takes a part
                line = line[os.write(file, line) :]
            os.fsync(file)
            if not size:
                sync_folder(self.path)
        finally:
            os.close(file)
