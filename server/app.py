"""The Flower ServerApp of the coordinator, and the whole run that it carries out.

A run is registration, the private rounds, the comparison without noise, variants, summary and report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedpriv
from fedpriv.config import ON_NODES, RunConfig, parse, why_recipe, with_mechanism_parameters
from fedpriv.errors import DiskFullError, FlowerError, InputError, LedgerError, TooFewClientsError
from fedpriv.learning.data import release_memory
from fedpriv.learning.data.identity import other_partitions
from fedpriv.learning.training.noise_plan import calibrated, decided
from fedpriv.learning.training.workbench import Workbench, workbench
from fedpriv.methods.audit.black_box import audit_of, registration, run_scores
from fedpriv.models.publishing import card
from fedpriv.models.variants import stored_in
from fedpriv.privacy.accounting.views import View
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import carry_on, keep_names
from fedpriv.runs import RunWriter, files, marked_alive
from fedpriv.runs.plan.preflight import check_clients, check_run
from fedpriv.runs.show import check_installed, tracked_run
from server import answers, checkpoint, registry
from server.affordable import check_affordable
from server.bookkeeping import announce_budgets
from server.by_file import MixedGrid, mixed
from server.checkpoint import Checkpoint
from server.observer import FollowedObserver, LogObserver, Observer, RunProgress
from server.registration import NO_NODE, Nodes, check_counted, label_of, register_nodes
from server.round import Receipts
from server.series import Series
from server.summary import SeriesOutcome, summarize

if TYPE_CHECKING:
    from server.baselines import Baselines


log = logging.getLogger("flwr")

EXPECTED = (InputError, TooFewClientsError, LedgerError, DiskFullError, FlowerError)


class WithoutTrace(logging.Filter):
    """Leaves of an end that is expected the one line that says why: neither Flower's traceback nor its exit code."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged, once it is one line."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, EXPECTED):
            record.msg, record.args, record.exc_info = f"the run ends: {error}", (), None
        return not record.getMessage().startswith("Exit Code: ")


