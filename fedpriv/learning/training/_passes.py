"""Passes of a model: which records share one, how far each is padded, and one loss for each record.

In a node each record has a pass of its own, in a length that it alone decides, so that no other record can touch it. A
simulation protects nobody: records of like length share passes as large as memory and a CPU's caches allow. No record's
loss depends on another record or on the batch size.

A language model's losses need not wait for the logits of a whole batch: a vocabulary of 50,000 and a batch of 8 records
of 256 tokens make 400 MB of logits, and as much for their gradient. `sliced_predictions` computes those of the tokens
that predict a target alone, a block at a time: prompts and padding cost nothing, and short answers share the reading of
the layer's weights. The backward pass needs the gradient of the hidden states alone, which is computed with the losses
and kept in place of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedpriv.learning.adapters import lora
from fedpriv.learning.data.chat import RESPONSE_MASK

TOKENS_OF_A_PASS = 4096
"""With padding and answers: the states of all layers, or the logits of a vocabulary, are kept for each."""

RECORDS_OF_A_STEP = 64
"""Records of a step of usual size."""

_FLOAT_BYTES = 4

# More of an activation no longer fits in the caches of a thread's core. With fewer than two shares, what a pass costs
# beside its products shows.
_FLOATS_OF_A_THREAD = 2**19

_MULTIPLE = 8

IGNORED = -100

# Targets of a block: more are hardly faster.
_MOST_TARGETS = 64
# Logits that stand in memory at once, 64 MiB in float32.
_MOST_LOGITS = 2**24


def padded(tokens: int, longest: int | None) -> int:
    """The length to which a record of so many tokens, >= 1, is padded where it has a pass of its own.

    It is a multiple of 8, and from 64 tokens on of the largest power of two that is at most an eighth of the record's.
    All records but the longest have some padding: without any, models leave out the mask and compute in another way.

    Args:
        longest: the most tokens that the model takes; None without a limit.
    """
    if longest is not None and tokens >= longest:
        return tokens
    multiple = max(_MULTIPLE, 1 << max(0, tokens.bit_length() - 4))
    length = (tokens // multiple + 1) * multiple
    return min(length, longest or length)


def lengths_up_to(most: int, longest: int | None) -> list[int]:
    """The largest number of tokens, at most `most`, of each way to be padded, ascending; `longest` as for `padded`."""
    largest = {(padded(tokens, longest), tokens == longest): tokens for tokens in range(1, most + 1)}
    return sorted(largest.values())


def batches(lengths: Sequence[int], most_rows: Callable[[int], int]) -> Iterator[list[int]]:
    """The positions of texts in passes without much padding, shortest first.

    Args:
        lengths: tokens of each text.
        most_rows: of a pass whose longest text has so many tokens; less than 1 counts as 1.
    """
    chosen: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda position: lengths[position]):
        if chosen and len(chosen) >= most_rows(lengths[position]):
            yield chosen
            chosen = []
        chosen.append(position)
    if chosen:
        yield chosen


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

    def rows_in(self, memory_limit: int, tokens: int, num_values: int | None = None) -> int:
        """The most records of this length whose passes fit in memory at once, whatever their adapter; may be 0."""
        num_values = self.num_values if num_values is None else num_values
        needed = _FLOAT_BYTES * (2 * num_values + tokens * self.per_token + tokens**2 * self.per_token_pair)
        return memory_limit // needed

    def most_rows(self, tokens: int, num_values: int, memory_limit: int) -> int:
        """The most rows of a pass of records of this length that fit in memory and in a CPU's caches, >= 1."""
        at_most = self.rows_in(memory_limit, tokens, num_values)
        if self.on_cpu:
            most_floats = _FLOATS_OF_A_THREAD * max(2, torch.get_num_threads())
            at_most = min(at_most, most_floats // self.widest_activation // tokens)
        return max(1, at_most)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; a GPU copies it from pinned memory while both sides go on."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """A model's predictions of a batch's records, each by itself.

    Attributes:
        losses: [rows], in nats: cross-entropy of the class, or the mean over the record's targets; zero without any.
        hits: [rows], in [0, 1]: whether the class is right, or the share of the targets that are.
        num_targets: int64 [rows], tokens to predict; 1 for a class.
    """

    losses: Tensor
    hits: Tensor
    num_targets: Tensor


def class_sum_losses(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Minus the logit of each record's label, [batch]: its gradient in the head is minus what the head reads.

    Raises:
        ValueError: there are no labels.
    """
    if "labels" not in batch:
        raise ValueError("objective = class-sums: needs a classifier's labels")
    return -logits.gather(1, batch["labels"].unsqueeze(1)).squeeze(1)


def next_token_targets(batch: Mapping[str, Tensor]) -> Tensor:
    """The token that each position must predict, int64 [batch, tokens - 1]; -100 if there is none.

    A position has a target only if it and the next one are real tokens: with padding on the left, the first real
    token would otherwise be predicted from padding alone.
    """
    mask = batch["attention_mask"].bool()
    is_target = mask[:, 1:] & mask[:, :-1]
    if RESPONSE_MASK in batch:
        is_target &= batch[RESPONSE_MASK][:, 1:].bool()
    return batch["input_ids"][:, 1:].masked_fill(~is_target, IGNORED)


def predictions(logits: Tensor, batch: Mapping[str, Tensor]) -> Predictions:
    """The predictions of each record that the logits make.

    With labels, the batch is one of classification; without, of next-token prediction.
    """
    if "labels" in batch:
        labels = batch["labels"]
        hits = (logits.argmax(dim=-1) == labels).to(torch.float32)
        losses = F.cross_entropy(logits, labels, reduction="none")
        return Predictions(losses=losses, hits=hits, num_targets=torch.ones_like(labels))
    targets = next_token_targets(batch)
    valid = targets != IGNORED
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    correct = (logits[:, :-1].argmax(dim=-1) == targets) & valid
    num_targets = valid.sum(dim=1)
    divisors = num_targets.clamp_min(1)  # a record without targets has a loss of zero
    return Predictions(losses=losses.sum(dim=1) / divisors, hits=correct.sum(dim=1) / divisors, num_targets=num_targets)


@torch.no_grad()
def output_layer(model: Any, inputs: dict[str, Tensor]) -> nn.Linear | None:
    """The frozen linear layer whose output is a causal model's logits; None if there is none, or they are not that.

    Args:
        model: a peft model.
        inputs: of one record, with which it is tried: some models scale or cap what the layer returns.
    """
    layer = model.get_output_embeddings() if lora.is_causal(model) else None
    if type(layer) is not nn.Linear:
        return None
    calls: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _, _args, output: calls.append(output))
    try:
        logits = model(**inputs).logits
    finally:
        hook.remove()
    return layer if len(calls) == 1 and calls[0] is logits else None


