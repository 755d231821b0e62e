"""In passes of which sizes a record's gradient has the same bits, whatever the size: found out on this machine.

A library may choose another kernel, which rounds otherwise, for another number of rows, and a thread's chunk of a
tensor may end within a vector. Both depend on shapes, processor and number of threads, not on values. So the model's
own pass is tried, there and back, at the number of threads that it will have: with one record in all rows, whose
gradients must be equal in every place, and the same in passes of other sizes. Equal layers are tried once.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedpriv.adapters import lora
from fedpriv.data.records import BatchShape, Records
from fedpriv.training.clipping import part_norms
from fedpriv.training.kernels import Watched, are_equal
from fedpriv.training.losses import predictions
from fedpriv.training.per_sample import Stack, TrainableLayer, per_sample_gradients, recorded

if TYPE_CHECKING:
    from fedpriv.training.model import TrainingModel

# What was found in this process, oldest first: {what decides: [(sizes, their groups)]}. Verdicts depend on shapes,
# settings and threads, not on weights.
_found: dict[Hashable, list[tuple[frozenset[int], list[tuple[int, ...]]]]] = {}
_MOST_FOUND = 4096

Trial = Callable[[int], Hashable | None]
"""The bits that each record has in a pass of so many rows; None if they depend on its place."""


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
    """As `with_equal_bits`, tried once in this process.

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


def bits_of_pass(model: TrainingModel, rows: int, tokens: int, *, full: bool, rank: int | None) -> Hashable | None:
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


def _bits_of_pass(model: TrainingModel, rows: int, tokens: int, full: bool, rank: int | None) -> Hashable | None:
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


def bits_of_head(model: TrainingModel, rows: int) -> Hashable | None:
    """As `bits_of_pass`, of a pass through the model's head alone."""
    assert model.head is not None
    layer = model.layers[model.head]
    stack = _random_stack(
        {n: p.shape for n, p in model.peft_model.named_parameters() if n in (layer.weight, layer.bias)}, rows
    )
    features = torch.randn(layer.module.in_features, generator=torch.Generator().manual_seed(0)).repeat(rows, 1)
    batch = {"labels": torch.zeros(rows, dtype=torch.int64)}
    return bits_of(rows, {model.head: layer}, stack, lambda: predictions(layer.module(features), batch).losses)


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
    """What decides which kernels a layer calls: its modules, their shapes and settings, but not which layer it is."""
    settings = [
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, str | int | float) and "layer_id" not in name
    ]
    return repr(layer), str(settings), str([(name, p.dtype) for name, p in layer.named_parameters()])
