"""Flower's SuperLink behind a door: from outside, a node's authenticated requests pass, and nothing else does.

Flower 1.42 serves all its APIs on one port, and its open distribution knows no accounts: anyone who reaches that port
may register nodes, start, stop and read runs, and take the token with which a ServerApp works. So this SuperLink
listens twice, with one app, one state and one certificate:

- at the coordinator's address, where those requests pass that Flower authenticates by a node's key;
- on a free port of 127.0.0.1, for `flwr`, SuperExec and ServerApps: for this process's own user and root alone.
  Others are refused even with a ServerApp's token, which the list of processes shows.

And the process of an app receives no bundle that the coordinator's operator has not approved. The SuperExec, which
starts these processes, is started again if it dies, and says at once of one that was killed that its run failed.

A node or server app that asks again for messages, where there were none, is answered once there may be some: so it asks
less often, and learns of a message sooner.

    python -m server.deploy.guarded_superlink DIR [--with-parent]

With `--with-parent` it ends when its standard input closes.

This file holds every private name of Flower 1.42 that a coordinator needs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from flwr.cli.config_utils import get_fab_metadata
from flwr.common.config import get_project_dir
from flwr.common.constant import SubStatus
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.proto.runtime_pb2 import PushTaskOutputRequest
from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.superlink.routers.control.middlewares import (
    ControlAuthenticationMiddleware,
    ControlEventLogMiddleware,
    ControlLicenseMiddleware,
    ControlSensitiveResponseMiddleware,
)
from flwr.superlink.routers.fleet.middlewares import FleetEventLogMiddleware
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from starlette.middleware import Middleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fedpriv import errors
from fedpriv.operate.approvals import install, is_approved
from fedpriv.operate.checks import listening
from fedpriv.operate.processes import Kept, end_with_parent
from server.deploy.folder import Coordinator

log = logging.getLogger("flwr")

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[..., Awaitable[Any]], Callable[..., Awaitable[Any]]], Awaitable[None]]

# (method, path) of each request that Flower's own NodeAuthMiddleware authenticates, by exactly these two.
NODE_REQUESTS = frozenset(key for key in PROTOBUF_REQUEST_TYPES if key[1].startswith("/v1/fleet/"))

# Each ends with the process that started it. A server app takes `server` from its bundle, so nothing of it here.
_SUPEREXEC = f"from {__package__}.guarded_superlink import superexec; superexec()"
_SERVERAPP = (
    "from fedpriv.operate.processes import end_with_parent; end_with_parent(); "
    "from fedpriv.operate.flower import ask_again_soon; "
    "from flwr.supercore.inflatable.inflatable_utils import pull_objects; ask_again_soon(pull_objects); "
    "from flwr.superlink.cli import flwr_serverapp; flwr_serverapp()"
)

_ROOT = 0
_LOOPBACK = "127.0.0.1"

# They would open further ports, for everybody.
_OTHER_APIS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")

# Of a socket that its process has closed, the kernel no longer knows the owner and says root, without an inode.
_ESTABLISHED, _NO_INODE = "01", "0"


# In the state of a request: its connection, and on loopback who holds the other end.
_CONNECTION, _OWNER = "connection", "owner"

# {a middleware of Flower's that passes on what is not of one API: the prefix of that one's paths}
_OF_ONE_API: dict[Any, str] = {
    **dict.fromkeys((NodeAuthMiddleware, FleetEventLogMiddleware), "/v1/fleet/"),
    ControlSensitiveResponseMiddleware: "/v1/control/",
    ControlAuthenticationMiddleware: "/v1/control/",
    ControlLicenseMiddleware: "/v1/control/",
    ControlEventLogMiddleware: "/v1/control/",
}

# {an API through which messages are pushed: the one through which they are pulled}
_PULLED_THROUGH = {"runtime": "fleet", "fleet": "runtime"}
# The longest that a pull is held; a server app looks at its deadline in between.
_HELD_SECONDS = 1.0
# The longest that a node waits for what messages hold to be pushed; Flower's client gives an answer up after 30.
_PUSHED_SECONDS = 10.0


class Door:
    """Lets a request pass to Flower's app, or answers it with a status and nothing else.

    Attributes:
        private: host and port of the listener on loopback; any other one is public.
    """

    def __init__(self, app: App, private: tuple[str, int]) -> None:
        self._app, self.private = app, private
        self._pushed_through: set[str] = set()
        # {API: set once there may be messages to pull, and then replaced}
        self._news = {api: asyncio.Event() for api in _PULLED_THROUGH}

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """Serve one request, or one of the server's own events."""
        status = None if scope["type"] == "lifespan" else self._refusal(scope)
        if status is None:
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    async def _serve(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """Let Flower's app answer; a pull after one that found nothing is held until there may be something."""
        *_, api, call = f"//{scope.get('path', '')}".split("/")
        if scope["type"] != "http" or api not in self._news:
            await self._app(scope, receive, send)
            return
        connection: Connection = scope["state"][_CONNECTION]
        was_let_in, is_pull = connection.is_let_in, call == "pull-messages"
        if was_let_in:
            self._hear(api, call)
        if is_pull:
            if connection.found_nothing is self._news[api]:
                await self._wait(api, _HELD_SECONDS)
            # A node that asks for what messages hold before it has been pushed asks again at ever longer intervals.
            if api == "fleet" and was_let_in and "runtime" in self._pushed_through:
                await self._wait(api, _PUSHED_SECONDS)
            if connection.transport.is_closing():  # Flower would count a message as delivered that nobody receives
                return
        news = self._news[api]

        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                connection.is_let_in = message["status"] == 200
                if connection.is_let_in and not was_let_in:
                    self._hear(api, call)
                if is_pull:
                    is_empty = connection.is_let_in and (b"content-length", b"0") in message["headers"]
                    connection.found_nothing = news if is_empty else None
            await send(message)

        await self._app(scope, receive, noted)

    def _hear(self, api: str, call: str) -> None:
        """Note what somebody does whom Flower lets in: who pushed messages pulls once what they hold is pushed too."""
        if call == "push-messages":
            self._pushed_through.add(api)
        elif call == "pull-messages" and api in self._pushed_through:
            self._pushed_through.remove(api)
            other = _PULLED_THROUGH[api]
            self._news[other].set()
            self._news[other] = asyncio.Event()

    async def _wait(self, api: str, seconds: float) -> None:
        """Wait until there may be messages to pull through an API, for so long at most."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news[api].wait(), seconds)

    def _refusal(self, scope: Scope) -> int | None:
        """The status that refuses a request; None if it may pass."""
        if scope.get("server") == self.private:
            return None if scope.get("state", {}).get(_OWNER) in (os.geteuid(), _ROOT) else 403
        return None if (scope.get("method"), scope["path"]) in NODE_REQUESTS else 404


class OfOneApi:
    """A middleware of Flower's that looks at the requests of one API alone; the others are spared the way through it.

    The way through one takes a quarter of a millisecond of a core, and a server app's requests would go through six.

    Args:
        app: what it stands before.
        kind: its class.
        prefix: of the paths of its API.
    """

    def __init__(self, app: App, kind: Callable[[App], App], prefix: str) -> None:
        self._app, self._prefix, self._middleware = app, prefix, kind(app)

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """Serve one request."""
        is_for_it = scope.get("path", "").startswith(self._prefix)
        await (self._middleware if is_for_it else self._app)(scope, receive, send)


class Connection(HttpToolsProtocol):
    """A connection to a `Door`, which notes once who holds its other end: Linux takes milliseconds to say that.

    Attributes:
        is_let_in: whether Flower answered what was asked last through this connection.
        found_nothing: the news of its API at the last pull, if it found no messages.
    """

    is_let_in = False
    found_nothing: asyncio.Event | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the server."""
        super().connection_made(transport)
        door: Any = self.config.app
        self.app_state = {**self.app_state, _CONNECTION: self}
        if self.client and self.server == door.private:
            found = owner(self.client, door.private)
            # Had the other end gone before the look, another connection might have had its port by then.
            self.app_state = {**self.app_state, _OWNER: found if _is_established(transport) else None}


def _is_established(transport: asyncio.BaseTransport) -> bool:
    """Whether neither end of a connection has closed it: the first byte of Linux's `struct tcp_info`."""
    return bool(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1)


def owner(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The number of the user who holds the client's end of a connection on this machine; None if nobody is found.

    Args:
        client: IPv4 address and port of the client's end.
        server: the same of the other end.
    """
    for table, family, prefix in (("tcp", socket.AF_INET, ""), ("tcp6", socket.AF_INET6, "::ffff:")):
        file = Path("/proc/net", table)
        ends = [_as_listed(socket.inet_pton(family, prefix + host), port) for host, port in (client, server)]
        for line in file.read_text(encoding="ascii").splitlines()[1:] if file.exists() else ():
            fields = line.split()
            if fields[1:3] == ends and fields[3] == _ESTABLISHED and fields[9] != _NO_INODE:
                return int(fields[7])
    return None


def _as_listed(address: bytes, port: int) -> str:
    """An address as /proc/net/tcp writes it: words of 32 bits as this machine stores them."""
    words = [address[start : start + 4] for start in range(0, len(address), 4)]
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"


def approved_alone(handlers: Any, file: Path) -> SimpleNamespace:
    """Flower's handlers of the Runtime API, of which an app's process gets approved bundles alone, installed here."""

    def pull_task_input(request: Any, state: Any, task: Any) -> Any:
        answer = handlers.pull_task_input(request, state, task)
        if not is_approved(answer.fab.content, file):
            raise FlowerError(ApiErrorCode.RUNTIME_TASK_START_FAILED, f"the bundle is not approved in {file}")
        # Flower executes the folder of this name, which may exist.
        name = (*get_fab_metadata(answer.fab.content), hashlib.sha256(answer.fab.content).hexdigest())
        if (answer.run.fab_id, answer.run.fab_version, answer.fab.hash_str) != name:
            raise FlowerError(ApiErrorCode.RUNTIME_TASK_START_FAILED, "the bundle comes under another bundle's name")
        install(answer.fab.content, get_project_dir(*name))
        return answer

    return SimpleNamespace(**{**vars(handlers), "pull_task_input": pull_task_input})


def server_of(coordinator: Coordinator, app: Any, private: socket.socket, **options: Any) -> uvicorn.Server:
    """A server of Flower's app behind its door; the options are those of uvicorn."""
    app.state.runtime_handlers = approved_alone(app.state.runtime_handlers, coordinator.approved)
    app.user_middleware = [
        Middleware(OfOneApi, each.cls, _OF_ONE_API[each.cls]) if each.cls in _OF_ONE_API else each
        for each in app.user_middleware
    ]
    # No header may say who the client is.
    door = Door(app, private.getsockname())
    return uvicorn.Server(uvicorn.Config(door, **{**options, "http": Connection, "proxy_headers": False}))


class WatchedExecutor(SubprocessExecutor):
    """Starts the process of a server app, and says of one that a signal ended that its task failed.

    It cannot say so itself, and Flower would wait for a minute for its heartbeats.
    """

    def __init__(self) -> None:
        self._tasks: dict[subprocess.Popen[bytes], ExecutionSpec] = {}

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process of a task."""
        if spec.task_type != TaskType.SERVER_APP:
            return super().launch(spec)
        arguments = ["--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
        authority = ["--root-certificates", str(spec.root_certificates_path)]
        command = [sys.executable, "-c", _SERVERAPP, *arguments, *authority]
        nowhere = subprocess.DEVNULL  # it sends its log to the SuperLink
        self._tasks[subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)] = spec
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Look for processes that have ended; Flower calls this every few seconds."""
        for process in [each for each in self._tasks if each.poll() is not None]:
            spec = self._tasks.pop(process)
            if process.returncode < 0:
                log.error("the process of task %s was ended by signal %s", spec.task_id, -process.returncode)
                _report_failed(spec, f"its process was ended by signal {-process.returncode}")


def _report_failed(spec: ExecutionSpec, reason: str) -> None:
    """Say in a task's own name that it failed."""
    certificates = validate_and_resolve_root_certificates(spec.root_certificates_path, spec.insecure)
    client = RuntimeHttpClient.from_server_address(
        server_address=spec.runtime_api_address,
        insecure=spec.insecure,
        root_certificates=certificates,
        interceptors=[RuntimeVersionHttpInterceptor("SuperExec"), RuntimeTokenHttpInterceptor(spec.token)],
        retry_invoker=make_simple_http_retry_invoker(),
    )
    try:
        client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=reason))
    except httpx.HTTPError as error:  # Flower then waits for its heartbeats
        log.error("task %s: its failure could not be reported (%s)", spec.task_id, type(error).__name__)
    finally:
        client.close()