def make_app(observer: Observer, during: Callable[[], AbstractContextManager[None]] = nullcontext) -> ServerApp:
    """The ServerApp whose run reports to the observer, within a context if there is one."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        log.info("server uses %s", fedpriv.__file__)
        config = parse(context.run_config)
        if why := why_recipe(context.run_config):
            observer.notice(why)
        for key, path in (("out", config.out or "."), ("ledger", config.ledger), ("resume", config.resume)):
            if path and not Path(path).is_absolute():
                raise InputError(
                    f"{key} = {path!r}: must be an absolute path, since Flower runs in a folder of its own"
                )
        try:
            with during(), mixed(grid, config, context.run_config) as link:
                run(link, config, observer)
        except EXPECTED:
            log.addFilter(WithoutTrace())
            raise

    return app


def run(grid: Grid, config: RunConfig, observer: Observer) -> Path:
    """Carry out the run over the grid's nodes and return its folder.

    Raises:
        InputError: something in the configuration, the data or the federation cannot be used.
        TooFewClientsError: a round had fewer usable replies than `min_clients`.
    """
    check_run(config)
    check_installed(config.track)
    config = with_mechanism_parameters(config)
    config = checkpoint.with_base_dtype(config)
    checkpoint.check_configuration(config)
    observer.progressed(RunProgress(what="loading model and data"))
    bench = workbench(config)
    check_clients(config, bench.num_clients)
    if config.ledger and bench.accounts:
        carry_on(Path(config.ledger))
    if not config.resume:
        return _begun(grid, config, bench, None, observer)
    # Held before anything of the folder is read: no checkpoint is stale, and no row is dropped of a run that lives.
    with marked_alive(files.run_folder_of(Path(config.resume))):
        checkpoint.check_data(config, bench)
        config = checkpoint.with_choice(config)
        bench = bench.started(config)
        return _begun(grid, config, bench, checkpoint.read_last(Path(config.resume), bench.initial), observer)


def _begun(grid: Grid, config: RunConfig, bench: Workbench, resumed: Checkpoint | None, observer: Observer) -> Path:
    """Carry out a run from its registration on, in a new folder, or in that of the resumed run, which is held."""
    from fedpriv.runs.show import kept_page  # deferred: matplotlib is loaded once a run has begun

    observer.progressed(RunProgress(what="registering the nodes"))
    nodes = _nodes(grid, config, bench, resumed)
    if config.ledger and bench.accounts and not config.audit:
        check_counted(nodes, [records.num_units for records in bench.data.clients], config.ledger)
    sizes = [registration.num_records for _, registration in nodes.values()]
    if resumed is None:
        config, reason = decided(config, sizes, bench.initial)
        bench = bench.started(config)
        if reason:
            observer.notice(reason)
    observer.progressed(RunProgress(what="calibrating the noise"))
    # A run that goes on has its noise: shares of a target that are calibrated again differ in their last digits.
    if resumed is None or config.digest != resumed.digest:
        config = calibrated(config, sizes, bench.initial)
    with ExitStack() as stack:
        if resumed:
            writer = checkpoint.reopened_folder(config, resumed)
        else:
            writer = RunWriter.created(Path(config.out).absolute(), config)
            stack.enter_context(marked_alive(writer.path))
            if bench.digests is not None:
                writer.write_digests(bench.digests.to_json())
        follow = stack.enter_context(tracked_run(writer.path, config, observer.notice, stored_in))
        show = stack.enter_context(kept_page(writer.path, config.round_seconds))
        _carry_out(grid, config, bench, nodes, resumed, writer, FollowedObserver(observer, show, follow))
    return writer.path


def _carry_out(
    grid: Grid,
    config: RunConfig,
    bench: Workbench,
    nodes: Nodes,
    resumed: Checkpoint | None,
    writer: RunWriter,
    observer: Observer,
) -> None:
    """The rounds, and all that follows them, into the run's folder."""
    path = Path(config.ledger) if config.ledger else writer.ledger
    with checkpoint.reopened_ledger(path, resumed) if resumed else Ledger(path) as ledger:
        series = Series(config, bench, nodes, ledger, resumed, receipts=Receipts.of(config, writer.path, nodes))
        if others := other_partitions(bench.accounts, (known.client for known in ledger.data_sets())):
            observer.notice(
                f"{path} also has accounts of {', '.join(others)}: what a record has spent is the sum over all ways of "
                "dealing out its data, and budget_epsilon bounds each of them alone"
            )
        writer.write_registrations({each.client: vars(each) for each in series.registrations})
        if config.ledger:
            keep_names(path, {each.data_set: each.name for each in series.registrations})
        registered = registration(config, bench) if config.audit else None
        if registered:
            writer.register_audit(registered)
        if series.books.costs.caveat:
            observer.notice(f"{series.books.costs.caveat}; this run has NO privacy guarantee")
        announce_budgets(series.books, config, series.names, observer)
        if config.data == ON_NODES:
            after = resumed.round if resumed else 0
            observer.progressed(RunProgress(what="asking the nodes what they allow"))
            times = check_affordable(grid, config, nodes, series.books.costs, after=after, observer=observer)
            said = ", ".join(f"{label_of(nodes, client)} {seconds:,.1f} s" for client, seconds in times.items())
            log.info("replies leave after their charge: %s; a round waits %g s", said, config.round_seconds)
            writer.journal.write("reply_times", round_seconds=config.round_seconds, replies_after=said)
        if resumed:
            gone = [
                f"{label_of(nodes, client)}, which has paid epsilon {series.books.epsilon_so_far(client, 'local'):.3g}"
                for client, (node_id, _) in nodes.items()
                if node_id == NO_NODE
            ]
            without = f" without {'; '.join(gone)}: what is paid stays paid, the others pay as planned" if gone else ""
            back = ". A node that registers again with the same key is asked again" if gone else ""
            observer.notice(f"the run resumes after round {resumed.round}{without}{back}")
        outcome = series.run(grid, writer, observer)
        uploads = registry.uploads_in(ledger, series.run_id, series.registrations)
        if config.ledger:
            ledger.copy(writer.ledger)
        head = ledger.head
    comparison = _comparison(grid, config, bench, nodes, writer, observer, outcome) if config.compares else None
    spoken = answers.answered(config, bench, outcome, comparison, writer, observer)
    observer.progressed(RunProgress(what="keeping the variants"))
    registry.keep(config, bench, writer, outcome, series.registrations, uploads)
    integral = registry.keep_recurring(config, bench, writer, outcome, series.registrations, uploads)
    plain = _baselines(config, bench, observer) if config.computes_baselines else None
    observer.progressed(RunProgress(what="accounting by pld"))
    summary = summarize(config, bench, outcome, comparison, plain)
    summary |= spoken | {"ledger_head": head, "integral": integral}
    summary["audit"] = None
    if registered:
        observer.progressed(RunProgress(what="auditing by canaries"))
        accounts = outcome.strategy.books.accounts
        # The attacker sees global models alone; where sums had too few uploads, what holds is the local view.
        view: View = "aggregate" if config.secure_aggregation and accounts.largest("aggregate") else "local"
        events, claim = accounts.worst(view, part="this run")
        final = outcome.strategy.model.adapter
        scores, included = run_scores(config, bench, final)
        writer.write_audit_scores(scores, included)
        summary["audit"] = audit_of(config, scores, included, registered=registered, events=events, claim=claim)
    writer.finish(summary)
    card.write(writer.path)
    if config.dedup:
        observer.progressed(RunProgress(what="deduplicating"))
        registry.deduplicate(config, bench, writer)
    observer.progressed(RunProgress(what="writing the report"))
    _write_report(writer.path)
    observer.finished(writer.path, summary)


