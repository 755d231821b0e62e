"""A whole run: registration, the private rounds, the comparison without noise, variants, summary and report."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedpriv import guard
from fedpriv.accounting.calibration import noise_multiplier_for_all
from fedpriv.accounting.clipping import clipping_parts, sensitivity_factor
from fedpriv.accounting.views import default_delta
from fedpriv.adapters import lora
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.protocol import Registration
from fedpriv.reports.page import write_report
from fedpriv.training.evaluation import Evaluation, evaluate
from fedpriv.training.workbench import Workbench, workbench
from server.history import ClientRow, RoundRow
from server.registration import register_nodes
from server.run_folder import RunFolder
from server.strategy import DpLora

log = logging.getLogger("flwr")

Nodes = dict[int, tuple[int, Registration]]


class Observer(Protocol):
    """Who is told how the run goes on; the terminal display is one."""

    def started(self, config: RunConfig, registrations: Sequence[Registration]) -> None:
        """A series of rounds begins: the private run, or its comparison."""

    def round_done(self, row: RoundRow) -> None:
        """A round is over."""

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Everything is written."""


class LogObserver:
    """Tells the log, for runs without a terminal of their own."""

    def started(self, config: RunConfig, registrations: Sequence[Registration]) -> None:
        """Log who takes part."""
        kind = f"z = {config.noise_multiplier}" if config.noise_multiplier else "comparison, z = 0"
        sizes = ", ".join(f"{r.client}: {r.num_records}" for r in registrations)
        log.info("run with %s; records by client: %s", kind, sizes)

    def round_done(self, row: RoundRow) -> None:
        """Log a round's figures."""
        log.info(
            "round %s: accuracy %.4f, epsilon local <= %.3f, rho <= %.3f",
            *(row.round, row.test_accuracy, row.epsilon_local_max, row.epsilon_rho_max),
        )

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Log where the results are."""
        log.info("accuracy %.4f; results in %s", summary["accuracy"], folder)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """One series of rounds."""

    rows: list[RoundRow]
    client_rows: list[ClientRow]
    strategy: DpLora
    adapter: Adapter
    seconds: float


def run(grid: Grid, config: RunConfig, observer: Observer) -> Path:
    """Carry out the run over the grid's nodes and return its folder.

    Raises:
        InputError: something in the configuration, the data or the federation cannot be used.
        TooFewClientsError: a round had fewer usable replies than `min_clients`.
    """
    guard.check_run(
        public=config.data_are_public,
        simulate=config.simulate,
        comparison=config.compares,
        noise_multiplier=config.noise_multiplier,
    )
    bench = workbench(config)
    nodes = register_nodes(grid, num_expected=len(bench.data.clients))
    config = calibrated(config, [registration.num_records for _, registration in nodes.values()], bench.initial)
    folder = RunFolder(Path(config.out).absolute(), config)
    outcome = _rounds(grid, config, bench, nodes, folder, observer)
    comparison = None
    if config.compares:
        plain = config.without_noise
        inner = RunFolder(folder.path / "comparison", plain)
        comparison = _rounds(grid, plain, bench, nodes, inner, observer)
        inner.finish(_summary(plain, bench, comparison, None))
    _save_variants(bench, outcome, folder)
    summary = _summary(config, bench, outcome, comparison)
    folder.finish(summary)
    write_report(folder.path)
    observer.finished(folder.path, summary)
    return folder.path


def calibrated(config: RunConfig, sizes: Sequence[int], tensor_names: Iterable[str]) -> RunConfig:
    """The configuration with the noise multiplier that its `target_epsilon` needs, if it has one.

    A client is assumed to take part in every round. On the `rho` view the worst case over who may drop out counts:
    rho_bar of n participants is never below 1 / sqrt(n).

    Raises:
        InputError: no noise meets the target.
    """
    if config.target_epsilon is None:
        return config
    selected = min(config.clients_per_round or len(sizes), len(sizes))
    view = 1 / math.sqrt(selected) if config.privacy_view == "rho" else 1.0
    parts = clipping_parts(config.clipping, tensor_names)
    try:
        noise_multiplier = noise_multiplier_for_all(
            config.target_epsilon,
            [(min(1.0, config.batch_size / size), config.delta or default_delta(size)) for size in sizes],
            steps=config.rounds * config.local_steps,
            scale=view / sensitivity_factor(config.clipping, len(parts)),
        )
    except ValueError as error:
        raise InputError(f"target_epsilon = {config.target_epsilon}: {error}") from None
    return replace(config, noise_multiplier=noise_multiplier)


def _rounds(
    grid: Grid,
    config: RunConfig,
    bench: Workbench,
    nodes: Nodes,
    folder: RunFolder,
    observer: Observer,
) -> _Outcome:
    """All rounds of one series, told to the folder and the observer."""
    rows: list[RoundRow] = []
    client_rows: list[ClientRow] = []

    def test(adapter: Adapter) -> Evaluation:
        lora.write_parameters(bench.model.parameters, adapter)
        return evaluate(bench.model, bench.test)

    def on_round(row: RoundRow, clients: list[ClientRow]) -> None:
        rows.append(row)
        client_rows.extend(clients)
        folder.add(row, clients)
        observer.round_done(row)

    started = time.monotonic()
    observer.started(config, [registration for _, registration in nodes.values()])
    strategy = DpLora(config, nodes, tensor_names=bench.initial, evaluate=test, on_round=on_round)
    result = strategy.start(grid, ArrayRecord(bench.initial), num_rounds=config.rounds)
    adapter = dict(result.arrays.to_torch_state_dict())
    seconds = time.monotonic() - started
    return _Outcome(rows=rows, client_rows=client_rows, strategy=strategy, adapter=adapter, seconds=seconds)


def _save_variants(bench: Workbench, outcome: _Outcome, folder: RunFolder) -> None:
    """The last upload of every client, and the final global adapter, in peft's format."""
    variants = {f"client-{client}": adapter for client, adapter in sorted(outcome.strategy.uploads.items())}
    for name, adapter in {**variants, "global": outcome.adapter}.items():
        lora.write_parameters(bench.model.parameters, adapter)
        lora.save(bench.model.peft_model, bench.base, folder.variant(name), labels=bench.data.label_names)


