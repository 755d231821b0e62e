"""Traffic: the size of a message's records as Flower serialises them."""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, RecordDict


def wire_bytes(content: RecordDict) -> int:
    """Bytes of all objects that Flower's link sends for these records: records, arrays and chunks of arrays.

    Arrays of equal content are sent once, and count once.
    """
    return _deflated_bytes(RecordDict({name: _unsliced(record) for name, record in content.items()}))


def _unsliced(record: Any) -> Any:
    """The record with fresh arrays of the same bytes: those from Flower hold chunks that cannot be copied again."""
    if not isinstance(record, ArrayRecord):
        return record
    arrays = {name: Array(a.dtype, a.shape, a.stype, a.data) for name, a in record.items()}
    return ArrayRecord(arrays)


def _deflated_bytes(part: Any) -> int:
    return len(part.deflate()) + sum(map(_deflated_bytes, (part.children or {}).values()))