def places_of(targets: Tensor) -> list[Tensor]:
    """The places of each row's targets, [rows] of int64 vectors."""
    return [(own != IGNORED).nonzero().squeeze(1) for own in targets]


def sliced_predictions(hidden: Tensor, layer: nn.Linear, targets: Tensor, places: Sequence[Tensor]) -> Predictions:
    """The `predictions` of each record's targets that the layer's logits make.

    Args:
        hidden: [rows, tokens, width], what the layer reads; gradients flow to it alone.
        layer: frozen, with vocabulary x width weights.
        targets: int64 [rows, tokens - 1], from `next_token_targets`, on the CPU, as their places are.
        places: from `places_of`.
    """
    losses, hits = _Sliced.apply(hidden, layer, targets, places)  # type: ignore[no-untyped-call]
    return Predictions(
        losses=losses, hits=hits, num_targets=to_device(torch.tensor([len(own) for own in places]), hidden.device)
    )


def even_predictions(hidden: Tensor, layer: nn.Linear, targets: Tensor) -> Predictions:
    """The same of one row, without gradients, with logits at every place, so that no shape tells its targets."""
    wanted, size = to_device(targets[0], hidden.device), max(1, min(_MOST_TARGETS, _MOST_LOGITS // layer.out_features))
    blocks = zip(hidden[0, :-1].split(size), wanted.clamp_min(0).split(size), strict=True)
    found = [block_losses(states, layer, tokens, None) for states, tokens in blocks]
    num_targets = (wanted != IGNORED).sum()
    losses, hits = (
        torch.where(wanted != IGNORED, torch.cat(own), 0.0).sum(dim=0, keepdim=True) / num_targets.clamp_min(1)
        for own in list(zip(*found, strict=True))[:2]
    )
    return Predictions(losses=losses, hits=hits, num_targets=num_targets.unsqueeze(0))


class _Sliced(torch.autograd.Function):
    """Mean cross-entropy and share of hits of each row; zeros for one without targets."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, layer: nn.Linear, targets: Tensor, places: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        counts = [len(own) for own in places]
        gradient = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        rows = torch.cat([own.new_full((len(own),), row) for row, own in enumerate(places)])
        columns = torch.cat(list(places))
        shares = to_device(torch.tensor(counts)[rows], hidden.device)
        wanted = to_device(targets[rows, columns], hidden.device)
        rows, columns = to_device(rows, hidden.device), to_device(columns, hidden.device)
        # The first is there for batches without targets.
        of_losses, of_hits = [torch.zeros(0, device=hidden.device)], [torch.zeros(0, device=hidden.device)]
        size = max(1, min(_MOST_TARGETS, _MOST_LOGITS // layer.out_features))
        for begin in range(0, len(rows), size):
            block = slice(begin, begin + size)
            at = rows[block], columns[block]
            found = block_losses(hidden[at], layer, wanted[block], shares[block] if gradient is not None else None)
            of_losses.append(found[0])
            of_hits.append(found[1])
            if gradient is not None:
                gradient[at] = found[2]
        # Divided once, after the sum: shares of hits that are added up may round to more than 1.
        losses, hits = (
            torch.stack([own.sum() / max(1, len(own)) for own in torch.cat(of_targets).split(list(counts))])
            for of_targets in (of_losses, of_hits)
        )
        ctx.mark_non_differentiable(hits)
        ctx.save_for_backward(gradient)
        return losses, hits

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_outputs[0][:, None, None].to(gradient.dtype), None, None, None


def block_losses(
    states: Tensor, layer: nn.Linear, wanted: Tensor, shares: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Each target's loss and hit, [targets], and its loss's gradient by the states over its share, as the states.

    Args:
        states: [targets, width], what the layer reads.
        layer: frozen.
        wanted: int64 [targets], the tokens.
        shares: int64 [targets], by which gradients are divided; None if they are not needed, which are empty then.
    """
    wanted = wanted.unsqueeze(1)
    logits = F.linear(states, layer.weight, layer.bias).float()
    log_sums = logits.logsumexp(dim=1, keepdim=True)
    losses = log_sums - logits.gather(1, wanted)
    hits = (logits.argmax(dim=1, keepdim=True) == wanted).to(losses.dtype)
    gradient = states[:0]
    if shares is not None:
        of_logits = logits.sub_(log_sums).exp_()  # in place: a second one would be as large
        of_logits.scatter_add_(1, wanted, -torch.ones_like(log_sums))
        gradient = of_logits.div_(shares.unsqueeze(1)).to(layer.weight.dtype) @ layer.weight
    return losses.squeeze(1), hits.squeeze(1), gradient
