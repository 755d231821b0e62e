"""One pass of the frozen base for rows of different variants, each with its own LoRA factors and head.

The base's products are shared by all rows; what a variant adds to a layer is a batched product of its low-rank factors
with its own rows. Nothing that a row's variant holds enters another row's sums, so a NaN stays where it is.

Source: Chen et al. 2024 (Punica), section 3; Sheng et al. 2024 (S-LoRA), section 4.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from fedpriv.learning.adapters import A_SUFFIX, B_SUFFIX, use_the_faster
from fedpriv.learning.adapters.pooling import pools, vectors
from fedpriv.learning.training.model import TrainingModel
from fedpriv.models.serving.requests import Tokens

_HEAD = ".modules_to_save.default"


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """A variant's tensors in one piece of memory.

    Attributes:
        rank: of all its LoRA layers.
        flat: float32 [values], in the order of the model's `Places`; B is scaled already.
        active: LoRA layers whose B is not all zero; the others add nothing.
    """

    variant: str
    rank: int
    flat: Tensor
    active: frozenset[str]

    @property
    def num_bytes(self) -> int:
        """The bytes in memory."""
        return self.flat.nbytes


@dataclass(frozen=True, eq=False)
class _Stacked:
    """The tensors of a pass's rows, {name: [rows or 1, *shape]}; one stands for all rows if they are all of it."""

    rows: tuple[Weights, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    active: frozenset[str] = frozenset()


class SharedBase:
    """A frozen base that runs rows of many variants at once. Not thread-safe: one thread runs passes.

    Args:
        model: a peft model with LoRA layers and, if it classifies, a linear head; its layers' forward passes are
            replaced for good, and its own adapter is no longer used.
        has_types: whether its texts have types of tokens too, all 0: some models add those up where they are given.

    Attributes:
        shares_passes: whether several rows may have one pass; if not, callers give one row at a time.
        embeds: whether it is an encoder that pools a text's states into one vector.
        most_positions: tokens of a row that the base has positions for; None without a limit.
    """

    def __init__(self, model: TrainingModel, *, has_types: bool = False) -> None:
        self.peft_model: Any = model.peft_model
        self._has_types = has_types
        self.config: Any = model.peft_model.config
        self.device: torch.device = model.device
        self.shares_passes = not model.alone
        self.most_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self.num_embeddings: int = self.peft_model.get_input_embeddings().num_embeddings
        self._base: Any = self.peft_model.get_base_model()
        self.embeds = pools(self._base)
        self._layers: dict[str, LoraLayer] = {
            name: module for name, module in self.peft_model.named_modules() if isinstance(module, LoraLayer)
        }
        heads = {
            name: module
            for name, module in self.peft_model.named_modules()
            if _HEAD in name and type(module) is nn.Linear
        }
        # A name for each tensor of a file, as peft writes it, with its shape here; the rank may be another there.
        own = get_peft_model_state_dict(self.peft_model, save_embedding_layers=False)
        self._shapes: dict[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in own.items()}
        self._current = _Stacked()
        use_the_faster(self._base)
        for name, layer in self._layers.items():
            vars(layer)["forward"] = self._lora_forward(name, layer)
        for name, head in heads.items():
            vars(head)["forward"] = self._head_forward(name.replace(_HEAD, ""))

    def weights(self, variant: str, tensors: Mapping[str, Tensor]) -> Weights:
        """A variant's tensors as passes use them.

        Args:
            tensors: by peft's names, float32; all LoRA layers have one rank, which may differ from the model's.

        Raises:
            ValueError: they do not fit the model; names the first that does not.
        """
        if unmatched := sorted(tensors.keys() ^ self._shapes.keys()):
            raise ValueError(f"{unmatched[0]} is {'missing' if unmatched[0] in self._shapes else 'one too many'}")
        ranks = {len(tensor) for name, tensor in tensors.items() if name.endswith(A_SUFFIX)} or {0}
        rank = max(ranks)
        for name, tensor in tensors.items():
            expected = self._shape(name, rank)
            if tuple(tensor.shape) != expected or tensor.dtype != torch.float32:
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not float32 {list(expected)}")
        parts, active = [], set()
        for name in sorted(self._shapes):
            tensor = tensors[name]
            if name.endswith(B_SUFFIX):
                layer = name.removesuffix(B_SUFFIX)
                if tensor.count_nonzero():  # a NaN counts as one
                    active.add(layer)
                tensor = tensor.T * self._layers[layer].scaling["default"]
            parts.append(tensor.reshape(-1))
        flat = torch.cat(parts).to(self.device)
        return Weights(variant=variant, rank=rank, flat=flat, active=frozenset(active))

    @property
    def no_variant(self) -> dict[str, Tensor]:
        """Tensors of which `weights` makes the base as it is; a head that they have is zero."""
        return {name: torch.zeros(self._shape(name, 1)) for name in self._shapes}

    @torch.inference_mode()
    def run(self, rows: Sequence[Weights], **inputs: Any) -> Any:
        """The base's output for a batch of transformers' inputs, [batch, ...], whose rows each have a variant."""
        with self._using(rows):
            return self._base(**inputs)

    def classify(self, rows: Sequence[Weights], texts: Sequence[Tokens]) -> Tensor:
        """The logits of texts, each with a token or more and padded, float32 [rows, labels], each by its variant."""
        logits: Tensor = self.run(rows, **self._padded_texts(texts)).logits.float().cpu()
        return logits

    @torch.inference_mode()
    def embed(self, rows: Sequence[Weights], texts: Sequence[Tokens]) -> Tensor:
        """The vectors of texts, float32 [rows, hidden] of length 1, as each row's own variant pools for its head."""
        with self._using(rows):
            read, _ = vectors(self._base, **self._padded_texts(texts))
        return F.normalize(read, dim=-1).cpu()

    def _padded_texts(self, texts: Sequence[Tokens]) -> dict[str, Tensor]:
        longest, padding = max(map(len, texts)), self.config.pad_token_id or 0
        ids = torch.tensor([[*text, *[padding] * (longest - len(text))] for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        types = {"token_type_ids": torch.zeros_like(ids)} if self._has_types else {}
        inputs = {"input_ids": ids, "attention_mask": mask, **types}
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}

    @contextmanager
    def _using(self, rows: Sequence[Weights]) -> Iterator[None]:
        """Within this context the layers use these variants' tensors."""
        kept = tuple(rows[:1]) if all(row is rows[0] for row in rows) else tuple(rows)
        # Rows of a generation stay together for many passes: their tensors are laid together once.
        if len(kept) != len(self._current.rows) or any(
            one is not other for one, other in zip(kept, self._current.rows, strict=True)
        ):
            self._current = self._stacked(kept)
        try:
            yield
        finally:
            if len(kept) == 1:
                self._current = _Stacked()  # nothing was copied; do not keep a variant that may be paged out

    def forget(self) -> None:
        """Free the tensors of the last pass."""
        self._current = _Stacked()

    def _stacked(self, rows: tuple[Weights, ...]) -> _Stacked:
        rank = max(row.rank for row in rows)
        flats = [row.flat if row.rank == rank else self._padded(row, rank) for row in rows]
        whole = torch.stack(flats) if len(flats) > 1 else flats[0].unsqueeze(0)
        tensors = {name: whole[:, begin:end].view(-1, *shape) for name, begin, end, shape in self._places(rank)}
        return _Stacked(rows, tensors, frozenset[str]().union(*(row.active for row in rows)))

    def _padded(self, row: Weights, rank: int) -> Tensor:
        """The tensors at a higher rank, of which the further rows of A and B^T are zeros."""
        parts = []
        for name, begin, end, shape in self._places(row.rank):
            tensor = row.flat[begin:end].view(shape)
            further = rank - row.rank if name.endswith((A_SUFFIX, B_SUFFIX)) else 0
            parts.append((F.pad(tensor, (0, 0, 0, further)) if further else tensor).reshape(-1))
        return torch.cat(parts)

    def _shape(self, name: str, rank: int) -> tuple[int, ...]:
        shape = self._shapes[name]
        if name.endswith(A_SUFFIX):
            return rank, shape[1]
        return (shape[0], rank) if name.endswith(B_SUFFIX) else shape

    def _places(self, rank: int) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
        """(name, begin, end, shape) of each tensor in `Weights.flat`; B is transposed there."""
        begin = 0
        for name in sorted(self._shapes):
            shape = self._shape(name, rank)
            shape = shape[::-1] if name.endswith(B_SUFFIX) else shape
            end = begin + torch.Size(shape).numel()
            yield name, begin, end, shape
            begin = end

    def _lora_forward(self, name: str, layer: Any) -> Callable[..., Tensor]:
        def forward(x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            output: Tensor = layer.base_layer(x)
            stacked = self._current
            if name not in stacked.active:
                return output
            return _added(output, x, stacked.tensors[name + A_SUFFIX], stacked.tensors[name + B_SUFFIX])

        return forward

    def _head_forward(self, name: str) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            weight, bias = self._current.tensors[name + ".weight"], self._current.tensors.get(name + ".bias")
            x = x.to(weight.dtype)
            if len(weight) == 1:
                return F.linear(x, weight[0], None if bias is None else bias[0])
            output = x.reshape(len(x), -1, x.shape[-1]) @ weight.transpose(1, 2)
            if bias is not None:
                output = output + bias.unsqueeze(1)
            return output.reshape(*x.shape[:-1], output.shape[-1])

        return forward


def _added(output: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The output, [rows, tokens, out], changed in place if float32, plus x A^T B, of [rows or 1, rank, ...] each."""
    narrow = x.to(a.dtype)
    if len(a) == 1:
        added = F.linear(narrow, a[0]) @ b[0]
        return output.add_(added) if output.dtype == added.dtype else (output + added).to(output.dtype)
    if len(x) != len(a):
        raise ValueError(f"a layer's input has {len(x)} rows, but the pass has {len(a)}")
    narrow = narrow.reshape(len(x), -1, x.shape[-1]) @ a.transpose(1, 2)
    flat = output.view(len(x), -1, output.shape[-1])
    if output.dtype == narrow.dtype:
        return flat.baddbmm_(narrow, b).view(output.shape)
    return (flat + narrow @ b).to(output.dtype).view(output.shape)
