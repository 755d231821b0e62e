"""Membership inference on records: scores from losses, and how well they separate members from non-members.

A higher score means that a record is more likely to be a member. On real data the result is itself computed from
membership: it is a release that no epsilon of the run covers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from fedpriv.errors import InputError
from fedpriv.methods.audit._bounds import checked_scores, clopper_pearson
from fedpriv.privacy.accounting.law import Array

# With fewer shadow losses than this, variances are pooled over records; otherwise each record has its own (Carlini et
# al. 2022).
_OWN_VARIANCE_FROM = 64
_SMALLEST_STDDEV = 1e-6


@dataclass(frozen=True, kw_only=True)
class _AtFalsePositiveRate:
    """An attack's true positive rate at a given false positive rate, with its Clopper-Pearson interval [low, high]."""

    false_positive_rate: float
    true_positive_rate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Membership:
    """How well scores separate members from non-members.

    Attributes:
        auc: probability that a member's score exceeds a non-member's, with ties counted as one half.
        auc_low, auc_high: DeLong interval of the AUC.
        confidence: of all intervals, in (0, 1).
    """

    auc: float
    auc_low: float
    auc_high: float
    confidence: float
    num_members: int
    num_others: int
    rates: tuple[_AtFalsePositiveRate, ...]


def loss_scores(losses: npt.ArrayLike) -> Array:
    """[records] The loss threshold attack: the lower a record's loss, the more likely it is a member.

    Source: Yeom et al. 2018.
    """
    return -_finite("loss", losses)


def calibrated_scores(losses: npt.ArrayLike, reference: npt.ArrayLike) -> Array:
    """[records] How far the model's loss is below that of a model that was trained on none of the records.

    Args:
        losses: [records] of the model under attack.
        reference: [records], or [models, records], whose mean is used.

    Raises:
        InputError: the lengths differ, or a loss is not finite.

    Source: Watson et al. 2022.
    """
    target, other = _finite("loss", losses), _finite("reference_loss", reference)
    mean = other.mean(axis=0) if other.ndim == 2 else other
    if mean.shape != target.shape:
        raise InputError(f"reference_loss: {mean.size} values for {target.size} losses; must be one for each record")
    return np.asarray(mean - target)


def lira_scores(losses: npt.ArrayLike, shadow_losses: npt.ArrayLike, shadow_members: npt.ArrayLike) -> Array:
    """[records] The log likelihood ratio of the loss under membership and non-membership, from shadow models.

    Losses are converted into the log odds of the correct class, log(p / (1 - p)) with p = e^-loss, and modelled for
    each record as Gaussian, separately for in and out. With fewer than 64 shadow models of either kind, variances are
    pooled over records.

    Args:
        losses: [records] of the model under attack.
        shadow_losses: [models, records].
        shadow_members: bool [models, records], which records each shadow model was trained on.

    Raises:
        InputError: shapes differ, or a record is in all shadow models or in none of them.

    Source: Carlini et al. 2022, Algorithm 1.
    """
    target, shadows = _log_odds(losses), _log_odds(shadow_losses)
    members = np.asarray(shadow_members).astype(bool)
    if shadows.ndim != 2 or members.shape != shadows.shape or shadows.shape[1] != len(target):
        raise InputError(
            f"shadow_losses: shape {shadows.shape} with memberships {members.shape} for {target.size} losses; must be "
            "[models, records] both"
        )
    num_in = members.sum(axis=0)
    if bad := np.flatnonzero((num_in == 0) | (num_in == len(members))).tolist():
        raise InputError(f"shadow_members: record {bad[0]} is in {num_in[bad[0]]} of {len(members)} shadow models")
    means, stddevs = zip(*(_fitted(shadows, chosen) for chosen in (members, ~members)), strict=True)
    inside, outside = (stats.norm.logpdf(target, mean, stddev) for mean, stddev in zip(means, stddevs, strict=True))
    return np.asarray(inside - outside)


def rmia_scores(losses: npt.ArrayLike, reference_losses: npt.ArrayLike) -> Array:
    """[records] The log ratio of a record's likelihood to its mean over reference models.

    The attack compares each record's ratio with those of a population and counts how many it exceeds by a factor. With
    one population for all records that is a rising function of the ratio, so the ratio has the same ROC curve.

    Args:
        losses: [records] of the model under attack, negative log likelihoods.
        reference_losses: [models, records]; about half of the models were trained on each record.

    Raises:
        InputError: shapes differ, or a loss is not finite.

    Source: Zarifzadeh, Liu and Shokri 2024, Equations 2 and 4.
    """
    target, references = _finite("loss", losses), _finite("reference_losses", reference_losses)
    if references.ndim != 2 or references.shape[1] != len(target):
        raise InputError(
            f"reference_losses: shape {references.shape} for {target.size} losses; must be [models, records]"
        )
    return np.asarray(math.log(len(references)) - target - special.logsumexp(-references, axis=0))


