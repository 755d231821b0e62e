"""Flower's SuperNode with one more rule: it runs only app bundles (FABs) whose SHA-256 the node's operator approved.

The ClientApp's code comes from the coordinator, so a guard inside it protects nobody by itself. Flower's own trusted
entities require signatures that only its hub issues: if any are configured, a SuperNode refuses every bundle from a
self-hosted SuperLink. So this check compares the bytes when the SuperNode first sees a run, before anything from the
bundle is stored, installed or imported; a refused run gets Flower's error reply for invalid bundles. Before each task
the folder that Flower executes is made to hold the bundle's files, and nothing else.

And it loses less time: it asks more often while messages come, tells its SuperExec when there is a task, and that
starts the process of a task from one that has imported Flower already. Every task still has a process of its own. And
no message of a run that ends as it comes puts the replies to later ones out of step.

    python -m clients.deploy.approved_supernode APPROVED_FABS --host HOST --port PORT ... (further arguments of Flower)

With `--with-parent` it ends when its standard input closes.

This file holds every private name of Flower 1.42 that a node needs.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import select
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error
from flwr.cli.config_utils import get_fab_metadata
from flwr.common.config import get_project_dir
from flwr.common.constant import ErrorCode
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.runtime.run_clientapp import run_clientapp
from flwr.supernode.servicer.runtime import runtime_handlers

from fedpriv.files import read_text
from fedpriv.operate import approvals
from fedpriv.operate.flower import ask_again_soon, seconds_to_pause
from fedpriv.operate.processes import Kept, end_with_parent
from fedpriv.texts import holder_label

# What a task's process needs of what the operator has installed. Nothing of `clients`: a task takes that from the
# bundle, and would take what is already imported instead.
_PRELOADED = ["flwr.supernode.runtime.run_clientapp", "flwr.clientapp", "httpcore", "fedpriv.holder.wire.frame"]

# The SuperExec asks when it is told to, and else after this time; Flower makes it pause after each question besides.
_UNTOLD_SECONDS = 1.0
_SUPEREXEC_PAUSE = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.01"}

_SHORTEST_PAUSE_SECONDS = 0.05

# With `-m` or a file, every task's process would import it, and `clients` with it.
_SUPEREXEC = f"from {__package__}.approved_supernode import superexec; superexec()"


def require_approval(path: Path, whose: str) -> None:
    """Make every SuperNode of this process refuse bundles that the file does not approve.

    Flower 1.42 calls `_verify_fab` on a bundle that has verifications if trusted entities are configured. This function
    supplies both, and lets the file decide, which is read again for each run. Flower's own reply says that the bundle
    could not be verified; this one says to the coordinator who refuses which bundle, and what helps.
    """
    pull: Callable[..., Any] = start_client_internal._pull_and_store_message

    def pull_approved(*, get_fab: Callable[[str, int], Any], **rest: Any) -> Any:
        def marked(fab_hash: str, run_id: int) -> Any:
            return replace(get_fab(fab_hash, run_id), verifications={"valid_license": "approved-fabs"})

        return pull(get_fab=marked, **{**rest, "trusted_entities": {"approved-fabs": str(path)}})

    def verify(fab: Any, trusted_entities: dict[str, str]) -> bool:
        if approvals.is_approved(fab.content, Path(trusted_entities["approved-fabs"])):
            return True
        digest = hashlib.sha256(fab.content).hexdigest()
        told = (
            f"{whose} has not approved this run's bundle; if it is right, run there: fedpriv node approve DIR {digest}"
        )
        start_client_internal.FAB_VERIFICATION_ERROR = Error(ErrorCode.INVALID_FAB, told)
        return False

    # It hands on whatever Flower passes, so its signature is wider than that of Flower's function.
    start_client_internal._pull_and_store_message = pull_approved  # type: ignore[assignment]
    start_client_internal._verify_fab = verify


def install_what_is_approved() -> None:
    """Make every task of this SuperNode run its bundle's own files.

    Flower 1.42 executes the folder that the bundle's name leads to, and installs nothing if there is one.
    """
    pull: Callable[..., Any] = runtime_handlers.pull_task_input

    def pull_installed(request: Any, state: Any, task: Any) -> Any:
        answer = pull(request, state, task)
        name = (*get_fab_metadata(answer.fab.content), hashlib.sha256(answer.fab.content).hexdigest())
        if (answer.run.fab_id, answer.run.fab_version, answer.fab.hash_str) != name:
            raise FlowerError(ApiErrorCode.RUNTIME_TASK_START_FAILED, "the bundle comes under another bundle's name")
        approvals.install(answer.fab.content, get_project_dir(*name))
        return answer

    runtime_handlers.pull_task_input = pull_installed


def keep_pace(on_message: Callable[[], None]) -> None:
    """Make the SuperNode of this process pause for shorter while messages come, and report each that has arrived.

    Its loop asks the SuperLink for messages every 3 s and itself for the reply every 0.5 s. These become the longest
    pauses, each a tenth of the time since the last message at most.
    """
    pull: Callable[..., Any] = start_client_internal._pull_and_store_message
    last = time.monotonic()

    def pull_reported(**arguments: Any) -> Any:
        nonlocal last
        if (run_id := pull(**arguments)) is not None:
            last = time.monotonic()
            on_message()
        return run_id

    def sleep(seconds: float) -> None:
        time.sleep(seconds_to_pause(time.monotonic() - last, shortest=_SHORTEST_PAUSE_SECONDS, longest=seconds))

    # As above; and of the module `time`, Flower's file uses `sleep` alone.
    start_client_internal._pull_and_store_message = pull_reported  # type: ignore[assignment]
    start_client_internal.time = SimpleNamespace(sleep=sleep)  # type: ignore[assignment, attr-defined]


def answer_each_message() -> None:
    """Make the SuperNode of this process expect a reply to each message that it keeps, and keep no other.

    Flower's loop sends one reply after each message that it has received. Of a message whose run ends while it is
    received, it keeps what has come and expects no reply: a task may answer it all the same, that reply goes out in
    place of the next message's, and the next message's waits until another one comes.
    """
    pull: Callable[..., Any] = start_client_internal._pull_and_store_message

    def pull_paired(
        *, pull_object: Callable[..., bytes], confirm_message_received: Callable[..., None], **rest: Any
    ) -> Any:
        def pulled(run_id: int, object_id: str) -> bytes:
            try:
                return pull_object(run_id, object_id)
            except RunNotRunningException:  # as any failure, after which Flower drops the message
                raise OSError(f"run {run_id} has ended") from None

        def confirmed(run_id: int, message_id: str) -> None:
            with suppress(RunNotRunningException):  # all of it is here, and a task may have begun
                confirm_message_received(run_id, message_id)

        return pull(pull_object=pulled, confirm_message_received=confirmed, **rest)

    start_client_internal._pull_and_store_message = pull_paired  # type: ignore[assignment]


def kept_superexec(address: str) -> Kept:
    """The process that starts a process for each task of this node; it ends when this one does.

    Args:
        address: HOST:PORT of this SuperNode's own API.
    """
    arguments = ["--insecure", "--runtime-api-address", address, "--parent-pid", str(os.getpid())]
    return Kept("SuperExec", [sys.executable, "-c", _SUPEREXEC, *arguments], _SUPEREXEC_PAUSE)


class WarmExecutor(SubprocessExecutor):
    """Starts the process of a ClientApp from one that has imported all it needs; any other as Flower does.

    Args:
        told: file descriptor with a byte for each task.
    """

    def __init__(self, told: int) -> None:
        self._told, self._supernode = told, os.getppid()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        forkserver.ensure_running()

    def reconcile(self) -> None:
        """Wait until there may be a task; Flower calls this before it asks for one.

        Raises:
            SystemExit: the SuperNode has ended.
        """
        ready, _, _ = select.select([self._told], [], [], _UNTOLD_SECONDS)
        if ready and not os.read(self._told, 4096):
            raise SystemExit(0)

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process of a task."""
        if spec.task_type != TaskType.CLIENT_APP:
            return super().launch(spec)
        # Its token does not become an argument, which every user of the machine could read.
        arguments = {
            "runtime_api_address": spec.runtime_api_address,
            "token": spec.token,
            "insecure": spec.insecure,
            "certificates": validate_and_resolve_root_certificates(spec.root_certificates_path, spec.insecure),
            "parent_pid": self._supernode,  # a task goes on without its SuperExec, of which another takes the place
            "runtime_dependency_install": spec.runtime_dependency_install,
        }
        self._context.Process(target=run_clientapp, kwargs=arguments, daemon=True).start()
        return LaunchResult.accepted()


