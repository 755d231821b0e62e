"""Flower's messages as a mod reads and answers them: arrays with checks, digests, and replies without anything else."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.holder.vault import RefusedError, RetiredError
from fedpriv.holder.wire.frame import FAILED, MAX_ARRAYS_BYTES, REFUSED, RETIRED, Response, Scalar
from fedpriv.privacy.ledger.entries import MOST

log = logging.getLogger("flwr")

# The record of a reply that holds its numbers, and the number by which Flower's strategies weight a reply.
METRICS = "metrics"
NUM_EXAMPLES = "num-examples"

# Where Flower's strategies say which round it is.
_ROUND = "server-round"

# Characters of all arrays' names: JSON writes at most six for one, and a stored header holds 2^20.
_MAX_NAMES = 2**17


@dataclass(frozen=True, kw_only=True, eq=False)
class Parameters:
    """The parameters of a message or a reply.

    Attributes:
        record: name of their record.
        arrays: {name: array of any shape}, at least one value that may change.
        kept: names of the arrays that no reply changes: integers, and what the app does not train. To anyone who asked,
            they say nothing; an app's own would, such as the number of batches that BatchNorm counts.
    """

    record: str
    arrays: Mapping[str, np.ndarray]
    kept: frozenset[str]

    @property
    def changing(self) -> dict[str, np.ndarray]:
        """{name: floats} of the arrays that a reply may change."""
        return {name: array for name, array in self.arrays.items() if name not in self.kept}

    @property
    def num_values(self) -> int:
        """Values that may change."""
        return sum(array.size for array in self.changing.values())

    @property
    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite."""
        return all(bool(np.isfinite(array).all()) for array in self.arrays.values())

    def difference(self, other: Parameters) -> Tensor:
        """The values that may change less the other's, float64 [num_values].

        Raises:
            ValueError: these have other names, shapes or types.
        """
        kinds = [[(name, a.shape, a.dtype) for name, a in each.changing.items()] for each in (self, other)]
        if kinds[0] != kinds[1]:
            raise ValueError("the reply's arrays differ from the received ones in name, order, shape or type")
        with np.errstate(over="ignore", invalid="ignore"):
            parts = [array.astype(np.float64) - other.arrays[name] for name, array in self.changing.items()]
        return torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))

    def moved(self, difference: Tensor) -> Parameters:
        """These values plus a difference, float64 [num_values], each array in its own shape and type."""
        moved, start = dict(self.arrays), 0
        with np.errstate(over="ignore"):
            for name, array in self.changing.items():
                step = difference[start : start + array.size].numpy().reshape(array.shape)
                moved[name] = np.asarray(array.astype(np.float64) + step).astype(array.dtype)
                start += array.size
        return replace(self, arrays=moved)


def parameters_of(content: RecordDict, untrained: Collection[str]) -> Parameters:
    """The parameters in a message's content.

    Args:
        content: of the message.
        untrained: names of arrays that are kept though they hold floats, or the last parts of such names.

    Raises:
        RefusedError: there is not exactly one record of arrays, or an array is malformed, of no numbers or not finite.
    """
    if len(content.array_records) != 1:
        raise RefusedError(f"arrays: are in {len(content.array_records)} records; must be in exactly one")
    ((record, named),) = content.array_records.items()
    try:
        arrays = {name: read_array(name, array.data) for name, array in named.items()}
    except ValueError as error:
        raise RefusedError(f"arrays: {error}") from None
    kept = set()
    for name, array in arrays.items():
        if array.dtype.kind in "biu" or not {name, name.rpartition(".")[2]}.isdisjoint(untrained):
            kept.add(name)
        elif array.dtype not in (np.float16, np.float32, np.float64):
            raise RefusedError(f"{name}: is {array.dtype}; only float16, float32 and float64 are noised")
    found = Parameters(record=record, arrays=arrays, kept=frozenset(kept))
    size, names = sum(array.nbytes for array in arrays.values()), sum(map(len, arrays))
    if size > MAX_ARRAYS_BYTES // 2 or names > _MAX_NAMES:
        raise RefusedError(f"arrays: are {size} bytes; at most {MAX_ARRAYS_BYTES // 2} can be stored")
    if not found.num_values:
        raise RefusedError("arrays: hold no value that is trained")
    if not found.is_finite:
        raise RefusedError("arrays: hold a value that is not finite")
    return found


