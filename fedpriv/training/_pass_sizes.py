"""The number of records in a pass: as many as fit in memory, and such that each gets the same bits on this machine.

A library may choose another kernel, which rounds otherwise, for another number of rows, and a thread's chunk of a
tensor may end within a vector. Both depend on shapes, processor and number of threads, not on values. So the model's
own pass is tried, there and back, at the number of threads that it will have: with one record in all rows, whose
gradients must be equal in every place, and the same in passes of other sizes. Equal layers are tried once.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedpriv.adapters import lora
from fedpriv.data.records import BatchShape, Item, Records
from fedpriv.training._kernels import Watched, are_equal
from fedpriv.training._losses import Predictions, block_losses, largest_block, predictions
from fedpriv.training._shapes import MULTIPLE
from fedpriv.training.clipping import part_norms
from fedpriv.training.per_sample import Stack, TrainableLayer, per_sample_gradients, recorded

_FLOAT_BYTES = 4

# Tokens of a pass on a CPU where its number of rows must be constant, times the root of the widest activation, in a
# step of 64 records. The last pass of each length is half dummies on average, which costs in proportion to the tokens;
# each pass has a fixed cost, in inverse proportion. The sum is least at a root of the step's tokens and of the fixed
# cost. Measured: results/benchmarks.md.
_TOKENS_TIMES_ROOT_OF_WIDTH = 10_240
RECORDS_OF_A_STEP = 64

# A larger activation no longer fits in a CPU's caches.
_MOST_ACTIVATION_FLOATS = 2**21

# Tokens of a pass on a CPU, in a step of 64 records, over the best multiple of record lengths. Padding costs in
# proportion to the multiple and to the records; a further length costs a pass that is not full, which takes as long as
# the root of the records. So the best multiple falls with their fourth root. Measured: results/benchmarks.md.
_TOKENS_PER_MULTIPLE = 26

# Records of a pass through the head alone.
_FEATURES_AT_ONCE = 1024

# What was found in this process, oldest first: {what decides: [(sizes, their groups)]}. Verdicts depend on shapes,
# settings and threads, not on weights.
_found: dict[Hashable, list[tuple[frozenset[int], list[tuple[int, ...]]]]] = {}
_MOST_FOUND = 4096

Trial = Callable[[int], Hashable | None]
"""The bits that each record has in a pass of so many rows; None if they depend on its place."""


class _Model(Protocol):
    """A `TrainingModel`, as far as its passes are tried here."""

    peft_model: Any
    layers: dict[str, TrainableLayer]
    adapter_names: dict[str, str]
    head: str | None
    recomputed: Sequence[nn.Module]

    def shapes(self, rank: int | None) -> dict[str, torch.Size]:
        """The shapes of an adapter's tensors."""

    def predictions(self, items: Sequence[Item], *, cached: bool, shape: BatchShape | None = None) -> Predictions:
        """The model's predictions of the records."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory that one record needs in a forward and backward pass, in floats; generous estimates.

    Attributes:
        num_values: of the model's own adapter; per-sample gradients take twice as many.
        per_token: what the backward pass keeps of all layers, and a causal model's logits if it needs all at once.
        per_token_pair: for attention, per square of the number of tokens.
        widest_activation: per token.
        on_cpu: whether passes should fit in a CPU's caches.
    """

    num_values: int
    per_token: int
    per_token_pair: int
    widest_activation: int
    on_cpu: bool

    @staticmethod
    def of(
        peft_model: Any,
        parameters: Iterable[nn.Parameter],
        frozen_layers: int,
        *,
        whole_logits: bool,
        recomputes: bool = False,
    ) -> Footprint:
        config = peft_model.config
        hidden, heads = config.hidden_size, config.num_attention_heads
        intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
        layers = config.num_hidden_layers - frozen_layers
        kept = min(layers, 1) if recomputes else layers
        vocabulary = config.vocab_size if whole_logits else 0
        return Footprint(
            num_values=sum(parameter.numel() for parameter in parameters),
            per_token=kept * (16 * hidden + 4 * intermediate) + (layers * hidden if recomputes else 0) + 3 * vocabulary,
            per_token_pair=3 * kept * heads,
            widest_activation=max(intermediate, vocabulary),
            on_cpu=next(peft_model.parameters()).device.type == "cpu",
        )

    def tokens_at_once(self, num_expected: float) -> int:
        """Tokens of a pass on a CPU, in a step of so many records."""
        tokens = _TOKENS_TIMES_ROOT_OF_WIDTH * math.sqrt(num_expected / RECORDS_OF_A_STEP / self.widest_activation)
        return int(min(tokens, _MOST_ACTIVATION_FLOATS / self.widest_activation))

    def multiple(self, num_expected: float) -> int:
        """The multiple of record lengths in a step of so many records, taken for 64 if they are fewer: a power of two.

        A rehearsal is of 64 records at least, and so meets every length.
        """
        if not self.on_cpu:
            return MULTIPLE
        best = self.tokens_at_once(RECORDS_OF_A_STEP) / _TOKENS_PER_MULTIPLE
        best *= (RECORDS_OF_A_STEP / max(RECORDS_OF_A_STEP, num_expected)) ** 0.25
        return 1 << round(math.log2(max(MULTIPLE, best)))

    def most_rows(self, tokens: int, num_values: int, memory_limit: int) -> int:
        """The most rows of a pass of records of this length that fit in memory and in a CPU's caches, >= 1."""
        needed = _FLOAT_BYTES * (2 * num_values + tokens * self.per_token + tokens**2 * self.per_token_pair)
        at_most = memory_limit // needed
        if self.on_cpu:
            at_most = min(at_most, _MOST_ACTIVATION_FLOATS // self.widest_activation // tokens)
        return max(1, at_most)


def features_at_once(num_values: int) -> int:
    """Records of a pass through the head alone, whose per-sample gradients have so many values each."""
    return max(1, min(_FEATURES_AT_ONCE, _MOST_ACTIVATION_FLOATS // num_values))


def candidates(largest: int) -> tuple[int, ...]:
    """Numbers of rows to try, up to `largest`, ascending: threads are likely to get equal chunks of so many rows.

    These are the powers of two and, for a number of threads that is none, their products with its odd factor. A product
    of a single row often has a kernel of its own, so 1 is not among them.
    """
    threads = torch.get_num_threads()
    odd = threads // (threads & -threads)
    sizes = {factor << power for factor in (1, odd) for power in range(largest.bit_length())}
    return tuple(sorted(size for size in sizes if 2 <= size <= largest))


def with_equal_bits(trial: Trial, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The sizes, ascending, in groups in which a record's bits depend neither on the size nor on its place."""
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for size in sizes:
        bits = trial(size)
        if bits is not None:
            groups[bits].append(size)
    return [tuple(group) for group in groups.values()]


def found_once(key: Hashable, trial: Trial, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return what `with_equal_bits` does, tried once in this process.

    Args:
        key: all that the verdict depends on, but the number of threads.
        trial, sizes: as for `with_equal_bits`.
    """
    known = _found.setdefault((key, torch.get_num_threads()), [])
    wanted = frozenset(sizes)
    groups = next((groups for tried, groups in known if wanted <= tried), None)
    if groups is None:
        groups = with_equal_bits(trial, sizes)
        known.append((wanted, groups))
        for oldest in list(_found)[:-_MOST_FOUND]:
            del _found[oldest]
    return [kept for group in groups if (kept := tuple(size for size in group if size in wanted))]


def structure(model: nn.Module) -> str:
    """Digest of what decides which kernels a model calls, whatever its weights."""
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    attention = getattr(model.config, "_attn_implementation", "")
    return hashlib.sha256(f"{_kind(model)} {parameters} {model.config} {attention}".encode()).hexdigest()


def chosen(groups: Sequence[tuple[int, ...]], constant: int) -> tuple[int, ...]:
    """The sizes of passes, ascending: as many as can be mixed, or else one.

    Args:
        groups: from `with_equal_bits`.
        constant: rows that suit passes of one size, which dummies fill.
    """
    best = max(groups, key=lambda group: (len(group), group[-1]), default=(1,))
    if len(best) > 1:
        return best
    return (max((size for group in groups for size in group if size <= constant), default=1),)


def bits_of_pass(model: _Model, rows: int, tokens: int, *, full: bool, rank: int | None) -> Hashable | None:
    """The bits that a record's gradient has in a pass of so many rows; None if they depend on its place.

    Args:
        model: on a CPU.
        rows: of the pass, >= 1.
        tokens: of each row, >= 2.
        full: whether none of them is padding.
        rank: of the adapter; None stands for the model's own.

    Raises:
        Exception: whatever the pass raises.
    """
    with _by_themselves(model.recomputed):
        try:
            with _one_layer_of_each_kind(model.peft_model):
                return _bits_of_pass(model, rows, tokens, full, rank)
        except Exception:  # some models cannot be shortened
            return _bits_of_pass(model, rows, tokens, full, rank)


@contextmanager
def _by_themselves(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Within this context the blocks run as they are, though a pass under way lets them run again later."""
    replaced = [(block, vars(block).pop("forward")) for block in blocks if "forward" in vars(block)]
    try:
        yield
    finally:
        for block, forward in replaced:
            vars(block)["forward"] = forward


def _bits_of_pass(model: _Model, rows: int, tokens: int, full: bool, rank: int | None) -> Hashable | None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.peft_model.config.vocab_size, (tokens if full else tokens - 1,), generator=generator)
    labels = torch.zeros(0 if lora.is_causal(model.peft_model) else 1, dtype=torch.int64)
    items = (
        Records({"input_ids": (ids,)}, labels, pad_token_id=model.peft_model.config.pad_token_id or 0).items() * rows
    )
    shape = BatchShape(rows=rows, tokens=tokens, full=full)
    shapes = model.shapes(rank)
    stack = _random_stack({name: shapes[stored] for name, stored in model.adapter_names.items()}, rows)
    return bits_of(rows, model.layers, stack, lambda: model.predictions(items, cached=False, shape=shape).losses)


def bits_of_head(model: _Model, rows: int) -> Hashable | None:
    """Return what `bits_of_pass` does, for a pass through the model's head alone."""
    assert model.head is not None
    layer = model.layers[model.head]
    stack = _random_stack(
        {n: p.shape for n, p in model.peft_model.named_parameters() if n in (layer.weight, layer.bias)}, rows
    )
    features = torch.randn(layer.module.weight.shape[1], generator=torch.Generator().manual_seed(0)).repeat(rows, 1)
    batch = {"labels": torch.zeros(rows, dtype=torch.int64)}
    return bits_of(rows, {model.head: layer}, stack, lambda: predictions(layer.module(features), batch).losses)


def blocks_of_targets(layer: nn.Linear) -> tuple[int, ...]:
    """The numbers of targets whose logits may be computed at once, ascending: a target has the same bits in all."""
    most = largest_block(layer)
    if layer.weight.device.type != "cpu":
        return (most,)
    key = "targets", layer.weight.shape, layer.weight.dtype, layer.bias is None
    return chosen(found_once(key, partial(_bits_of_target, layer), candidates(most)), constant=most)


@torch.no_grad()
def _bits_of_target(layer: nn.Linear, num: int) -> Hashable | None:
    """The bits of a target's loss and gradient in a block of so many equal ones; None if they depend on its place."""
    state = torch.randn(layer.in_features, generator=torch.Generator().manual_seed(0)).to(layer.weight.dtype)
    ones = torch.ones(num, dtype=torch.int64)
    with Watched(num) as watched:
        losses, _, gradients = block_losses(state.repeat(num, 1), layer, ones, ones)
    telling = watched.of_telling_values()
    if telling is None or not (watched.equal and are_equal(gradients) and are_equal(losses.unsqueeze(1))):
        return None
    return hashlib.sha256(gradients[0].float().numpy().tobytes()).digest(), losses[0].item(), telling


def bits_of(
    rows: int, layers: Mapping[str, TrainableLayer], stack: Stack, losses: Callable[[], Tensor]
) -> Hashable | None:
    """The bits of a record's gradient and of its norm in a pass of equal rows; None if they depend on the place.

    Args:
        rows: of the pass.
        layers, losses, stack: as for `per_sample_gradients`.
    """
    with torch.enable_grad(), Watched(rows) as watched:
        gradients, _ = per_sample_gradients(layers, losses, stack)
        flat = torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)
        norms = part_norms(flat, (slice(0, flat.shape[1]),))
    # What caches keep is computed so; without a way back, some products have another kernel.
    with torch.no_grad(), Watched(rows) as one_way, recorded(layers, stack):
        values = losses()
    if not (watched.equal and one_way.equal and are_equal(flat) and are_equal(norms.T) and are_equal(values)):
        return None
    telling = watched.of_telling_values(), one_way.of_telling_values()
    if None in telling:
        return None
    return hashlib.sha256(flat[0].numpy().tobytes()).digest(), norms[0, 0].item(), values[0].item(), telling


def _random_stack(shapes: Mapping[str, torch.Size], rows: int) -> Stack:
    """Parameters as views of one vector, as a client's are."""
    sizes = [shape.numel() for shape in shapes.values()]
    values = 0.1 * torch.randn(1, sum(sizes), generator=torch.Generator().manual_seed(1))
    parts = zip(shapes.items(), values.split(sizes, dim=1), strict=True)
    return Stack(
        parameters={name: part.view(1, *shape) for (name, shape), part in parts},
        owners=torch.zeros(rows, dtype=torch.int64),
    )


@contextmanager
def _one_layer_of_each_kind(model: nn.Module) -> Iterator[None]:
    """Within this context the model's lists of layers have one layer of each kind: the others call the same kernels."""
    shortened: list[tuple[str, nn.ModuleList]] = []
    for path, layers in list(model.named_modules()):
        inside = any(path.startswith(f"{other}.") for other, _ in shortened)
        if isinstance(layers, nn.ModuleList) and not inside:
            shortened.append((path, layers))
    try:
        for path, layers in shortened:
            of_kind: dict[Hashable, nn.Module] = {}
            for layer in layers:
                of_kind.setdefault(_kind(layer), layer)
            _replace(model, path, nn.ModuleList(of_kind.values()))
        yield
    finally:
        for path, layers in shortened:
            _replace(model, path, layers)


def _replace(model: nn.Module, path: str, layers: nn.ModuleList) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layers)


def _kind(layer: nn.Module) -> Hashable:
    """All that decides which kernels a layer calls: its modules, their shapes and settings.

    Neither its position nor the folder that its weights were read from.
    """
    settings = [
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, str | int | float) and "layer_id" not in name and name != "name_or_path"
    ]
    return repr(layer), str(settings), str([(name, p.dtype) for name, p in layer.named_parameters()])
