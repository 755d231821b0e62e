"""`fedpriv coordinator ...`: a federation's coordinator, from certificates to runs."""

from __future__ import annotations

import secrets
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.errors import InputError
from fedpriv.files import read_text
from fedpriv.operate.checks import check_tls, print_checks
from fedpriv.operate.command_line import UnitFolder, back_up, compare, give_units, run_command_line
from fedpriv.operate.flower import Log, use_proxies
from fedpriv.privacy.ledger import keys
from server.deploy import by_file, certificates, membership, runs, superlink
from server.deploy import folder as folders
from server.deploy.folder import Coordinator

_MIN_PASSPHRASE = 12

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The coordinator's folder.")]
PassphraseFile = Annotated[Path | None, typer.Option(help="File whose first line is the passphrase of ca.key.")]
Override = Annotated[list[str] | None, typer.Option("-c", help="key=value of the run's configuration.")]
Days = Annotated[int, typer.Option(help="Number of days for which the server certificate is valid.")]


@app.callback()
def deploy() -> None:
    """The coordinator of a federation across machines: TLS, registered nodes, runs.

    Example: fedpriv coordinator init ~/federation --address fl.example.org
    """
    use_proxies(partial(typer.echo, err=True))


@app.command()
def init(
    folder: Folder,
    address: Annotated[list[str], typer.Option(help="DNS name or IP address; repeatable, the nodes use the first.")],
    port: Annotated[int, typer.Option(help="The only port that the nodes must reach.")] = folders.DEFAULT_PORT,
    days: Days = 365,
    ca_passphrase_file: PassphraseFile = None,
    override: Override = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Write figures for Prometheus to DIR/metrics/fedpriv.prom.")
    ] = False,
    contact: Annotated[str, typer.Option(help="Whom institutions ask; invitations show it.")] = "",
) -> None:
    """Create a coordinator's folder: a certificate authority, a server certificate, and the run that is planned.

    The authority's key is encrypted. Without --ca-passphrase-file its passphrase is random, and printed once. The
    planned run is kept in run.toml: invitations show it, and `run` starts it.

    Example: fedpriv coordinator init ~/federation --address fl.example.org --address 10.0.0.5 -c data=on-nodes
    -c labels=cardiology,neurology -c rounds=20 -c target_epsilon=2
    """
    passphrase = _new_passphrase(ca_passphrase_file)
    coordinator = folders.make(
        folder,
        addresses=address,
        port=port,
        days=days,
        passphrase=passphrase,
        planned=runs.given(override or []),
        metrics=metrics,
        contact=contact,
    )
    typer.echo(f"created {coordinator.folder}; {coordinator.ca_key} is encrypted, and needed for `renew` alone")
    _tell_passphrase(ca_passphrase_file, passphrase)
    quoted = shlex.quote(str(folder))
    for command in ("start", "invite", "admit", "run"):
        rest = {"invite": ' "NAME OF AN INSTITUTION"', "admit": " APPLICATION"}.get(command, "")
        typer.echo(f"next: fedpriv coordinator {command} {quoted}{rest}")


def _new_passphrase(file: Path | None) -> str:
    """A passphrase for ca.key: the one in the file, else a random one of 192 bits."""
    return secrets.token_urlsafe(24) if file is None else _first_line(file)


def _tell_passphrase(file: Path | None, passphrase: str) -> None:
    if file is None:
        typer.echo(f"passphrase of ca.key, shown this once: {passphrase}")


def _first_line(file: Path) -> str:
    try:
        passphrase = read_text(file).partition("\n")[0].strip()
    except OSError as error:
        raise InputError(f"--ca-passphrase-file = {file}: {error.strerror}") from None
    if len(passphrase) < _MIN_PASSPHRASE:
        raise InputError(f"--ca-passphrase-file = {file}: its first line needs {_MIN_PASSPHRASE} characters")
    return passphrase


@app.command()
def start(folder: Folder) -> None:
    """Run the SuperLink in the foreground until SIGINT or SIGTERM; report how many nodes are online.

    Example: fedpriv coordinator start ~/federation
    """
    raise typer.Exit(superlink.start(Coordinator.read(folder), Log(typer.echo)))


@app.command()
def backup(folder: Folder, out: Annotated[Path, typer.Option(help="New folder, on another disk at best.")]) -> None:
    """Copy the coordinator's folder, also while it runs: certificates, keys, nodes, Flower's state, runs and ledgers.

    To restore it, put it in the folder's place and `start`; nodes find it at its address, or after `move`.

    Example: fedpriv coordinator backup ~/federation --out /mnt/backup/federation-2027-05-03
    """
    coordinator = Coordinator.read(folder)
    ledger = str(coordinator.planned.get("ledger") or "")
    elsewhere = [Path(ledger + suffix) for suffix in ("", ".receipts") if ledger]
    outside = [path for path in elsewhere if not path.is_relative_to(coordinator.folder)]
    number = back_up(coordinator.folder, out, leaves_out=folders.NOT_KEPT, elsewhere=outside)
    typer.echo(f"{number} files of {coordinator.folder} are in {out}, the keys too: keep it as closed")


