"""A data holder's vault and its SuperNode, which run in the foreground and show their logs, or as systemd units.

The vault is started first, ended last, and started again if it dies. As a unit it has no network, and the SuperNode
sees no record.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import tomli_w

from clients.deploy import metrics, separate_users
from clients.deploy.folder import Node
from clients.deploy.separate_users import Users, program, user_ids
from fedpriv.apps import CHECKOUT, FLOWER_APP
from fedpriv.errors import FlowerError, InputError
from fedpriv.files import User, owner_of, replace_file
from fedpriv.holder.vault import history
from fedpriv.operate.checks import check_port_free
from fedpriv.operate.command_line import Unit, unit_name
from fedpriv.operate.flower import (
    environment,
    python_path,
    run_and_explain,
    seconds_to_pause,
)
from fedpriv.operate.processes import only_start, signals_handled_by, start_child

# Where Flower's processes on this machine find each other.
_HOST = "127.0.0.1"

# What Flower logs if a node's key is not registered, or is in use: by another node, or by this node before it was
# killed, until two of its heartbeats are overdue.
_NOT_ADMITTED = "Failed to activate SuperNode"
_SHORTEST_RETRY_SECONDS = 10.0
_LONGEST_RETRY_SECONDS = 60.0


# Its first line once it can be asked.
_READY = "vault listens on"
_READY_SECONDS = 120.0
_RESTART_SECONDS = 2.0
# A vault ends when the reply to the request that it works on may leave; one that is killed before is closed.
_END_SECONDS = 90.0


UNKNOWN_KEY = (
    "does not know node.key; send application.toml to the coordinator, who runs `admit`; if it took the node out, run "
    "`new-key --node` first"
)


def is_admitted(node: Node) -> bool:
    """Whether the coordinator knows the node's key; OSError if it does not say."""
    from clients.deploy import approved_supernode  # deferred: loads Flower

    return approved_supernode.is_admitted(node.superlink, node.ca_certificate, node.key)


def command(node: Node, key: Path) -> list[str]:
    """The command that starts the SuperNode; a file holds its settings, since paths may contain spaces and quotes.

    Args:
        node: whose SuperNode to start.
        key: the file with node.key that the SuperNode reads.
    """
    return [
        *program(node),
        *("--superlink", node.superlink, "--root-certificates", str(node.ca_certificate)),
        *("--auth-supernode-private-key", str(key)),
        *("--host", _HOST, "--port", str(node.port)),
        *("--node-config", str(node.node_config_file)),
    ]


def start(node: Node, say: Callable[[str], None], *, by_file: bool = False) -> int:
    """Run the vault and the SuperNode until a signal or an error ends the latter, and return its exit code.

    A node that is not admitted yet waits until it is. What a killed `start` of the folder left behind is ended first.

    Args:
        node: whose vault and SuperNode to run.
        say: prints a line; other threads call it too.
        by_file: whether there is no SuperNode, since the node has no network; a signal ends the vault.

    Raises:
        InputError: another `start` of the folder runs, its port is taken, or see `prepare`.
        FlowerError: the vault does not start.
    """
    with only_start(node.folder, user_ids(node), say) as mark:
        return _start(node, say, {**_environment(node), **mark}, by_file=by_file)


def _start(node: Node, say: Callable[[str], None], environ: Mapping[str, str], *, by_file: bool) -> int:
    """Run the vault and the SuperNode in this environment, and return the exit code of the latter."""
    if not by_file and not (free := check_port_free(_HOST, node.port)).ok:
        raise InputError(f"{free.name} = {free.detail}")
    users = prepare(node)
    with (
        signals_handled_by(_end),
        running_vault(node, say, variables=environ, user=users.vault),
        metrics.running(node, say, variables=environ, user=users.vault),
    ):
        if by_file:
            say("the vault runs, without a network; `fedpriv node answer` takes requests by file")
            threading.Event().wait()
        say(f"SuperNode started for {node.superlink}, partition {node.vault.partition_id}; its log follows")
        started = time.monotonic()
        while (ending := _run(node, users, environ, say)).not_admitted:
            waited = time.monotonic() - started
            pause = seconds_to_pause(waited, shortest=_SHORTEST_RETRY_SECONDS, longest=_LONGEST_RETRY_SECONDS)
            say(
                f"not admitted yet, after {waited:.0f} s: waiting until the coordinator registers its keys, "
                "or until the place of a node that was killed is free (up to a minute); "
                f"next try in {pause:.0f} s, Ctrl-C ends it"
            )
            time.sleep(pause)
    say(f"SuperNode ended with exit code {ending.code}{ending.meaning}{_why(node) if ending.code else ''}")
    return ending.code


