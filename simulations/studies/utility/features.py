"""Features of records, kept beyond one run: they depend on the tokens alone while A and B have not been trained.

Partitions, seeds and splits of one corpus share their records, and what the head reads of them is by far the largest
part of a run that trains the head alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.adapters import B_SUFFIX, INNER_SUFFIX
from fedpriv.config import RunConfig
from fedpriv.data.records import BatchShape, Item
from fedpriv.training import Body, FeatureCache
from fedpriv.training.model import TrainingModel

Compute = Callable[[Sequence[Item], BatchShape, Body, bool], Tensor]


class FeatureStore:
    """Features by what they depend on, in memory and in a file.

    Args:
        path: of the file; read if it is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._states: dict[bytes, npt.NDArray[np.float32]] = {}
        self._num_saved = 0
        if path.is_file():
            with np.load(path) as saved:
                self._states = {key.tobytes(): state for key, state in zip(saved["keys"], saved["states"], strict=True)}
            self._num_saved = len(self._states)

    def serve(self, model: TrainingModel, config: RunConfig) -> None:
        """Let the model look here first; what it computes is added.

        Args:
            model: whose head reads one vector for each record.
            config: of the run.
        """
        if model.features is None or model.head is None:
            return
        base = f"{config.model} {config.max_length} {config.normalize_features} {model.base_dtype_name}".encode()
        width = model.layers[model.head].module.in_features
        compute = self._remembered(
            model._head_inputs, base
        )  # the cache's constructor takes it, and nothing public has it
        model.features = FeatureCache(compute, model.body_passes, width=width, memory_limit=model.memory_limit)

    def save(self) -> None:
        """Write what is new to the file."""
        if len(self._states) == self._num_saved:
            return
        keys = np.frombuffer(b"".join(self._states), dtype="V16")
        partial = self._path.with_suffix(".partial.npz")
        np.savez(partial, keys=keys, states=np.stack(list(self._states.values())))
        partial.replace(self._path)
        self._num_saved = len(self._states)

    def _remembered(self, compute: Compute, base: bytes) -> Compute:
        def states(items: Sequence[Item], shape: BatchShape, body: Body, cached: bool) -> Tensor:
            if not _is_untrained(body):
                return compute(items, shape, body, cached)
            keys = [_digest(item, base) for item in items]
            missing = [position for position, key in enumerate(keys) if key not in self._states]
            if missing:
                # Fewer rows than the model's own pass: the same features up to rounding.
                needed = shape if len(missing) == len(keys) else replace(shape, rows=len(missing))
                computed = compute([items[position] for position in missing], needed, body, cached)
                rows = computed[: len(missing)].float().cpu().numpy().copy()
                self._states.update(zip([keys[position] for position in missing], rows, strict=True))
            return torch.from_numpy(np.stack([self._states[key] for key in keys]))

        return states


def _is_untrained(body: Body) -> bool:
    """Whether nothing is added to the frozen base: B, or R before a frozen one, is zero before it is trained."""
    trained = (tensor for name, tensor in body.tensors.items() if name.endswith((B_SUFFIX, INNER_SUFFIX)))
    return not body.merged and not any(bool(tensor.any()) for tensor in trained)


def _digest(item: Item, base: bytes) -> bytes:
    records, index = item
    return hashlib.blake2b(base + records.features["input_ids"][index].numpy().tobytes(), digest_size=16).digest()
