"""Weights that processes of one user share: mapped from a file, their pages are in memory once for all of them.

Weights as they are in a checkpoint are mapped from it by safetensors. What was converted has a file of its own, in
`$FEDPRIV_CACHE` or `~/.cache/fedpriv`. It is named by its contents and compared with them whenever it is mapped, so
nothing depends on whether it is there.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.files import write_new

log = logging.getLogger(__name__)

# Of smaller models there is nothing to save.
_LEAST_BYTES = 2**24


def cache_folder() -> Path:
    """Where converted weights are kept."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedpriv"
    return Path(os.environ.get("FEDPRIV_CACHE") or default)


def shared(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Equal tensors that are mapped from a file; the given ones if they are small, or if there can be no such file.

    Writing to a mapped tensor changes neither the file nor what other processes see.

    Args:
        weights: on the CPU, none of them a view of another.
    """
    own = {name: tensor.contiguous() for name, tensor in weights.items()}
    if sum(tensor.nbytes for tensor in own.values()) < _LEAST_BYTES:
        return own
    try:
        path = cache_folder() / f"{_digest(own)}.safetensors"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(InputError):  # it is there by now: another process may have mapped it
                write_new(path, save(own), mode=0o600)
        mapped = load_file(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        log.info("the base's weights are this process's own: %s", error)
        return own
    if mapped.keys() != own.keys() or not all(torch.equal(mapped[name], tensor) for name, tensor in own.items()):
        log.warning("%s: does not hold the weights that it is named by; delete it", path)
        return own
    return mapped


def _digest(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
