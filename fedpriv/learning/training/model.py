"""The model for local training and evaluation: forward passes with or without the frozen-prefix cache."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedpriv.learning import adapters
from fedpriv.learning.adapters.pooling import pools
from fedpriv.learning.data.chat import RESPONSE_MASK
from fedpriv.learning.data.records import Item, Records, collate, num_tokens
from fedpriv.learning.training import _caches, _passes
from fedpriv.learning.training.independence import Tell, raising_failures, silent
from fedpriv.learning.training.per_sample import Stack, TrainableLayer, recorded, trainable_layers

# Of a LoRA layer's frozen weight, after the layer's name.
_WEIGHT = ".base_layer.weight"

# Of the record with which a model is tried.
_FEW_TOKENS = 8


def rank_of(shapes: Mapping[str, torch.Size]) -> int | None:
    """The rank of an adapter whose tensors have these shapes; None without LoRA layers, or if they differ in it.

    Of matrices R it is the most rows or columns of any: none is larger than its layer's weight.
    """
    inner = [max(shape, default=0) for name, shape in shapes.items() if name.endswith(adapters.INNER_SUFFIX)]
    ranks = {max(inner)} if inner else {shape[0] for name, shape in shapes.items() if name.endswith(adapters.A_SUFFIX)}
    return ranks.pop() if len(ranks) == 1 else None


class TrainingModel:
    """A peft model with per-sample gradients for all of its trainable layers; `TrainedModel` says what it has.

    Args:
        peft_model: in eval mode, where it stays, so that neither dropout nor batch statistics couple records.
        memory_limit: bytes for one forward and backward pass, the same again for the prefix cache in memory, and at
            most that for the features that a head reads.
        prefix_cache: whether to cache the states below the first trainable layer.
        activation_checkpointing: whether the layers from the first trainable one on keep their inputs alone and run
            again in the backward pass.
        max_length: tokens of the longest record, if known; none is padded further than to the next multiple of 8.
        alone: whether each record has a pass of its own, in a length that it alone decides, so that no other record can
            change a bit of what is computed of it.
        num_workers: processes that compute such passes side by side, on a CPU; as many as memory allows.
        pretrained: {parameter's name: float32} of the frozen weights as they were read; those that are missing are as
            they are now.

    Raises:
        ValueError: a trainable layer does not support per-sample gradients; names it.
    """

    features: _caches.FeatureCache | None = None
    tell: Tell = staticmethod(silent)

    def __init__(
        self,
        peft_model: Any,
        *,
        memory_limit: int,
        prefix_cache: bool = True,
        activation_checkpointing: bool = False,
        max_length: int | None = None,
        alone: bool = False,
        num_workers: int = 1,
        pretrained: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.peft_model, self.alone = peft_model, alone
        self.device: torch.device = next(peft_model.parameters()).device
        self.layers: dict[str, TrainableLayer] = trainable_layers(peft_model)
        self.parameters: dict[str, nn.Parameter] = adapters.lora.trainable(peft_model)
        self.initial: adapters.Adapter = adapters.lora.read_parameters(self.parameters)
        # Rounds leave these as they are, but deduplication may replace their blocks.
        self._frozen_factors = {
            name: p for name, p in peft_model.named_parameters() if ".lora_" in name and not p.requires_grad
        }
        self._merged: adapters.Merged = {}
        self._pretrained = {n: weight for n, weight in (pretrained or {}).items() if n.endswith(_WEIGHT)}
        # Gradients are keyed by module names, adapters by peft's names.
        by_id = {id(parameter): name for name, parameter in self.parameters.items()}
        self.adapter_names = {n: by_id[id(p)] for n, p in peft_model.named_parameters() if p.requires_grad}
        prefix = _caches.find_prefix(peft_model)
        self.recomputed: Sequence[nn.Module] = (
            _caches.blocks_from_first_trained(peft_model) if activation_checkpointing else ()
        )
        self.output_layer = _passes.output_layer(peft_model, self._first_tokens())
        self._footprint = _passes.Footprint.of(
            peft_model,
            self.parameters.values(),
            prefix.length if prefix else 0,
            whole_logits=adapters.lora.is_causal(peft_model) and self.output_layer is None,
            recomputes=bool(self.recomputed),
        )
        self.memory_limit = memory_limit
        self.longest = _longest(peft_model.config, max_length)
        self.num_workers = self._most_workers(num_workers)
        self.cache: _caches.PrefixCache | None = None
        if prefix and prefix_cache:
            width = peft_model.config.hidden_size
            self.cache = _caches.PrefixCache(self._forward, self, prefix, width=width, dtype=self.base_dtype)
        self.head = self._find_head()
        if self.head is not None:
            width = self.layers[self.head].module.weight.shape[1]
            self.features = _caches.FeatureCache(self._head_inputs, self, width=width)

    @property
    def base_dtype(self) -> torch.dtype:
        """The format in which the frozen base computes."""
        return adapters.base_dtype(self.peft_model)

    @property
    def base_dtype_name(self) -> Literal["float32", "bfloat16", "nf4"]:
        """The base's format, as the configuration names it."""
        if adapters.is_quantised(self.peft_model):
            return "nf4"
        return "bfloat16" if self.base_dtype == torch.bfloat16 else "float32"

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Refuse, by name, tensors that do not fit the model; layers may have another rank, or leading blocks of R."""
        if shapes.keys() != self.parameters.keys():
            unmatched = sorted(shapes.keys() ^ self.parameters.keys())
            raise ValueError(f"adapter: tensors {', '.join(unmatched)} are on one side only")
        for name, expected in self.shapes(rank_of(shapes)).items():
            if shapes[name] != expected:
                raise ValueError(f"adapter: {name} has shape {tuple(shapes[name])}, the model's is {tuple(expected)}")

    def shapes(self, rank: int | None) -> dict[str, torch.Size]:
        """The shapes of an adapter's tensors, of this LoRA rank; None stands for the model's own."""
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        if rank is not None:
            shapes |= {n: torch.Size((rank, shape[1])) for n, shape in shapes.items() if n.endswith(adapters.A_SUFFIX)}
            shapes |= {n: torch.Size((shape[0], rank)) for n, shape in shapes.items() if n.endswith(adapters.B_SUFFIX)}
            inner = {n: shape for n, shape in shapes.items() if n.endswith(adapters.INNER_SUFFIX)}
            shapes |= {n: torch.Size(max(1, min(rank, most)) for most in shape) for n, shape in inner.items()}
        return shapes

    @property
    def num_frozen_values(self) -> int:
        """The number of values of the base."""
        trained = {id(parameter) for parameter in self.parameters.values()}
        return sum(p.numel() for p in self.peft_model.parameters() if id(p) not in trained)

    @property
    def merged(self) -> adapters.Merged:
        """The sum of products that was added to the pretrained weights."""
        return self._merged

    def check_merged(self, merged: adapters.Merged) -> None:
        """Refuse, with a ValueError, additions to frozen weights of no LoRA, of another shape, or quantised."""
        if merged and self.base_dtype_name == "nf4":
            raise ValueError("merged: nothing can be added to weights in 4 bits; use base_dtype = bfloat16 or float32")
        known = adapters.factors_of(self.initial)
        for name, product in merged.items():
            if name not in known:
                raise ValueError(f"merged: {name} is not a layer with LoRA")
            expected = known[name][0].shape[0], known[name][1].shape[1]
            if product.shape != expected:
                raise ValueError(f"merged: {name} is a matrix of shape {product.shape}, not {expected}")

    def merge(self, merged: adapters.Merged) -> None:
        """Set the frozen weights to the pretrained ones plus `merged`, in place of earlier calls' (`check_merged`)."""
        if adapters.same_merged(merged, self._merged):
            return
        self.check_merged(merged)
        with torch.no_grad():
            for name in {*self._merged, *merged}:
                layer = self.peft_model.get_submodule(name)
                weight = layer.get_base_layer().weight
                pretrained = self._pretrained.setdefault(name + _WEIGHT, weight.detach().clone())
                weight.copy_(pretrained)
                if name in merged:
                    added = layer.scaling["default"] * merged[name].matrix().to(weight.device)
                    # Rounded once, after the sum: an addition too small for bfloat16 then shows on average.
                    weight.copy_(pretrained + (added.T if layer.fan_in_fan_out else added))
        self._merged = dict(merged)

    def logits(self, items: Sequence[Item], *, cached: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """The model's logits on the given records, float32, and the batch; see `collate`."""
        batch = self._on_device(self._batch(items))
        return self._run(items, batch, cached=cached).logits.float(), batch

    def _forward(self, items: Sequence[Item]) -> None:
        self._run(items, self._on_device(self._batch(items)), cached=False)

    def _batch(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """The records of one pass, on the CPU."""
        if not self.alone or items[0][0].are_choices:
            return collate(items, self.longest if self.alone else None)
        return collate(items, max(_passes.padded(num_tokens(item), self.longest) for item in items))

    def _on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _passes.to_device(tensor, self.device) for name, tensor in batch.items()}

    def _run(self, items: Sequence[Item], batch: Mapping[str, Tensor], *, cached: bool) -> Any:
        inputs: dict[str, Any] = {n: tensor for n, tensor in batch.items() if n not in ("labels", RESPONSE_MASK)}
        if adapters.lora.is_causal(self.peft_model):  # else keys and values of all layers are kept for a next token
            inputs["use_cache"] = False
        if self.cache is None or not cached:
            return self.peft_model(**inputs)
        hidden = self.cache.hidden(items, batch["input_ids"].shape).to(self.device)
        with _caches.skipping_prefix(self.cache.prefix, hidden):
            return self.peft_model(**inputs)

    def objectives(self, items: Sequence[Item], objective: str, *, cached: bool) -> Tensor:
        """[records] The values whose gradients an update descends.

        Args:
            objective: one of `OBJECTIVES`.
            cached: whether the states of the prefix cache are used.
        """
        if objective == "class-sums":
            return _passes.class_sum_losses(*self.logits(items, cached=cached))
        return self.predictions(items, cached=cached).losses

    def _first_tokens(self) -> dict[str, Tensor]:
        """A record of the vocabulary's first tokens: that of padding alone may have no embedding."""
        tokens = torch.arange(_FEW_TOKENS, device=self.device).remainder(self.peft_model.config.vocab_size).unsqueeze(0)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    def predictions(self, items: Sequence[Item], *, cached: bool) -> _passes.Predictions:
        """The model's predictions of the given records."""
        if self.output_layer is None:
            return _passes.predictions(*self.logits(items, cached=cached))
        # On the CPU: how many targets there are decides shapes, for which a GPU would be waited for.
        batch = self._batch(items)
        targets = _passes.next_token_targets(batch)
        if cached and self.cache is not None:  # a pass that stops at its middle would stop this one
            self.cache.fill(items)
        with _caches.input_of(self.output_layer) as captured:
            self._run(items, self._on_device(batch), cached=cached)
        if self.alone and items[0][0].are_choices:
            return _passes.even_predictions(captured[0], self.output_layer, targets)
        return _passes.sliced_predictions(captured[0], self.output_layer, targets, _passes.places_of(targets))

    def _find_head(self) -> str | None:
        names = [name for name in self.layers if ".modules_to_save." in name]
        return names[0] if len(names) == 1 and pools(self.peft_model.get_base_model()) else None

    @property
    def head_tensors(self) -> set[str]:
        """Names of the head's tensors in the adapter; empty without a `head`."""
        layer = self.layers[self.head] if self.head is not None else None
        return {self.adapter_names[name] for name in (layer.weight, layer.bias) if name} if layer else set()

    def _head_inputs(self, items: Sequence[Item], body: _caches.Body, cached: bool) -> Tensor:
        """[records, width] What the head reads, with the body's tensors in the place of the model's own."""
        assert self.head is not None
        layers = {name: layer for name, layer in self.layers.items() if name != self.head}
        by_name = {name: body.tensors[stored] for name, stored in self.adapter_names.items() if stored in body.tensors}
        stack = Stack(
            parameters={name: tensor.unsqueeze(0).to(self.device) for name, tensor in by_name.items()},
            owners=torch.zeros(len(items), dtype=torch.int64, device=self.device),
        )
        if cached and self.cache is not None:
            self.cache.fill(items)
        with recorded(layers, stack), _caches.input_of(self.layers[self.head].module) as captured:
            self._run(items, self._on_device(self._batch(items)), cached=cached)
        return captured[0]

    @torch.no_grad()
    def evaluation_logits(self, records: Records, indices: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits of public records by the current adapter, and the batch; features are kept."""
        if self.features is None or self.head is None:
            return self.logits(records.items(indices), cached=True)
        own = {name: p.detach().cpu() for name, p in self.parameters.items() if name not in self.head_tensors}
        own |= {name: p.detach().cpu() for name, p in self._frozen_factors.items()}
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        with raising_failures():
            features = self.features.features([(records, chosen)], _caches.Body(own, self._merged), keep=True)
        logits = self.layers[self.head].module(features.to(self.device))
        return logits, {"labels": records.labels[chosen].to(self.device)}

    def passes(self, items: Sequence[Item], num_values: int | None = None) -> Iterator[list[int]]:
        """The positions of the records that share a pass, which stays within the memory limit.

        Args:
            num_values: of the adapter that is trained, whose rank may not be the model's; None stands for the model's.
        """
        if self.alone:
            return ([position] for position in range(len(items)))
        lengths = [num_tokens(item) for item in items]
        return _passes.batches(lengths, partial(self._most_rows, num_values=num_values))

    def _most_rows(self, tokens: int, num_values: int | None = None) -> int:
        num_values = self._footprint.num_values if num_values is None else num_values
        return self._footprint.most_rows(tokens, num_values, self.memory_limit)

    def _most_workers(self, num_workers: int) -> int:
        """As many as can each hold a pass of the longest record; one on a GPU, whose passes follow one another."""
        if self.device.type != "cpu" or torch.accelerator.is_available() or self.longest is None:
            return 1  # where torch has started a thread for a GPU, a forked process has no backward pass
        return max(1, min(num_workers, self._footprint.rows_in(self.memory_limit, self.longest)))

    def reserve_cache(self, num_records: int) -> None:
        """Take room for the prefix cache of so many records of any length; where there is none, use no cache.

        Args:
            num_records: >= 1, the registered number: public numbers alone decide where the states go. Records beyond
                it are not cached.
        """
        if self.cache and (self.longest is None or not self.cache.reserve(num_records, self.longest)):
            self.cache = None


def _longest(config: Any, max_length: int | None) -> int | None:
    """Tokens of the longest record: a multiple of 8, unless the model has no room for that; None without a limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if max_length is None:
        return positions
    rounded = -(-max_length // 8) * 8
    return min(rounded, positions) if positions else rounded
