"""A node's metrics: what its ledger has charged, what it refused before any charge, and what of it runs.

The ClientApp, whose code is the coordinator's, may be able to read them too. So nothing here may say when work on
records ended or how: charges count, which are made before records are touched, and not releases, noise alone
or failures, which come after.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clients.deploy import separate_users
from clients.deploy.folder import Node
from fedpriv.apps import FLOWER_APP
from fedpriv.errors import LedgerError
from fedpriv.files import User, owner_of
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.operate.checks import sight_of_server
from fedpriv.operate.command_line import Unit, unit_name
from fedpriv.operate.processes import start_child
from fedpriv.privacy.ledger import keys, reader, statement
from fedpriv.privacy.ledger.receipts import chains_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from fedpriv.operate.metrics import Measured
    from fedpriv.privacy.ledger.entries import LedgerConnection

_HOST = "127.0.0.1"
_CONNECT_SECONDS = 2.0
_ASK_COORDINATOR_SECONDS = 60.0
_END_SECONDS = 10.0
# An account is computed right after a charge, when it must not keep the vault from its reply's public time.
_NICENESS = 19
_SECONDS_OF_A_DAY = 86_400.0

# The name with which the guard's reason begins. A ledger that cannot be used has none; it may be found full after a
# charge, when the work on records ended.
_REASON = re.compile(r"(?:refused|retired): ([a-z_.]{1,40}(?: [a-z]{1,20})?)(?: \d+)?(?: =|:|,)")
_COUNTED = ("refused", "retired")
_OTHER = "other"
# Requests, of any kind that nobody pays for, that the journal counts alone.
_BEYOND = "beyond_quota"
# Some reasons begin with what a coordinator sent.
_MOST_REASONS = 50


def write(node: Node) -> Path:
    """Keep the node's metrics in a file as long as this process lives, which gives way to all others; return its path.

    Raises:
        InputError: the file cannot be written.
    """
    from fedpriv.operate import metrics  # where there are none, nothing of Prometheus is loaded

    os.nice(_NICENESS)
    return metrics.write(node.folder, sources(node))


def sources(node: Node) -> list[Measured]:
    """The figures of a node, by how they are read."""
    from fedpriv.operate.metrics import Measured

    account, refusals = _Account(node.vault), Refusals(node.vault.events)
    return [
        Measured("processes", lambda: _processes(node)),
        Measured("ledger", account.read),
        Measured("journal", refusals.read),
        Measured("coordinator", lambda: _coordinator(node), _ASK_COORDINATOR_SECONDS),
    ]


def _processes(node: Node) -> Iterator[Metric]:
    """The parts of the node that are there, which any process of this machine can find out."""
    from fedpriv.operate.metrics import gauge

    vault = node.vault
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        yield gauge("fedpriv_vault_up", "1 if the vault takes requests.", _answers(connection, str(vault.socket)))
    with socket.socket() as connection:
        connection.settimeout(_CONNECT_SECONDS)
        # Asked by a connection: whoever listens there to find out would be in the SuperNode's way.
        is_up = _answers(connection, (_HOST, node.port)) * (separate_users.is_running(node) is not False)
        yield gauge("fedpriv_supernode_up", "1 if the SuperNode runs, and was admitted.", is_up)
    closed = float(vault.closed.exists())
    yield gauge("fedpriv_closed", "1 if the node closed, and refuses all until `fedpriv node reopen`.", closed)


def _answers(connection: socket.socket, address: Any) -> float:
    return float(connection.connect_ex(address) == 0)


def _coordinator(node: Node) -> Iterator[Metric]:
    """The coordinator's certificate and clock, as this machine sees them."""
    from fedpriv.operate.metrics import gauge

    up = "fedpriv_coordinator_up", "1 if the coordinator answers with a valid certificate."
    try:
        sight = sight_of_server(node.superlink_host, node.superlink_port, node.ca_certificate)
    except Exception:  # its answers are its own affair
        yield gauge(*up, 0.0)
        return
    yield gauge(*up, 1.0)
    days = (sight.valid_until - time.time()) / _SECONDS_OF_A_DAY
    yield gauge("fedpriv_certificate_days_left", "Days until the coordinator's certificate expires.", days)
    if sight.clock_offset is not None:
        ahead = "Seconds by which this machine's clock is ahead of the coordinator's."
        yield gauge("fedpriv_clock_offset_seconds", ahead, sight.clock_offset)


class _Account:
    """The charges on the node's data; computed when its ledger has changed."""

    def __init__(self, vault: VaultSettings) -> None:
        self._vault = vault
        self._seen: object = None
        self._figures: tuple[Metric, ...] = ()

    def read(self) -> Iterable[Metric]:
        """The figures; of a ledger that cannot be used, that it cannot."""
        ledger = self._vault.ledger
        seen = tuple(map(_state, (ledger, ledger.with_name(f"{ledger.name}.head"), self._vault.receipts)))
        if seen != self._seen:
            self._figures, self._seen = tuple(_account(self._vault)), seen
        return self._figures


