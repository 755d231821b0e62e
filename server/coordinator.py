"""A whole run: registration, the private rounds, the comparison without noise, variants, summary and report."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedpriv import guard
from fedpriv.accounting.calibration import noise_multiplier_for_all
from fedpriv.accounting.ledger import Ledger
from fedpriv.accounting.views import default_delta
from fedpriv.adapters import lora
from fedpriv.aggregation.global_model import GlobalModel
from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.protocol import Registration
from fedpriv.reports.page import write_report
from fedpriv.training.evaluation import Evaluation, evaluate
from fedpriv.training.local_update import UpdateSpec, planned_event
from fedpriv.training.workbench import Workbench, workbench
from server.bookkeeping import Books, check_budget_and_view
from server.history import ClientRow, RoundRow
from server.registration import register_nodes
from server.run_folder import RunFolder
from server.strategy import RuleStrategy
from server.summary import Outcome, summarize

log = logging.getLogger("flwr")

Nodes = dict[int, tuple[int, Registration]]


class Observer(Protocol):
    """Who is told how the run goes on; the terminal display is one."""

    def started(self, config: RunConfig, registrations: Sequence[Registration]) -> None:
        """A series of rounds begins: the private run, or its comparison."""

    def notice(self, text: str) -> None:
        """Something that whoever started the run should know before it goes on."""

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

    def notice(self, text: str) -> None:
        """Log it."""
        log.warning("%s", text)

    def round_done(self, row: RoundRow) -> None:
        """Log a round's figures."""
        log.info(
            "round %s: accuracy %.4f, epsilon local <= %.3f, rho <= %.3f",
            *(row.round, row.test_accuracy, row.epsilon_local_max, row.epsilon_rho_max),
        )

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Log where the results are."""
        log.info("accuracy %.4f; results in %s", summary["accuracy"], folder)


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
    check_budget_and_view(config, len(bench.data.clients))
    nodes = register_nodes(grid, num_expected=len(bench.data.clients))
    config = calibrated(config, [registration.num_records for _, registration in nodes.values()], bench.initial)
    folder = RunFolder(Path(config.out).absolute(), config)
    with Ledger(Path(config.ledger) if config.ledger else folder.ledger) as ledger:
        series = _Series(config, bench, nodes, ledger)
        announce_budgets(series.books, config, bench.data.client_names, observer)
        outcome = series.run(grid, folder, observer)
        if config.ledger:
            ledger.copy(folder.ledger)
        head = ledger.head
    comparison = None
    if config.compares:
        plain = config.without_noise
        inner = RunFolder(folder.path / "comparison", plain)
        comparison = _Series(plain, bench, nodes, None).run(grid, inner, observer)
        inner.finish(summarize(plain, bench, comparison, None))
    _save_variants(bench, outcome, folder)
    summary = summarize(config, bench, outcome, comparison) | {"ledger_head": head}
    folder.finish(summary)
    write_report(folder.path)
    observer.finished(folder.path, summary)
    return folder.path


def announce_budgets(books: Books, config: RunConfig, names: Sequence[str], observer: Observer) -> None:
    """Say, before the first round, whose budget ends before the run does, and after how many rounds.

    Raises:
        InputError: fewer clients than the run needs can take part in even one round.
    """
    allowed = books.rounds_allowed
    short = {client: rounds for client, rounds in allowed.items() if rounds < config.rounds}
    able = len(books.sizes) - sum(rounds == 0 for rounds in allowed.values())
    if able < config.min_clients:
        raise InputError(
            f"budget_epsilon = {list(config.budget_epsilon)}: allows {able} of {len(books.sizes)} clients a round, "
            f"min_clients = {config.min_clients}; use more noise, or a larger budget"
        )
    if short:
        each = ", ".join(f"{names[client]} {rounds}" for client, rounds in sorted(short.items()))
        observer.notice(
            f"budget_epsilon allows fewer than the {config.rounds} rounds of this run, on the {config.privacy_view} "
            f"view and whoever drops out: {each}; these clients then retire"
        )


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
    spec = replace(UpdateSpec.of(config), noise_multiplier=1.0)
    names = tuple(tensor_names)
    events = [planned_event(spec, min(1.0, config.batch_size / size), names) for size in sizes]
    try:
        noise_multiplier = noise_multiplier_for_all(
            config.target_epsilon,
            [
                (event.sampling_probability, config.delta or default_delta(size))
                for event, size in zip(events, sizes, strict=True)
            ],
            steps=config.rounds * events[0].count,
            scale=view * events[0].noise_multiplier,
        )
    except ValueError as error:
        raise InputError(f"target_epsilon = {config.target_epsilon}: {error}") from None
    return replace(config, noise_multiplier=noise_multiplier)


class _Series:
    """The rounds of the private run, or those of its comparison, which no ledger records."""

    def __init__(self, config: RunConfig, bench: Workbench, nodes: Nodes, ledger: Ledger | None) -> None:
        self.run_id = secrets.token_hex(16)
        self.registrations = [registration for _, registration in nodes.values()]
        self.books = Books(config, self.run_id, self.registrations, tensor_names=bench.initial, ledger=ledger)
        self._config, self._bench, self._nodes = config, bench, nodes

    def run(self, grid: Grid, folder: RunFolder, observer: Observer) -> Outcome:
        """All rounds, told to the folder and the observer."""
        bench, rows, client_rows = self._bench, [], []

        def test(model: GlobalModel) -> Evaluation:
            bench.model.merge(model.merged)
            lora.write_parameters(bench.model.parameters, model.adapter)
            return evaluate(bench.model, bench.test)

        def on_round(row: RoundRow, clients: list[ClientRow]) -> None:
            rows.append(row)
            client_rows.extend(clients)
            folder.add(row, clients)
            observer.round_done(row)

        started = time.monotonic()
        observer.started(self._config, self.registrations)
        strategy = RuleStrategy(
            self._config,
            self._nodes,
            books=self.books,
            run=self.run_id,
            initial=bench.initial,
            evaluate=test,
            on_round=on_round,
        )
        strategy.start(grid, ArrayRecord(bench.initial), num_rounds=self._config.rounds)
        if strategy.stopped:
            observer.notice(f"the run ended early: {strategy.stopped}")
        return Outcome(
            run_id=self.run_id,
            rows=rows,
            client_rows=client_rows,
            strategy=strategy,
            seconds=time.monotonic() - started,
        )


def _save_variants(bench: Workbench, outcome: Outcome, folder: RunFolder) -> None:
    """The last upload of every client, and the final global model, in peft's format."""
    strategy = outcome.strategy
    variants = {f"client-{client}": upload for client, upload in sorted(strategy.uploads.items())}
    for name, (adapter, merged) in {**variants, "global": (strategy.model.adapter, strategy.model.merged)}.items():
        lora.save(
            bench.model.peft_model,
            bench.base,
            folder.variant(name),
            adapter=adapter,
            merged=merged,
            labels=bench.data.label_names,
        )
