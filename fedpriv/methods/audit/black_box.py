"""Audit of a whole simulated run through its final model: a lower bound on epsilon from canaries.

The attacker knows the initial model and all canaries, and reads from the final model how likely each canary's outcome
is: its class, or its last token. Counted is the margin over other outcomes, which hardly bends as the weights change.
Training also moves the margin of a canary that was left out, along with all that resembles it. So the attacker computes
at both ends of the run how a step on each canary would move each margin, and estimates all coins together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.learning.adapters import Adapter, lora
from fedpriv.learning.data.records import Item, Records, num_tokens
from fedpriv.learning.training.canaries import AuditedClient, Flags, audited, digest
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import per_sample_gradients
from fedpriv.learning.training.workbench import Workbench
from fedpriv.methods.audit._bounds import fixed_num_guesses, one_run_audit
from fedpriv.methods.audit._membership import roc
from fedpriv.methods.audit.f_dp import has_curve, schedule_epsilon
from fedpriv.privacy.accounting.accountants import PrivacySpent
from fedpriv.privacy.accounting.law import Array, Event

_CONFIDENCE = 0.95
_RECORDS_PER_PASS = 64
# Logits of one pass.
_LOGITS_PER_PASS = 2**24
# Values of a gradient that are kept apart.
_MOST_VALUES = 2**14


def canary_scores(gains: Array, of_margins: Array, of_losses: Array) -> Array:
    """[canaries] Estimates of the coins from what each canary's margin gained; a higher one means more likely in.

    A step on canary j moves margin i by <v_i, u_j>, with v the gradient of a margin and u that of a loss, clipped to
    one length. So the gains are S b + V e, with S = V U^T, coins b, and e the noise and the steps on all else. The best
    linear estimate of b, of unknown mean m, is m + S^T Q^-1 (gains - m S 1) with Q = S S^T + r V V^T, m by generalised
    least squares, and r the variance of a coordinate of e over that of a coin's step. It hardly depends on r in 0.3..3,
    where the noise of epsilons from 1 to 10 lies; r is 1.

    Args:
        gains: [canaries], how far each margin rose from the initial to the final model.
        of_margins: [canaries, values], v, on average over the way from the initial to the final model.
        of_losses: [canaries, values], u likewise, of any length.
    """
    lengths = np.maximum(np.linalg.norm(of_margins, axis=1, keepdims=True), np.finfo(float).tiny)
    v, u = of_margins / lengths, -_directions(of_losses)
    moved = v @ u.T
    covariance = moved @ moved.T + v @ v.T
    if not np.trace(covariance) > 0:  # no value is trained that any margin depends on
        return np.zeros(len(gains))
    covariance += 1e-9 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    values, of_all = gains / lengths[:, 0], moved.sum(axis=1)
    weights = np.linalg.solve(covariance, of_all)
    mean = (weights @ values) / max(weights @ of_all, np.finfo(float).tiny)
    return np.asarray(moved.T @ np.linalg.solve(covariance, values - mean * of_all))


def _directions(rows: Array) -> Array:
    """The rows, each of length 1 or 0."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(float).tiny))