def num_online(coordinator: Coordinator, address: str) -> int:
    """The number of nodes that are online, by the running SuperLink.

    Not by `flwr`, which takes a second of processor to start: this is asked again and again.

    Args:
        coordinator: whose SuperLink it is.
        address: HOST:PORT of its listener on loopback.

    Raises:
        fedpriv.errors.FlowerError: it cannot be asked.
    """
    try:
        control = ControlHttpClient.from_server_address(
            address,
            insecure=False,
            root_certificates=coordinator.ca_certificate.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor("fedpriv coordinator")],
        )
        with closing(control):
            return sum(node.status == "online" for node in control.ListNodes(ListNodesRequest()).nodes_info)
    except (Exception, SystemExit) as error:  # of files, TLS, HTTP and Flower, which ends a program of another version
        reason = " ".join(str(error).split()) or type(error).__name__
        raise errors.FlowerError(f"the SuperLink does not say which nodes are online ({reason})") from None


def superexec() -> None:
    """Flower's SuperExec with a watched executor."""
    end_with_parent()
    run_superexec.get_executor = lambda *_, **__: WatchedExecutor()  # type: ignore[attr-defined]
    flower_superexec()


def main() -> None:
    """Flower's SuperLink for a coordinator's folder; see the top of this file."""
    folder, *with_parent = sys.argv[1:]
    if with_parent:
        end_with_parent()
    coordinator = Coordinator.read(Path(folder))
    for name in _OTHER_APIS:
        os.environ.pop(name, None)
    public = listening(coordinator.bind_host, coordinator.port)
    private = socket.create_server((_LOOPBACK, 0))
    port = private.getsockname()[1]
    coordinator.connect(f"{_LOOPBACK}:{port}")
    sys.argv[1:] = [
        *("--host", _LOOPBACK, "--port", str(port), "--database", str(coordinator.database), "--isolation", "process"),
        *("--ssl-ca-certfile", str(coordinator.ca_certificate)),
        *("--ssl-certfile", str(coordinator.server_certificate), "--ssl-keyfile", str(coordinator.server_key)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]
    flower = import_module("flwr.superlink.cli.flower_superlink")

    def run(app: Any, **options: Any) -> None:
        address = ["--runtime-api-address", f"{_LOOPBACK}:{port}"]
        authority = ["--root-certificates", str(coordinator.ca_certificate)]
        Kept("SuperExec", [sys.executable, "-c", _SUPEREXEC, *address, *authority])
        server_of(coordinator, app, private, **options).run(sockets=[private, public])

    flower.uvicorn = SimpleNamespace(run=run)  # type: ignore[attr-defined]
    flower.flower_superlink()


if __name__ == "__main__":
    main()
