"""Receipts: a node signs them for its charges, so that an old copy of its ledger is noticed, and can be recovered.

The charges of a data set form a chain of their own. Each link is the SHA-256 of the one before and of what was charged:
the release's key, its event, its noise. It holds no hash of content, no time and no size, so two nodes whose records
differ have the same links. A ledger that was restored with its head is intact, but a link that the node has signed
since is not in its chain, or another stands in its place.

Recovery (`fedpriv ledger recover`) finds the charges that a restored ledger lacks, as far as others know. A receipt
under the node's own signature proves a charge, and all charges before it. Where the detail of a proven charge is
nowhere to be found, the data set counts as spent in full: it was never charged beyond its budget. A ledger of somebody
else, such as the coordinator's, proves nothing. What it claims is charged in addition, so a false claim costs the node
budget and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from fedpriv.errors import InputError
from fedpriv.files import sync_folder
from fedpriv.privacy.accounting import events
from fedpriv.privacy.accounting.gaussian import MAX_HOLDERS
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.entries import RECOVERED, DataSet, LedgerConnection
from fedpriv.privacy.ledger.head_file import EMPTY_CHAIN
from fedpriv.privacy.ledger.reader import reading, verify

FIELD = "receipt"
"""The field of a message, and of a journal's event, that holds a receipt as text."""

# Keeps a signature of a receipt from standing for anything else that the vault's key signs.
_PURPOSE = "fedpriv charge 1"

_SQLITE = b"SQLite format 3\0"
_MAX_CHARACTERS = 4000
_OPTIONAL = "other_holders"
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
        other_holders: as charged, see `Release`; left out of the statement where there are none, as in older receipts.
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
    other_holders: tuple[tuple[float, float], ...] = ()
    signer: str = ""
    signature: str = ""

    @property
    def statement(self) -> bytes:
        """The bytes that are signed: everything but who signs."""
        content = {name: value for name, value in self._content.items() if name not in ("signer", "signature")}
        return json.dumps({"purpose": _PURPOSE, **content}, sort_keys=True).encode()

    @property
    def _content(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != _OPTIONAL or value}

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
        return json.dumps(self._content, sort_keys=True)


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
    if not isinstance(values, dict) or values.keys() | {_OPTIONAL} != Receipt.__annotations__.keys():
        raise ValueError(f"{FIELD}: must be an object with {', '.join(Receipt.__annotations__)}")
    for name, value in values.items():
        if name in _NUMBERS and not (type(value) is int and 0 <= value < 2**53):
            raise ValueError(f"{FIELD}: {name}: must be an integer from 0 to 2^53 - 1")
        if name in _TEXTS and type(value) is not str:
            raise ValueError(f"{FIELD}: {name}: must be a text")
    if values["aggregate_scale"] is not None and type(values["aggregate_scale"]) is not float:
        raise ValueError(f"{FIELD}: aggregate_scale: must be a number or null")
    return Receipt(**values | {_OPTIONAL: _holders(values.get(_OPTIONAL, []))})


def _holders(values: object) -> tuple[tuple[float, float], ...]:
    """Pairs (s_j, q_j) as JSON has them."""
    pairs: list[Any] = values if isinstance(values, list) else [values]
    if not all(isinstance(pair, list) and [type(value) for value in pair] == [float, float] for pair in pairs):
        raise ValueError(f"{FIELD}: {_OPTIONAL}: must be a list of pairs of numbers")
    holders = tuple((s, q) for s, q in pairs)
    if len(holders) >= MAX_HOLDERS or not all(0 < s < math.inf and 0 <= q <= 1 for s, q in holders):
        raise ValueError(f"{FIELD}: {_OPTIONAL}: must be at most {MAX_HOLDERS - 1} pairs of s > 0 and q in [0, 1]")
    return holders


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
        note = json.loads(entry.note) if entry.note else {}
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
            other_holders=tuple((s, q) for s, q in note.get(_OPTIONAL, ())),
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
        append_line(self.path, receipt.text(), may_create=self._may_create)


def append_line(path: Path, text: str, *, may_create: bool = True) -> None:
    """Append a line to a file; it is on disk when this returns.

    Raises:
        OSError: the file cannot be written, or is missing and may not be created.
    """
    file = os.open(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if may_create else 0), 0o600)
    try:
        # A line that a crash cut short must not swallow this one.
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        line = b"\n" * torn + text.encode() + b"\n"
        while line:  # a disk that is nearly full takes a part
            line = line[os.write(file, line) :]
        os.fsync(file)
        if not size:
            sync_folder(path)
    finally:
        os.close(file)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """The charges of a data set that a ledger lacks.

    Attributes:
        proven: links of another state of its chain, each under the node's signature or before one that is, in order.
        claimed: charges that a ledger among the sources has and nothing proves.
        unknown: digests of proven links of which nobody knows more.
    """

    data_set: DataSet
    proven: tuple[Receipt, ...]
    claimed: tuple[Receipt, ...]
    unknown: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.proven or self.claimed or self.unknown)

    def lines(self, reason: str) -> Iterator[dict[str, Any]]:
        """The entries with which a ledger charges it; what is proven comes first, since it may continue the chain.

        A link's request is in the note: a coordinator that makes it again gets another release, and pays for it.
        """
        replaced = [{"replaces": link.digest} for link in self.proven] + [{} for _ in self.claimed]
        for link, replaces in zip((*self.proven, *self.claimed), replaced, strict=True):
            others = {_OPTIONAL: link.other_holders} if link.other_holders else {}
            yield {
                **self._common,
                "client": link.client,
                "run": link.run or None,
                "round": link.round,
                "event": link.event or None,
                "rho_bar": 1.0,
                "aggregate_scale": link.aggregate_scale,
                "noise_source": link.noise_source,
                "note": json.dumps({"request": link.request, "reason": reason, **replaces, **others}, sort_keys=True),
            }
        for digest in self.unknown:
            note = json.dumps({"reason": reason, "replaces": digest}, sort_keys=True)
            yield {**self._common, "client": self.data_set.client, "note": note}

    @property
    def _common(self) -> dict[str, Any]:
        return {"phase": RECOVERED, "data_set": self.data_set.id}


