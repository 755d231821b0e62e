"""Inclusion: the coordinator signs what each round's sum was made of, and every node finds its own upload in it.

A round's record is the signed root of a tree with one leaf for each position, a partition id: the digest of the reply
that is in the sum with its weight, or the reason why none is. Every node of the tree holds the number of replies and
the weight below it. So a second copy of an upload has no place: it would stand at another holder's position, or change
the weight that its own holder finds there. Leaves and inner nodes are hashed apart, and an odd node moves up as it is.

With the next request each data holder's node is shown its leaf and the path to the root. It releases nothing more in
the run unless both fit what its own ledger says. Whether the model was made of this sum, an auditor with the uploads
can tell.

Source: Laurie, Langley and Kasper 2013, section 2.1, for the tree; the sums in its nodes are added here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from fedpriv.privacy.ledger import keys

_PURPOSE = "fedpriv round 1"
_MAX_CHARACTERS = 4000
_STRICT = ConfigDict(extra="forbid")
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
_Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Node(NamedTuple):
    """A node of the tree: its hash in hex, and the number of replies and the weight below it."""

    digest: str
    included: int
    weight: float


# As a path has it: 44 bytes.
_PACKED = struct.Struct(">32sId")


def _above(left: _Node, right: _Node) -> _Node:
    digest = hashlib.sha256(b"\1" + json.dumps([left, right]).encode()).hexdigest()
    return _Node(digest, left.included + right.included, left.weight + right.weight)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Leaf:
    """The end of a round for one position.

    Attributes:
        position: the holder's partition id.
        reply: SHA-256, in hex, of its reply that is in the sum, as both ledgers record it; empty if none is.
        weight: >= 0, to which the reply's share of the sum is in proportion.
        reason: why no reply is in the sum; empty if one is.
    """

    position: _Count
    reply: _Digest = ""
    weight: _Weight = 0.0
    reason: Annotated[str, Field(max_length=150)] = ""

    @property
    def node(self) -> _Node:
        """The leaf in the tree."""
        content = json.dumps(asdict(self), sort_keys=True).encode()
        return _Node(hashlib.sha256(b"\0" + content).hexdigest(), int(self.reply != ""), self.weight)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Record:
    """A round's sum, as the coordinator signs it.

    Attributes:
        run, round: of the sum.
        asked: SHA-256, in hex, of the digests of what its clients were asked, the terms of a masked sum among it.
        positions: the number of leaves.
        included: the number of replies in the sum.
        weight: their total.
        root: of the tree, in hex.
        sum: `digest_of_sum`, in hex; empty if there is none.
        signature: by the coordinator's key, in base64.
    """

    run: Annotated[str, Field(max_length=100)]
    round: _Count
    asked: _Digest
    positions: Annotated[int, Field(strict=True, ge=1, lt=2**32)]
    included: _Count
    weight: _Weight
    root: _Digest
    sum: _Digest
    signature: str = ""

    @property
    def statement(self) -> bytes:
        """The bytes that are signed: everything but the signature."""
        content = {name: value for name, value in asdict(self).items() if name != "signature"}
        return json.dumps({"purpose": _PURPOSE, **content}, sort_keys=True).encode()


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class InclusionProof:
    """One leaf of a round's record, with the path from it to the root.

    Attributes:
        path: the siblings on the way up, each its hash, number of replies and weight, 44 bytes, in base64.
    """

    record: Record
    leaf: Leaf
    path: Annotated[str, Field(max_length=2000)] = ""

    def text(self) -> str:
        """The proof as JSON, in one line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @property
    def tree(self) -> Any:
        """The tree as far as it is shown: the leaf, with its siblings on the way up, in pairs."""
        return self._climbed(asdict(self.leaf), lambda left, right: [left, right])

    def _climbed(self, top: Any, above: Callable[[Any, Any], Any]) -> Any:
        """The root over a leaf; ValueError if the path is not as long as the position's is."""
        place, width = self.leaf.position, self.record.positions
        try:
            others = [_Node(each[0].hex(), *each[1:]) for each in _PACKED.iter_unpack(base64.b64decode(self.path))]
            if place >= width or not all(0 <= each.weight < np.inf for each in others):
                raise ValueError
            while width > 1:
                if place ^ 1 < width:
                    top = above(others.pop(0), top) if place % 2 else above(top, others.pop(0))
                place, width = place // 2, (width + 1) // 2
            if others:
                raise ValueError
        except (ValueError, IndexError, struct.error):
            raise ValueError(f"round {self.record.round}: its path is none of position {self.leaf.position}") from None
        return top

    def check(self, signer: str) -> None:
        """Refuse a proof that the coordinator has not signed, or that its root does not bear out.

        Args:
            signer: the coordinator's public line.

        Raises:
            ValueError: one line that says what is wrong.
        """
        record = self.record
        if not keys.verify(signer, record.statement, record.signature):
            raise ValueError(f"round {record.round}: its record is not signed with the coordinator's key")
        if self._climbed(self.leaf.node, _above) != (record.root, record.included, record.weight):
            raise ValueError(f"round {record.round}: its record is of other uploads, or of another total")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Sum:
    """A round's record with all leaves, in order of position, as the coordinator keeps it."""

    record: Record
    leaves: tuple[Leaf, ...]

    @staticmethod
    def of(leaves: Sequence[Leaf], *, run: str, round: int, asked: Collection[str], sum: str, key: Path) -> Sum:
        """The record of a round, signed.

        Args:
            leaves: of all positions 0, 1, 2, ...
            asked: digests of what the clients were asked.
            key: the coordinator's private key.

        Raises:
            InputError: the key cannot be used.
        """
        top = _rows(leaves)[-1][0]
        digest = hashlib.sha256("\n".join(sorted(asked)).encode()).hexdigest()
        record = Record(
            run=run,
            round=round,
            asked=digest,
            positions=len(leaves),
            included=top.included,
            weight=top.weight,
            root=top.digest,
            sum=sum,
        )
        return Sum(record=replace(record, signature=keys.sign(key, record.statement)), leaves=tuple(leaves))

    def proof(self, position: int) -> InclusionProof:
        """The proof of one position."""
        place, path = position, b""
        for row in self._rows[:-1]:
            if place ^ 1 < len(row):
                digest, *totals = row[place ^ 1]
                path += _PACKED.pack(bytes.fromhex(digest), *totals)
            place //= 2
        return InclusionProof(record=self.record, leaf=self.leaves[position], path=base64.b64encode(path).decode())

    @cached_property
    def _rows(self) -> list[list[_Node]]:
        return _rows(self.leaves)

    @property
    def tree(self) -> Any:
        """The whole tree: a leaf, or a pair of trees."""
        row: list[Any] = [asdict(leaf) for leaf in self.leaves]
        while len(row) > 1:
            row = [row[i : i + 2] if i + 1 < len(row) else row[i] for i in range(0, len(row), 2)]
        return row[0]

    def text(self) -> str:
        """The sum as JSON, in one line."""
        return json.dumps(asdict(self))


