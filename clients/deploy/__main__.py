"""`fedpriv node ...`: a data holder's node, from its key to taking part in runs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from clients.deploy import admission, by_file, folder, inclusion, joining, records, supernode
from clients.deploy import doctor as node_doctor
from clients.deploy import metrics as node_metrics
from clients.deploy.folder import Node
from fedpriv.apps import FLOWER_APP
from fedpriv.errors import InputError, LedgerError
from fedpriv.holder.vault import history
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.holder.vault.settings import approved_peers
from fedpriv.operate import approvals
from fedpriv.operate.checks import print_checks
from fedpriv.operate.command_line import UnitFolder, back_up, compare, give_units, run_command_line
from fedpriv.operate.flower import Log, use_proxies
from fedpriv.operate.joining import Roster, read
from fedpriv.operate.processes import end_with_parent, only_start
from fedpriv.privacy.ledger import keys
from fedpriv.texts import printable

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

# A SuperNode's user may pass through the folder, and not list it.
Folder = Annotated[Path, typer.Argument(metavar="DIR", readable=False, help="The node's folder.")]


InvitationFile = Annotated[Path, typer.Option(help="What the coordinator sent.")]
InvitationFingerprint = Annotated[
    str | None, typer.Option(help="Of the invitation, as the coordinator read it to you; a terminal asks for it.")
]


class NotedCommand(TyperCommand):
    """A command of which the node's history notes what it changes."""

    def invoke(self, ctx: Any) -> Any:
        """Run it between two looks at the folder, so that no earlier change by hand passes as its own."""
        with history.noting(Path(ctx.params["dir_"]), str(ctx.info_name)):
            return super().invoke(ctx)


@app.callback()
def deploy() -> None:
    """A data holder's node in a federation: its keys, its data, its policy, and the code that it approves.

    Example: fedpriv node init ~/node --invite invitation.toml --fingerprint ABCD-EFGH-IJKL-MNOP-QRST
    """
    use_proxies(partial(typer.echo, err=True))


