"""No record's loss depends on other records or on the batch size, and padding is never a target."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fedpriv.training._losses import IGNORED, _causal_losses, next_token_targets, predictions


def test_targets_exclude_padding_on_either_side():
    right = {"input_ids": torch.tensor([[5, 6, 7, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    left = {"input_ids": torch.tensor([[0, 5, 6, 7]]), "attention_mask": torch.tensor([[0, 1, 1, 1]])}
    assert next_token_targets(right).tolist() == [[6, 7, IGNORED]]
    assert next_token_targets(left).tolist() == [[IGNORED, 6, 7]]


def test_causal_loss_is_the_mean_over_each_records_own_targets():
    logits = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[3, 4, IGNORED], [1, IGNORED, IGNORED]])
    first = F.cross_entropy(logits[0, :2], torch.tensor([3, 4]))
    second = F.cross_entropy(logits[1, :1], torch.tensor([1]))
    torch.testing.assert_close(_causal_losses(logits, targets), torch.stack([first, second]))


def test_a_record_without_a_target_has_zero_loss():
    assert _causal_losses(torch.randn(1, 3, 5), torch.full((1, 2), IGNORED)).tolist() == [0.0]


def test_classification_loss_does_not_depend_on_the_batch():
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0, 1])
    together = predictions(logits, {"labels": labels})
    alone = torch.cat([predictions(logits[i : i + 1], {"labels": labels[i : i + 1]}).losses for i in range(5)])
    torch.testing.assert_close(together.losses, alone)
    assert together.hits.tolist() == (logits.argmax(dim=1) == labels).float().tolist()