def unmoved(before: Adapter, after: Adapter) -> list[str]:
    """The tensors that training left as they were."""
    return [name for name in before if torch.equal(before[name], after[name])]


def _summary(config: RunConfig, bench: Workbench, outcome: _Outcome, comparison: _Outcome | None) -> dict[str, Any]:
    """The contents of summary.json; epsilons by pld, each from its client's whole history."""
    accounts, rows = outcome.strategy.accounts, outcome.rows
    clients = []
    upper_bound_only = False
    for client, size in outcome.strategy.sizes.items():
        local, rho = (accounts.spent(client, view, "pld") for view in ("local", "rho"))
        upper_bound_only |= local.upper_bound_only or rho.upper_bound_only
        clients.append(
            {
                "client": client,
                "name": bench.data.client_names[client],
                "num_records": size,
                "rounds": accounts.num_releases(client),
                "epsilon_local": local.epsilon,
                "epsilon_rho": rho.epsilon,
                "delta": accounts.deltas[client],
                "bytes_up": sum(row.bytes_up for row in outcome.client_rows if row.client == client),
                "bytes_down": sum(row.bytes_down for row in outcome.client_rows if row.client == client),
            }
        )
    labels = bench.data.label_names
    still = unmoved(bench.initial, outcome.adapter)
    return {
        "accuracy": rows[-1].test_accuracy,
        "accuracy_initial": rows[0].test_accuracy,
        "accuracy_non_private": comparison.rows[-1].test_accuracy if comparison else None,
        "chance_accuracy": 1 / (len(labels) if labels else bench.base.model.config.vocab_size),
        "epsilon_local_max": max(client["epsilon_local"] for client in clients),
        "epsilon_rho_max": max(client["epsilon_rho"] for client in clients),
        "delta_max": max(accounts.deltas.values()),
        "accountant": "pld, but rdp where its epsilon exceeds 100" if upper_bound_only else "pld",
        "private": config.noise_multiplier > 0 and not config.simulate,
        "noise_source": config.noise_source,
        "adapters_moved": not still,
        "unmoved_tensors": still,
        "num_clients": len(clients),
        "num_rounds": rows[-1].round,
        "bytes_up": sum(row.bytes_up for row in rows),
        "bytes_down": sum(row.bytes_down for row in rows),
        "seconds": outcome.seconds + (comparison.seconds if comparison else 0.0),
        "engine": config.engine,
        "configuration_digest": config.digest,
        "clients": clients,
    }
