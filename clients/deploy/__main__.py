"""`python -m clients.deploy ...`: a data holder's node, from its key to taking part in runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from clients.deploy import approvals, folder, records, supernode
from clients.deploy import doctor as node_doctor
from clients.deploy.folder import Node
from fedpriv.deployment.checks import print_checks
from fedpriv.deployment.command_line import run_command_line
from fedpriv.errors import InputError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The node's folder.")]


@app.callback()
def deploy() -> None:
    """A data holder's node in a federation: its key, its data, its policy, and the code that it approves.

    Example: python -m clients.deploy init ~/node --superlink fl.example.org:9093 --ca ca.crt --partition-id 0
    """


@app.command()
def init(
    dir_: Folder,
    superlink: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")],
    ca: Annotated[Path, typer.Option(help="The coordinator's ca.crt.")],
    partition_id: Annotated[int, typer.Option(help="Which client of a run the node is: 0, 1, ...")],
    name: Annotated[str | None, typer.Option(help="Display name, visible to the coordinator.")] = None,
    data: Annotated[Path | None, typer.Option(help="File with the records; by default the embedded corpus.")] = None,
    text_column: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    label_column: Annotated[str, typer.Option(help="Column with the label; empty for causal models.")] = "label",
    text_pair_column: Annotated[str, typer.Option(help="Column with the second text, for tasks on text pairs.")] = "",
    ledger: Annotated[Path | None, typer.Option(help="The node's ledger; by default ledger.sqlite in DIR.")] = None,
    budget_epsilon: Annotated[float | None, typer.Option(help="Epsilon that all runs together may spend, > 0.")] = None,
    delta: Annotated[float | None, typer.Option(help="By default 1 / (10 N_k), at most 1e-5.")] = None,
    port: Annotated[int, typer.Option(help="Free port on this machine, for local use only.")] = folder.DEFAULT_PORT,
) -> None:
    """Create a node's folder: a key pair, the coordinator's certificate, settings and a policy.

    Example: python -m clients.deploy init ~/node --superlink fl.example.org:9093 --ca ca.crt --partition-id 0
    --data records.csv --text-column note --label-column department --budget-epsilon 4
    """
    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    node = folder.make(
        dir_,
        ca=ca,
        superlink=superlink,
        partition_id=partition_id,
        name=f"node-{partition_id}" if name is None else name,
        port=port,
        data=data.expanduser().absolute() if data else None,
        **(columns if data else {}),
        ledger_file=ledger.expanduser().absolute() if ledger else None,
        budget_epsilon=budget_epsilon,
        delta=delta,
    )
    typer.echo(f"created {node.folder}; keep {node.key} secret and review {node.policy}")
    typer.echo(f"send to the coordinator: {node.public_key}")
    typer.echo(node.public_key.read_text().strip())
    quoted = shlex.quote(str(dir_))
    for command in (f"register {quoted}", f"approve {quoted} --this-checkout", f"doctor {quoted}", f"start {quoted}"):
        typer.echo(f"next: python -m clients.deploy {command}")


@app.command()
def register(dir_: Folder) -> None:
    """Count the records and register them in the node's own ledger; their number is fixed from then on.

    Example: python -m clients.deploy register ~/node
    """
    data_set = records.register(Node.read(dir_))
    typer.echo(f"N_k = {data_set.num_records}, data set {data_set.id}")


@app.command()
def approve(
    dir_: Folder,
    fab_hash: Annotated[str | None, typer.Argument(help="SHA-256 of a bundle, 64 hex digits.")] = None,
    this_checkout: Annotated[bool, typer.Option("--this-checkout", help="The bundle of this checkout.")] = False,
) -> None:
    """Allow a bundle of code to run on this node.

    Example: python -m clients.deploy approve ~/node --this-checkout
    """
    if this_checkout == (fab_hash is not None):
        raise InputError("approve: give either FAB_HASH or --this-checkout")
    node = Node.read(dir_)
    digest = fab_hash if fab_hash is not None else approvals.bundle_digest()
    is_new = approvals.approve(node, digest)
    typer.echo(f"{digest} {'is approved' if is_new else 'was approved before'}")
    if this_checkout and (files := approvals.uncommitted()):
        typer.echo(f"note: {len(files)} bundled files differ from the last commit, starting with {files[0]}")


@app.command()
def start(dir_: Folder) -> None:
    """Run the node in the foreground until SIGINT or SIGTERM.

    Example: python -m clients.deploy start ~/node
    """
    raise typer.Exit(supernode.start(Node.read(dir_), typer.echo))


@app.command()
def doctor(dir_: Folder) -> None:
    """Check this machine: versions, connection, clock, data, ledger, key, policy, disk. Exit code 0 if all checks pass.

    Example: python -m clients.deploy doctor ~/node
    """
    raise typer.Exit(0 if print_checks(node_doctor.checks(Node.read(dir_))) else 1)


if __name__ == "__main__":
    run_command_line(app, "python -m clients.deploy")
