"""A coordinator and data holders on this machine, each with a folder and processes of its own, made by the kits.

A command line may also run in this process, which takes no seconds to start.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

import psutil
import typer

from fedpriv.holder.vault.settings import FILE
from fedpriv.operate import checks, joining
from fedpriv.operate.command_line import run_command_line
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.entries import Entry
from fedpriv.privacy.ledger.reader import reading, verify_with_head

ROOT = Path(__file__).resolve().parents[1]
SERVER, CLIENT = "server.deploy", "clients.deploy"


def kit(module: str, *arguments: object, code: int = 0) -> str:
    """Run a command of a kit and return what it prints.

    Raises:
        RuntimeError: it ended with another exit code than this one.
    """
    app: typer.Typer = import_module(f"{module}.__main__").app
    return _expected(run_in_process(app, module, *arguments), code)


def _expected(done: subprocess.CompletedProcess[str], code: int) -> str:
    text = done.stdout + done.stderr
    if done.returncode != code:
        raise RuntimeError(f"{' '.join(map(str, done.args))}: exit code {done.returncode}\n{text[-6000:]}")
    return text


def wait_until(true: Callable[[], object], what: str, seconds: float, *, every: float = 0.2) -> None:
    """Wait for something.

    Raises:
        TimeoutError: names it.
    """
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(every)


class Service:
    """A command of a kit that runs until it is ended, with its output in a file."""

    def __init__(self, log: Path, module: str, *arguments: object, checkout: Path = ROOT) -> None:
        self.log = log
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                cwd=checkout,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        """The output so far."""
        return self.log.read_text()

    def wait_for(self, pattern: str, seconds: float = 60, *, times: int = 1) -> None:
        """Wait until the pattern was printed so often.

        Raises:
            TimeoutError: it was not, within this time.
            RuntimeError: the command ended before.
        """

        def found() -> bool:
            return len(re.findall(pattern, self.text())) >= times

        try:
            wait_until(lambda: found() or self.process.poll() is not None, pattern, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.text()[-3000:]}") from None
        if not found():
            raise RuntimeError(f"ended with {self.process.returncode} before {pattern!r}\n{self.text()[-3000:]}")

    def kill(self) -> None:
        """End it and everything that it started, without a chance to say anything."""
        try:
            family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=30)
        self.process.wait(timeout=30)

    def stop(self) -> int:
        """End it as an operator would."""
        self.process.terminate()
        try:
            return self.process.wait(timeout=60)
        finally:
            self.kill()


class DeployedFederation:
    """A coordinator and its nodes."""

    def __init__(
        self,
        folder: Path,
        *,
        num_nodes: int = 3,
        holdings: Mapping[int, list[str]] | None = None,
        model: Path | None = None,
        settings: str = "",
        metrics: bool = False,
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.coordinator = folder / "coordinator"
        self.services: dict[str, Service] = {}
        folder.mkdir(parents=True)
        measured = ["--metrics"] if metrics else []
        kit(SERVER, "init", self.coordinator, "--address", "127.0.0.1", "--port", self.port, *measured)
        self.digest = ""
        with contextlib.ExitStack() as unless_all_answer:
            unless_all_answer.callback(self.stop)
            self.start_superlink()
            self.invite(num_nodes)
            for client in range(num_nodes):
                self.make_node(client, *(holdings or {}).get(client, []), *measured)
                with (self.node(client) / FILE).open("a") as file:
                    file.write(settings)
                if model is not None:
                    self.approve_model(client, model)
                self.admit(client)
            for client in range(num_nodes):
                self.start_node(client)
            self.wait_for_nodes(num_nodes)
            unless_all_answer.pop_all()

    def node(self, client: int) -> Path:
        """A node's folder."""
        return self.folder / f"node-{client}"

    def invite(self, number: int) -> None:
        """Invite so many institutions: `Clinic 0` is partition 0, and so on."""
        kit(SERVER, "invite", self.coordinator, *(f"Clinic {client}" for client in range(number)))

    def invitation(self, client: int) -> tuple[object, ...]:
        """The options by which a node's operator takes an invitation, having heard its fingerprint."""
        file = self.coordinator / "invitations" / f"{client}.toml"
        return "--invite", file, "--fingerprint", joining.read(joining.Invitation, file).fingerprint

    def make_node(self, client: int, *more: str) -> None:
        """A node's folder, of an institution that was invited, with this checkout's bundle approved."""
        kit(CLIENT, "init", self.node(client), *self.invitation(client), *more)
        if not self.digest:
            self.digest = kit(CLIENT, "approve", self.node(client), "--this-checkout").split()[0]
        else:
            self.approve(client, self.digest)

    def approve_model(self, client: int, model: Path) -> None:
        """Let a model run on a node."""
        kit(CLIENT, "approve-model", self.node(client), model)

    def approve(self, client: int, digest: str) -> None:
        """Let a bundle run on a node."""
        kit(CLIENT, "approve", self.node(client), digest)

    def admit(self, client: int, *more: str) -> None:
        """Admit a node, whose operator has read the fingerprint of its vault's key to the coordinator's."""
        application = self.application(client)
        told = keys.fingerprint(joining.read(joining.Application, application).vault_key)
        kit(SERVER, "admit", self.coordinator, application, "--fingerprint", told, *more)

    def approve_peers(self, client: int, *more: object) -> None:
        """Let a node add up with all others that are admitted, whose operators read it their fingerprints."""
        roster = self.coordinator / "roster.toml"
        told = [member.fingerprint for member in joining.read(joining.Roster, roster).members]
        kit(CLIENT, "approve-peers", self.node(client), roster, *(f"--fingerprint={each}" for each in told), *more)

    def application(self, client: int) -> Path:
        """The file that a node hands to the coordinator."""
        return self.node(client) / "application.toml"

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it answers."""
        service = Service(self.folder / "superlink.log", SERVER, "start", self.coordinator)
        before = len(re.findall("SuperLink answers", service.text()))
        self.services["superlink"] = service
        service.wait_for("SuperLink answers", times=before + 1)

    def start_node(self, client: int, checkout: Path = ROOT) -> None:
        """Start a node."""
        log = self.folder / f"node-{client}.log"
        self.services[f"node-{client}"] = Service(log, CLIENT, "start", self.node(client), checkout=checkout)

    def wait_for_nodes(self, number: int, seconds: float = 90) -> None:
        """Wait until so many nodes are online."""
        wait_until(lambda: self.online() == number, f"{number} nodes online", seconds)

    def online(self) -> int:
        """How many nodes the SuperLink sees, as its `start` said last; to ask it takes a second of a core."""
        said = self.services["superlink"].text().rpartition("starting the SuperLink")[2]
        return int(["0", *re.findall(r"nodes online: (\d+) of", said)][-1])

    def flwr(self, *arguments: str) -> str:
        """The answer of Flower's own command."""
        variables = {**os.environ, "FLWR_HOME": str(self.coordinator / "flower"), "FLWR_DISABLE_UPDATE_CHECK": "1"}
        command = [str(Path(sys.executable).parent / "flwr"), *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout

    def run(self, values: Mapping[str, object], *, code: int = 0, checkout: Path = ROOT, seconds: float = 400) -> str:
        """Carry out a run to its end."""
        command = [sys.executable, "-m", *self._run_command(values)]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=seconds, check=False)
        return _expected(done, code)

    def start_run(self, name: str, values: Mapping[str, object], checkout: Path = ROOT) -> Service:
        """Start a run and go on."""
        module, *arguments = self._run_command(values)
        return Service(self.folder / f"{name}.log", module, *arguments, checkout=checkout)

    def _run_command(self, values: Mapping[str, object]) -> list[str]:
        pairs = [("-c", f"{key}={json.dumps(value)}") for key, value in values.items()]
        return [SERVER, "run", str(self.coordinator), *(part for pair in pairs for part in pair)]

    def charges(self, client: int) -> list[Entry]:
        """The entries of a node's ledger, whose chain must be whole."""
        return [entry for entry in self.entries(client) if entry.phase == "charged"]

    def entries(self, client: int) -> list[Entry]:
        """A node's ledger; its chain must be whole."""
        return read_ledger(self.node(client) / "ledger.sqlite")

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"== {file.name}\n{file.read_text()[-2500:]}" for file in sorted(self.folder.glob("*.log")))

    def stop(self) -> None:
        """End everything."""
        for service in reversed(self.services.values()):
            service.kill()


def read_ledger(path: Path) -> list[Entry]:
    """A ledger's entries, once its chain is verified."""
    with reading(path) as db:
        verify_with_head(db, path)
        return list(db.entries())


# Below those that Linux hands out by itself and above those of Ray's workers; each of pytest's workers has its own.
FIRST_PORT, PORTS_OF_A_WORKER, MOST_WORKERS = 20_000, 3_000, 4


def free_port() -> int:
    """A port of loopback that nothing listens on and that no other worker of this test run is given."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MOST_WORKERS
    first = FIRST_PORT + worker * PORTS_OF_A_WORKER
    return checks.free_port(range(first, first + PORTS_OF_A_WORKER))


def run_in_process(app: typer.Typer, name: str, *arguments: object) -> CompletedProcess[str]:
    """Run `python -m NAME ARGUMENTS` in this process, without the seconds that a new interpreter takes."""
    out, err, command = io.StringIO(), io.StringIO(), [name, *map(str, arguments)]
    code = 0
    argv, variables = mock.patch.object(sys, "argv", command), mock.patch.dict(os.environ)
    with argv, variables, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_command_line(app, name)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return CompletedProcess(command, code, out.getvalue(), err.getvalue())