@app.command()
def units(folder: Folder, out: UnitFolder = None) -> None:
    """Print the systemd unit of the SuperLink, or write it into a folder.

    Example: fedpriv coordinator units ~/federation --out /etc/systemd/system
    """
    give_units(superlink.units(Coordinator.read(folder)), out)


@app.command()
def invite(
    folder: Folder,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Of the institutions, for display.")],
) -> None:
    """Write an invitation for each institution: address, certificate, and the code, model and run that are planned.

    Send the file, and read its fingerprint to the institution by telephone. Whom you invite again gets the same
    number, and what is planned now.

    Example: fedpriv coordinator invite ~/federation "St. Anna" "St. Bruno"
    """
    for path, invitation in membership.invite(Coordinator.read(folder), names).items():
        typer.echo(f"send to {invitation.name}: {path}, fingerprint {invitation.fingerprint}")


@app.command()
def admit(
    folder: Folder,
    applications: Annotated[list[Path], typer.Argument(metavar="APPLICATION...", help="What institutions sent back.")],
    fingerprints: Annotated[
        list[str] | None,
        typer.Option("--fingerprint", help="Of a vault's key, as its institution read it to you; once for each."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="A node may have had other keys; they end.")] = False,
    is_by_file: Annotated[
        bool, typer.Option("--by-file", help="They have no network: `post` and `collect` exchange files with them.")
    ] = False,
) -> None:
    """Admit nodes while the SuperLink is running; when all that were invited are, write the roster for them.

    Let each institution read you the fingerprint of its vault's key: give them here, or on a terminal compare them one
    by one. Nobody is admitted before all are compared. Repeating it for the same node does no harm; with or without
    --by-file it says how runs that begin from then on reach the node.

    Example: fedpriv coordinator admit ~/federation anna.toml --fingerprint ABCD-EFGH-IJKL-MNOP-QRST
    """
    coordinator = Coordinator.read(folder)
    found = [membership.read_application(coordinator, path) for path in applications]
    prints = {each.name: keys.fingerprint(each.vault_key) for each in found}
    new = {each.name: prints[each.name] for each in found if not membership.is_known(coordinator, each)}
    compare(fingerprints or (), new, prints.values())
    for each in found:
        is_new = membership.register(coordinator, each.partition_id, each.node_key, each.vault_key, replace_old=replace)
        membership.reach(coordinator, each.partition_id, by_file=is_by_file)
        state = f"{'is admitted' if is_new else 'was admitted before'}{', by file' if is_by_file else ''}"
        typer.echo(f"{each.name} {state}: vault key {prints[each.name]}")
    if waiting := membership.missing(coordinator):
        typer.echo(f"not yet admitted: {', '.join(waiting)}; `unregister` takes back an invitation")
        return
    num_members = len(membership.write_roster(coordinator).members)
    typer.echo(f"all {num_members} are admitted; for sums under masks, send to each: {coordinator.roster}")


@app.command()
def unregister(folder: Folder, name: Annotated[str, typer.Argument(help="As the institution was invited.")]) -> None:
    """Take a node out of the federation, or back an invitation, while the SuperLink is running.

    Nobody else gets the partition id of a node that was admitted.

    A run that is under way goes on without it. Send the others the new roster.

    Example: fedpriv coordinator unregister ~/federation "St. Bruno"
    """
    coordinator = Coordinator.read(folder)
    id_ = membership.unregister(coordinator, name)
    typer.echo(f"{name}, partition {id_}, is out; what it was charged stays on record")
    if coordinator.registered(keys.VAULT):
        membership.write_roster(coordinator)
        typer.echo(f"for sums under masks, send to each of the others: {coordinator.roster}")


@app.command()
def run(
    folder: Folder,
    override: Override = None,
) -> None:
    """Start a run on the registered nodes and follow it to its end; Ctrl-C stops it.

    Exit code 0 if all rounds end, 3 if they cost more than `target_epsilon`, as rounds do that are charged again.

    Example: fedpriv coordinator run ~/federation -c rounds=5 -c noise_multiplier=1.2
    """
    raise typer.Exit(runs.run(Coordinator.read(folder), override or [], Log(typer.echo)))


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, which need not be there yet.")]