def _why(node: Node) -> str:
    """A reason why the SuperNode may have ended, behind a colon; empty if the coordinator knows none."""
    try:
        return "" if is_admitted(node) else f": {node.superlink} {UNKNOWN_KEY}"
    except (OSError, SystemExit):
        return f": {node.superlink} gives no answer"


def prepare(node: Node) -> Users:
    """Make a node's folder ready for its SuperNode, and return whose processes it and the vault are.

    Raises:
        InputError: one of its keys cannot be used, the SuperNode cannot run as the user that it should, or that user
            and others could change what decides.
    """
    opened = [separate_users.check_deciding(node)] if node.vault.client_user else []
    for check in (*opened, *separate_users.check_keys(node)):
        if not check.ok:
            raise InputError(check.detail)
    users = separate_users.prepared(node, _environment(node))
    replace_file(node.node_config_file, tomli_w.dumps(node.node_config).encode())
    return users


@dataclass(frozen=True)
class _Ending:
    """The end of a SuperNode: exit code, its meaning, and whether the SuperLink refused to admit the node."""

    code: int
    meaning: str
    not_admitted: bool


def _run(node: Node, users: Users, environ: Mapping[str, str], say: Callable[[str], None]) -> _Ending:
    refusals: list[str] = []

    def on_line(line: str) -> None:
        say(line)
        if _NOT_ADMITTED in line:
            refusals.append(line)

    code, meaning = run_and_explain(
        [*command(node, users.key), "--with-parent"],
        variables=users.client_variables(environ),
        folder=node.flower_home,
        on_line=on_line,
        user=users.client,
    )
    return _Ending(code, meaning, bool(refusals) and code != 0)


def become(node: Node) -> NoReturn:
    """Turn this process into the SuperNode, once root has prepared the folder for its user, which runs this.

    Raises:
        InputError: there is no `client_user`, or another user runs this, or the folder is not prepared.
    """
    client, key = separate_users.client_of(node), separate_users.client_key(node)
    if os.geteuid() != client.uid:
        raise InputError(f"client_user = {client.name!r}: this user's number is {os.geteuid()}, must be {client.uid}")
    if not key.is_file():
        raise InputError(f"{key}: no such file; run `fedpriv node prepare {node.folder}` as root first")
    os.chdir(node.flower_home)
    program, *arguments = command(node, key)
    os.execve(program, [program, *arguments], {**_environment(node), "HOME": str(node.flower_home)})


def _environment(node: Node) -> dict[str, str]:
    """The SuperNode's whole environment: its own home, and this checkout's modules.

    Python looks for modules neither where it is started nor in a home, both of which are Flower's folder: what a
    coordinator's bundle left there would otherwise run at every later start, approved or not.
    """
    return environment(node.flower_home, PYTHONSAFEPATH="1", PYTHONNOUSERSITE="1", **python_path(CHECKOUT))


def _end(*_: object) -> None:
    """End this process, and the vault with it: while no SuperNode runs, SIGTERM does as SIGINT does."""
    raise SystemExit(0)


@contextmanager
def running_vault(
    node: Node, say: Callable[[str], None], *, variables: Mapping[str, str], user: User | None
) -> Iterator[None]:
    """The node's vault, as long as the block runs; its output is shown behind `vault: `.

    Args:
        node: whose vault to run.
        say: prints a line, from other threads too.
        variables: environment of the vault.
        user: whose process it is; None stands for the user of this process.

    Raises:
        FlowerError: it ends before it can be asked, or takes too long.
    """
    vault = _Vault(node, say, variables=variables, user=user)
    vault.start()
    try:
        vault.wait_until_ready()
        yield
    finally:
        vault.end()


