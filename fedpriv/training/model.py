"""The model as local training and evaluation see it: forward passes with or without the frozen-prefix cache."""

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

# Larger passes are slower on a CPU: beyond this size of its widest activation a layer no longer works in the caches,
# and records of unlike length share more padding.
_WIDEST_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class _Footprint:
    """What one record takes in a forward and backward pass, in floats; generous estimates.

    Attributes:
        per_record: per-sample gradients, twice.
        per_token: what the backward pass keeps of all layers, and the logits of a causal model.
        per_square: times the square of its tokens, for attention.
        widest: of the widest activation, for each token.
        cached: whether passes should stay within a CPU's caches.
    """

    per_record: int
    per_token: int
    per_square: int
    widest: int
    cached: bool

    @staticmethod
    def of(peft_model: Any, parameters: Iterable[nn.Parameter], frozen_layers: int) -> _Footprint:
        config = peft_model.config
        hidden, heads = config.hidden_size, config.num_attention_heads
        wide = getattr(config, "intermediate_size", None) or 4 * hidden
        layers = config.num_hidden_layers - frozen_layers
        causal = peft_model.active_peft_config.task_type == "CAUSAL_LM"
        return _Footprint(
            per_record=2 * sum(parameter.numel() for parameter in parameters),
            per_token=layers * (16 * hidden + 4 * wide) + (3 * config.vocab_size if causal else 0),
            per_square=3 * layers * heads,
            widest=max(wide, config.vocab_size if causal else 0),
            cached=next(peft_model.parameters()).device.type == "cpu",
        )

    def records_at_once(self, tokens: int, memory_limit: int) -> int:
        """How many records of that length one pass takes."""
        needed = _FLOAT_BYTES * (self.per_record + tokens * self.per_token + tokens**2 * self.per_square)
        at_most = memory_limit // needed
        if self.cached:
            at_most = min(at_most, _WIDEST_BYTES // (_FLOAT_BYTES * self.widest * max(tokens, 1)))
        return max(1, at_most)


class TrainingModel:
    """A peft model whose trainable layers can all be differentiated for each sample.

    Args:
        peft_model: in eval mode; it stays there, so that neither dropout nor batch statistics couple records.
        memory_limit: bytes that one forward and backward pass may take, and again the prefix cache in memory.
        prefix_cache: whether states below the first trainable layer are kept.

    Raises:
        ValueError: a trainable layer that cannot be differentiated for each sample, by name.
    """

    def __init__(self, peft_model: Any, *, memory_limit: int, prefix_cache: bool = True) -> None:
        self.peft_model = peft_model
        self.device: torch.device = next(peft_model.parameters()).device
        self.layers: dict[str, TrainableLayer] = trainable_layers(peft_model)
        self.parameters: dict[str, nn.Parameter] = lora.trainable(peft_model)
        self.initial: Adapter = lora.read_parameters(self.parameters)
        self._merged: Merged = {}
        self._untouched: dict[str, Tensor] = {}
        # Gradients come by module names, adapters by peft's names.
        by_id = {id(parameter): name for name, parameter in self.parameters.items()}
        self.adapter_names = {n: by_id[id(p)] for n, p in peft_model.named_parameters() if p.requires_grad}
        prefix = find_prefix(peft_model)
        self.cache = PrefixCache(self._forward, prefix, memory_limit=memory_limit) if prefix and prefix_cache else None
        self._footprint = _Footprint.of(peft_model, self.parameters.values(), prefix.length if prefix else 0)
        self.memory_limit = memory_limit

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Refuse an adapter that is not the model's; the rank of all LoRA layers together may differ.

        Raises:
            ValueError: names what does not fit.
        """
        if shapes.keys() != self.parameters.keys():
            odd = sorted(shapes.keys() ^ self.parameters.keys())
            raise ValueError(f"adapter: tensors {', '.join(odd)} are on one side only")
        ranks = {shape[0] for name, shape in shapes.items() if name.endswith(A_SUFFIX)}
        rank = ranks.pop() if len(ranks) == 1 else None
        for name, parameter in self.parameters.items():
            expected = tuple(parameter.shape)
            if rank is not None and name.endswith((A_SUFFIX, B_SUFFIX)):
                expected = (rank, expected[1]) if name.endswith(A_SUFFIX) else (expected[0], rank)
            if tuple(shapes[name]) != expected:
                raise ValueError(f"adapter: {name} has shape {tuple(shapes[name])}, the model's is {expected}")

    def check_merged(self, merged: Merged) -> None:
        """Refuse additions to frozen weights that are not the model's.

        Raises:
            ValueError: a layer that has no LoRA, or a matrix of another shape.
        """
        known = factors_of(self.initial)
        for name, product in merged.items():
            if name not in known:
                raise ValueError(f"merged: {name} is no layer with LoRA")
            right, wrong = (known[name][0].shape[0], known[name][1].shape[1]), product.shape
            if wrong != right:
                raise ValueError(f"merged: {name} is a matrix of shape {wrong}, not {right}")

    def merge(self, merged: Merged) -> None:
        """Set the frozen weights to the pretrained ones plus what aggregation has added; the last call counts alone.

        Raises:
            ValueError: as `check_merged`.
        """
        if same(merged, self._merged):
            return
        self.check_merged(merged)
        with torch.no_grad():
            for name in {*self._merged, *merged}:
                layer = self.peft_model.get_submodule(name)
                weight = layer.get_base_layer().weight
                untouched = self._untouched.setdefault(name, weight.detach().clone())
                weight.copy_(untouched)
                if name in merged:
                    added = layer.scaling["default"] * merged[name].matrix().to(weight.device)
                    weight.add_(added.T if layer.fan_in_fan_out else added)
        self._merged = dict(merged)

    def _precision(self) -> AbstractContextManager[object]:
        """bfloat16 for the frozen base on a GPU; the trainable layers compute in float32 by themselves."""
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
        """The places of the records, by length, cut so that one pass over a piece stays within the memory limit.

        Sums of clipped gradients do not depend on the cut but for rounding.
        """
        lengths = list(map(num_tokens, items))
        batch: list[int] = []
        for place in sorted(range(len(items)), key=lengths.__getitem__):
            if batch and len(batch) + 1 > self._footprint.records_at_once(lengths[place], self.memory_limit):
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch
