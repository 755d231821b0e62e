"""Find the charges that a ledger restored from an old copy lacks, as far as others know: `fedpriv ledger recover`.

A receipt under the node's own signature proves a charge, and all charges before it, since each link of the chain names
the one before. Where the detail of a proven charge is nowhere to be found, the data set counts as spent in full: it was
never charged beyond its budget. A ledger of somebody else, such as the coordinator's, proves nothing. What it claims is
charged in addition, so a false claim costs the node budget and nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedpriv.accounting import events
from fedpriv.errors import InputError
from fedpriv.ledger.entries import RECOVERED, DataSet, LedgerConnection
from fedpriv.ledger.reader import reading, verify
from fedpriv.ledger.receipts import Chain, Receipt, ReceiptLog, chain_of

_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True, kw_only=True)
class Missing:
    """The charges of a data set that a ledger lacks.

    Attributes:
        data_set: that they were charged to.
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
            yield {
                **self._common,
                "client": link.client,
                "run": link.run or None,
                "round": link.round,
                "event": link.event or None,
                "rho_bar": 1.0,
                "aggregate_scale": link.aggregate_scale,
                "noise_source": link.noise_source,
                "note": json.dumps({"request": link.request, "reason": reason, **replaces}, sort_keys=True),
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
        db: the ledger, open for reading.
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
