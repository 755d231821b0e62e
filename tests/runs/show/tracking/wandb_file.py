"""Reads the file that W&B writes in offline mode: records in blocks, as LevelDB logs them, after a header."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER_BYTES, _BLOCK_BYTES, _RECORD_HEADER_BYTES = 7, 32768, 7
_FULL, _LAST = 1, 4


def records(file: Path) -> Iterator[Any]:
    """The file's records, as W&B's protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    assert content.startswith(b":W&B")
    position, parts = _HEADER_BYTES, b""
    while position < len(content):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _RECORD_HEADER_BYTES:  # the rest of a block is filled up
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + _RECORD_HEADER_BYTES])
        position += _RECORD_HEADER_BYTES
        parts += content[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
