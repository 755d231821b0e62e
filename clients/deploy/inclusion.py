"""The end of each round for a node's upload: by the coordinator's signed records, and by the node's own ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from fedpriv.errors import InputError
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.entries import CHARGED, RELEASED
from fedpriv.privacy.ledger.inclusion import InclusionProof, Sum, check_owed, kept_in
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.ledger.receipts import append_line
from fedpriv.texts import printable


@dataclass
class Paid:
    """A round that the node has paid for: the times of its charges, and each reply with the time it was stored."""

    charged: list[str] = field(default_factory=list)
    replies: dict[str, str] = field(default_factory=dict)


def take(vault: VaultSettings, path: Path) -> int:
    """Keep the node's proofs from a coordinator's file of records, as a run's last round needs; return how many.

    Raises:
        InputError: a record is not the coordinator's, or not what the node's ledger knows; nothing is kept.
    """
    if not path.is_file():
        raise InputError(f"--from {path}: no such file; the coordinator has it in the run's folder")
    signer, paid = keys.read_public_line(vault.coordinator), _paid(vault)
    kept = {(each.record.run, each.record.round): each for each in kept_in(vault.inclusions, InclusionProof)}
    agreed = {run: proof.leaf.weight for (run, _), proof in kept.items() if proof.leaf.reply}
    new = []
    for made in kept_in(path, Sum):
        place = made.record.run, made.record.round
        if place not in paid or place in kept or vault.partition_id >= len(made.leaves):
            continue
        proof = made.proof(vault.partition_id)
        try:
            proof.check(signer)
            check_owed(
                [proof],
                {place[1]: paid[place].replies},
                position=vault.partition_id,
                positions=made.record.positions,
                weight=agreed.get(place[0], proof.leaf.weight),
            )
        except ValueError as error:
            raise InputError(f"--from {path}: run {printable(place[0])}, {error}") from None
        new.append(proof)
    for proof in new:
        append_line(vault.inclusions, proof.text())
    return len(new)


def told(vault: VaultSettings, run: str = "") -> Iterator[str]:
    """A line on each round that the node has paid for, in all runs or in one.

    Raises:
        InputError: the node has paid for nothing in the run.
    """
    paid = {place: each for place, each in _paid(vault).items() if run in ("", place[0])}
    if run and not paid:
        raise InputError(f"RUN = {printable(run)}: this node has paid for nothing in it; `ledger statement` lists runs")
    kept = {(each.record.run, each.record.round): each for each in kept_in(vault.inclusions, InclusionProof)}
    for place, each in paid.items():
        yield f"run {printable(place[0])}, round {place[1]}: {_end(kept.get(place), each)}"


def _end(proof: InclusionProof | None, paid: Paid) -> str:
    stored = [
        f"{(datetime.fromisoformat(time) - datetime.fromisoformat(charged)).total_seconds():.1f} s after its charge"
        for charged, time in zip(paid.charged, paid.replies.values(), strict=False)
    ]
    known = f"this node stored its reply {', '.join(stored)}" if stored else "this node stored no reply"
    if proof is None:
        return f"no record yet, it comes with the next request, or by --from; {known}"
    leaf, record = proof.leaf, proof.record
    if not leaf.reply:
        return f"NOT in the sum of {record.included} replies: {printable(leaf.reason)}; {known}"
    share = f"weight {leaf.weight:g} of {record.weight:g}, {leaf.weight / record.weight:.1%}"
    more = f"; {len(paid.replies) - 1} more of its replies are not" if len(paid.replies) > 1 else ""
    return f"in the sum of {record.included} replies, {share}, root {record.root}{more}"


def _paid(vault: VaultSettings) -> dict[tuple[str, int], Paid]:
    """{(run, round): what the node's ledger has of it}, in order."""
    found: defaultdict[tuple[str, int], Paid] = defaultdict(Paid)
    with reading(vault.ledger) as db:
        for entry in db.entries():
            if entry.run and entry.round is not None and entry.phase in (CHARGED, RELEASED):
                each = found[entry.run, entry.round]
                if entry.phase == CHARGED:
                    each.charged.append(entry.time)
                elif entry.reply:
                    each.replies[entry.reply] = entry.time
    return dict(found)
