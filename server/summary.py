"""The contents of summary.json: what a series of rounds reached, and what it cost every client.

The final model is compared with what needs no federation, and a warning says when that is nothing to be proud of.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from fedpriv.config import RunConfig
from fedpriv.learning.adapters import A_SUFFIX, B_SUFFIX
from fedpriv.learning.aggregation import GlobalModel
from fedpriv.learning.training.evaluation import Evaluation
from fedpriv.learning.training.local_update import trained_names
from fedpriv.learning.training.workbench import Workbench
from fedpriv.privacy.accounting.accountants import PrivacySpent, closed_form, epsilon_of
from fedpriv.privacy.accounting.risk import Risk
from fedpriv.privacy.accounting.views import VIEWS
from fedpriv.privacy.ledger.accounts import Part
from fedpriv.runs import ClientTotals, RoundRow
from fedpriv.runs.figures import above_target
from fedpriv.runs.plan.preflight import objections_to_aggregate
from server.evaluation import PrivateEvaluation
from server.figures import chance_accuracy, class_figures, log_perplexity_change
from server.strategy import RuleStrategy

if TYPE_CHECKING:
    from server.baselines import Baselines


_CostsByView = Mapping[str, Mapping[int, PrivacySpent | None]]

_STANDARD_ERRORS = 2


@dataclass(frozen=True, kw_only=True)
class SeriesOutcome:
    """One series of rounds; `test` and `untrained` are of its last and first model, if the server has a test set.

    `rounds_charged_again` is that of its books, which the ledger must be open for.
    """

    run_id: str
    rows: list[RoundRow]
    totals: ClientTotals
    strategy: RuleStrategy
    names: Mapping[int, str]
    seconds: float
    rounds_charged_again: list[int]
    test: Evaluation | None = None
    untrained: Evaluation | None = None
    evaluation: PrivateEvaluation | None = None


def summarize(
    config: RunConfig,
    bench: Workbench,
    outcome: SeriesOutcome,
    comparison: SeriesOutcome | None,
    baselines: Baselines | None = None,
) -> dict[str, Any]:
    """The figures of a run; epsilons by pld, each from its client's whole history, earlier runs included."""
    accounts, rows = outcome.strategy.books.accounts, outcome.rows
    costs = {f"epsilon_{view}": accounts.final(view) for view in VIEWS}
    known = [cost for by_client in costs.values() for cost in by_client.values() if cost is not None]
    costs["epsilon_local_this_run"] = accounts.final("local", part="this run")
    tested = _tests_of_holders(bench, outcome.test, baselines)
    risks = accounts.risks(config.privacy_view)
    # That of a client without a release, too, whose risk names no unit of its own.
    unit = {"unit": next(iter(outcome.strategy.books.costs.units))}
    bytes_up, bytes_down = Counter(outcome.totals.bytes_up), Counter(outcome.totals.bytes_down)
    if outcome.evaluation:
        bytes_up.update(outcome.evaluation.bytes_up)
        bytes_down.update(outcome.evaluation.bytes_down)
    risk_of = cache(_risk)  # which few histories have

    def entry(client: int) -> dict[str, Any]:
        sent = {"bytes_up": bytes_up[client], "bytes_down": bytes_down[client]}
        own = _client(client, costs, outcome) | sent | tested(client) | risk_of(risks[client]) | unit
        return own | labels_of(client)

    labels = bench.data.label_names or (config.answers if outcome.test else ())
    if config.choice_columns and outcome.test:  # by their places
        labels = tuple(config.labels[at] if at < len(config.labels) else str(at) for at in range(config.max_choices))
    labels_of = _labels_of(bench, config, bench.data.label_names)
    asked = outcome.strategy.schedule.totals
    model = outcome.strategy.model
    unmoved = unmoved_tensors(model, {name for spec in asked for name in trained_names(model.adapter, spec.trains)})
    largest = {view: cost.epsilon if (cost := accounts.largest(view)) else None for view in VIEWS}
    parts: dict[str, Part] = {"this_run": "this run", "before": "before"} if accounts.has_earlier else {}
    caveat = outcome.strategy.books.costs.caveat
    evaluation = outcome.evaluation
    estimate = evaluation.estimate if evaluation else None
    summary: dict[str, Any] = {
        "accuracy": estimate.accuracy if estimate else rows[-1].test_accuracy,
        "accuracy_interval": [estimate.low, estimate.high] if estimate else None,
        "evaluation_noise_multiplier": config.evaluation_noise_multiplier,
        "num_evaluated_clients": evaluation.num_answers if evaluation else None,
        "accuracy_initial": rows[0].test_accuracy,
        "accuracy_non_private": comparison.rows[-1].test_accuracy if comparison else None,
        "chance_accuracy": chance_accuracy(bench, 0 if config.choice_columns else len(labels)),
        **quality(rows, outcome.test, labels, baselines),
        **perplexities(outcome.untrained, outcome.test, comparison.test if comparison else None),
        **{f"epsilon_{view}_max": epsilon for view, epsilon in largest.items()},
        **{
            f"epsilon_{name}_max": cost.epsilon if (cost := accounts.largest(config.privacy_view, part=part)) else None
            for name, part in parts.items()
        },
        "theorem_1": _theorem_1(config, outcome, costs["epsilon_rho"]),
        "rounds_charged_again": outcome.rounds_charged_again,
        "delta_max": max(accounts.deltas.values()),
        "num_readers": accounts.num_readers,
        "aggregate_objections": list(objections_to_aggregate(config)),
        **_largest_risk(accounts.largest_risk(config.privacy_view)),
        **unit,
        "holders_per_person": config.holders_per_person,
        "accountant": "pld or rdp" if any(cost.upper_bound_only for cost in known) else "pld",
        "private": largest["local"] != math.inf and not config.simulate and not caveat,
        "mechanism": config.mechanism,
        "epsilon_as_published_max": _largest_epsilon(outcome) if caveat else None,
        "epsilon_sound_max": _largest_epsilon(outcome, proven=True) if caveat else None,
        "caveat": caveat,
        "noise_source": config.noise_source,
        "budget_epsilon": list(config.budget_epsilon),
        "privacy_view": config.privacy_view,
        "target_epsilon": config.target_epsilon,
        "target_risk": config.target_risk,
        "target_epsilon_published": config.target_epsilon_published,
        "stopped_early": outcome.strategy.stopped,
        "adapters_moved": not unmoved,
        "unmoved_tensors": unmoved,
        "aggregation": config.aggregation,
        "upload_codec": outcome.strategy.spec.codec,
        "num_silent": sum(row.num_silent for row in rows),
        "num_refused": outcome.totals.num_malformed,
        "base_model_bytes": 4 * bench.model.num_frozen_values,  # as float32
        "num_clients": len(accounts.deltas),
        "num_rounds": rows[-1].round,
        "bytes_up": bytes_up.total(),
        "bytes_down": bytes_down.total(),
        "seconds": outcome.seconds + (comparison.seconds if comparison else 0.0),
        "engine": config.engine,
        "run_id": outcome.run_id,
        "configuration_digest": config.digest,
        "clients": _Entries(entry, tuple(outcome.strategy.books.sizes)),
    }
    summary["warnings"] += filter(None, [above_target(summary)])
    return summary


