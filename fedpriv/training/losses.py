"""One loss per record: no record's loss depends on another record or on the batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedpriv.data.records import RESPONSE_MASK

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """How well a model predicts the records of a batch, each by itself.

    Attributes:
        losses: [rows], in nats: cross-entropy of the class, or the mean over the record's targets; zero without any.
        hits: [rows], in [0, 1]: whether the class is right, or the share of the targets that are.
        num_targets: int64 [rows], tokens to predict; 1 for a class.
    """

    losses: Tensor
    hits: Tensor
    num_targets: Tensor


def classification_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each record, [batch].

    Args:
        logits: [batch, classes].
        labels: int64 [batch].
    """
    return F.cross_entropy(logits, labels, reduction="none")


def class_sum_losses(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Minus the logit of each record's class, [batch]: its gradient in the head is minus what the head reads.

    Args:
        logits: [batch, classes].
        batch: with labels, int64 [batch].

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


def causal_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over each record's own targets, [batch]; zero for a record without any.

    Args:
        logits: [batch, tokens, vocabulary].
        targets: int64 [batch, tokens - 1], from `next_token_targets`.
    """
    token_losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return token_losses.sum(dim=1) / (targets != IGNORED).sum(dim=1).clamp_min(1)


def predictions(logits: Tensor, batch: Mapping[str, Tensor]) -> Predictions:
    """How well the logits predict each record.

    With labels, the batch is one of classification; without, of next-token prediction.
    """
    if "labels" in batch:
        labels = batch["labels"]
        hits = (logits.argmax(dim=-1) == labels).to(torch.float32)
        return Predictions(losses=classification_losses(logits, labels), hits=hits, num_targets=torch.ones_like(labels))
    targets = next_token_targets(batch)
    valid = targets != IGNORED
    correct = (logits[:, :-1].argmax(dim=-1) == targets) & valid
    num_targets = valid.sum(dim=1)
    return Predictions(
        losses=causal_losses(logits, targets),
        hits=correct.sum(dim=1) / num_targets.clamp_min(1),
        num_targets=num_targets,
    )
