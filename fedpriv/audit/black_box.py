"""Audit of a whole simulated run through its final model: a lower bound on epsilon from canaries.

The attacker has the initial and the final model, knows all canaries, and reads from each model how likely every outcome
is for every canary: each class, or each canary's last token. A canary that was trained on has gained on its own
outcome, but so has every canary from all other records. The score therefore is what it gained on its own outcome above
the other outcomes, less what the others gained there in the mean, over the spread of such gains for this canary. In the
models of results/audit.md such scores tell nearly as much as the inner products of each canary's gradient with the
change of all weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.accounting.accountants import PrivacySpent
from fedpriv.accounting.composition.law import Array, Event
from fedpriv.adapters import Adapter, lora
from fedpriv.audit._bounds import OneRunAudit, fixed_num_guesses, one_run_audit
from fedpriv.audit._membership import roc
from fedpriv.audit.canaries import AuditedClient, audited, digest
from fedpriv.audit.f_dp import schedule_epsilon
from fedpriv.config import RunConfig
from fedpriv.data.records import Records, num_tokens
from fedpriv.training.model import TrainingModel
from fedpriv.training.workbench import Workbench

_CONFIDENCE = 0.95
_RECORDS_PER_PASS = 64
# Logits of one pass.
_LOGITS_PER_PASS = 2**24
# Of fewer outcomes, the spread of one canary's gains is not known.
_FEW_OUTCOMES = 16


def canary_scores(before: Array, after: Array, own: npt.NDArray[np.int64]) -> Array:
    """[canaries] How far a canary's gain on its own outcome exceeds what is usual for canary and outcome.

    Args:
        before, after: [canaries, outcomes] log probabilities by the initial and the final model.
        own: [canaries] column of each canary's outcome.
    """
    gains = after - before
    num = gains.shape[1]
    # Above the mean of all other outcomes: what is common to a context's outcomes says nothing.
    margins = (num * gains - gains.sum(axis=1, keepdims=True)) / (num - 1)
    rows = np.arange(len(margins))
    is_other = np.ones(margins.shape, dtype=bool)
    is_other[rows, own] = False
    others = is_other.sum(axis=0)
    usual = np.where(is_other, margins, 0.0).sum(axis=0) / np.maximum(others, 1)
    excess = margins - usual
    scores = excess[rows, own]
    if num < _FEW_OUTCOMES:
        return np.asarray(scores)
    spread = np.sqrt(np.where(is_other, excess**2, 0.0).sum(axis=1) / (num - 1))
    return np.asarray(scores / np.maximum(spread, np.finfo(float).tiny))


@torch.no_grad()
def _log_probabilities(model: TrainingModel, adapter: Adapter, canaries: Records, outcomes: Array) -> Array:
    """[canaries, outcomes] under the model with the adapter: of classes, or of tokens as each canary's last one."""
    lora.write_parameters(model.parameters, adapter)
    found = np.empty((len(canaries), len(outcomes)))
    chosen = torch.from_numpy(outcomes)
    longest = max(num_tokens(item) for item in canaries.items())
    values = longest * model.peft_model.config.vocab_size if not len(canaries.labels) else 1
    rows = max(1, min(_RECORDS_PER_PASS, _LOGITS_PER_PASS // values))
    order = sorted(range(len(canaries)), key=lambda index: num_tokens((canaries, index)))
    for begin in range(0, len(order), rows):
        indices = order[begin : begin + rows]
        logits, _ = model.logits(canaries.items(indices), cached=True)
        if logits.dim() == 3:  # the token before the last predicts it
            places = torch.tensor([num_tokens((canaries, index)) - 2 for index in indices], device=logits.device)
            logits = logits[torch.arange(len(indices), device=logits.device), places]
        found[indices] = logits.float().log_softmax(dim=-1).cpu()[:, chosen].numpy()
    return found


@torch.no_grad()
def record_losses(model: TrainingModel, adapter: Adapter, records: Records) -> Array:
    """[records] Loss of each record under the model with the adapter, which stays in the model."""
    lora.write_parameters(model.parameters, adapter)
    losses = np.empty(len(records))
    order = sorted(range(len(records)), key=lambda index: num_tokens((records, index)))
    for begin in range(0, len(order), _RECORDS_PER_PASS):
        indices = order[begin : begin + _RECORDS_PER_PASS]
        losses[indices] = model.predictions(records.items(indices), cached=True).losses.double().cpu().numpy()
    return losses


def scores_of(model: TrainingModel, initial: Adapter, final: Adapter, clients: Sequence[AuditedClient]) -> Array:
    """[canaries of all clients] The scores of a run's canaries; the model's adapter is changed.

    Memory and time grow with the square of the number of canaries of a causal model: 10,000 take a gigabyte.
    """
    labels = torch.cat([client.canaries.labels for client in clients])
    own = labels if len(labels) else torch.stack([row[-1] for c in clients for row in c.canaries.features["input_ids"]])
    outcomes, columns = np.unique(own.numpy(), return_inverse=True)
    before, after = (
        np.concatenate([_log_probabilities(model, adapter, client.canaries, outcomes) for client in clients])
        for adapter in (initial, final)
    )
    return canary_scores(before, after, columns)


def audit_run(
    model: TrainingModel,
    initial: Adapter,
    final: Adapter,
    clients: Sequence[AuditedClient],
    *,
    num_guesses: int,
    delta: float,
    confidence: float = _CONFIDENCE,
    group_size: int = 1,
) -> OneRunAudit:
    """A lower bound on the largest client epsilon, from only the initial and final global adapter of a run.

    The guarantee of each client covers its own canaries, and the largest epsilon at the largest delta covers all of
    them together.

    Args:
        model: of the run; its adapter is changed.
        initial: the adapter before the first round.
        final: the one after the last round.
        clients: with canaries.
        num_guesses: fixed before the run.
        delta: the largest delta of the clients.
        confidence: of the bound.
        group_size: records that a canary consists of, where records are the unit.
    """
    return one_run_audit(
        scores_of(model, initial, final, clients),
        np.concatenate([client.included for client in clients]),
        num_guesses=num_guesses,
        delta=delta,
        confidence=confidence,
        group_size=group_size,
    )


def registration(config: RunConfig, bench: Workbench) -> dict[str, Any]:
    """An audit's choices, for a file that is written before the first round: nothing may be chosen afterwards.

    Args:
        config: with an audit.
        bench: with all clients' records.
    """
    clients = _clients(config, bench)
    num = sum(len(client.canaries) for client in clients)
    return {
        "kind": config.audit,
        "num_canaries": num,
        "repeats": config.audit_repeats,
        "num_guesses": fixed_num_guesses(num),
        "confidence": _CONFIDENCE,
        "sha256": digest(clients),
    }


def audit_of(
    config: RunConfig,
    bench: Workbench,
    final: Adapter,
    *,
    registered: Mapping[str, Any],
    events: Sequence[Event],
    claim: PrivacySpent,
) -> dict[str, Any]:
    """The audit of a run's claim by its canaries, for the summary.

    Args:
        config: of the run, with an audit.
        bench: with all clients' records; the adapter of its model is changed.
        final: the global adapter after the last round.
        registered: the run's `registration`.
        events: of the client that spent most in this run, on the view of those who see the global models alone.
        claim: their epsilon, which is infinite without noise, at the largest delta of the clients.
    """
    clients = _clients(config, bench)
    bench.model.merge({})
    scores = scores_of(bench.model, bench.initial, final, clients)
    included = np.concatenate([client.included for client in clients])
    group_size = config.audit_repeats if config.unit == "record" else 1
    result = one_run_audit(
        scores,
        included,
        num_guesses=registered["num_guesses"],
        delta=claim.delta,
        confidence=registered["confidence"],
        group_size=group_size,
    )
    by_curve = schedule_epsilon(
        events,
        claim.delta,
        num_canaries=result.num_canaries,
        num_guesses=result.num_guesses,
        num_correct=result.num_correct,
        confidence=result.confidence,
        group_size=group_size,
    )
    wrongly, rightly = roc(scores, included)
    return {
        "kind": config.audit,
        **asdict(result),
        "epsilon_lower_f_dp": by_curve,
        "claimed_epsilon": claim.epsilon,
        "refuted": max(result.epsilon_lower, by_curve) > claim.epsilon,
        "sha256": registered["sha256"],
        "roc": {"fpr": wrongly.tolist(), "tpr": rightly.tolist()},
    }


def _clients(config: RunConfig, bench: Workbench) -> list[AuditedClient]:
    found = (audited(config, bench, index) for index in range(len(bench.data.clients)))
    return [client for client in found if client is not None]
