"""Checks of a data holder's machine; none of them opens the records."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from clients.deploy import records, separate_users, supernode
from clients.deploy.admission import peers_summary, waiting_run
from clients.deploy.folder import Node
from fedpriv.errors import FlowerError, InputError, LedgerError
from fedpriv.files import user_named
from fedpriv.holder.vault import history
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.holder.vault.settings import NodeLimits, VaultSettings, agreed_runs, is_unchanged_model, read_models
from fedpriv.operate.approvals import approved
from fedpriv.operate.checks import Check, check_disk, check_port_free, check_programs, check_server
from fedpriv.privacy.accounting import filters
from fedpriv.privacy.ledger import statement
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.ledger.receipts import chains_of
from fedpriv.texts import printable

_MIN_DISK_BYTES = 2**30
_ANSWER_SECONDS = 5.0
# Of a log of events, which grows: the last of them.
_TAIL_BYTES = 2**16
_HOST = "127.0.0.1"

_UNREGISTERED = "holds no data set; restore the ledger that `init` made, or make a new folder with `init`"


def checks(node: Node) -> Iterator[Check]:
    """The checks of this machine before vault and SuperNode are started."""
    vault = node.vault
    yield from check_programs()
    yield from check_server(node.superlink_host, node.superlink_port, node.ca_certificate)
    yield _port(node)
    yield Check.of("admitted", lambda: _admitted(node))
    yield from separate_users.check_keys(node)
    yield separate_users.check_deciding(node)
    if vault.client_user:
        yield Check.of("client_user", lambda: separate_users.checked_way(node))
    settings = (*node.folder.glob("*.toml"), node.approved)
    closed = check_files(path for path in settings if path != node.application)
    yield Check("settings", closed.ok, closed.detail)
    yield check_policy(vault.policy)
    yield check_ledger(vault.ledger)
    if vault.data:
        yield from _own_records(vault)
    else:
        yield Check("data", True, "the embedded synthetic corpus; no real records, so no budget and any model")
    yield _closed(vault)
    yield Check.of("approved", lambda: _approved(node))
    yield Check.of("history", lambda: _history(node.folder))
    yield check_disk(node.folder, _MIN_DISK_BYTES)


def _port(node: Node) -> Check:
    """Whether the node can listen, or does so already."""
    free = check_port_free(_HOST, node.port)
    is_running = separate_users.is_running(node)
    if not free.ok and is_running:
        return Check("port", True, f"{_HOST}:{node.port}: the node runs, and its SuperNode listens there")
    if not free.ok and is_running is None and _vault(node).ok:
        return Check("port", True, f"{_HOST}:{node.port}: the vault runs, and /proc does not show who listens there")
    return free


def _admitted(node: Node) -> str:
    """A line on whether the coordinator lets the node in, as it will when the node starts."""
    try:
        is_known = supernode.is_admitted(node)
    except OSError as error:
        raise FlowerError(
            f"{node.superlink}: does not say whether it knows node.key ({error}); see the TLS check"
        ) from None
    if not is_known:
        raise FlowerError(f"{node.superlink}: {supernode.UNKNOWN_KEY}")
    return f"{node.superlink} knows node.key"


def health(node: Node) -> Iterator[Check]:
    """Whether the vault takes requests, and the SuperNode runs, which it does once it is admitted."""
    yield (vault := _vault(node))
    listens, is_running = not check_port_free(_HOST, node.port).ok, separate_users.is_running(node)
    if listens and is_running is False:
        yield Check("supernode", False, f"does not run; another program listens on {_HOST}:{node.port}")
        return
    unseen = "; /proc does not show whose process listens" if is_running is None else ""
    runs = listens and (is_running or vault.ok)
    yield Check("supernode", runs, f"runs{unseen}" if runs else "does not run, or is not admitted yet")


def _vault(node: Node) -> Check:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(str(node.vault.socket))
            return Check("vault", True, f"listens on {node.vault.socket}")
        except OSError as error:
            return Check("vault", False, f"{node.vault.socket}: {error.strerror or 'no answer'}; run `start`")


def _own_records(vault: VaultSettings) -> Iterator[Check]:
    assert vault.data is not None, "asked of nodes with records of their own"
    yield check_data(vault.data)
    counted = [vault.counter_file] if vault.counter_file else []
    yield check_files((vault.data, vault.ledger, vault.events, vault.log, vault.tokens, *counted), vault.client_user)
    yield Check.of("columns", lambda: _columns(vault))
    yield Check.of("labels", lambda: _labels(vault))
    yield Check.of("budget", lambda: _budget(vault))
    yield Check.of("peers", lambda: peers_summary(vault))
    yield Check("device", True, f"{vault.device}, with a pass of its own for each record")
    yield check_registered(vault.ledger, vault.delta)
    yield Check.of("newest", lambda: _newest(vault))
    yield Check.of("enforced", lambda: _enforced(vault))
    yield Check.of("models", lambda: _models(vault))
    yield Check.of("runs", lambda: _runs(vault))
    yield Check("replies", True, _replies(vault))


def _newest(vault: VaultSettings) -> str:
    """Refuse a ledger that lacks what the node has signed, as far as its folder and its counter file know."""
    sources = [path for path in (vault.receipts, vault.counter_file) if path is not None and path.exists()]
    with reading(vault.ledger) as db:
        chains = chains_of(db)
        recovered = statement.gap_lines(recovered=statement.gaps(db)["recovered"])
    watch = ReceiptWatch.of(vault)
    lost = watch.lost(chains) if watch and chains else None
    if lost is not None:
        known = " ".join(f"--from {path}" for path in sources)
        raise LedgerError(
            f"a restored copy: this node has signed charge {lost.counter}, which {vault.ledger} lacks; stop the node, "
            f"run `fedpriv ledger recover {vault.ledger} {known}`, and add what coordinator and peers keep"
        )
    number = chains[-1].newest.counter if chains else 0
    return "; ".join([f"{number} charges, none is known that the ledger lacks", *recovered])


def _columns(vault: VaultSettings) -> str:
    """The columns of a record that are read, and who is protected."""
    records.check_columns(vault)
    protected = f"; protects the persons in {vault.person_column!r}" if vault.person_column else ""
    if vault.messages_column:
        return f"chats in {vault.messages_column!r}{protected}"
    if vault.prompt_column:
        choices = f" among the choices in {', '.join(vault.choice_columns)}" if vault.choice_columns else ""
        return f"prompts in {vault.prompt_column!r}, their responses in {vault.response_column!r}{choices}{protected}"
    return f"texts in {vault.text_column!r}{protected}"


def _labels(vault: VaultSettings) -> str:
    records.check_labels(vault)
    return ", ".join(vault.labels) or "none, for causal models"


def _budget(vault: VaultSettings) -> str:
    records.check_budget(vault)
    return f"epsilon {vault.budget_epsilon} for all runs together, on the {vault.budget_view} view"


def _enforced(vault: VaultSettings) -> str:
    """The rule that enforces the budget, and how much of it is used; refuses one under which nothing is released."""
    with reading(vault.ledger) as db:
        if (data_set := db.data_set(None)) is None or (epsilon := vault.budget_epsilon) is None:
            return "nothing: there is no budget or no data set"
        rule, used = statement.enforced(db, data_set, epsilon, vault.budget_view)
        largest = filters.largest_budget(db.bounds(data_set.id), vault.budget_view) or 0.0
    filters.check_allows(rule, epsilon, data_set.delta_for_releases)
    proven = f"; proven is epsilon {largest:g}, the largest budget in force so far" if largest > epsilon else ""
    return f"by {rule}, {used:.0%} of it used{proven}"


def _models(vault: VaultSettings) -> str:
    """The approved models, of which there must be one, and each unchanged."""
    known = read_models(vault.models)
    if not known:
        raise InputError(f"{vault.models}: no model may run here yet; run `approve-model`")
    for model in known:
        if not is_unchanged_model(model):
            raise InputError(f"{model.name}: its files changed; look at them, `approve-model --replace`")
    return ", ".join(f"{model.name} ({model.digest[:12]}...)" for model in known)


def _runs(vault: VaultSettings) -> str:
    """The runs that are agreed to, and the one that waits."""
    known = agreed_runs(vault.agreed)
    said = ", ".join(f"{run.get('purpose') or 'no purpose named'}, {run.get('rounds')} rounds" for run in known)
    sums = "; secure sums alone" if vault.require_secure_sums else ""
    waits = ""
    if vault.waiting.exists():
        waits = f"; one waits ({'; '.join(waiting_run(vault)[1])}): run `approve-run`, or delete {vault.waiting}"
    if vault.other_runs == "allow" or not known:
        return f"any that policy.toml allows{sums}{waits}"
    return printable(f"agreed to: {said}; others {vault.other_runs}{sums}{waits}")


def _replies(vault: VaultSettings) -> str:
    """When replies leave, as the operator set it, or as the node told the last run that asked."""
    if vault.reply_seconds:
        return f"leave {vault.reply_seconds:g} s after their charge, by reply_seconds"
    try:
        with vault.events.open("rb") as file:
            file.seek(max(0, vault.events.stat().st_size - _TAIL_BYTES))
            lines = [line for line in file.read().splitlines() if b'"reply_seconds"' in line]
        last = json.loads(lines[-1])
        return (
            f"of the run that asked on {last['time'][:10]}: at most {last['reply_seconds']:,.1f} s after their charge"
        )
    except (OSError, ValueError, LookupError, TypeError):
        return "leave when measurements say; no run has asked yet"


def _closed(vault: VaultSettings) -> Check:
    if vault.closed.exists():
        return Check("open", False, f"the node closed: {_reason(vault)}; find out why, then run `reopen`")
    return Check("open", True, "takes part in runs")


def _reason(vault: VaultSettings) -> str:
    said = vault.closed.read_text(encoding="utf-8", errors="replace").split()
    return " ".join(said) or f"{vault.closed} does not say why"


def reopen(vault: VaultSettings) -> str:
    """Let a closed node take part again, and return why it had closed.

    Raises:
        InputError: it is not closed.
    """
    if not vault.closed.exists():
        raise InputError(f"{vault.closed}: no such file; the node is open")
    reason = _reason(vault)
    vault.closed.unlink()
    return reason


def _approved(node: Node) -> str:
    number = len(approved(node.approved))
    if not number:
        raise InputError(f"{node.approved}: no bundle may run here yet; run `approve`")
    return f"{number} bundle{'s' if number > 1 else ''} may run here"


def _history(folder: Path) -> str:
    """The number of changes of settings and approvals that are noted, where that goes on."""
    if not os.access(folder, os.W_OK):
        raise InputError(f"{history.path_in(folder)}: cannot be written, {folder} is not writable")
    return history.summary(folder)


def check_ledger(path: Path) -> Check:
    """Whether the node can write its ledger and its chain is intact; if there is none, whether it can be created."""
    if not path.exists():
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            return Check("ledger", False, f"{path}: cannot be created, {folder} is not writable")
        return Check("ledger", True, f"{path}: none yet, can be created")

    def opened() -> str:
        with Ledger(path) as ledger:
            return f"{path}: {ledger.last[0]} entries, chain intact"

    return Check.of("ledger", opened)


def check_registered(path: Path, delta: float | None = None) -> Check:
    """Whether a data set is registered in the node's ledger, with this delta if it is set; its N_k and id."""

    def registered() -> str:
        data_set, changes = None, []
        if path.is_file():
            with reading(path) as db:
                data_set = db.data_set(None)
                changes = db.content_changes(data_set.id)[1:] if data_set else []
        if data_set is None:
            raise InputError(f"{path}: {_UNREGISTERED}")
        data_set.check_fixed(path, delta=delta)
        since = f"; its records changed, as a run found on {changes[-1].time[:10]}, see `records`" if changes else ""
        return f"N_k = {data_set.num_records}, data set {data_set.id}{since}"

    return Check.of("registered", registered)


