"""`python -m server.deploy ...`: a federation's coordinator, from certificates to runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.deployment import certificates
from fedpriv.deployment.checks import check_tls, print_checks
from fedpriv.deployment.command_line import UnitFolder, give_units, run_command_line
from server.deploy import doctor as coordinator_doctor
from server.deploy import folder as folders
from server.deploy import registration, runs, superlink
from server.deploy import units as coordinator_units
from server.deploy.folder import Coordinator

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The coordinator's folder.")]
Days = Annotated[int, typer.Option(help="Number of days for which the server certificate is valid.")]


@app.callback()
def deploy() -> None:
    """The coordinator of a federation across machines: TLS, registered nodes, runs.

    Example: python -m server.deploy init ~/federation --address fl.example.org
    """


@app.command()
def init(
    folder: Folder,
    address: Annotated[list[str], typer.Option(help="DNS name or IP address; repeatable, the nodes use the first.")],
    port: Annotated[int, typer.Option(help="The only port that the nodes must reach.")] = folders.DEFAULT_PORT,
    days: Days = 365,
) -> None:
    """Create a coordinator's folder: a certificate authority, a server certificate and Flower's connection file.

    Example: python -m server.deploy init ~/federation --address fl.example.org --address 10.0.0.5
    """
    coordinator = folders.make(folder, addresses=address, port=port, days=days)
    typer.echo(f"created {coordinator.folder}; keep {coordinator.ca_key} secret")
    typer.echo(f"send to every node: {coordinator.ca_certificate} and the address {coordinator.address}")
    quoted = shlex.quote(str(folder))
    typer.echo(f"next: python -m server.deploy start {quoted}")
    typer.echo(f"then, for each node: python -m server.deploy register {quoted} PARTITION_ID PUBKEY_FILE")
    typer.echo(f"then: python -m server.deploy run {quoted} -c rounds=10")


@app.command()
def start(folder: Folder) -> None:
    """Run the SuperLink in the foreground until SIGINT or SIGTERM; report how many nodes are online.

    Example: python -m server.deploy start ~/federation
    """
    raise typer.Exit(superlink.start(Coordinator.read(folder), typer.echo))


@app.command()
def units(folder: Folder, out: UnitFolder = None) -> None:
    """Print the systemd unit of the SuperLink, or write it into a folder.

    Example: python -m server.deploy units ~/federation --out /etc/systemd/system
    """
    give_units(coordinator_units.units(Coordinator.read(folder)), out)


@app.command()
def register(
    folder: Folder,
    partition_id: Annotated[int, typer.Argument(help="Which client of a run the node is: 0, 1, ...")],
    pubkey_file: Annotated[Path, typer.Argument(help="The node's .pub file.")],
) -> None:
    """Admit a node while the SuperLink is running; repeating it for the same node does no harm.

    Example: python -m server.deploy register ~/federation 0 clinic.pub
    """
    is_new = registration.register(Coordinator.read(folder), partition_id, pubkey_file)
    typer.echo(f"node {partition_id} {'is registered' if is_new else 'was registered before'}")


@app.command()
def run(
    folder: Folder,
    override: Annotated[list[str] | None, typer.Option("-c", help="key=value of the run's configuration.")] = None,
) -> None:
    """Start a run on the registered nodes and follow it to its end; Ctrl-C stops it. Exit code 0 if it completes.

    Example: python -m server.deploy run ~/federation -c rounds=5 -c noise_multiplier=1.2
    """
    completed = runs.run(Coordinator.read(folder), override or [], typer.echo)
    raise typer.Exit(0 if completed else 1)


@app.command()
def renew(folder: Folder, days: Days = 365) -> None:
    """Issue a new server certificate by the same authority, so that the nodes need nothing new.

    Example: python -m server.deploy renew ~/federation
    """
    coordinator = Coordinator.read(folder)
    certificates.make_server_certificate(coordinator.folder, coordinator.addresses, days)
    until = certificates.valid_until(coordinator.server_certificate)
    typer.echo(f"certificate valid until {until:%Y-%m-%d}; restart the SuperLink to use it")


@app.command()
def health(folder: Folder) -> None:
    """Exit code 0 if the SuperLink answers; it is quick, for whoever asks every minute.

    Example: python -m server.deploy health ~/federation
    """
    coordinator = Coordinator.read(folder)
    found = check_tls(coordinator.local_host, coordinator.port, coordinator.ca_certificate)
    raise typer.Exit(0 if print_checks([found]) else 1)


@app.command()
def doctor(folder: Folder) -> None:
    """Check this machine: versions, certificate, SuperLink, nodes, disk. Exit code 0 if all checks pass.

    Example: python -m server.deploy doctor ~/federation
    """
    raise typer.Exit(0 if print_checks(coordinator_doctor.checks(Coordinator.read(folder))) else 1)


if __name__ == "__main__":
    run_command_line(app, "python -m server.deploy")