def _baselines(config: RunConfig, bench: Workbench, observer: Observer) -> Baselines | None:
    from server import baselines  # deferred: scikit-learn is not needed without them

    observer.progressed(RunProgress(what="training the baselines"))
    return baselines.compute(config, bench)


def _write_report(path: Path) -> None:
    from fedpriv.runs.show import write_report  # deferred: matplotlib is loaded once a run has begun

    release_memory()
    write_report(path, stored_in(path))


def _nodes(grid: Grid, config: RunConfig, bench: Workbench, resumed: Checkpoint | None) -> Nodes:
    """The nodes that take part."""
    node_keys = Path(config.node_keys) if config.node_keys else None
    nodes = register_nodes(
        grid,
        num_expected=bench.num_clients,
        wait=config.registration_seconds,
        node_keys=node_keys,
        may_be_missing=checkpoint.may_be_missing(resumed, config.min_clients, node_keys) if resumed else (),
        secure_aggregation=config.secure_aggregation,
        may_come=config.engine == "flower",
        goes_on=grid.goes_on if isinstance(grid, MixedGrid) else lambda: False,
    )
    return checkpoint.first_registrations(nodes, resumed, config.min_clients) if resumed else nodes


def _comparison(
    grid: Grid,
    config: RunConfig,
    bench: Workbench,
    nodes: Nodes,
    writer: RunWriter,
    observer: Observer,
    private: SeriesOutcome,
) -> SeriesOutcome:
    """The rounds without noise, in a folder of their own within the run's."""
    path, plain = writer.path / files.COMPARISON, config.without_noise
    inner = RunWriter.started_over(path, plain)  # it has no ledger to go on with
    outcome = Series(plain, bench, nodes, None, untrained=private.untrained).run(grid, inner, observer)
    inner.finish(summarize(plain, bench, outcome, None))
    return outcome


_observer = LogObserver()
app = make_app(_observer, _observer.heartbeat)