def check_data(path: Path) -> Check:
    """Whether the file of records is there and can be read; it is not opened."""
    if not path.is_file():
        return Check("data", False, f"{path}: no such file")
    if not os.access(path, os.R_OK):
        return Check("data", False, f"{path}: this user may not read it")
    return Check("data", True, f"{path}: {path.stat().st_size} bytes")


def check_files(paths: Iterable[Path], stranger: str = "") -> Check:
    """Whether files are closed to all users but their owner and group; files that do not exist are.

    Args:
        paths: of the files.
        stranger: a user who must not read them as owner or by group either; empty for none.
    """
    try:
        user = user_named(stranger) if stranger else None
        existing = [path for path in paths if path.is_file()]
        for path in existing:
            if (mode := path.stat().st_mode & 0o777) & 0o007:
                return Check("files", False, f"{path}: mode {mode:o} lets everybody in; chmod 600 {path}")
            if user is not None and separate_users.can_use(user, path):
                return Check("files", False, f"{path}: user {stranger} can read it; change its owner, then chmod 600")
    except InputError as error:
        return Check("files", False, str(error))
    return Check("files", True, f"{len(existing)} files, closed to others")


def check_policy(path: Path) -> Check:
    """Whether a node's policy file can be read; the limits that it sets."""

    def limits() -> str:
        return ", ".join(f"{name} = {value:g}" for name, value in asdict(NodeLimits.read(path)).items())

    return Check.of("policy", limits)