@dataclass(frozen=True, kw_only=True)
class _Canaries:
    """All clients' canaries: ids of the outcomes that margins compare, and [canaries] the column of each one's own."""

    items: list[Item]
    outcomes: Tensor
    own: Tensor

    @staticmethod
    def of(clients: Sequence[AuditedClient]) -> _Canaries:
        """Those of the clients, in order."""
        items = [item for client in clients for item in client.canaries.items()]
        labels = torch.cat([client.canaries.labels for client in clients])
        ids = labels if len(labels) else torch.stack([records.features["input_ids"][i][-1] for records, i in items])
        outcomes, own = ids.unique(return_inverse=True)
        return _Canaries(items=items, outcomes=outcomes, own=own)

    def passes(self, vocabulary: int) -> Iterator[list[int]]:
        """Places of canaries of about one length, few enough for their logits."""
        order = sorted(range(len(self.items)), key=lambda place: num_tokens(self.items[place]))
        longest = num_tokens(self.items[order[-1]])
        rows = max(1, min(_RECORDS_PER_PASS, _LOGITS_PER_PASS // (longest * vocabulary)))
        return (order[begin : begin + rows] for begin in range(0, len(order), rows))

    def margins(self, model: TrainingModel, places: Sequence[int]) -> Tensor:
        """[places] the logit of a canary's outcome less the mean of all outcomes'."""
        items = [self.items[place] for place in places]
        logits, _ = model.logits(items, cached=True)
        rows = torch.arange(len(items), device=logits.device)
        if logits.dim() == 3:  # the token before the last predicts it
            logits = logits[rows, torch.tensor([num_tokens(item) - 2 for item in items], device=logits.device)]
        compared = logits[:, self.outcomes.to(logits.device)]
        return compared[rows, self.own[list(places)].to(logits.device)] - compared.mean(dim=1)


@torch.no_grad()
def _margins(model: TrainingModel, adapter: Adapter, canaries: _Canaries) -> Array:
    """[canaries] the margins under the model with the adapter."""
    lora.write_parameters(model.parameters, adapter)
    found = np.empty(len(canaries.items))
    for places in canaries.passes(model.peft_model.config.vocab_size):
        found[places] = canaries.margins(model, places).double().cpu().numpy()
    return found


def _slopes(model: TrainingModel, adapter: Adapter, canaries: _Canaries) -> tuple[Array, Array]:
    """[canaries, values] the gradients of margins and of losses at the adapter, by the trained values or sums of them.

    Of more than 16,384 values each is added, with a random sign, to one of so many sums, which keep inner products up
    to a hundredth.
    """
    lora.write_parameters(model.parameters, adapter)
    num = sum(parameter.numel() for parameter in model.parameters.values())
    if is_summed := num > _MOST_VALUES:
        generator = torch.Generator().manual_seed(0)
        places = torch.randint(_MOST_VALUES, (num,), generator=generator)
        signs = torch.randint(2, (num,), generator=generator) * 2.0 - 1.0

    def of(values: Callable[[list[int]], Tensor]) -> Array:
        found = np.empty((len(canaries.items), min(num, _MOST_VALUES)), dtype=np.float32)
        for chosen in canaries.passes(model.peft_model.config.vocab_size):
            by_name, _ = per_sample_gradients(model.layers, partial(values, chosen), recomputed=model.recomputed)
            rows = torch.cat([by_name[name].flatten(1) for name in sorted(by_name)], dim=1).float().cpu()
            if is_summed:
                rows = torch.zeros(len(rows), _MOST_VALUES).index_add_(1, places, rows * signs)
            found[chosen] = rows.numpy()
        return found.astype(float)

    def losses(chosen: list[int]) -> Tensor:
        return model.predictions([canaries.items[place] for place in chosen], cached=True).losses

    return of(partial(canaries.margins, model)), of(losses)


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
    """[canaries of all clients] The scores of a run's canaries; the model's adapter is changed."""
    canaries = _Canaries.of(clients)
    before, after = (_margins(model, adapter, canaries) for adapter in (initial, final))
    (v, u), (v_last, u_last) = (_slopes(model, adapter, canaries) for adapter in (initial, final))
    return canary_scores(after - before, (v + v_last) / 2, _directions(u) + _directions(u_last))


def registration(config: RunConfig, bench: Workbench) -> dict[str, Any]:
    """An audit's choices, for a file from before the first round; InputError if all canaries are in, or none."""
    clients = _clients(config, bench)
    included = np.concatenate([client.included for client in clients])
    num = len(included)
    if included.all() or not included.any():
        raise InputError(f"audit_canaries = {config.audit_canaries}: by chance all or none of {num} are in; use more")
    return {
        "kind": config.audit,
        "num_canaries": num,
        "repeats": config.audit_repeats,
        "num_guesses": fixed_num_guesses(num),
        "confidence": _CONFIDENCE,
        "sha256": digest(clients),
    }


def run_scores(config: RunConfig, bench: Workbench, final: Adapter) -> tuple[Array, Flags]:
    """[canaries of all clients] the scores of a run's canaries, and which of them were included.

    Args:
        bench: with all clients' records; the adapter of its model is changed.
        final: the global adapter after the last round.
    """
    clients = _clients(config, bench)
    bench.model.merge({})
    # A model that diverged tells nothing.
    scores = np.nan_to_num(scores_of(bench.model, bench.initial, final, clients), nan=0.0, posinf=0.0, neginf=0.0)
    return scores, np.concatenate([client.included for client in clients])


def audit_of(
    config: RunConfig,
    scores: Array,
    included: Flags,
    *,
    registered: Mapping[str, Any],
    events: Sequence[Event],
    claim: PrivacySpent,
) -> dict[str, Any]:
    """The audit of a run's claim by its canaries, for the summary.

    Args:
        included: bool [canaries].
        events: that cover every client's in this run, on the view of those who see the global models alone; none if
            there are no such, and then no bound is by f-DP.
        claim: their epsilon, which is infinite without noise, at the largest delta of the clients.
    """
    group_size = config.audit_repeats if config.unit == "record" else 1
    result = one_run_audit(
        scores,
        included,
        num_guesses=registered["num_guesses"],
        delta=claim.delta,
        confidence=registered["confidence"],
        group_size=group_size,
    )
    found = asdict(result)
    deciding = result.epsilon_lower
    if events and (has_curve(events) or math.isinf(claim.epsilon)):
        deciding = found["epsilon_lower_f_dp"] = schedule_epsilon(
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
        **found,
        "claimed_epsilon": claim.epsilon,
        "refuted": deciding > claim.epsilon,
        "sha256": registered["sha256"],
        "roc": {"fpr": wrongly.tolist(), "tpr": rightly.tolist()},
    }


def _clients(config: RunConfig, bench: Workbench) -> list[AuditedClient]:
    return [audited(config, bench, index) for index in range(len(bench.data.clients))]