def membership(
    scores: npt.ArrayLike,
    members: npt.ArrayLike,
    *,
    false_positive_rates: Sequence[float] = (0.001, 0.01),
    confidence: float = 0.95,
) -> Membership:
    """How well the scores separate members from non-members.

    Args:
        scores: [records], finite.
        members: bool [records].
        false_positive_rates: in (0, 1). If there are fewer non-members than the inverse of a rate, none may pass.
        confidence: in (0, 1).

    Raises:
        InputError: a value is out of range, or there are no members or no non-members.
    """
    values, is_member = checked_scores(scores, members)
    if not 0 < confidence < 1:
        raise InputError(f"confidence = {confidence}: must lie in (0, 1), for instance 0.95")
    member_scores, other_scores = values[is_member], values[~is_member]
    auc, stddev = _auc(member_scores, other_scores)
    half_width = float(stats.norm.ppf((1 + confidence) / 2)) * stddev
    return Membership(
        auc=auc,
        auc_low=max(0.0, auc - half_width),
        auc_high=min(1.0, auc + half_width),
        confidence=confidence,
        num_members=len(member_scores),
        num_others=len(other_scores),
        rates=tuple(_at_rate(rate, member_scores, other_scores, confidence) for rate in false_positive_rates),
    )


def roc(scores: npt.ArrayLike, members: npt.ArrayLike) -> tuple[Array, Array]:
    """False and true positive rates at every threshold, from (0, 0) to (1, 1), both [points]."""
    values, is_member = checked_scores(scores, members)
    order = np.argsort(-values, kind="stable")
    last = np.append(np.flatnonzero(np.diff(values[order])), len(values) - 1)  # equal scores pass together
    passed = np.cumsum(is_member[order])[last]
    return (np.append(0.0, (last + 1 - passed) / (~is_member).sum()), np.append(0.0, passed / is_member.sum()))


def _at_rate(rate: float, members: Array, others: Array, confidence: float) -> _AtFalsePositiveRate:
    if not 0 < rate < 1:
        raise InputError(f"false_positive_rate = {rate}: must lie in (0, 1)")
    threshold = np.sort(others)[::-1][int(rate * len(others) * (1 + 1e-12))]
    num = int((members > threshold).sum())
    low, high = clopper_pearson(num, len(members), confidence)
    return _AtFalsePositiveRate(false_positive_rate=rate, true_positive_rate=num / len(members), low=low, high=high)


def _auc(members: Array, others: Array) -> tuple[float, float]:
    """The area under the curve and its standard deviation (DeLong, DeLong and Clarke-Pearson 1988)."""
    ranks = stats.rankdata(np.concatenate([members, others]))
    m, n = len(members), len(others)
    above = (ranks[:m] - stats.rankdata(members)) / n  # for each member, the share of non-members below it
    below = 1 - (ranks[m:] - stats.rankdata(others)) / m
    variance = sum(float(part.var(ddof=1)) / len(part) for part in (above, below) if len(part) > 1)
    return float(above.mean()), float(np.sqrt(variance))


def _log_odds(losses: npt.ArrayLike) -> Array:
    values = np.clip(_finite("loss", losses), 1e-9, None)
    return np.asarray(-values - np.log(-np.expm1(-values)))


def _fitted(shadows: Array, chosen: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """Mean and standard deviation of each record's values in the chosen models."""
    counts = chosen.sum(axis=0)
    mean = np.where(chosen, shadows, 0).sum(axis=0) / counts
    squares = np.where(chosen, (shadows - mean) ** 2, 0).sum(axis=0)
    own = np.sqrt(squares / np.maximum(counts - 1, 1))
    pooled = np.sqrt(squares.sum() / max(1, int((counts - 1).sum())))
    stddev = np.where(counts >= _OWN_VARIANCE_FROM, own, pooled)
    return mean, np.maximum(stddev, _SMALLEST_STDDEV)


def _finite(name: str, values: npt.ArrayLike) -> Array:
    array = np.asarray(values, dtype=float)
    if not np.isfinite(array).all():
        raise InputError(f"{name} = {array[~np.isfinite(array)][0]}: must be finite")
    return array


def plot_roc(attacks: Mapping[str, npt.ArrayLike], members: npt.ArrayLike, path: Path) -> None:
    """Write the ROC curves of all attacks, on logarithmic axes to show low false positive rates."""
    from matplotlib.figure import Figure  # deferred: bounds and scores draw nothing

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, scores in attacks.items():
        axes.plot(*roc(scores, members), label=name, drawstyle="steps-post")
    axes.plot([1e-4, 1], [1e-4, 1], color="grey", linestyle=":", label="chance")
    axes.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(1e-3, 1))
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.legend()
    figure.savefig(path, dpi=120)