def _state(path: Path) -> tuple[int, int] | None:
    """Changes whenever the file does; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _account(vault: VaultSettings) -> Iterator[Metric]:
    """The account of the data set that is charged now, on the view of the budget."""
    from fedpriv.operate.metrics import counter, gauge

    view, budget = vault.budget_view, vault.budget_epsilon
    usable = "fedpriv_ledger_usable", "1 if the ledger can be read, is intact and lacks nothing that the node signed."
    try:
        with reader.reading(vault.ledger) as db:
            reader.verify_with_head(db, vault.ledger)
            _check_whole(vault, db)
            data_set = db.data_set(None)
            charges = db.charges(data_set.id) if data_set else []
            epsilon = statement.epsilon_spent(db, data_set, view) if data_set else 0.0
            used = statement.enforced(db, data_set, budget, view)[1] if data_set and budget else None
            left = statement.remaining_rounds(db, data_set, budget, view) if data_set and budget else None
    except (LedgerError, ValueError):
        yield gauge(*usable, 0.0)
        return
    yield gauge(*usable, 1.0)
    yield counter("fedpriv_releases", "Releases that were charged to the data, whatever became of them.", len(charges))
    if charges:
        yield gauge("fedpriv_last_round", "Round of the last charge.", float(charges[-1].round or 0))
        when = datetime.fromisoformat(charges[-1].time).timestamp()
        yield gauge("fedpriv_last_charge_timestamp_seconds", "Time of the last charge.", when)
    for name, meaning, figure in (
        ("fedpriv_epsilon_spent", "Epsilon of all releases so far, by pld.", epsilon),
        ("fedpriv_epsilon_budget", "Epsilon that may be spent.", budget),
        (
            "fedpriv_epsilon_left",
            "The budget less what is spent.",
            None if budget is None else max(0.0, budget - epsilon),
        ),
        ("fedpriv_delta", "Delta at which epsilons hold.", None if data_set is None else data_set.delta),
        ("fedpriv_rounds_left", "Rounds like the last one that the budget allows.", left),
        ("fedpriv_budget_used_ratio", "Share of the budget that is used up, by the rule that enforces it.", used),
    ):
        if data_set is not None and figure is not None:
            yield gauge(name, meaning, {(str(vault.partition_id), view): figure}, ["client", "view"])


def _check_whole(vault: VaultSettings, db: LedgerConnection) -> None:
    """Refuse a ledger that lacks a charge whose receipt is in the node's folder, where the vault keeps it if shown one.

    Neither the private key nor the counter file, which this process may not see, is asked.
    """
    if keys.public_path(vault.key).is_file():
        watch = replace(ReceiptWatch.in_folder(vault), lost_key=True, counter_file=None)
        if watch.lost(chains_of(db)):
            raise LedgerError(f"{vault.ledger}: lacks charges that this node has signed")


class Refusals:
    """The requests that a node refused before any charge, by the name with which the reason begins.

    Args:
        journal: the node's events, of which each line is read once.
    """

    def __init__(self, journal: Path) -> None:
        self._journal, self._position = journal, 0
        self._counts: Counter[str] = Counter()

    def read(self) -> list[Metric]:
        """The number of refusals so far, by reason."""
        from fedpriv.operate.metrics import counter

        for line in self._new_lines():
            reason, number = _refusals(line)
            if number:
                is_known = reason in self._counts or len(self._counts) < _MOST_REASONS
                self._counts[reason if is_known else _OTHER] += number
        meaning = "Requests that were refused before any charge, by what was wrong with them."
        counts: dict[tuple[str, ...], float] = {(reason,): float(number) for reason, number in self._counts.items()}
        return [counter("fedpriv_refusals", meaning, counts, ["reason"])]

    def _new_lines(self) -> Iterator[bytes]:
        """The whole lines since the last call; one that is still being written waits."""
        if not self._journal.exists():
            return
        with self._journal.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if line.endswith(b"\n"):
                    self._position += len(line)
                    yield line


def _refusals(line: bytes) -> tuple[str, int]:
    """The name with which the reason of a refusal begins, and for how many the event stands; 0 for any other event."""
    try:
        event: Mapping[str, Any] = json.loads(line)
        if event["event"] == _BEYOND:
            return _BEYOND, int(event["number"])
        found = _REASON.match(event["reason"]) if event["event"] in _COUNTED else None
    except (ValueError, KeyError, TypeError):
        return "", 0
    return (found[1], 1) if found else ("", 0)


@contextmanager
def running(
    node: Node, say: Callable[[str], None], *, variables: Mapping[str, str], user: User | None
) -> Iterator[None]:
    """A process of its own that writes the node's metrics as long as the block runs, if its settings say so.

    Whatever becomes of it is said, and nothing else.

    Args:
        node: whose metrics to write.
        say: prints a line, from other threads too.
        variables: environment of the process.
        user: whose process it is, that of the vault; None stands for the user of this process.
    """
    if not node.metrics:
        yield
        return
    process: subprocess.Popen[str] | None = None
    try:
        command = [sys.executable, "-m", __package__, "metrics", "--with-parent", str(node.folder)]
        process = start_child(command, folder=node.folder, variables=variables, user=user)
        threading.Thread(target=_show, args=(process, say), daemon=True).start()
    except OSError as error:
        say(f"metrics: cannot be written ({error.strerror})")
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)


def unit(node: Node) -> Unit:
    """The service that writes the node's metrics, as the folder's owner, who sees neither records nor keys there."""
    vault, folder = node.vault, node.folder
    return Unit(
        name=unit_name("metrics", folder),
        description=f"fedpriv metrics of {folder}",
        command=[sys.executable, "-m", __package__, "metrics", str(folder)],
        folder=FLOWER_APP,
        user=owner_of(folder).name,
        variables={"PYTHONUNBUFFERED": "1", "FEDPRIV_CACHE": str(folder / "cache")},
        # Where it could only read, SQLite would leave out the newest charges.
        writable=sorted({folder, vault.ledger.parent}),
        hidden=[*([vault.data] if vault.data else []), vault.tokens, vault.key, node.key],
    )


def _show(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    for line in process.stdout or ():
        say(f"metrics: {line.rstrip()}")
    if (code := process.wait()) > 0:
        say(f"metrics: ended with code {code}; the node goes on without them")
