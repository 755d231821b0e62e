"""The tokens of a node's records, kept in its folder from one start of the vault to the next.

The file says as much as the records do, so the node's user alone may read it. It is opened after the charge, like the
records, and gives what the tokenizer would: no upload depends on whether there is one. Its size is a function of public
numbers, since otherwise a disk that is nearly full would tell by what the ledger can still write which records a node
has.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from fedpriv.files import require_room
from fedpriv.learning.adapters import model_digest
from fedpriv.learning.data.chat import Row
from fedpriv.learning.data.records import Encoder, PlainText

log = logging.getLogger(__name__)

# Part of every key: another version of this file's code ignores what this one wrote.
_FORMAT = 1
# The length of a record that the tokenizer refuses.
_REFUSED = -1
# Of a safetensors file, without its arrays.
_MOST_HEADER_BYTES = 4096

_Arrays = dict[str, npt.NDArray[Any]]
_Digest = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """The file that keeps the tokens of one set of records.

    Attributes:
        path: of the file, in a folder of the node's.
        num_records: N_k as registered: there is room for so many; further records are tokenised each time.
        model: folder of the approved model, with its tokenizer.
        most_bytes: a larger file is not made.
        encoder: makes the tokens.
    """

    path: Path
    num_records: int
    model: Path
    most_bytes: int
    encoder: Encoder = field(default_factory=PlainText)

    def encode(self, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> list[Row]:
        """The rows that the encoder returns; from the file if it holds just these, else the file is written again."""
        n = self.num_records
        kept = self._first(tokenizer, texts[:n], None if pairs is None else pairs[:n], max_length)
        return kept + self._made(tokenizer, texts[n:], None if pairs is None else pairs[n:], max_length)

    def _made(self, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> list[Row]:
        """The rows of records that are not kept."""
        return self.encoder.encode(tokenizer, texts, pairs, max_length)

    def _first(self, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> list[Row]:
        """The rows of the records for which there is room."""
        names = self.encoder.names(tokenizer, pairs=pairs is not None, max_length=max_length)
        layout = _Layout(names=names, num_records=self.num_records, max_length=max_length)
        if not names or layout.num_bytes > self.most_bytes:
            return self._made(tokenizer, texts, pairs, max_length)
        key = _key(self.model, texts, pairs, max_length, self.encoder.key(tokenizer))
        try:
            return layout.unpacked(_read(self.path, layout.num_bytes), key)[: len(texts)]
        except Exception as error:  # whatever is wrong with the file, it decides nothing
            log.info("%s: the tokens are made again (%s)", self.path, type(error).__name__)
        rows = self._made(tokenizer, texts, pairs, max_length)
        try:
            _write(self.path, layout.packed(rows, key))
        except Exception as error:  # such as a full disk: the rows are there all the same
            reason = getattr(error, "strerror", None) or type(error).__name__
            log.warning("%s: the tokens are not kept (%s)", self.path, reason)
            if not isinstance(error, OSError):  # a record's doing, which the size of the file must not tell
                with suppress(Exception):
                    _write(self.path, layout.packed((), np.zeros_like(key)))
        return rows


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The arrays of a file: `lengths`, int32 [num_records], and each feature, int32 [num_records, max_length]."""

    names: tuple[str, ...]
    num_records: int
    max_length: int

    @property
    def num_bytes(self) -> int:
        """The most that a file takes."""
        return 4 * self.num_records * (1 + len(self.names) * self.max_length) + _MOST_HEADER_BYTES

    def packed(self, rows: Sequence[Row], key: _Digest) -> bytes:
        """The file's content, of one size whatever the rows are."""
        lengths = np.full(self.num_records, _REFUSED, np.int32)
        lengths[: len(rows)] = [_REFUSED if row is None else len(row["input_ids"]) for row in rows]
        arrays: _Arrays = {"lengths": lengths}
        for name in self.names:
            tokens = map(_in_a_word, chain.from_iterable(row[name] for row in rows if row is not None))
            arrays[name] = np.zeros((self.num_records, self.max_length), np.int32)
            arrays[name][np.arange(self.max_length) < lengths[:, None]] = np.fromiter(tokens, np.int32)
        return safetensors.numpy.save(arrays | {"key": key, "checksum": _checksum(arrays)})

    def unpacked(self, content: bytes, key: _Digest) -> list[Row]:
        """[num_records] the rows that were packed, and refused ones where there were fewer.

        Raises:
            ValueError: the content is of another key or layout, or damaged.
            SafetensorError: it is no safetensors file.
        """
        arrays: _Arrays = safetensors.numpy.load(content)
        stored_key, checksum = (arrays.pop(name, None) for name in ("key", "checksum"))
        if stored_key is None or not np.array_equal(stored_key, key):
            raise ValueError("of other records")
        shapes = {"lengths": (self.num_records,), **dict.fromkeys(self.names, (self.num_records, self.max_length))}
        if {name: array.shape for name, array in arrays.items()} != shapes:
            raise ValueError("of another layout")
        lengths = arrays["lengths"]
        fits = bool(((lengths >= _REFUSED) & (lengths <= self.max_length)).all())
        if checksum is None or not np.array_equal(checksum, _checksum(arrays)) or not fits:
            raise ValueError("damaged")
        return [
            None if length == _REFUSED else {name: arrays[name][row, :length].tolist() for name in self.names}
            for row, length in enumerate(lengths.tolist())
        ]


def _in_a_word(token: int) -> int:
    """The token, or one that no model knows in place of one that needs more than 32 bits."""
    return token if 0 <= token < 2**31 else -1


def _key(model: Path, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int, encoder: str = "") -> _Digest:
    """SHA-256 of all that the tokens depend on."""
    software = {name: version(name) for name in ("transformers", "tokenizers")}
    public = {"format": _FORMAT, "max_length": max_length, "tokenizer": model_digest(model, weights=False)}
    digest = hashlib.sha256(json.dumps(public | software | {"encoder": encoder}).encode())
    for column in (texts, () if pairs is None else pairs):
        digest.update(len(column).to_bytes(8))
        for text in column:
            content = text.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8) + content)
    return np.frombuffer(digest.digest(), np.uint8)


def _checksum(arrays: _Arrays) -> _Digest:
    """SHA-256 of the values and types, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} ".encode() + arrays[name].tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


def _read(path: Path, most_bytes: int) -> bytes:
    """The content of a file that belongs to this process's user and to nobody else.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is another's, or larger than it could be.
    """
    # A pipe in its place must not be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
            raise ValueError("not a file of this user's alone")
        if state.st_size > most_bytes:
            raise ValueError("too large")
        return file.read()


def _write(path: Path, content: bytes) -> None:
    """Replace the file as a whole; others cannot read it at any moment.

    Raises:
        OSError: there is no room, or the folder cannot be written; what was there stays.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # of a process that was killed
    require_room(path.parent, len(content))  # which both files take for a moment
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