class _Entries(Sequence[dict[str, Any]]):
    """The clients' entries, each made when it is asked for: those of many would take more memory than their run."""

    def __init__(self, entry: Callable[[int], dict[str, Any]], clients: Sequence[int]) -> None:
        self._entry, self._clients = entry, clients

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, position: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, position: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, position: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(position, slice):
            return [self._entry(client) for client in self._clients[position]]
        return self._entry(self._clients[position])


def _tests_of_holders(
    bench: Workbench, test: Evaluation | None, baselines: Baselines | None
) -> Callable[[int], dict[str, Any]]:
    """A client's keys of summary.json for what its own model and the federation's get right, in all and on its records.

    Accuracies are None where the model, or which test records are whose, is not known.
    """
    keys = ("alone_accuracy", "num_own_test_records", "own_alone_accuracy", "own_accuracy")
    nothing: dict[str, Any] = dict.fromkeys(keys)
    found: defaultdict[int, dict[str, Any]] = defaultdict(nothing.copy)
    for key, by_client in (
        ("alone_accuracy", baselines.alone if baselines else {}),
        ("own_alone_accuracy", baselines.alone_on_own if baselines else {}),
        ("num_own_test_records", Counter(bench.data.test_holders)),
    ):
        for client, value in by_client.items():
            found[client][key] = value
    if test and test.right is not None and bench.data.test_holders:
        holders = np.array(bench.data.test_holders)
        for client in set(bench.data.test_holders):
            found[client]["own_accuracy"] = float(test.right[holders == client].mean())
    return lambda client: found.get(client, nothing)