class _Vault:
    """Keeps one vault running until it is told to end it."""

    def __init__(
        self, node: Node, say: Callable[[str], None], *, variables: Mapping[str, str], user: User | None
    ) -> None:
        self._node, self._say = node, say
        self._variables, self._user = dict(variables), user
        self._ready, self._ending = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def start(self) -> None:
        self._keeper.start()

    def wait_until_ready(self) -> None:
        if not self._ready.wait(_READY_SECONDS):
            raise FlowerError(f"vault: does not listen within {_READY_SECONDS:g} s")
        if self._ending.is_set():
            raise FlowerError("vault: ended before it could be asked; the lines above say why")

    def end(self) -> None:
        """End the vault; it is not started again."""
        with self._lock:
            self._ending.set()
            process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        self._keeper.join(_END_SECONDS)

    def _keep(self) -> None:
        """Start the vault whenever there is none; one that never was ready is not started again."""
        while (process := self._started()) is not None:
            for line in process.stdout or ():
                self._say(f"vault: {line.rstrip()}")
                if line.startswith(_READY):
                    self._ready.set()
            code = process.wait()
            if not self._ready.is_set() or self._ending.is_set():
                break
            self._say(f"vault: ended with code {code}; it is started again in {_RESTART_SECONDS:g} s")
            self._ending.wait(_RESTART_SECONDS)
        self._ending.set()
        self._ready.set()

    def _started(self) -> subprocess.Popen[str] | None:
        """A new process; None once the vault is to end, or if the system does not let it start."""
        with self._lock:
            if self._ending.is_set():
                return None
            try:
                self._process = self._popen()
            except OSError as error:
                self._say(f"vault: cannot be started ({error.strerror})")
                return None
            return self._process

    def _popen(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fedpriv.holder.vault", "--with-parent", str(self._node.folder)]
        return start_child(command, folder=self._node.folder, variables=self._variables, user=self._user)


def units(node: Node) -> list[Unit]:
    """The services of a node's machine: the vault as the folder's owner, the SuperNode as `client_user`.

    Raises:
        InputError: there is no `client_user`, or it is root or the owner.
    """
    vault, folder = node.vault, node.folder
    client = separate_users.client_of(node)
    if client.is_nameless or owner_of(folder).is_nameless:
        raise InputError(
            f"client_user = {client.name!r}: systemd knows users, and the owner of {folder}, by name alone"
        )
    name = unit_name("vault", folder)
    data, counted = ([path] if path else [] for path in (vault.data, vault.counter_file))
    return [
        Unit(
            name=name,
            description=f"fedpriv vault of {folder}",
            command=[sys.executable, "-m", "fedpriv.holder.vault", str(folder)],
            folder=folder,
            user=owner_of(folder).name,
            variables={"PYTHONUNBUFFERED": "1", "FEDPRIV_CACHE": str(folder / "cache")},
            # Beside a ledger, SQLite keeps files of its own.
            writable=[*sorted({folder, vault.ledger.parent}), *counted],
            read_only=data,
            networked=False,
        ),
        Unit(
            name=unit_name("supernode", folder),
            description=f"fedpriv SuperNode of {folder}",
            command=[sys.executable, "-m", __package__, "supernode", str(folder)],
            prepared_by=[sys.executable, "-m", __package__, "prepare", str(folder)],
            folder=FLOWER_APP,
            user=client.name,
            variables=python_path(CHECKOUT),
            writable=[node.flower_home],
            hidden=[
                *(*data, *counted),
                *(vault.ledger, vault.tokens, node.key, vault.key, vault.policy),
                *(vault.events, vault.log, vault.receipts),
                history.path_in(folder),
            ],
            port=node.port,
            after=[f"{name}.service"],
        ),
        *([metrics.unit(node)] if node.metrics else []),
    ]
