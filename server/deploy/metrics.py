"""A coordinator's metrics: its SuperLink, its nodes, its certificate, and the newest run of its folder.

They hold what the run's folder holds, which was released or registered, and no name of a holder.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fedpriv.errors import InputError
from fedpriv.runs import RunFolder, RunStatus, files, spent_on_view, status_of
from server.deploy import certificates
from server.deploy.folder import Coordinator

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_CONNECT_SECONDS = 2.0
# Of a run with more clients, those that have spent most.
_MOST_CLIENTS = 200


def write(coordinator: Coordinator, num_online: Callable[[], int | None], say: Callable[[str], None]) -> None:
    """Keep the coordinator's metrics in a file as long as this process lives, if its settings say so.

    Args:
        coordinator: whose SuperLink this process runs.
        num_online: the number of nodes that are online; None if nobody knows.
        say: prints a line: where they are, or why not. The SuperLink runs all the same.
    """
    if not coordinator.metrics:
        return
    from fedpriv.operate import metrics  # where there are none, nothing of Prometheus is loaded

    sources = [
        metrics.Measured("SuperLink", lambda: _superlink(coordinator, num_online())),
        metrics.Measured("newest run", lambda: _newest_run(coordinator.runs)),
    ]
    try:
        say(f"metrics: written to {metrics.write(coordinator.folder, sources)}")
    except InputError as error:
        say(f"metrics: not written: {error}")


def _superlink(coordinator: Coordinator, num_online: int | None) -> Iterator[Metric]:
    """The SuperLink as this machine sees it, and its nodes."""
    from fedpriv.operate.metrics import gauge

    try:
        socket.create_connection((coordinator.local_host, coordinator.port), timeout=_CONNECT_SECONDS).close()
        is_up = 1.0
    except OSError:
        is_up = 0.0
    yield gauge("fedpriv_superlink_up", "1 if the SuperLink listens.", is_up)
    yield gauge("fedpriv_nodes_registered", "Nodes with a registered key.", float(len(coordinator.registered())))
    if num_online is not None:
        yield gauge("fedpriv_nodes_online", "Nodes that are online.", float(num_online))
    left = certificates.valid_until(coordinator.server_certificate) - datetime.now(UTC)
    meaning = "Days until the coordinator's certificate expires."
    yield gauge("fedpriv_certificate_days_left", meaning, left / timedelta(days=1))


def _newest_run(runs: Path) -> Iterator[Metric]:
    """The run that began last; nothing before its first row."""
    from fedpriv.operate.metrics import counter, gauge

    begun = [path.parent for path in runs.glob(f"*/{files.CLIENTS}")]
    if not begun:
        return
    folder = RunFolder(max(begun, key=lambda path: (path / files.CONFIG).stat().st_mtime))
    run = status_of(folder)
    yield gauge("fedpriv_run_finished", "1 once the run is finished.", float(run.state == "finished"))
    if run.state != "finished":
        yield gauge("fedpriv_run_alive", "1 if the run's process lives, or may live.", float(run.state == "running"))
        yield gauge("fedpriv_run_silent_seconds", "Seconds since the run wrote anything.", run.seconds_since_change)
    yield gauge("fedpriv_last_round", "Rounds that are over.", float(run.num_rounds))
    if run.num_rounds_planned is not None:
        yield gauge("fedpriv_rounds_planned", "Rounds that the run is to have.", float(run.num_rounds_planned))
    yield from _accounts(folder, run)
    replies: Counter[tuple[str, ...]] = Counter()
    for client in run.clients:
        replies.update({(status,): number for status, number in client.status_counts.items()})
    meaning = "Clients asked in a round, by how it ended for them; `refused` and `retired` are the node's own answer."
    yield counter("fedpriv_replies", meaning, {status: float(number) for status, number in replies.items()}, ["status"])
    troubled = float(sum(client.is_troubled for client in run.clients))
    yield gauge("fedpriv_clients_troubled", "Clients that retired, are skipped, or gave no usable reply.", troubled)


def _accounts(folder: RunFolder, run: RunStatus) -> Iterator[Metric]:
    """Every client's spending on the run's view, and what its budget, or the run's target, leaves."""
    from fedpriv.operate.metrics import gauge

    limits = dict(enumerate(run.budget_epsilon))
    # A target bounds the run, and what an earlier one has spent is no part of it.
    target = run.target_epsilon if run.epsilon_before_max is None else None
    everyones = run.budget_epsilon[0] if len(run.budget_epsilon) == 1 else target
    spent = {client: epsilon for client, epsilon in spent_on_view(folder).items() if epsilon is not None}
    most = sorted(spent, key=lambda client: -spent[client])[:_MOST_CLIENTS]
    deltas = {client.client: client.delta for client in run.clients}
    labels = "client", "view"
    of: dict[int, tuple[str, ...]] = {client: (str(client), run.privacy_view) for client in most}
    budgets = {client: limit for client in most if (limit := limits.get(client, everyones)) is not None}
    for name, meaning, values in (
        ("spent", f"Epsilon of all releases so far, by {run.accountant}.", {client: spent[client] for client in most}),
        ("budget", "Epsilon that may be spent: the client's budget, or the run's target.", budgets),
        ("left", "The budget less what is spent.", {c: max(0.0, b - spent[c]) for c, b in budgets.items()}),
    ):
        yield gauge(f"fedpriv_epsilon_{name}", meaning, {of[client]: each for client, each in values.items()}, labels)
    known = {of[client]: delta for client in most if (delta := deltas[client]) is not None}
    yield gauge("fedpriv_delta", "Delta at which epsilons hold.", known, labels)
