"""Flower's SuperLink behind a door: from outside, a node's authenticated requests pass, and nothing else does.

Flower 1.41 serves all its APIs on one port, and its open distribution knows no accounts: anyone who reaches that port
may register nodes, start, stop and read runs, and take the token with which a ServerApp works. So this SuperLink
listens twice, with one app, one state and one certificate:

- at the coordinator's address, where those requests pass that Flower authenticates by a node's key;
- on a free port of 127.0.0.1, for `flwr`, SuperExec and ServerApps: for this process's own user and root alone.

And the process of an app receives no bundle that the coordinator's operator has not approved.

    python -m server.deploy.guarded_superlink DIR

This file holds every private name of Flower 1.41 that a coordinator needs.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from flwr.cli.config_utils import get_fab_metadata
from flwr.common.config import get_project_dir
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fedpriv.deployment.approvals import install, is_approved
from server.deploy.folder import Coordinator

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[..., Awaitable[Any]], Callable[..., Awaitable[Any]]], Awaitable[None]]

# (method, path) of each request that Flower's own NodeAuthMiddleware authenticates, by exactly these two.
NODE_REQUESTS = frozenset(key for key in PROTOBUF_REQUEST_TYPES if key[1].startswith("/v1/fleet/"))

_ROOT = 0
_LOOPBACK = "127.0.0.1"

# They would open further ports, for everybody.
_OTHER_APIS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")

# Of a socket that its process has closed, the kernel no longer knows the owner and says root, without an inode.
_ESTABLISHED, _NO_INODE = "01", "0"


# In the state of a request on loopback: who holds the other end of its connection.
_OWNER = "owner"


class Door:
    """Lets a request pass to Flower's app, or answers it with a status and nothing else.

    Attributes:
        private: host and port of the listener on loopback; any other one is public.
    """

    def __init__(self, app: App, private: tuple[str, int]) -> None:
        self._app, self.private = app, private

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """Serve one request, or one of the server's own events."""
        status = None if scope["type"] == "lifespan" else self._refusal(scope)
        if status is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    def _refusal(self, scope: Scope) -> int | None:
        """The status that refuses a request; None if it may pass."""
        if scope.get("server") == self.private:
            return None if scope.get("state", {}).get(_OWNER) in (os.geteuid(), _ROOT) else 403
        return None if (scope.get("method"), scope["path"]) in NODE_REQUESTS else 404


class Connection(HttpToolsProtocol):
    """A connection to a `Door`, which notes once who holds its other end: Linux takes milliseconds to say that."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the server."""
        super().connection_made(transport)
        door: Any = self.config.app
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
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
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
    # No header may say who the client is.
    door = Door(app, private.getsockname())
    return uvicorn.Server(uvicorn.Config(door, **{**options, "http": Connection, "proxy_headers": False}))


def main() -> None:
    """Flower's SuperLink for a coordinator's folder; see the top of this file."""
    coordinator = Coordinator.read(Path(sys.argv[1]))
    for name in _OTHER_APIS:
        os.environ.pop(name, None)
    family = socket.AF_INET6 if ":" in coordinator.bind_host else socket.AF_INET
    public = socket.create_server((coordinator.bind_host, coordinator.port), family=family)
    private = socket.create_server((_LOOPBACK, 0))
    port = private.getsockname()[1]
    coordinator.connect(f"{_LOOPBACK}:{port}")
    # Flower hands the address that it is told to its SuperExec and ServerApps.
    sys.argv[1:] = [
        *("--host", _LOOPBACK, "--port", str(port), "--database", str(coordinator.database)),
        *("--ssl-ca-certfile", str(coordinator.ca_certificate)),
        *("--ssl-certfile", str(coordinator.server_certificate), "--ssl-keyfile", str(coordinator.server_key)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]
    flower = import_module("flwr.superlink.cli.flower_superlink")

    def run(app: Any, **options: Any) -> None:
        server_of(coordinator, app, private, **options).run(sockets=[private, public])

    flower.uvicorn = SimpleNamespace(run=run)  # type: ignore[attr-defined]
    flower.flower_superlink()


if __name__ == "__main__":
    main()
