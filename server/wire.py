"""What travels: the length of a message's records as Flower serialises them."""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, RecordDict


def wire_bytes(content: RecordDict) -> int:
    """Bytes of all objects that Flower's link sends for these records: records, arrays and pieces of arrays.

    Arrays of equal content travel once, and count once.
    """
    return _deflated(RecordDict({name: _unsliced(record) for name, record in content.items()}))


def _unsliced(record: Any) -> Any:
    """A record whose arrays, of the same bytes, remember nothing: Flower's keep pieces that cannot be copied again."""
    if not isinstance(record, ArrayRecord):
        return record
    arrays = {name: Array(a.dtype, a.shape, a.stype, a.data) for name, a in record.items()}
    return ArrayRecord(arrays)


def _deflated(part: Any) -> int:
    return len(part.deflate()) + sum(map(_deflated, (part.children or {}).values()))