@app.command()
def post(
    run: RunFolder, to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder for the files.")]
) -> None:
    """Write a request for each node without a network that a run waits for: signed, and sealed for that node alone.

    It waits until the run asks. Posting again writes the same files. Each node answers its own with `fedpriv node
    answer`; `collect` takes the answers.

    Example: fedpriv coordinator post ~/federation/runs/first --to /media/stick
    """
    by_file.post(run, to, typer.echo)


@app.command()
def collect(
    run: RunFolder,
    source: Annotated[Path, typer.Option("--from", metavar="DIR", help="Folder with the answers, *.reply.")],
    goes_on: Annotated[
        bool, typer.Option("--go-on", help="Without the answers that are missing: those nodes drop out of the round.")
    ] = False,
) -> None:
    """Take the answers of nodes without a network; the run goes on once none is missing, or its time is over.

    A file counts if the node that was asked signed it for a request that is open; the first counts. Exit code 1 if a
    file was refused: the lines say which, and why. It can be called again.

    Example: fedpriv coordinator collect ~/federation/runs/first --from /media/stick

    Example: fedpriv coordinator collect ~/federation/runs/first --from /media/stick --go-on
    """
    refused = by_file.collect(run, source, typer.echo, goes_on=goes_on)
    raise typer.Exit(1 if refused else 0)


@app.command()
def renew(
    folder: Folder,
    days: Days = 365,
    ca_key: Annotated[Path | None, typer.Option(help="The authority's key; by default ca.key in DIR.")] = None,
    ca_passphrase_file: PassphraseFile = None,
) -> None:
    """Issue a new server certificate by the same authority, so that the nodes need nothing new.

    On a terminal it asks for the passphrase of ca.key.

    Example: fedpriv coordinator renew ~/federation --ca-key /media/stick/ca.key
    """
    coordinator = Coordinator.read(folder)
    certificates.check_lasting(coordinator.folder, coordinator.addresses)
    certificates.make_server_certificate(
        coordinator.folder,
        coordinator.addresses,
        days,
        authority_key=ca_key,
        passphrase=_passphrase(ca_passphrase_file),
    )
    until = certificates.valid_until(coordinator.server_certificate)
    typer.echo(f"certificate valid until {until:%Y-%m-%d}; restart the SuperLink to use it")
    if certificates.is_ending(certificates.valid_until(coordinator.ca_certificate)):
        typer.echo(f"note: {certificates.cure(coordinator.folder)}")


def _passphrase(file: Path | None) -> str:
    """The passphrase of an encrypted ca.key: of the file, else of the person at the terminal."""
    if file is not None:
        return _first_line(file)
    if not sys.stdin.isatty():
        raise InputError("--ca-passphrase-file: is required without a terminal, since the key is encrypted")
    return str(typer.prompt("Passphrase of ca.key", hide_input=True))


@app.command("new-authority")
def new_authority(folder: Folder, ca_passphrase_file: PassphraseFile = None) -> None:
    """Make a new certificate authority next to the old one, whose key was lost, or known to others.

    Invite everyone again: nodes that `move` trust both. Then `renew`, which signs by the new one. At last delete the
    second certificate from ca.crt, and invite again: until then the old key's holder can play the coordinator.

    Example: fedpriv coordinator new-authority ~/federation
    """
    coordinator = Coordinator.read(folder)
    passphrase = _new_passphrase(ca_passphrase_file)
    certificates.add_authority(coordinator.folder, passphrase, lambda: _tell_passphrase(ca_passphrase_file, passphrase))
    quoted = shlex.quote(str(folder))
    typer.echo(f"{coordinator.ca_certificate} has both authorities; {coordinator.ca_key} is the new one's")
    typer.echo(f"next: fedpriv coordinator invite {quoted} NAME...; at each node: fedpriv node move DIR --invite FILE")
    typer.echo(f"then: fedpriv coordinator renew {quoted}, and restart the SuperLink")
    typer.echo("at last: delete the second certificate from ca.crt, which is the old one's, and invite everyone again")


@app.command()
def health(folder: Folder) -> None:
    """Exit code 0 if the SuperLink answers; it is quick, for a monitor that asks every minute.

    Example: fedpriv coordinator health ~/federation
    """
    coordinator = Coordinator.read(folder)
    found = check_tls(coordinator.local_host, coordinator.port, coordinator.ca_certificate)
    raise typer.Exit(0 if print_checks([found]) else 1)


@app.command()
def doctor(folder: Folder) -> None:
    """Check this machine: versions, certificate, SuperLink, nodes, disk. Exit code 0 if all checks pass.

    Example: fedpriv coordinator doctor ~/federation
    """
    raise typer.Exit(0 if print_checks(superlink.checks(Coordinator.read(folder))) else 1)


if __name__ == "__main__":
    run_command_line(app, "fedpriv coordinator")
