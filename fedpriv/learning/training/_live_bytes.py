"""The memory of a pass for per-sample gradients, counted on tensors without values, before anything is loaded."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedpriv.learning.data.records import Records
from fedpriv.learning.training._caches import input_of
from fedpriv.learning.training._losses import sliced_predictions
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import Stack, per_sample_gradients


class _LiveBytes(TorchDispatchMode):
    """Counts the memory of the tensors that are made within this context, for as long as they stand.

    What an operation takes for itself while it runs is not seen.

    Args:
        before: tensors that stood before, which are not counted.

    Attributes:
        peak: the most bytes at any time.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._now = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in before}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operation's result, counted."""
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)


def peak_of_pass(model: Any, *, rows: int, tokens: int, activation_checkpointing: bool = False) -> int:
    """Bytes of all tensors at once in a pass for per-sample gradients, without the model's own: the gradients are in.

    Args:
        model: a causal peft model in eval mode, on torch's meta device; its parameters' formats count.
        rows: records of the pass, >= 1.
        tokens: of each record, >= 2.
        activation_checkpointing: as of `TrainingModel`.
    """
    live: _LiveBytes
    with _without_values(model):
        training = TrainingModel(
            model, memory_limit=2**62, prefix_cache=False, activation_checkpointing=activation_checkpointing
        )
        ids = (torch.ones(tokens, dtype=torch.int64),) * rows
        records = Records({"input_ids": ids}, torch.zeros(0, dtype=torch.int64), 0)
        # As in a run: each record has its own client's parameters.
        own = {name: p.detach().unsqueeze(0) for name, p in model.named_parameters() if p.requires_grad}
        stack = Stack(parameters=own, owners=torch.zeros(rows, dtype=torch.int64))
        with _LiveBytes([*model.parameters(), *model.buffers()]) as live:
            per_sample_gradients(
                training.layers, lambda: _losses(training, records), stack, recomputed=training.recomputed
            )
    return live.peak


def _losses(training: TrainingModel, records: Records) -> Tensor:
    """Losses of `TrainingModel.predictions` with a target at every place: values alone would tell where they are."""
    if training.output_layer is None:
        return training.predictions(records.items(), cached=False).losses
    with input_of(training.output_layer) as captured:
        training.logits(records.items(), cached=False)
    rows, tokens = captured[0].shape[:2]
    targets = torch.zeros(rows, tokens - 1, dtype=torch.int64)
    places = [torch.arange(tokens - 1)] * rows
    return sliced_predictions(captured[0], training.output_layer, targets, places).losses


@contextmanager
def _without_values(model: Any) -> Iterator[None]:
    """Within this context all tensors, the model's own too, stand for tensors on a CPU and have no memory."""
    meta = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    stand_ins: dict[int, nn.Parameter] = {}  # tied parameters stay one
    with FakeTensorMode():
        for module, parameters, buffers in meta:
            for name, p in parameters.items():
                if p is not None:
                    empty = torch.empty(p.shape, dtype=p.dtype)
                    stand_ins.setdefault(id(p), nn.Parameter(empty, requires_grad=p.requires_grad))
                    module._parameters[name] = stand_ins[id(p)]
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        try:
            yield
        finally:
            for module, parameters, buffers in meta:
                module._parameters.update(parameters)
                module._buffers.update(buffers)
