"""A client's records in a run: their registration and, after a charge, the records themselves.

Their tokens may be kept from one start of the vault to the next. The file says as much as the records do, so the node's
user alone may read it. It is opened after the charge, like the records, and gives what the tokenizer would: no upload
depends on whether there is one. Its size is a function of public numbers, since otherwise a disk that is nearly full
would tell by what the ledger can still write which records a node has.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from fedpriv.config import RunConfig
from fedpriv.errors import is_memory_failure
from fedpriv.files import require_room, trace_without_message
from fedpriv.holder.vault import _charging, _summed
from fedpriv.holder.vault._charging import RefusedError
from fedpriv.holder.vault.holder import Holder, NodeHolder, RecordsToRead, bench_of, run_named, run_of
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import Request, Response
from fedpriv.learning.adapters import model_digest
from fedpriv.learning.data.chat import Row
from fedpriv.learning.data.records import Encode, Encoder, PlainText, RecordSet
from fedpriv.learning.training.canaries import audited
from fedpriv.learning.training.workbench import Workbench
from fedpriv.privacy.ledger.entries import DataSet

log = logging.getLogger(__name__)

# Part of every key: another version of this file's code ignores what this one wrote.
_FORMAT = 1
# The length of a record that the tokenizer refuses.
_REFUSED = -1
# Of a safetensors file, without its arrays.
_MOST_HEADER_BYTES = 4096

_Arrays = dict[str, npt.NDArray[Any]]
_Digest = npt.NDArray[np.uint8]


def register(request: Request, holder: Holder) -> Response:
    """The client's registration: partition id, registered number of records, display name and data set id.

    Raises:
        RefusedError: the node does not take part in such a run, or its data are not registered with its ledger.
        LedgerError: the node's ledger cannot be used.
        InputError: the run's configuration or, in a simulation, its data cannot be used.
    """
    config = run_of(request.run_config, holder)
    bench = None if isinstance(holder, NodeHolder) else bench_of(config, holder)
    client = holder.partition(bench.num_clients if bench else config.num_clients)
    data_set, num_registered = registered(config, bench, holder)
    name = holder.name
    if bench is not None:
        name = name or bench.data.client_names[client]
        if data_set is not None:
            _charging.log_content(holder.policy, data_set, bench.content(client), _size(bench, client))
    signs = holder.identity_key is not None or config.secure_aggregation
    identity = _summed.identity_of(holder, client) if signs else None
    registration = kinds.Registration(
        client=client,
        num_records=num_registered,
        name=name or f"client-{client}",
        # A node without a ledger remembers nothing, so its spending attaches to this run alone.
        data_set=data_set.id if data_set else secrets.token_hex(16),
        keeps_replies=data_set is not None,
        software=kinds.SOFTWARE,
        identity=identity.public_line if identity else "",
        receipt=_charging.signed_receipt(holder.policy, data_set),
    )
    if identity:
        registration = replace(registration, signature=identity.sign(registration.signed))
    noted = holder.journal.write("registered", num_records=registration.num_records, data_set=registration.data_set)
    if noted and isinstance(holder, NodeHolder):
        target = (
            f"target epsilon {config.target_epsilon:g}" if config.target_epsilon else f"z = {config.noise_multiplier}"
        )
        sums = "sums under masks" if config.secure_aggregation else "single uploads"
        log.info("%s registers this node: %s rounds of %s, %s", run_named(config), config.rounds, sums, target)
    return Response.of(fields=kinds.pack(registration))


def registered(config: RunConfig, bench: Workbench | None, holder: Holder) -> tuple[DataSet | None, int]:
    """The data set in the node's ledger, if it keeps one, and N_k.

    Raises:
        RefusedError: a node's own records are not registered yet, or there is no ledger.
        LedgerError: the ledger cannot be used.
    """
    if bench is None or isinstance(holder, NodeHolder):
        data_set = _charging.registered_data_set(holder.policy, str(holder.client), None)
        if data_set is None:
            raise RefusedError("ledger: this node has none, and releases nothing that it cannot record")
        return data_set, data_set.num_records
    client = holder.partition(bench.num_clients)
    canaries = audited(config, bench, client) if config.audit else None
    num_records = canaries.num_registered if canaries else _size(bench, client)
    data_set = _charging.registered_data_set(holder.policy, bench.accounts[client], num_records)
    return data_set, data_set.num_records if data_set else num_records


def _size(bench: Workbench, client: int) -> int:
    """The number of records, or persons, that a client has, by its index in the bench's data."""
    return bench.data.clients[client].num_units


def of_release(reading: RecordsToRead, bench: Workbench, holder: Holder) -> RecordSet:
    """The records that a release reads; in an audited run, with the canaries that are included.

    The charge is made, so records that cannot be read are none, and the release is noise alone.

    Args:
        reading: which they are.
        bench, holder: of the client.

    Raises:
        Exception: they cannot be read, on a holder that allows releases without privacy; or memory ran out.
    """
    config, data_set = reading.config, reading.data_set
    own = holder if isinstance(holder, NodeHolder) else None
    client = 0 if own else holder.partition(bench.num_clients)
    try:
        if own and not reading.may_begin and not bench.has_tokens(client):
            raise RefusedError("an earlier update failed on them, and only the first on a model has the time to read")
        if own:
            _read_own(bench, own, data_set)
        if reading.aside:
            return bench.tokenize_tested(bench.set_aside(client))
        if own:
            return bench.client(client, _encode(config, bench, own.settings, data_set))
        return audited(config, bench, client).records if config.audit else bench.client(client)
    except Exception as error:  # whatever the file holds must not decide whether there is a release
        if holder.policy.allow_not_private or is_memory_failure(error):
            raise
        if not reading.aside:  # whose replies have time for all that an earlier one has left undone
            bench.forget_records()
        # Our own words, or where the error arose, since its text may hold a record.
        reason = str(error) if isinstance(error, RefusedError) else trace_without_message(error)
        log.error("the records cannot be used, so the release is noise alone: %s", reason)
        return bench.no_records


def _read_own(bench: Workbench, holder: Holder, data_set: DataSet | None) -> None:
    """Read a node's own records, once for each data set: what an earlier one holds is not this one's to pay for."""
    if data_set is None or bench.read_for == data_set.id:
        return
    bench.forget_records()
    bench.coin_key, bench.content_note = _charging.opened_records(
        holder.policy, data_set, bench.content(0), _size(bench, 0)
    )
    bench.read_for = data_set.id


def _encode(config: RunConfig, bench: Workbench, settings: VaultSettings, data_set: DataSet | None) -> Encode:
    """The function that tokenises a node's own records, and keeps their tokens if the operator lets it."""
    if not settings.keep_tokens or data_set is None:
        return bench.encoder.encode
    return TokenFile(
        path=settings.tokens,
        num_records=data_set.num_records * (settings.max_records_per_person if settings.person_column else 1),
        model=Path(config.model),
        most_bytes=settings.memory_limit_mb * 2**20,
        encoder=bench.encoder,
    ).encode


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
            of_all = chain.from_iterable(row[name] for row in rows if row is not None)
            # In place of a token that needs more than 32 bits stands one that no model knows.
            tokens = (token if 0 <= token < 2**31 else -1 for token in of_all)
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
