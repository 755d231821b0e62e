"""Plain safetensors files served from bounded memory: the baseline that a store must beat."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.models.variants.blocks import TensorSpec

_DTYPES = {
    **{
        f"{kind}{8 * size}": f"{name}{8 * size}"
        for kind, name in (("I", "int"), ("U", "uint"))
        for size in (1, 2, 4, 8)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BOOL": "bool",
}

Reader = Literal["direct", "safetensors"]


@dataclass(frozen=True, kw_only=True)
class FileContent:
    """Which values a safetensors file holds, and where.

    Attributes:
        tensors: {tensor: its first byte and the one after its last, counted from the start of the values}.
        num_bytes: of all values.
    """

    tensors: Mapping[TensorSpec, tuple[int, int]]
    num_bytes: int


class PlainFiles:
    """Loads files into preallocated memory: a free slot, or that of the least recently used file.

    Args:
        files: {name: a safetensors file, which must not change}.
        memory_bytes: bound on the loaded tensors.
        reader: `safetensors` copies from what the library's `load_file` gives; `direct` is faster and reads all
            values at once straight into the tensors, at the offsets that the headers gave at construction.

    Attributes:
        misses: files read so far.
        bytes_read: values read so far.

    Raises:
        InputError: a file is missing or damaged, holds a type without a NumPy equivalent, or does not fit.
    """

    def __init__(self, files: Mapping[str, Path], memory_bytes: int, reader: Reader = "direct") -> None:
        self._files, self._memory_bytes, self._reader = dict(files), memory_bytes, reader
        headers = {name: read_header(path) for name, path in files.items()}
        self._starts = {name: start for name, (start, _) in headers.items()}
        self._contents = {name: content for name, (_, content) in headers.items()}
        self._loaded: OrderedDict[str, _Memory] = OrderedDict()
        self._free: list[_Memory] = []
        for name, content in self._contents.items():
            if content.num_bytes > memory_bytes:
                raise InputError(f"memory_bytes = {memory_bytes}: file {name!r} alone needs {content.num_bytes}")
            if self.used_bytes + content.num_bytes <= memory_bytes:
                self._free.append(_Memory(content))
        self.misses = self.bytes_read = 0

    @property
    def names(self) -> list[str]:
        """The files in memory, least recently used first."""
        return list(self._loaded)

    @property
    def used_bytes(self) -> int:
        """Memory allocated, including free slots."""
        return sum(memory.content.num_bytes for memory in (*self._loaded.values(), *self._free))

    def get(self, name: str) -> dict[str, Tensor]:
        """The file's tensors, read-only and valid until the next call, which may reuse their memory."""
        if name not in self._loaded:
            content = self._contents[name]
            memory = self._allocate(content)
            if self._reader == "direct":
                memory.read(self._files[name], self._starts[name])
            else:
                memory.copy(self._files[name])
            self._loaded[name] = memory
            self.misses += 1
            self.bytes_read += content.num_bytes
        self._loaded.move_to_end(name)
        return self._loaded[name].tensors

    def _allocate(self, content: FileContent) -> _Memory:
        while True:
            if self._free:
                memory = self._free.pop()
            elif self.used_bytes + content.num_bytes <= self._memory_bytes:
                return _Memory(content)
            else:
                _, memory = self._loaded.popitem(last=False)
            if memory.content == content:
                return memory


class MappedFiles:
    """Files mapped by safetensors, whose tensors are the maps themselves: read where and when they are used.

    Args:
        files: {name: a safetensors file, which must not change}.
        memory_bytes: bound on what is mapped; None for no bound, since the system gives mapped pages back.

    Attributes:
        misses: files mapped so far.
        bytes_read: 0, since nothing is copied.
    """

    def __init__(self, files: Mapping[str, Path], memory_bytes: int | None = None) -> None:
        self._files, self._memory_bytes = dict(files), memory_bytes
        self._mapped: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self.misses = self.bytes_read = 0

    def get(self, name: str) -> dict[str, Tensor]:
        """The file's tensors, read-only."""
        if name not in self._mapped:
            while self._mapped and self._memory_bytes is not None and self._size(name) > self._memory_bytes:
                self._mapped.popitem(last=False)
            self._mapped[name] = load_file(self._files[name])
            self.misses += 1
        self._mapped.move_to_end(name)
        return self._mapped[name]

    def _size(self, added: str) -> int:
        return sum(self._files[name].stat().st_size for name in (*self._mapped, added))


class _Memory:
    """Tensors for the values of a file, in one buffer."""

    def __init__(self, content: FileContent) -> None:
        self.content = content
        self._buffer = np.empty(content.num_bytes, np.uint8)
        self._buffer.fill(0)  # so that the system commits the memory before a load is timed
        self.tensors = {
            spec.name: torch.from_numpy(self._buffer[first:end].view(spec.dtype).reshape(spec.shape))
            for spec, (first, end) in content.tensors.items()
        }

    def copy(self, path: Path) -> None:
        """Fill the tensors with those of a file, through safetensors."""
        for name, values in load_file(path).items():
            self.tensors[name].copy_(values)

    def read(self, path: Path, start: int) -> None:
        """Fill the tensors with the values of a file that begin at byte `start`."""
        unread = self._buffer.data
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while len(unread):
                count = file.readinto(unread)
                if not count:
                    raise InputError(f"{path}: {len(unread)} bytes are missing at its end")
                unread = unread[count:]


def read_header(path: Path) -> tuple[int, FileContent]:
    """The byte at which the values of a safetensors file begin, and its content.

    Raises:
        InputError: the file is missing or damaged, or holds a type without a NumPy equivalent.
    """
    try:
        with safe_open(path, "np"), path.open("rb") as file:  # safetensors checks that the header fits the file
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {
            TensorSpec(name, tuple(tensor["shape"]), _DTYPES[tensor["dtype"]]): tuple(tensor["data_offsets"])
            for name, tensor in sorted(header.items())
        }
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    except KeyError as error:
        raise InputError(f"{path}: values of type {error}; give one of {', '.join(_DTYPES)}") from None
    return 8 + length, FileContent(tensors=tensors, num_bytes=max((end for _, end in tensors.values()), default=0))