def _client(client: int, costs: _CostsByView, outcome: SeriesOutcome) -> dict[str, Any]:
    books = outcome.strategy.books
    return {
        "client": client,
        "name": outcome.names[client],
        "num_records": books.sizes[client],
        "rounds": books.accounts.num_releases(client) - books.num_evaluations[client],
        **{name: cost.epsilon if (cost := by_client[client]) else None for name, by_client in costs.items()},
        "delta": books.accounts.deltas[client],
        "earlier_runs": books.earlier_runs[client],
        "retired": books.retired.get(client),
    }


def _labels_of(bench: Workbench, config: RunConfig, labels: Sequence[str]) -> Callable[[int], dict[str, Any]]:
    """A client's key of summary.json for its labels, where nobody's privacy depends on them; else none."""
    clients = bench.data.clients
    if not (config.protects_nobody and labels and clients and not config.is_own_model):
        return lambda client: {}

    def of_client(client: int) -> dict[str, Any]:
        numbers = Counter(map(str, clients[client].labels))
        return {"num_by_label": [numbers[label] for label in labels]}

    return of_client


def _theorem_1(config: RunConfig, outcome: SeriesOutcome, costs: Mapping[int, PrivacySpent | None]) -> Any:
    """The closed form of the DP-LoRA paper for the client with the largest epsilon on `rho`, and whether it applies.

    At unit sensitivity, as the paper counts: with sigma = `noise_multiplier`, whatever the clipping rule. It is no
    guarantee. None where the theorem has nothing to say: without noise, or unless all releases have one q and sigma.
    """
    charged = {client: cost.epsilon for client, cost in costs.items() if cost}
    if not charged or config.noise_multiplier == 0 or config.noise_on == "upload":
        return None
    accounts, client = outcome.strategy.books.accounts, max(charged, key=lambda each: charged[each])
    (local, *_), seen = accounts.history(client, "local"), accounts.history(client, "rho")
    try:
        events = [event.with_noise(config.noise_multiplier / local.effective_noise_multiplier) for event in seen]
        return asdict(closed_form(events, accounts.deltas[client]))
    except (ValueError, ZeroDivisionError):
        return None


def _largest_epsilon(outcome: SeriesOutcome, *, proven: bool = False) -> float:
    """The largest figure that an accounting without proof gives a client; or the proven one of the same noise."""
    accounts = outcome.strategy.books.accounts
    histories = ((accounts.history(client, "local"), delta) for client, delta in accounts.deltas.items())
    return max(
        epsilon_of([each.proven for each in events] if proven else events, delta, allow_unproven=True).epsilon
        for events, delta in histories
    )


# The shares wrongly accused for which a summary has the trade-off curve, as a report draws it.
_CURVE = (*(n / 1000 for n in (0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70)), *(n / 20 for n in range(2, 21)))


def _risk(risk: Risk | None) -> dict[str, Any]:
    """The keys about an account's risk; each None where the view does not hold."""
    return dict.fromkeys(Risk.none().values) if risk is None else risk.values


