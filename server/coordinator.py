"""A whole run: registration, the private rounds, the comparison without noise, variants, summary and report."""

from __future__ import annotations

import logging
import math
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedpriv import config as configuration
from fedpriv.adapters import lora
from fedpriv.aggregation.global_model import GlobalModel
from fedpriv.audit.run_canaries import audit_of
from fedpriv.config import RunConfig
from fedpriv.errors import InputError, TooFewClientsError
from fedpriv.ledger.ledger import Ledger
from fedpriv.protocol import Registration
from fedpriv.reports.page import write_report
from fedpriv.runs import files
from fedpriv.runs.rows import ClientRow, RoundRow
from fedpriv.runs.writer import RunWriter
from fedpriv.training.evaluation import Evaluation, evaluate
from fedpriv.training.workbench import Workbench, workbench
from fedpriv.vault import guard
from server import checkpoint, registry
from server.bookkeeping import Books, check_budget_and_view
from server.checkpoint import Checkpoint
from server.noise import calibrated, with_mechanism_parameters
from server.registration import Nodes, register_nodes
from server.strategy import RuleStrategy
from server.summary import Outcome, summarize

log = logging.getLogger("flwr")


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
    config = with_mechanism_parameters(config)
    _check_as_before(config)
    bench = workbench(config)
    check_budget_and_view(config, bench.num_clients)
    resumed = checkpoint.read_last(Path(config.resume), bench.initial) if config.resume else None
    nodes = register_nodes(
        grid,
        num_expected=bench.num_clients,
        wait=config.registration_seconds,
        node_keys=Path(config.node_keys) if config.node_keys else None,
    )
    if resumed:
        nodes = _as_before(nodes, resumed)
    config = calibrated(config, [registration.num_records for _, registration in nodes.values()], bench.initial)
    folder = _folder(config, resumed)
    path = Path(config.ledger) if config.ledger else folder.ledger
    if resumed and not path.exists():
        raise InputError(f"ledger {path}: is not there; a run goes on with the ledger that it began with")
    with Ledger(path) as ledger:
        if resumed and not ledger.has_entry(*resumed.ledger):
            raise InputError(f"ledger {path}: is not the one of the run, or lacks what the checkpoint has seen")
        series = _Series(config, bench, nodes, ledger, resumed)
        folder.write_registrations(series.registrations)
        if config.caveat:
            observer.notice(f"{config.caveat}; this run has NO privacy guarantee")
        announce_budgets(series.books, config, series.names, observer)
        if resumed:
            observer.notice(f"the run goes on after round {resumed.round}")
        outcome = series.run(grid, folder, observer)
        uploads = registry.uploads_in(ledger, series.run_id, series.registrations)
        if config.ledger:
            ledger.copy(folder.ledger)
        head = ledger.head
    comparison = None
    if config.compares:
        plain = config.without_noise
        shutil.rmtree(folder.path / files.COMPARISON, ignore_errors=True)  # it costs nobody anything, so it starts anew
        inner = RunWriter.created(folder.path / files.COMPARISON, plain)
        comparison = _Series(plain, bench, nodes, None).run(grid, inner, observer)
        inner.finish(summarize(plain, bench, comparison, None))
    registry.keep(config, bench, folder, outcome, series.registrations, uploads)
    integral = registry.keep_recurring(config, bench, folder, outcome, series.registrations, uploads)
    summary = summarize(config, bench, outcome, comparison) | {"ledger_head": head, "integral": integral}
    claimed = math.inf if summary["epsilon_local_max"] is None else summary["epsilon_local_max"]
    final = outcome.strategy.model.adapter
    summary["audit"] = audit_of(config, bench, final, delta=summary["delta_max"], claimed_epsilon=claimed)
    folder.finish(summary)
    if config.dedup:
        registry.deduplicate(config, bench, folder)
    write_report(folder.path)
    observer.finished(folder.path, summary)
    return folder.path


def _folder(config: RunConfig, resumed: Checkpoint | None) -> RunWriter:
    """A new folder, or that of the run that goes on.

    Raises:
        InputError: the folder holds a run, or this configuration is not what the checkpoint was written with.
    """
    if resumed is None:
        return RunWriter.created(Path(config.out).absolute(), config)
    if config.digest != resumed.digest:
        raise InputError(f"resume = {config.resume!r}: its checkpoint was written with another configuration")
    return RunWriter.reopened(files.run_folder_of(Path(config.resume)), round_=resumed.round)