def is_admitted(address: str, certificates: Path, key: Path) -> bool:
    """Whether a SuperLink knows a node's key; it changes nothing there.

    Flower 1.42 looks the key up before it refuses heartbeats at such an interval.

    Args:
        address: HOST:PORT of the SuperLink.
        certificates: of its authority.
        key: the node's private key.

    Raises:
        OSError: it gives no answer, or one that says neither.
    """
    private = load_ssh_private_key(key.read_bytes(), password=None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise OSError(f"{key}: is no key of a SuperNode")
    signer = NodeAuthHttpInterceptor(private, private.public_key())
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    asked = ActivateNodeRequest(public_key=public_key_to_bytes(private.public_key()), heartbeat_interval=-1.0)
    try:
        with FleetHttpClient.from_server_address(address, False, str(certificates), [version, signer]) as client:
            client.ActivateNode(asked)
    except httpx.HTTPStatusError as error:
        said = FlowerError.from_json(error.response.text)
        if said and said.code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
            return True
        if said and said.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            return False
    except httpx.HTTPError as error:
        raise OSError(str(error)) from None
    raise OSError("the SuperLink does not say whether it knows the key")


def superexec() -> None:
    """Flower's SuperExec with a warm executor, told of tasks on its standard input."""
    # Flower names this function by import, and a module's attribute is what it calls.
    run_superexec.get_executor = lambda *_, **__: WarmExecutor(sys.stdin.fileno())  # type: ignore[attr-defined]
    flower_superexec()


def main() -> None:
    """Flower's SuperNode; see the top of this file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("approved", type=Path)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True)
    parser.add_argument("--node-config", type=Path, required=True)
    parser.add_argument("--with-parent", action="store_true")
    own, flowers = parser.parse_known_args()
    node = tomllib.loads(read_text(own.node_config))
    if own.with_parent:
        end_with_parent()
    address = ["--host", own.host, "--port", own.port, "--node-config", str(own.node_config)]
    sys.argv[1:] = ["--isolation", "process", *address, *flowers]
    require_approval(own.approved.absolute(), holder_label(node["partition-id"], node["name"]))
    install_what_is_approved()
    ask_again_soon(pull_objects)
    answer_each_message()
    keep_pace(kept_superexec(f"{own.host}:{own.port}").tell)
    flower_supernode()


if __name__ == "__main__":
    main()