Kept = TypeVar("Kept", InclusionProof, Sum)


def _rows(leaves: Sequence[Leaf]) -> list[list[_Node]]:
    """The nodes of the tree, from the leaves to the root."""
    rows = [[leaf.node for leaf in leaves]]
    while len(row := rows[-1]) > 1:
        rows.append([_above(*row[i : i + 2]) if i + 1 < len(row) else row[i] for i in range(0, len(row), 2)])
    return rows


def digest_of_sum(uploads: Sequence[tuple[Mapping[str, np.ndarray], float]]) -> str:
    """SHA-256, in hex, of the weighted sum of uploads, the same on every machine; empty if their shapes differ.

    Floats times their weights are added in float64, element by element and in this order. Words of a masked sum are
    added as they are, modulo 2^bits: their weights are in them.

    Args:
        uploads: ({name: array}, weight), in order of position.
    """
    total: dict[str, np.ndarray] = {}
    shapes = {tuple(sorted((name, array.shape) for name, array in arrays.items())) for arrays, _ in uploads}
    if len(shapes) != 1:
        return ""
    for arrays, weight in uploads:
        for name, array in arrays.items():
            term = array if array.dtype.kind == "u" else array.astype("<f8") * weight
            total[name] = total[name] + term if name in total else term
    digest = hashlib.sha256()
    for name, array in sorted(total.items()):
        digest.update(name.encode() + b"\0" + array.tobytes())
    return digest.hexdigest()


def proofs_in(text: str) -> list[InclusionProof]:
    """The proofs that `InclusionProof.text` wrote, one a line; ValueError, which says so, if one is malformed."""
    lines = text.splitlines()
    if any(len(line) > _MAX_CHARACTERS for line in lines):
        raise ValueError(f"a line has more than {_MAX_CHARACTERS} characters")
    try:
        return [TypeAdapter(InclusionProof).validate_json(line) for line in lines]
    except ValidationError:
        raise ValueError("a line is no record of a round with a leaf and its path") from None


def kept_in(path: Path, form: type[Kept], run: str | None = None) -> Iterator[Kept]:
    """The records of all runs or one in a file, one a line; a line that a crash cut short is passed over."""
    named = b"" if run is None else json.dumps(run).encode()  # other lines need not be parsed
    for line in path.read_bytes().splitlines() if path.exists() else ():
        if named in line:
            with suppress(ValidationError):
                kept = TypeAdapter(form).validate_json(line)
                if run is None or kept.record.run == run:
                    yield kept


def check_owed(
    proofs: Sequence[InclusionProof],
    owed: Mapping[int, Collection[str]],
    *,
    position: int,
    positions: int,
    weight: float,
) -> None:
    """Refuse proofs by which a node's uploads are not in the sums as was agreed.

    Args:
        proofs: of one run, each checked.
        owed: {round that the node has paid for: digests of the replies that it has stored for it}.
        position: of the node.
        positions: that there are in the run.
        weight: of its upload.

    Raises:
        ValueError: one line that names the round and what is wrong.
    """
    shown = {proof.record.round: proof for proof in proofs}
    for round_, replies in sorted(owed.items()):
        if round_ not in shown:
            raise ValueError(f"round {round_}: no record says whether this node's upload is in the sum")
        leaf, at = shown[round_].leaf, f"round {round_}: position {position}"
        if (leaf.position, shown[round_].record.positions) != (position, positions):
            raise ValueError(f"{at} of {positions} is this node's, and the record shows another")
        if not leaf.reply and (leaf.weight or not leaf.reason.strip()):
            raise ValueError(f"{at}: this node's upload is left out, and no reason is given")
        if leaf.reply and leaf.reply not in replies:
            raise ValueError(f"{at}: another upload stands in place of this node's")
        if leaf.reply and leaf.weight != weight:
            raise ValueError(f"{at}: this node's upload has weight {leaf.weight:g}, agreed is {weight:g}")