def _check_as_before(config: RunConfig) -> None:
    """Refuse to resume a run with another configuration than it began with.

    Raises:
        InputError: names the keys that differ.
    """
    if not config.resume:
        return
    began = files.read_config(files.run_folder_of(Path(config.resume)))
    # Where noise follows a target, the folder's file has what was calibrated, and is calibrated again.
    free = {*configuration.PLACES, *(["noise_multiplier"] if began.target_epsilon else [])}
    differing = [key for key in configuration.KEYS if getattr(began, key) != getattr(config, key)]
    if named := ", ".join(key for key in differing if key not in free):
        raise InputError(f"resume = {config.resume!r}: the run began with another configuration; {named} differ")


def _as_before(nodes: Nodes, resumed: Checkpoint) -> Nodes:
    """The nodes with the registrations that the run began with.

    Raises:
        InputError: a node is missing or new, or registers something else.
    """
    before = {registration.client: registration for registration in resumed.registrations}
    if odd := sorted(before.keys() ^ nodes.keys()):
        raise InputError(f"partition-id {', '.join(map(str, odd))}: the run that is resumed began with other nodes")
    for client, (_, now) in nodes.items():
        then = before[client]
        # A node without a ledger knows of no earlier data set, and names a new one every time.
        names = ("num_records", "keeps_replies") + ("data_set",) * now.keeps_replies
        for name in names:
            if getattr(now, name) != getattr(then, name):
                raise InputError(
                    f"{name} = {getattr(now, name)}: client {client} began this run with {getattr(then, name)}"
                )
    return {client: (node_id, before[client]) for client, (node_id, _) in nodes.items()}


def announce_budgets(books: Books, config: RunConfig, names: Mapping[int, str], observer: Observer) -> None:
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


class _Series:
    """The rounds of the private run, or those of its comparison, which no ledger records."""

    def __init__(
        self,
        config: RunConfig,
        bench: Workbench,
        nodes: Nodes,
        ledger: Ledger | None,
        resumed: Checkpoint | None = None,
    ) -> None:
        self.run_id = resumed.run if resumed else secrets.token_hex(16)
        self.registrations = [registration for _, registration in nodes.values()]
        self.names = {registration.client: registration.name for registration in self.registrations}
        self.books = Books(
            config,
            self.run_id,
            self.registrations,
            initial=bench.initial,
            ledger=ledger,
            resumed_after=resumed.round if resumed else None,
        )
        for client, reason in (resumed.retired if resumed else {}).items():
            self.books.retire(client, reason)
        self._config, self._bench, self._nodes, self._ledger, self._resumed = config, bench, nodes, ledger, resumed
        self._after = resumed.round if resumed else 0

    def run(self, grid: Grid, folder: RunWriter, observer: Observer) -> Outcome:
        """All rounds, told to the folder and the observer, with a checkpoint after each where a ledger stands."""
        bench = self._bench

        def test(model: GlobalModel) -> Evaluation:
            bench.model.merge(model.merged)
            lora.write_parameters(bench.model.parameters, model.adapter)
            return evaluate(bench.model, bench.test)

        def on_round(row: RoundRow, clients: list[ClientRow]) -> None:
            folder.add(row, clients)
            if row.round in self._config.variant_rounds:
                registry.keep_round(bench, folder, row.round, strategy.model)
            if self._ledger is not None:
                checkpoint.write(folder.path, self._checkpoint(row.round, strategy))
                journal.write("checkpoint", round=row.round)
            observer.round_done(row)

        folder.journal = journal = folder.journal.with_fields(run=self.run_id)
        journal.write("rounds_begin", round=self._after, num_clients=len(self.registrations))
        started = time.monotonic() - sum(row.seconds for row in folder.rounds)
        observer.started(self._config, self.registrations)
        strategy = RuleStrategy(
            self._config,
            self._nodes,
            books=self.books,
            run=self.run_id,
            initial=bench.initial,
            resumed=self._resumed,
            evaluate=test,
            on_round=on_round,
        )
        try:
            strategy.start(
                grid,
                ArrayRecord(strategy.model.adapter),
                num_rounds=self._config.rounds,
                timeout=self._config.round_seconds,
            )
        except TooFewClientsError as error:
            journal.write("stopped", reason=str(error))
            raise
        journal.write("rounds_end", round=folder.rounds[-1].round, reason=strategy.stopped)
        self.books.count_held(self._config.rounds)
        if strategy.stopped:
            observer.notice(f"the run ended early: {strategy.stopped}")
        return Outcome(
            run_id=self.run_id,
            rows=folder.rounds,
            client_rows=folder.clients,
            strategy=strategy,
            names=self.names,
            seconds=time.monotonic() - started,
        )

    def _checkpoint(self, round_: int, strategy: RuleStrategy) -> Checkpoint:
        return Checkpoint(
            run=self.run_id,
            round=round_,
            digest=self._config.digest,
            ledger=self._ledger.last if self._ledger else (0, ""),
            registrations=tuple(self.registrations),
            retired=self.books.retired,
            model=strategy.model,
            uploads=strategy.uploads,
        )