def _largest_risk(worst: Risk | None) -> dict[str, Any]:
    """The keys about the risk on the run's view, of everyone protected, with the curve above all of theirs."""
    if worst is None:
        return _risk(None) | {"trade_off": None}
    return worst.values | {"trade_off": {"fpr": list(_CURVE), "tpr": worst.curve(_CURVE)}}


def unmoved_tensors(model: GlobalModel, trained: Collection[str]) -> list[str]:
    """The tensors that training did not change, in layers into whose frozen weight nothing was merged either.

    Args:
        model: the final one.
        trained: names of the tensors that any round trains; where that is the head alone, A and B stay.
    """
    return [
        name
        for name, start in model.initial.items()
        if name in trained
        and torch.equal(start, model.adapter[name])
        and name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX) not in model.merged
    ]


def quality(
    rows: list[RoundRow], test: Evaluation | None, labels: tuple[str, ...], baselines: Baselines | None
) -> dict[str, Any]:
    """The keys of summary.json about a classifier's test, and `warnings`; None where something is not known.

    Args:
        rows: of the run.
        test: of the final model on the server's test set, if there is one.
        labels: the classes, in the order of the confusion matrix.
        baselines: if they were computed.
    """
    confusion = test.confusion if test else None
    figures = class_figures(confusion)
    alone = list(baselines.alone.values()) if baselines else []
    return figures | {
        "confusion_matrix": [list(row) for row in confusion] if confusion else None,
        "labels": list(labels) if confusion else None,
        "probe_accuracy": baselines.probe_accuracy if baselines else None,
        "tfidf_accuracy": baselines.tfidf_accuracy if baselines else None,
        "alone_accuracy": fmean(alone) if alone else None,
        "alone_accuracy_min": min(alone, default=None),
        "alone_accuracy_max": max(alone, default=None),
        "baselines": asdict(baselines) if baselines else None,
        "warnings": warnings_of(
            accuracy=rows[-1].test_accuracy,
            standard_error=figures["accuracy_standard_error"],
            majority=figures["majority_accuracy"],
            loss_initial=rows[0].test_loss,
            loss=rows[-1].test_loss,
        ),
    }


def perplexities(
    untrained: Evaluation | None, test: Evaluation | None, non_private: Evaluation | None
) -> dict[str, float | None]:
    """The keys of summary.json about perplexity; None for a classifier and where something is not known.

    Args:
        untrained, test: before and after the run, of the same records.
        non_private: of the comparison run.
    """
    change = None
    if untrained and untrained.tokens and test and test.tokens:
        change = log_perplexity_change(untrained.tokens, test.tokens)
    return {
        "perplexity": test.perplexity if test else None,
        "perplexity_initial": untrained.perplexity if untrained else None,
        "perplexity_non_private": non_private.perplexity if non_private else None,
        "log_perplexity_change": change.mean if change else None,
        "log_perplexity_change_standard_error": change.standard_error if change else None,
    }


def warnings_of(
    *,
    accuracy: float | None,
    standard_error: float | None,
    majority: float | None,
    loss_initial: float | None,
    loss: float | None,
) -> list[str]:
    """Warnings that a user must not overlook, a line each. Nothing is compared with what is not known.

    Args:
        accuracy: of the final model, in [0, 1].
        standard_error: of the accuracy.
        majority: share of the largest class among the records of the accuracy.
        loss_initial: of the untrained model, nats.
        loss: of the final model on the same records; NaN counts as a rise.
    """
    found = []
    # "At most": on a test set of one class, where both accuracies are 1, nothing is shown either.
    if (
        accuracy is not None
        and standard_error is not None
        and majority is not None
        and accuracy - majority <= _STANDARD_ERRORS * standard_error
    ):
        found.append(
            f"accuracy {accuracy:.3f} ± {standard_error:.3f} is not above {majority:.3f}, the share of the largest "
            f"class, by {_STANDARD_ERRORS} standard errors: no better than always guessing that class"
        )
    if loss_initial is not None and loss is not None and not loss <= loss_initial:
        found.append(f"test loss rose from {loss_initial:.3f} (untrained) to {loss:.3f}: training made the model worse")
    return found