def read_array(name: str, data: bytes) -> np.ndarray:
    """An array of NumPy's file format, as Flower's messages hold it.

    Reading allocates what the header claims, so it is compared with what follows first.

    Raises:
        ValueError: it holds objects, or its header is malformed or claims more or fewer bytes than follow it.
    """
    stream = BytesIO(data)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(np.lib.format.read_magic(stream))
    if read_header is None:
        raise ValueError(f"{name}: unknown version of NumPy's format")
    shape, _, dtype = read_header(stream)
    if dtype.hasobject:
        raise ValueError(f"{name}: holds objects")
    claimed, actual = math.prod(shape) * dtype.itemsize, len(data) - stream.tell()
    if claimed != actual:
        raise ValueError(f"{name}: claims {claimed} bytes, but holds {actual}")
    found: np.ndarray = np.load(BytesIO(data), allow_pickle=False)
    return found


def check_type(message: Message, uncovered: Collection[str]) -> bool:
    """Whether a message asks for training; False for one of another type that the operator allows.

    Args:
        message: received.
        uncovered: types of messages that the operator lets the app answer by itself.

    Raises:
        RefusedError: it is of another type: the app's answer would be paid for by nobody.
    """
    kind = message.metadata.message_type
    if kind.split(".")[0] == "train":
        return True
    if kind not in uncovered:
        raise RefusedError(f"message type {kind[:60]}: this node answers train messages alone")
    return False


def round_of(content: RecordDict) -> int:
    """The round of which a message says that it is; 0 if it says none.

    Raises:
        RefusedError: it is no whole number >= 0, or too large for a ledger.
    """
    for record in content.config_records.values():
        if (number := record.get(_ROUND)) is not None:
            if type(number) is not int or not 0 <= number <= MOST:
                raise RefusedError(f"{_ROUND}: must be a whole number from 0 to {MOST}")
            return number
    return 0


def request_digest(kind: str, content: RecordDict) -> str:
    """SHA-256, in hex, of all that a message asks for: a message that differs in one bit has another digest.

    Args:
        kind: type of the message.
        content: of the message.
    """
    digest = hashlib.sha256()
    for part in _parts(kind, content):
        digest.update(len(part).to_bytes(8) + part)
    return digest.hexdigest()


def _parts(kind: str, content: RecordDict) -> Iterable[bytes]:
    yield kind.encode()
    for name, record in content.items():
        yield from (type(record).__name__.encode(), name.encode(), str(len(record)).encode())
        for key, value in record.items():
            yield key.encode()
            if isinstance(value, Array):
                yield from (repr((value.dtype, tuple(value.shape), value.stype)).encode(), value.data)
            else:
                yield repr(value).encode()


def metrics_of(reply: Message, allowed: Collection[str]) -> dict[str, Scalar]:
    """{name: number} of what the app's reply measures, of the names that the operator allows."""
    named = [(name, value) for record in reply.content.metric_records.values() for name, value in record.items()]
    return {k: v for k, v in named if k in allowed and isinstance(v, (int, float)) and not isinstance(v, bool)}


def reply_of(message: Message, response: Response, shapes: Mapping[str, tuple[int, ...]]) -> Message:
    """The reply to a message: one record of arrays and one of numbers, the same for the same stored response.

    Args:
        message: received.
        response: that was stored, with one record of arrays.
        shapes: {array's name: its shape}, since a stored array has at least one axis.
    """
    ((record, named),) = response.arrays.items()
    arrays = ArrayRecord({name: Array(array.reshape(shapes[name])) for name, array in named.items()})
    numbers = MetricRecord({name: value for name, value in response.fields.items() if not isinstance(value, str)})
    return Message(RecordDict({record: arrays, METRICS: numbers}), reply_to=message)


def refusing(message: Message, answer: Callable[[], Message]) -> Message:
    """The answer, or an error that holds public values alone: a refusal's one line, or that the node failed."""
    try:
        return answer()
    except RefusedError as error:
        log.warning("refused: %s", error)
        return Message(Error(RETIRED if isinstance(error, RetiredError) else REFUSED, str(error)), reply_to=message)
    except Exception:  # its text may come from records
        log.exception("failed")
        return Message(Error(FAILED, "failed; this node's log says why"), reply_to=message)


def check_names(name: str, values: Collection[str]) -> tuple[str, ...]:
    """Names as a tuple; a single text, whose letters would be names, is refused.

    Raises:
        InputError: the value is a single text.
    """
    if isinstance(values, str):
        raise InputError(f"{name} = {values!r}: must be a list of names")
    return tuple(values)
