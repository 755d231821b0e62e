"""A series of rounds with its books, checkpoints and tables: the private run, or its comparison."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedpriv.config import RunConfig
from fedpriv.errors import TooFewClientsError
from fedpriv.learning.adapters import lora
from fedpriv.learning.aggregation import GlobalModel
from fedpriv.learning.training import with_adapter
from fedpriv.learning.training.evaluation import Evaluation
from fedpriv.learning.training.noise_plan import derived_learning_rate, with_learning_rates
from fedpriv.learning.training.private_evaluation import EvaluationSpec
from fedpriv.learning.training.workbench import Workbench
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.runs import ClientRow, RoundRow, RunWriter
from fedpriv.texts import holder_label
from server import checkpoint, registry
from server.bookkeeping import Books
from server.checkpoint import Checkpoint
from server.evaluation import PrivateEvaluation, evaluate_privately
from server.inclusion import Inclusions
from server.observer import Observer, RunProgress
from server.registration import Nodes
from server.round import ROUNDS_WITHOUT_ANSWER, Absences, Receipts
from server.strategy import RuleStrategy
from server.summary import SeriesOutcome


class Series:
    """The rounds of the private run, or those of its comparison, which no ledger records.

    Args:
        config: of these rounds.
        bench: the model and the server's data.
        nodes: that take part.
        ledger: records the private run; None for its comparison.
        resumed: the checkpoint from which the run resumes; None for a new run.
        untrained: the test of the model that the rounds start from, where another series has made it.
        receipts: of the nodes' charges; None for rounds that no node charges.
    """

    def __init__(
        self,
        config: RunConfig,
        bench: Workbench,
        nodes: Nodes,
        ledger: Ledger | None,
        resumed: Checkpoint | None = None,
        untrained: Evaluation | None = None,
        receipts: Receipts | None = None,
    ) -> None:
        self.run_id = resumed.run if resumed else secrets.token_hex(16)
        began = {each.client: each for each in resumed.registrations} if resumed else {}
        # As they were signed: the identity of a node without a ledger is that of its process alone.
        self.registrations = [r if r.keeps_replies else began.get(r.client, r) for _, r in nodes.values()]
        sizes = [registration.num_records for registration in self.registrations]
        self.learning_rate = derived_learning_rate(config, sizes, bench.initial)
        self._rated = with_learning_rates(config, sizes, bench.initial)
        self.names = {registration.client: registration.name for registration in self.registrations}
        self.books = Books(
            self._rated,
            self.run_id,
            self.registrations,
            initial=bench.initial,
            accounts=_simulated_accounts(bench, self.names),
            ledger=ledger,
            resumed_after=resumed.round if resumed else None,
        )
        for client, reason in (resumed.retired if resumed else {}).items():
            self.books.retire(client, reason)
        self._config, self._bench, self._nodes, self._ledger, self._resumed = config, bench, nodes, ledger, resumed
        self._after = resumed.round if resumed else 0
        self._untrained, self._receipts = untrained, receipts

    def run(self, grid: Grid, writer: RunWriter, observer: Observer) -> SeriesOutcome:
        """Run all rounds and write them to the run's folder, with a checkpoint after each if there is a ledger."""
        bench = self._bench
        last: tuple[GlobalModel | None, Evaluation | None] = None, None

        def test(model: GlobalModel) -> Evaluation | None:
            nonlocal last
            if len(bench.test) and last[0] is not model:
                last = model, self._tested(model)
            return last[1]

        def on_round(row: RoundRow, clients: list[ClientRow]) -> None:
            writer.add(row, clients)
            if row.round in self._config.variant_rounds:
                registry.keep_round(bench, writer, row.round, strategy.model)
            if self._ledger is not None:
                checkpoint.write(writer.path, self._checkpoint(row.round, strategy))
                journal.write("checkpoint", round=row.round)
            observer.round_done(row)

        def on_change(event: Literal["skipped", "returned"], client: int, round_: int) -> None:
            journal.write(event, round=round_, client=client)
            observer.notice(_told(event, self.names[client], client, round_))

        def follow(progress: RunProgress) -> None:
            if progress.clients and progress.round is not None:
                writer.note_progress(progress.round, progress.clients)
            observer.progressed(progress)

        writer.journal = journal = writer.journal.with_fields(run=self.run_id)
        journal.write("rounds_begin", round=self._after, num_clients=len(self.registrations))
        started = time.monotonic() - sum(row.seconds for row in writer.rounds)
        observer.started(self._config, self.registrations, self.learning_rate)
        inclusions = Inclusions.of(self._config, self.run_id, writer.path, self._ledger)
        strategy = RuleStrategy(
            self._rated,
            self._nodes,
            books=self.books,
            run=self.run_id,
            initial=bench.initial,
            resumed=self._resumed,
            evaluate=test,
            on_round=on_round,
            follow=follow,
            absences=Absences(
                self._nodes,
                node_keys=Path(self._config.node_keys) if self._config.node_keys else None,
                on_change=on_change,
            ),
            receipts=self._receipts,
            inclusions=inclusions,
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
        journal.write("rounds_end", round=writer.rounds[-1].round, reason=strategy.stopped)
        evaluation = self._evaluated(grid, strategy, writer, observer, inclusions)
        self.books.count_unused(self._config.rounds + 1)
        if strategy.stopped:
            observer.notice(f"the run ended early: {strategy.stopped}")
        return SeriesOutcome(
            run_id=self.run_id,
            rows=writer.rounds,
            totals=writer.totals,
            strategy=strategy,
            names=self.names,
            seconds=time.monotonic() - started,
            rounds_charged_again=self.books.rounds_charged_again,
            test=test(strategy.model),  # as after the last round, unless the run was resumed after it
            untrained=self._start(),
            evaluation=evaluation,
        )

    def _tested(self, model: GlobalModel) -> Evaluation:
        """The evaluation of the model on the server's test set; the untrained one is tested once."""
        is_untrained = _is_untrained(model)
        if is_untrained and self._untrained is not None:
            return self._untrained
        self._bench.model.merge(model.merged)
        lora.write_parameters(self._bench.model.parameters, model.adapter)
        keep = self._has_first_body(model)
        tested = self._bench.evaluate(keep_features=keep)
        if is_untrained:
            self._untrained = tested
        return tested

    def _start(self) -> Evaluation | None:
        """The test of the untrained model, which a resumed run makes again if something is compared with it."""
        if self._untrained is None and self._config.task == "CAUSAL_LM" and len(self._bench.test):
            start = self._bench.initial
            with with_adapter(self._bench.model, start, {}):
                return self._tested(GlobalModel(initial=start, adapter=start))
        return self._untrained

    def _has_first_body(self, model: GlobalModel) -> bool:
        """Whether only the head has been trained so far; it depends on the model alone, so a resumed run agrees."""
        body = model.adapter.keys() - self._bench.model.head_tensors
        return not model.merged and all(torch.equal(model.adapter[name], model.initial[name]) for name in body)

    def _evaluated(
        self,
        grid: Grid,
        strategy: RuleStrategy,
        writer: RunWriter,
        observer: Observer,
        inclusions: Inclusions | None,
    ) -> PrivateEvaluation | None:
        """The evaluation of the final model on the holders' records, if the run asks for one."""
        spec = EvaluationSpec.of(self._config)
        if spec is None:
            return None
        round_ = writer.rounds[-1].round + 1
        strategy.absences.look_for(grid, round_)
        evaluation = evaluate_privately(
            grid,
            self._nodes,
            self.books,
            strategy.model,
            spec,
            run=self.run_id,
            round_=round_,
            seconds=self._config.round_seconds,
            skipped=strategy.absences.skipped,
            receipts=self._receipts,
            inclusions=inclusions,
        )
        writer.journal.write("evaluated", num_asked=evaluation.num_asked, num_answers=evaluation.num_answers)
        if evaluation.num_answers < len(self.registrations):
            observer.notice(
                f"the evaluation covers {evaluation.num_answers} of {len(self.registrations)} clients: the others did "
                "not answer, or their budgets did not allow it"
            )
        return evaluation

    def _checkpoint(self, round_: int, strategy: RuleStrategy) -> Checkpoint:
        return Checkpoint(
            run=self.run_id,
            round=round_,
            digest=self._config.digest,
            ledger=self._ledger.last if self._ledger else (0, ""),
            registrations=tuple(self.registrations),
            retired=self.books.retired,
            skipped=tuple(strategy.absences.skipped),
            model=strategy.model,
            uploads=strategy.uploads,
        )


def _simulated_accounts(bench: Workbench, names: Mapping[int, str]) -> dict[int, str]:
    """The accounts of the clients that registered under the names that the run's data give them, as in a simulation."""
    known = dict(enumerate(zip(bench.accounts, bench.data.client_names, strict=True))) if bench.accounts else {}
    return {client: account for client, (account, name) in known.items() if names.get(client) == name}


def _told(event: Literal["skipped", "returned"], name: str, client: int, round_: int) -> str:
    """A line on a client that is not asked any more, or is asked again."""
    who = holder_label(client, name)
    if event == "returned":
        return f"{who} has registered again, and is asked from round {round_} on"
    return (
        f"{who} gave no answer in {ROUNDS_WITHOUT_ANSWER} rounds up to round {round_}; until its node registers again "
        "it is skipped, and not charged"
    )


def _is_untrained(model: GlobalModel) -> bool:
    return not model.merged and all(torch.equal(tensor, model.initial[name]) for name, tensor in model.adapter.items())