@app.command(cls=NotedCommand)
def init(
    dir_: Folder,
    invite: InvitationFile,
    fingerprint: InvitationFingerprint = None,
    approve_: Annotated[
        bool, typer.Option("--approve", help="Let the invitation's model and this checkout's bundle run here.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="File with the records; by default the embedded corpus.")] = None,
    text_column: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    label_column: Annotated[str, typer.Option(help="Column with the label; empty for causal models.")] = "label",
    text_pair_column: Annotated[str, typer.Option(help="Column with the second text, for tasks on text pairs.")] = "",
    prompt_column: Annotated[str, typer.Option(help="Column with prompts, for models that answer.")] = "",
    response_column: Annotated[str, typer.Option(help="Column with the responses to them, which are learned.")] = "",
    messages_column: Annotated[str, typer.Option(help="Or a column with lists of chat messages.")] = "",
    choice_columns: Annotated[
        str, typer.Option(help="Columns a,b with choices, of which the response names one; or one with lists.")
    ] = "",
    person_column: Annotated[
        str, typer.Option(help="Column that says whom a record is about: the node then protects persons.")
    ] = "",
    max_records_per_person: Annotated[
        int | None, typer.Option(help="The most records of a person that are kept; by default 8.", min=1)
    ] = None,
    separator: Annotated[str, typer.Option(help="Of a CSV file: auto (its header), comma, semicolon, tab.")] = "auto",
    encoding: Annotated[str, typer.Option(help="Of a CSV or JSONL file: utf-8, latin-1 or cp1252.")] = "utf-8",
    table_checks: Annotated[str, typer.Option(help="On a likely mistake in the records: refuse or warn.")] = "refuse",
    labels: Annotated[str | None, typer.Option(help="The classes a,b,c; by default those of the planned run.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="The node's ledger; by default ledger.sqlite in DIR.")] = None,
    budget_epsilon: Annotated[float | None, typer.Option(help="Epsilon that all runs together may spend, > 0.")] = None,
    delta: Annotated[float | None, typer.Option(help="By default 1 / (10 N_k), at most 1e-5.")] = None,
    budget_view: Annotated[
        str | None, typer.Option(help="What the budget counts: local, or aggregate for secure sums. By default local.")
    ] = None,
    min_survivors: Annotated[int | None, typer.Option(help="Uploads that a secure sum needs; by default 3.")] = None,
    colluding_clients: Annotated[
        int | None, typer.Option(help="Nodes that may collude with the coordinator; by default 0.")
    ] = None,
    counter_file: Annotated[
        Path | None, typer.Option(help="New file on another disk, by which a restored ledger is noticed.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Of this machine, for local use; by default a free one.")] = None,
    client_user: Annotated[
        str | None, typer.Option(help="User, or its number, as whom the SuperNode runs; by default as the vault.")
    ] = None,
    other_runs: Annotated[
        str | None, typer.Option(help="On a run that the invitation did not plan: ask (approve-run), refuse or allow.")
    ] = None,
    require_secure_sums: Annotated[
        bool, typer.Option("--require-secure-sums", help="Uploads leave as parts of masked sums alone.")
    ] = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Write figures for Prometheus to DIR/metrics/fedpriv.prom.")
    ] = False,
) -> None:
    """Create a node's folder: two key pairs, settings and a policy; read the records once, and register their number.

    With --data, a budget is required; on a terminal it is asked for, and labels if the invitation names none. With
    --approve the invitation's model and bundle may run, if this machine has the same ones: review `clients/` of this
    checkout first, and approve a model only from where you trust.

    Example: fedpriv node init ~/node --invite invitation.toml --approve --data records.csv --text-column note
    --label-column department --budget-epsilon 4
    """
    invitation = joining.take(invite, fingerprint)
    if approve_:
        admission.check_asked(invitation)
    plan = invitation.plan
    own: dict[str, object] = {}
    if data is not None:
        own = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
        own |= {"prompt_column": prompt_column, "response_column": response_column, "messages_column": messages_column}
        own |= {"choice_columns": _names(choice_columns)}
        labelled = label_column and not (prompt_column or messages_column)
        if labels is None and plan is not None and labelled:
            labels = ",".join(plan.labels) or None
        if labels is None and labelled:
            labels = joining.asked("labels", "Labels a,b,c, in the order that all holders agreed on")
        if budget_epsilon is None:
            budget_epsilon = joining.number_asked("budget-epsilon", "Epsilon that all runs together may spend")
        own |= {"person_column": person_column, "max_records_per_person": max_records_per_person}
        own |= {"separator": separator, "encoding": encoding, "table_checks": table_checks}
        own |= {"labels": _names(labels), "data": data.expanduser().absolute()}
    made = folder.make(
        dir_,
        invitation,
        port=port,
        metrics=metrics,
        **own,
        ledger_file=ledger.expanduser().absolute() if ledger else None,
        budget_epsilon=budget_epsilon,
        delta=delta,
        budget_view=budget_view,
        min_survivors=min_survivors,
        colluding_clients=colluding_clients,
        counter_file=counter_file.expanduser().absolute() if counter_file else None,
        client_user=client_user,
        other_runs=other_runs,
        require_secure_sums=require_secure_sums or None,
    )
    if approve_:
        joining.approve_asked(made.node, invitation)
    if plan is not None and plan.secure_aggregation and made.node.vault.budget_view == "local":
        typer.echo("note: the planned run adds up under masks, but the budget counts uploads; see --budget-view")
    joining.tell(made, shlex.quote(str(dir_)), approves=approve_)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()


@app.command(cls=NotedCommand)
def move(
    dir_: Folder,
    invite: InvitationFile,
    fingerprint: InvitationFingerprint = None,
) -> None:
    """Follow the coordinator to another address or certificate authority, as a new invitation says; then start again.

    Keys, records, ledger, policy and approvals stay as they are.

    Example: fedpriv node move ~/node --invite invitation.toml
    """
    invitation = joining.take(invite, fingerprint)
    node = Node.read(dir_)
    folder.move(node, invitation)
    typer.echo(f"{node.folder} now looks for the coordinator at {invitation.superlink}; restart the node")


@app.command()
def register(
    dir_: Folder,
    disjoint: Annotated[
        str | None, typer.Option(help="Why no record is in an earlier data set: your statement, for a new one.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="File of `fedpriv plan --out`: these releases may be made, and no other.")
    ] = None,
    filter_: Annotated[
        str | None, typer.Option("--filter", help="renyi:ORDER, or gaussian for Gaussian noise without sampling.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Of the plan; by default the file's.")] = None,
) -> None:
    """Register the records that vault.toml names as a new data set, or say how the budget of the last is enforced.

    `init` registers the first. A new one starts with nothing spent; its file is read as by `init`. The file of
    an earlier data set is refused, as is one that begins with all of its records: what was spent on them counts. Where
    persons are the unit, only the same file is found. Whether single records are in both, only you know.

    A Renyi filter enforces the budget, whose order the budget and delta decide, unless you name another or a plan
    before anything is released; it then stays. A further plan may follow plans at any time: its epsilon and delta are
    added to theirs.

    Example: fedpriv node register ~/node --plan plan.json

    Example: fedpriv node register ~/node --disjoint "admissions of 2027 only"
    """
    vault = Node.read(dir_).vault
    if disjoint is None:
        typer.echo(f"the budget is enforced by {records.bound(vault, plan=plan, filter_=filter_, plan_delta=delta)}")
        return
    if vault.data is None:
        raise InputError(f"data: {dir_}/vault.toml names no file of records")
    if not disjoint.strip():
        raise InputError("--disjoint: must not be empty; say why no record is in an earlier data set")
    found = records.find(vault)
    made = records.register(
        vault, vault.ledger, found, disjoint=disjoint.strip(), plan=plan, filter_=filter_, plan_delta=delta
    )
    for line in found.lines():
        typer.echo(line)
    typer.echo(f"registered N_k = {made.num_records}, data set {made.id}")


@app.command("records")
def records_(dir_: Folder) -> None:
    """Count the node's records as `init` does, and say what counts of them, in a file that has grown or shrunk.

    Example: fedpriv node records ~/node
    """
    vault = Node.read(dir_).vault
    if vault.data is None:
        raise InputError(f"data: {dir_}/vault.toml names no file of records")
    found = records.find(vault)
    for line in (*found.lines(), *records.compared(vault, found)):
        typer.echo(line)


@app.command()
def erase(
    dir_: Folder,
    column: Annotated[str, typer.Option(help="That says whom a record is about; by default person_column.")] = "",
) -> None:
    """Delete a person's records from the file of a node that is stopped, and what was derived from them; note the day.

    It asks for the person, or reads the name from standard input. The day alone is noted, in DIR/erasures, and nobody
    else gets it; `fedpriv ledger statement --erasures` lists it. N_k stays as registered, and so does what was charged.

    Example: fedpriv node erase ~/node

    Example: fedpriv node erase ~/node --column patient < name.txt
    """
    node = Node.read(dir_)
    with only_start(node.folder, (), typer.echo):
        if next(node_doctor.health(node)).ok:
            raise InputError(f"{node.folder}: its vault runs, and has the records in memory; stop the node first")
        asked = partial(typer.prompt, "The person, as the file names them") if sys.stdin.isatty() else sys.stdin.read
        records.erase(node.vault, asked(), column)
    typer.echo(f"erased from {node.vault.data}; N_k stays as registered, and what was charged stays charged")
    typer.echo("next: do the same in copies, backups and files of earlier data sets, and tell other holders")
    typer.echo(f"next: fedpriv node start {shlex.quote(str(dir_))}")


@app.command("begin-counter")
def begin_counter(dir_: Folder) -> None:
    """Make the file that `counter_file` in vault.toml names, with what the node's ledger has charged so far.

    Every charge is noted there before anything is released, and a ledger that is behind it is refused. It belongs on
    another disk or machine than the ledger, on one that no backup or snapshot of the ledger puts back.

    Example: fedpriv node begin-counter ~/node
    """
    vault = Node.read(dir_).vault
    watch = ReceiptWatch.of(vault)
    if watch is None:
        raise InputError(f"key = {vault.key}: no such file; only what is signed can be counted; run `new-key`")
    watch.begin_counter_file(vault.ledger)
    typer.echo(f"{vault.counter_file} counts the charges of {vault.ledger} from now on")


@app.command("approve-model", cls=NotedCommand)
def approve_model(
    dir_: Folder,
    model: Annotated[str, typer.Argument(help="A folder, all-MiniLM-L6-v2, or a name on the Hugging Face Hub.")],
    name: Annotated[str | None, typer.Option(help="What runs call it; by default MODEL.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="The name may have stood for other files.")] = False,
) -> None:
    """Allow a model and its tokenizer to run on this node, as their files are now.

    Example: fedpriv node approve-model ~/node all-MiniLM-L6-v2
    """
    approval = admission.approve_model(Node.read(dir_).vault, model, name=name, replace_old=replace)
    state = "is approved" if approval.is_new else "was approved before"
    typer.echo(f"{approval.model.name} {state}: digest {approval.model.digest}, {approval.num_bytes} bytes")
    typer.echo(f"in {approval.model.folder}; the node refuses it once a file there changes")


@app.command(cls=NotedCommand)
def approve(
    dir_: Folder,
    fab_hash: Annotated[str | None, typer.Argument(help="SHA-256 of a bundle, 64 hex digits.")] = None,
    this_checkout: Annotated[bool, typer.Option("--this-checkout", help="The bundle of this checkout.")] = False,
) -> None:
    """Allow a bundle of code to run on this node.

    Example: fedpriv node approve ~/node --this-checkout
    """
    if this_checkout == (fab_hash is not None):
        raise InputError("approve: give either FAB_HASH or --this-checkout")
    node = Node.read(dir_)
    digest = fab_hash if fab_hash is not None else approvals.bundle_digest(FLOWER_APP)
    is_new = approvals.approve(node.approved, digest)
    typer.echo(f"{digest} {'is approved' if is_new else 'was approved before'}")
    if this_checkout and (note := approvals.note_on(FLOWER_APP)):
        typer.echo(note)


@app.command("approve-peers", cls=NotedCommand)
def approve_peers(
    dir_: Folder,
    roster: Annotated[Path, typer.Argument(metavar="ROSTER", help="What the coordinator sent when all were admitted.")],
    fingerprints: Annotated[
        list[str] | None,
        typer.Option("--fingerprint", help="Of a peer's vault.key, as its operator read it to you; once for each."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="A holder's key was exchanged.")] = False,
) -> None:
    """Let this node add up with the other holders, so that the coordinator learns their sum alone.

    A coordinator that put keys of its own into the roster would learn your part. So let each holder read you the
    fingerprint that its own `doctor` shows: give them here, or on a terminal compare them one by one. Approvals hold
    from the next sum on; delete a file in `peers` to end one.

    Example: fedpriv node approve-peers ~/node roster.toml --fingerprint ABCD-EFGH-IJKL-MNOP-QRST
    """
    vault = Node.read(dir_).vault
    found = read(Roster, roster)
    found.check(roster)
    unknown = admission.unknown_peers(vault, found, replace_old=replace)
    asked = {f"{member.name} (partition {member.partition_id})": member.fingerprint for member in unknown}
    compare(fingerprints or (), asked, [member.fingerprint for member in found.members])
    admission.approve_peers(vault, unknown)
    for member in unknown:
        typer.echo(f"{member.name}, partition {member.partition_id}, is approved: {member.fingerprint}")
    typer.echo(f"their keys are in {vault.peers}; they count from the next sum on, without a restart")
    for client in sorted(approved_peers(vault.peers).keys() - {member.partition_id for member in found.members}):
        typer.echo(
            f"note: partition {client} is approved, not in the roster; to end that, delete {vault.peers}/{client}.pub"
        )


@app.command("approve-run", cls=NotedCommand)
def approve_run(
    dir_: Folder,
    run: Annotated[str | None, typer.Option(help="The run's fingerprint, as this command shows it.")] = None,
) -> None:
    """Agree to the run that waits: it differs from what the invitation said, and is shown here key by key.

    On a terminal you are asked; else give the fingerprint that a first call shows. The run's next request is taken,
    and so are further runs on the same terms. To agree to nothing, delete waiting-run.json.

    Example: fedpriv node approve-run ~/node
    """
    vault = Node.read(dir_).vault
    asked, differing = admission.waiting_run(vault)
    for line in differing:
        typer.echo(printable(line))
    own = keys.fingerprint(json.dumps(asked, sort_keys=True))
    if run is None and sys.stdin.isatty():
        if not typer.confirm("Take part in this run?"):
            raise InputError(f"{vault.waiting}: is not approved; delete it to forget the run")
    elif run != own:
        raise InputError(f"--run = {run}: to agree to the run that waits, give --run {own}")
    admission.approve_run(vault, asked)
    typer.echo(f"run {own} is approved, from its next request on")


@app.command("new-key", cls=NotedCommand)
def new_key_(
    dir_: Folder,
    of_node: Annotated[bool, typer.Option("--node", help="node.key, with which the SuperNode connects.")] = False,
    sources: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Receipts that others keep of this node, to compare; once for each file."),
    ] = None,
) -> None:
    """Exchange a key of a node that is stopped, or replace one that was lost.

    By default vault.key, which signs all that the node says. Its receipts count for ever: `vault.key.earlier` keeps its
    public line, and a ledger that lacks what it has signed gets no new key. Then send application.toml to the
    coordinator, and its new roster to each peer: nothing that the new key signs counts before. With --node it is
    node.key, for Flower alone.

    Example: fedpriv node new-key ~/node
    """
    node = Node.read(dir_)
    if of_node:
        folder.replace_node_key(node)
    else:
        folder.replace_vault_key(node, sources or [])
    joining.tell_keys(node)
    typer.echo("there: fedpriv coordinator admit DIR FILE --replace")
    if not of_node:
        typer.echo("then, at each peer, with the new roster: fedpriv node approve-peers DIR ROSTER --replace")


@app.command()
def start(
    dir_: Folder,
    is_by_file: Annotated[
        bool, typer.Option("--by-file", help="The vault alone, on a machine without a network, for `answer`.")
    ] = False,
) -> None:
    """Run the node's vault and its SuperNode in the foreground until SIGINT or SIGTERM; DIR/node.log keeps their logs.

    Example: fedpriv node start ~/node

    Example: fedpriv node start ~/node --by-file
    """
    node = Node.read(dir_)
    raise typer.Exit(supernode.start(node, Log(typer.echo, node.log), by_file=is_by_file))


@app.command()
def answer(
    dir_: Folder,
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="What `fedpriv coordinator post` wrote.")],
    out: Annotated[Path, typer.Option(metavar="REPLY", help="New file for the answer, with the ending .reply.")],
) -> None:
    """Let the vault of a node without a network answer a request: as over the network, and for the same charge.

    The vault must run (`start --by-file`), and this as the user of its folder. The file is there when a reply over the
    network would leave. To answer again costs nothing, and gives the same. The answer is sealed for the coordinator; a
    refusal is one, and is shown here too.

    Example: fedpriv node answer ~/node /media/stick/0003-node-2.request --out /media/stick/0003-node-2.reply
    """
    typer.echo(by_file.answer(Node.read(dir_), request, out))


@app.command()
def metrics(
    dir_: Folder,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True, help="End with standard input.")] = False,
) -> None:
    """Keep the node's figures for Prometheus in DIR/metrics/fedpriv.prom, in the foreground, also of a stopped node.

    With `metrics = true` in node.toml, `start` does so by itself.

    Example: fedpriv node metrics ~/node
    """
    os.umask(0o077)  # as the vault's, in whose folder it runs
    typer.echo(f"written to {node_metrics.write(Node.read(dir_))}")
    if with_parent:
        end_with_parent()
    signal.pause()


@app.command()
def backup(dir_: Folder, out: Annotated[Path, typer.Option(help="New folder, on another disk at best.")]) -> None:
    """Copy the node's folder, also while it runs: keys, settings, ledger, receipts, approvals, history and events.

    The records, their tokens, Flower's folder and the logs are not in it. To restore it, see `ledger recover`: the node
    releases nothing as long as its ledger lacks what it has signed since.

    Example: fedpriv node backup ~/node --out /mnt/backup/node-2027-05-03
    """
    node = Node.read(dir_)
    vault = node.vault
    outside = [path for path in (vault.ledger_file,) if path]
    number = back_up(node.folder, out, leaves_out=folder.NOT_KEPT, elsewhere=outside)
    typer.echo(f"{number} files of {node.folder} are in {out}, the private keys too: keep it as closed as the node")


@app.command()
def units(dir_: Folder, out: UnitFolder = None) -> None:
    """Print the systemd units of the node's vault and SuperNode, or write them into a folder.

    The vault has no network, and the SuperNode, as `client_user` of vault.toml, neither records nor ledger.

    Example: fedpriv node units ~/node --out /etc/systemd/system
    """
    give_units(supernode.units(Node.read(dir_)), out)


@app.command(hidden=True)
def prepare(dir_: Folder) -> None:
    """Make the folder ready for a SuperNode as `client_user`; root runs this, in the SuperNode's unit for instance.

    Example: fedpriv node prepare ~/node
    """
    supernode.prepare(Node.read(dir_))


@app.command("supernode", hidden=True)
def supernode_(dir_: Folder) -> None:
    """Be the node's SuperNode alone, as `client_user`; its unit or container runs this once `prepare` has.

    Example: fedpriv node supernode ~/node
    """
    supernode.become(Node.read(dir_))


@app.command()
def doctor(dir_: Folder) -> None:
    """Check this machine: connection, key, policy, labels, budget, peers, models, files, disk. Exit code 0 if all pass.

    The records are not opened.

    Example: fedpriv node doctor ~/node
    """
    raise typer.Exit(0 if print_checks(node_doctor.checks(Node.read(dir_))) else 1)


@app.command()
def health(dir_: Folder) -> None:
    """Exit code 0 if the node's vault and its SuperNode are there; it is quick enough to be asked every minute.

    Example: fedpriv node health ~/node
    """
    raise typer.Exit(0 if print_checks(node_doctor.health(Node.read(dir_))) else 1)


@app.command("history")
def history_(
    dir_: Folder,
    head: Annotated[str | None, typer.Option(help="A digest that `doctor` printed earlier: 64 hex digits.")] = None,
) -> None:
    """Show who changed settings, approvals and peers, when, and from what to what. Exit code 1 if the chain is broken.

    Who can write the folder could write another history. With --head, it must still hold the line with this digest:
    then no line up to it was changed or lost since that was printed.

    Example: fedpriv node history ~/node
    """
    if not dir_.is_dir():
        raise InputError(f"{dir_}: no such folder")
    changes = history.read(dir_)
    for change in changes:
        for line in change.lines():
            typer.echo(line)
    if head is not None and head.strip().lower() not in {change.digest for change in changes}:
        raise LedgerError(f"{history.path_in(dir_)}: its chain is intact but has no line {head}: it was replaced")
    typer.echo(history.summary(dir_))


@app.command()
def included(
    dir_: Folder,
    run: Annotated[str, typer.Argument(help="Id of a run; by default all.")] = "",
    source: Annotated[
        Path | None,
        typer.Option("--from", help="inclusions.jsonl of the coordinator's run: its last round's record comes so."),
    ] = None,
) -> None:
    """Show round by round whether this node's upload is in the sum, with which share, or why the coordinator says not.

    The coordinator signs what each sum was made of, and shows this node its part with the next request; the vault
    goes on only if that is its own upload at the agreed weight. A reason is the coordinator's word: compare it with
    when this node stored its reply.

    Example: fedpriv node included ~/node

    Example: fedpriv node included ~/node 5f0e9d7c6b5a493827160594c1e3f70f --from inclusions.jsonl
    """
    vault = Node.read(dir_).vault
    if source is not None:
        typer.echo(f"{inclusion.take(vault, source)} records of {source} are kept")
    for line in inclusion.told(vault, run):
        typer.echo(line)


@app.command()
def reopen(dir_: Folder) -> None:
    """Let a node that closed itself take part again, and say why it had closed.

    Example: fedpriv node reopen ~/node
    """
    typer.echo(f"the node had closed: {node_doctor.reopen(Node.read(dir_).vault)}")
    typer.echo("it is open again")


if __name__ == "__main__":
    run_command_line(app, "fedpriv node")
