"""The contents of summary.json: what a series of rounds reached, and what it cost every client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedpriv.accounting.accountants import PrivacySpent, epsilon_of
from fedpriv.accounting.views import VIEWS
from fedpriv.adapters.arithmetic import A_SUFFIX, B_SUFFIX
from fedpriv.aggregation.fedavg import GlobalModel
from fedpriv.config import RunConfig
from fedpriv.run_checks import objections_to_aggregate
from fedpriv.runs.rows import ClientRow, RoundRow
from fedpriv.training.evaluation import Evaluation
from fedpriv.training.workbench import Workbench
from server.evaluation import PrivateEvaluation
from server.quality import perplexities, quality
from server.strategy import RuleStrategy

if TYPE_CHECKING:
    from fedpriv.baselines import Baselines

Costs = Mapping[str, Mapping[int, PrivacySpent | None]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One series of rounds; `test` and `untrained` are of its last and first model, if the server has a test set."""

    run_id: str
    rows: list[RoundRow]
    client_rows: list[ClientRow]
    strategy: RuleStrategy
    names: Mapping[int, str]
    seconds: float
    test: Evaluation | None = None
    untrained: Evaluation | None = None
    evaluation: PrivateEvaluation | None = None


def summarize(
    config: RunConfig,
    bench: Workbench,
    outcome: Outcome,
    comparison: Outcome | None,
    baselines: Baselines | None = None,
) -> dict[str, Any]:
    """The figures of a run; epsilons by pld, each from its client's whole history, earlier runs included."""
    accounts, rows = outcome.strategy.books.accounts, outcome.rows
    costs = {f"epsilon_{view}": accounts.final(view) for view in VIEWS}
    known = [cost for by_client in costs.values() for cost in by_client.values() if cost is not None]
    costs["epsilon_local_this_run"] = accounts.final("local", this_run_only=True)
    clients = [_client(client, costs, outcome) for client in outcome.strategy.books.sizes]
    labels = bench.data.label_names or (config.answers if outcome.test else ())
    unmoved = unmoved_tensors(outcome.strategy.model)
    largest = {view: _largest(costs[f"epsilon_{view}"].values()) for view in VIEWS}
    caveat = outcome.strategy.books.costs.caveat
    evaluation = outcome.evaluation
    estimate = evaluation.estimate if evaluation else None
    return {
        "accuracy": estimate.accuracy if estimate else rows[-1].test_accuracy,
        "accuracy_interval": [estimate.low, estimate.high] if estimate else None,
        "evaluation_noise_multiplier": config.evaluation_noise_multiplier,
        "num_evaluated_clients": evaluation.num_answers if evaluation else None,
        "accuracy_initial": rows[0].test_accuracy,
        "accuracy_non_private": comparison.rows[-1].test_accuracy if comparison else None,
        "chance_accuracy": 1 / (len(labels) if labels else bench.base.model.config.vocab_size),
        **quality(rows, outcome.test, labels, baselines),
        **perplexities(outcome.untrained, outcome.test, comparison.test if comparison else None),
        **{f"epsilon_{view}_max": epsilon for view, epsilon in largest.items()},
        "delta_max": max(accounts.deltas.values()),
        "num_readers": accounts.num_readers,
        "aggregate_objections": list(objections_to_aggregate(config)),
        "unit": next(iter(outcome.strategy.books.costs.units)),
        "accountant": "pld or rdp" if any(cost.upper_bound_only for cost in known) else "pld",
        "private": largest["local"] != math.inf and not config.simulate and not caveat,
        "mechanism": config.mechanism,
        "epsilon_as_published_max": _unproven(outcome) if caveat else None,
        "caveat": caveat,
        "noise_source": config.noise_source,
        "budget_epsilon": list(config.budget_epsilon),
        "privacy_view": config.privacy_view,
        "target_epsilon": config.target_epsilon,
        "stopped_early": outcome.strategy.stopped,
        "adapters_moved": not unmoved,
        "unmoved_tensors": unmoved,
        "aggregation": config.aggregation,
        "upload_codec": outcome.strategy.spec.codec,
        "num_silent": sum(row.num_silent for row in rows),
        "num_refused": sum(row.status == "malformed" for row in outcome.client_rows),
        "base_model_bytes": _frozen_bytes(bench),
        "num_clients": len(clients),
        "num_rounds": rows[-1].round,
        "bytes_up": sum(client["bytes_up"] for client in clients),
        "bytes_down": sum(client["bytes_down"] for client in clients),
        "seconds": outcome.seconds + (comparison.seconds if comparison else 0.0),
        "engine": config.engine,
        "run_id": outcome.run_id,
        "configuration_digest": config.digest,
        "clients": clients,
    }


def _client(client: int, costs: Costs, outcome: Outcome) -> dict[str, Any]:
    books, evaluation = outcome.strategy.books, outcome.evaluation
    up = evaluation.bytes_up.get(client, 0) if evaluation else 0
    down = evaluation.bytes_down.get(client, 0) if evaluation else 0
    return {
        "client": client,
        "name": outcome.names[client],
        "num_records": books.sizes[client],
        "rounds": books.accounts.num_releases(client) - books.num_evaluations[client],
        **{name: cost.epsilon if (cost := by_client[client]) else None for name, by_client in costs.items()},
        "delta": books.accounts.deltas[client],
        "earlier_runs": books.earlier_runs[client],
        "retired": books.retired.get(client),
        "bytes_up": up + sum(row.bytes_up for row in outcome.client_rows if row.client == client),
        "bytes_down": down + sum(row.bytes_down for row in outcome.client_rows if row.client == client),
    }


def _frozen_bytes(bench: Workbench) -> int:
    """The size of the frozen model that every variant is an adapter of, as float32."""
    trained = {id(parameter) for parameter in bench.model.parameters.values()}
    num_values: int = sum(p.numel() for p in bench.model.peft_model.parameters() if id(p) not in trained)
    return 4 * num_values


def _unproven(outcome: Outcome) -> float:
    """The largest figure that an accounting without proof gives a client; no guarantee."""
    accounts = outcome.strategy.books.accounts
    return max(
        epsilon_of(accounts.history(client, "local"), delta, "rdp", allow_unproven=True).epsilon
        for client, delta in accounts.deltas.items()
    )


def _largest(costs: Iterable[PrivacySpent | None]) -> float | None:
    """The largest epsilon; None if the view does not hold for a client."""
    epsilons = [cost.epsilon if cost else None for cost in costs]
    return None if None in epsilons else max((e for e in epsilons if e is not None), default=0.0)


def unmoved_tensors(model: GlobalModel) -> list[str]:
    """The tensors that training did not change, in layers into whose frozen weight nothing was merged either."""
    return [
        name
        for name, start in model.initial.items()
        if torch.equal(start, model.adapter[name])
        and name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX) not in model.merged
    ]