def missing(db: LedgerConnection, sources: Iterable[Path], signers: Collection[str]) -> list[Missing]:
    """The charges that each data set of a ledger lacks, by what these sources know.

    Args:
        sources: logs of receipts, journals of the node and ledgers, in any order.
        signers: public lines of the keys that have signed for the node.

    Raises:
        InputError: a source is neither, or cannot be read, or holds an event that is unknown here or of another unit.
        LedgerError: a ledger among the sources is broken.
    """
    receipts: list[Receipt] = []
    ledgers: list[Path] = []
    for path in sources:
        if _is_ledger(path):
            ledgers.append(path)
        else:
            receipts += _receipts_in(path)
    signed = [each for each in receipts if each.signer in signers and each.is_of(each.signer)]
    known = db.data_sets()
    orphans = [each for each in signed if each.counter and each.data_set not in {data_set.id for data_set in known}]
    if orphans and not known:
        raise InputError(
            "--from: proves charges, but this ledger has no data set to charge; register the records first"
        )
    return [_of_data_set(db, each, signed, orphans if each == known[-1] else [], ledgers) for each in known]


def _is_ledger(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise InputError(f"--from {path}: {error.strerror}; give a log of receipts, a journal or a ledger") from None


def _receipts_in(path: Path) -> list[Receipt]:
    if not (found := list(ReceiptLog(path).read())):
        raise InputError(f"--from {path}: holds no receipt, and is no ledger")
    return found


def _of_data_set(
    db: LedgerConnection,
    data_set: DataSet,
    receipts: Sequence[Receipt],
    orphans: Sequence[Receipt],
    ledgers: Sequence[Path],
) -> Missing:
    """The charges that it lacks, and those of data sets that the ledger lost, the orphans: their records may be its."""
    own = chain_of(db, data_set.id)
    others = {path: _links_in(path, data_set.id) for path in ledgers}
    lost = {each.data_set for each in orphans}
    unsigned = [link for path in ledgers for id_ in (data_set.id, *lost) for link in _links_in(path, id_)]
    signed = [each for each in receipts if each.data_set == data_set.id]
    has = own.digests | {Receipt(data_set=id_).digest for id_ in lost}
    proven, unknown = _proven(has, [*signed, *orphans], unsigned)
    known = Counter(_content(link) for link in (*own.links, *proven))
    claims: Counter[Receipt] = Counter()
    for links in others.values():
        # The largest number that any ledger has of equal charges, not their sum: each knows a part of the same.
        claims |= Counter(_content(link) for link in links if link.event) - known
    found = Missing(data_set=data_set, proven=tuple(proven), claimed=tuple(claims.elements()), unknown=tuple(unknown))
    _check_events(own, found)
    return found


def _links_in(path: Path, data_set: str) -> list[Receipt]:
    """A ledger's charges of a data set, which nobody has signed."""
    with reading(path) as db:
        verify(db, path)
        return list(chain_of(db, data_set).links[1:])


def _proven(
    has: Collection[str], signed: Sequence[Receipt], unsigned: Sequence[Receipt]
) -> tuple[list[Receipt], list[str]]:
    """The links that signatures prove and these digests lack, in order; and the digests of those without any detail."""
    details = {link.digest: link for link in (*unsigned, *signed)}
    found, unknown = dict[str, Receipt](), []
    for receipt in signed:
        digest = receipt.digest
        while digest not in has and digest not in found and digest not in unknown:
            if (link := details.get(digest)) is None:
                unknown.append(digest)
            else:
                found[digest] = link
                digest = link.previous
    return sorted(found.values(), key=lambda link: link.counter), unknown


def _content(link: Receipt) -> Receipt:
    """The link, reduced to what a coordinator's ledger too says of a release."""
    return replace(link, counter=0, previous="", request="", signer="", signature="")


def _check_events(own: Chain, found: Missing) -> None:
    """Refuse events with which the ledger could not be read again."""
    try:
        units = {
            events.from_json(link.event).unit for link in (*own.links, *found.proven, *found.claimed) if link.event
        }
    except ValueError as error:
        raise InputError(f"--from: a charge of data set {found.data_set.id}: {error}") from None
    if len(units) > 1:
        raise InputError(
            f"--from: charges of data set {found.data_set.id} have the units {', '.join(sorted(units))}, which do not "
            "compose; leave out the ledger that claims another unit than the node's"
        )
