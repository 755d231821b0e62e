"""The model for local training and evaluation: forward passes with or without the frozen-prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedpriv.adapters import lora
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.adapters.merged import A_SUFFIX, B_SUFFIX, Merged, factors_of, same
from fedpriv.data.records import Item, collate, num_tokens
from fedpriv.training.per_sample import TrainableLayer, trainable_layers
from fedpriv.training.prefix_cache import PrefixCache, find_prefix, skipping_prefix

_FLOAT_BYTES = 4

# Larger passes are slower on a CPU: if its widest activation exceeds this size, a layer no longer fits in the CPU's
# caches, and records of different lengths need more padding.
_MAX_ACTIVATION_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class _Footprint:
    """Memory that one record needs in a forward and backward pass, in floats; generous estimates.

    Attributes:
        per_record: per-sample gradients, twice.
        per_token: what the backward pass keeps of all layers, and the logits of a causal model.
        per_token_pair: for attention, per square of the number of tokens.
        widest_activation: per token.
        on_cpu: whether passes should fit in a CPU's caches.
    """

    per_record: int
    per_token: int
    per_token_pair: int
    widest_activation: int
    on_cpu: bool

    @staticmethod
    def of(peft_model: Any, parameters: Iterable[nn.Parameter], frozen_layers: int) -> _Footprint:
        config = peft_model.config
        hidden, heads = config.hidden_size, config.num_attention_heads
        intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
        layers = config.num_hidden_layers - frozen_layers
        causal = peft_model.active_peft_config.task_type == "CAUSAL_LM"
        return _Footprint(
            per_record=2 * sum(parameter.numel() for parameter in parameters),
            per_token=layers * (16 * hidden + 4 * intermediate) + (3 * config.vocab_size if causal else 0),
            per_token_pair=3 * layers * heads,
            widest_activation=max(intermediate, config.vocab_size if causal else 0),
            on_cpu=next(peft_model.parameters()).device.type == "cpu",
        )

    def records_at_once(self, tokens: int, memory_limit: int) -> int:
        """The number of records of this length that fit in one pass, >= 1."""
        needed = _FLOAT_BYTES * (self.per_record + tokens * self.per_token + tokens**2 * self.per_token_pair)
        at_most = memory_limit // needed
        if self.on_cpu:
            at_most = min(at_most, _MAX_ACTIVATION_BYTES // (_FLOAT_BYTES * self.widest_activation * max(tokens, 1)))
        return max(1, at_most)


class TrainingModel:
    """A peft model with per-sample gradients for all of its trainable layers.

    Args:
        peft_model: in eval mode, where it stays, so that neither dropout nor batch statistics couple records.
        memory_limit: bytes for one forward and backward pass, and the same again for the prefix cache in memory.
        prefix_cache: whether to cache the states below the first trainable layer.

    Raises:
        ValueError: a trainable layer does not support per-sample gradients; names it.
    """

    def __init__(self, peft_model: Any, *, memory_limit: int, prefix_cache: bool = True) -> None:
        self.peft_model = peft_model
        self.device: torch.device = next(peft_model.parameters()).device
        self.layers: dict[str, TrainableLayer] = trainable_layers(peft_model)
        self.parameters: dict[str, nn.Parameter] = lora.trainable(peft_model)
        self.initial: Adapter = lora.read_parameters(self.parameters)
        self._merged: Merged = {}
        self._pretrained: dict[str, Tensor] = {}
        # Gradients are keyed by module names, adapters by peft's names.
        by_id = {id(parameter): name for name, parameter in self.parameters.items()}
        self.adapter_names = {n: by_id[id(p)] for n, p in peft_model.named_parameters() if p.requires_grad}
        prefix = find_prefix(peft_model)
        self.cache = PrefixCache(self._forward, prefix, memory_limit=memory_limit) if prefix and prefix_cache else None
        self._footprint = _Footprint.of(peft_model, self.parameters.values(), prefix.length if prefix else 0)
        self.memory_limit = memory_limit

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Refuse an adapter that does not fit the model; its rank, equal in all LoRA layers, may differ.

        Raises:
            ValueError: names the tensors that do not fit.
        """
        if shapes.keys() != self.parameters.keys():
            unmatched = sorted(shapes.keys() ^ self.parameters.keys())
            raise ValueError(f"adapter: tensors {', '.join(unmatched)} are on one side only")
        ranks = {shape[0] for name, shape in shapes.items() if name.endswith(A_SUFFIX)}
        rank = ranks.pop() if len(ranks) == 1 else None
        for name, parameter in self.parameters.items():
            expected = tuple(parameter.shape)
            if rank is not None and name.endswith((A_SUFFIX, B_SUFFIX)):
                expected = (rank, expected[1]) if name.endswith(A_SUFFIX) else (expected[0], rank)
            if tuple(shapes[name]) != expected:
                raise ValueError(f"adapter: {name} has shape {tuple(shapes[name])}, the model's is {expected}")

    def check_merged(self, merged: Merged) -> None:
        """Refuse additions to frozen weights that do not fit the model.

        Raises:
            ValueError: a layer has no LoRA, or a matrix has another shape.
        """
        known = factors_of(self.initial)
        for name, product in merged.items():
            if name not in known:
                raise ValueError(f"merged: {name} is not a layer with LoRA")
            expected = known[name][0].shape[0], known[name][1].shape[1]
            if product.shape != expected:
                raise ValueError(f"merged: {name} is a matrix of shape {product.shape}, not {expected}")

    def merge(self, merged: Merged) -> None:
        """Set the frozen weights to the pretrained ones plus `merged`, which replaces that of earlier calls.

        Raises:
            ValueError: see `check_merged`.
        """
        if same(merged, self._merged):
            return
        self.check_merged(merged)
        with torch.no_grad():
            for name in {*self._merged, *merged}:
                layer = self.peft_model.get_submodule(name)
                weight = layer.get_base_layer().weight
                pretrained = self._pretrained.setdefault(name, weight.detach().clone())
                weight.copy_(pretrained)
                if name in merged:
                    added = layer.scaling["default"] * merged[name].matrix().to(weight.device)
                    weight.add_(added.T if layer.fan_in_fan_out else added)
        self._merged = dict(merged)

    def _precision(self) -> AbstractContextManager[object]:
        """bfloat16 for the frozen base on a GPU; the trainable layers compute in float32 regardless."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def _forward(self, items: Sequence[Item]) -> None:
        batch = collate(items)
        with self._precision():
            self.peft_model(**{name: tensor.to(self.device) for name, tensor in batch.items() if name != "labels"})

    def logits(self, items: Sequence[Item], *, cached: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """The model's logits on the given records, and the batch."""
        batch = {name: tensor.to(self.device) for name, tensor in collate(items).items()}
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        with self._precision():
            if self.cache is None or not cached:
                return self.peft_model(**inputs).logits.float(), batch
            with skipping_prefix(self.cache.prefix, self.cache.hidden(items).to(self.device)):
                return self.peft_model(**inputs).logits.float(), batch

    def physical_batches(self, items: Sequence[Item]) -> Iterator[list[int]]:
        """Indices of the records, sorted by length and split so that each pass stays within the memory limit.

        Except for rounding, sums of clipped gradients do not depend on the split.
        """
        lengths = list(map(num_tokens, items))
        batch: list[int] = []
        for index in sorted(range(len(items)), key=lengths.__getitem__):
            if batch and len(batch) + 1 > self._footprint.records_at_once(lengths[index], self.memory_limit):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch
