"""The coordinator's door: from outside only what nodes sign reaches Flower's app, whatever path is written."""

import asyncio
import hashlib
import inspect
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from http.client import HTTPConnection
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import certifi
import pytest
import uvicorn
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi.routing import iter_route_contexts
from flwr.cli.install import install_from_fab
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.error import FlowerError
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.main import _get_middleware, create_app
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv import errors
from fedpriv.files import user_named
from fedpriv.operate.approvals import approve
from server.deploy import guarded_superlink
from server.deploy.folder import Coordinator
from server.deploy.guarded_superlink import NODE_REQUESTS, Connection, Door, OfOneApi, approved_alone, owner, server_of
from tests.bundles import FILES, bundle, held, plant, task_input

_PROTOBUF = {"Content-Type": "application/protobuf"}


# What is replaced, and what relies on it: whoever updates Flower reads these again, and then their digests here.
SOURCES = {
    "flwr.superlink.cli.flower_superlink:flower_superlink": "398ce9c85755e9ee",
    "flwr.superlink.cli.flower_superlink:_run_superlink_http_api": "eb0d78b85f999576",
    "flwr.superlink.cli.flower_superlink:SuperLinkLifespan": "a2c1f2f11725c17f",
    "flwr.superlink.main:create_app": "ee966b630c8ba8b5",
    "flwr.superlink.main:_get_middleware": "911d5e2a5aaf11ec",
    "flwr.superlink.routers.control.middlewares:ControlSensitiveResponseMiddleware": "25cca938600324c2",
    "flwr.superlink.routers.control.middlewares:ControlAuthenticationMiddleware": "1495e41d9bbbd25d",
    "flwr.superlink.routers.control.middlewares:ControlLicenseMiddleware": "0f57194171e921a3",
    "flwr.superlink.routers.control.middlewares:ControlEventLogMiddleware": "d8db2d506ca7d0c5",
    "flwr.superlink.routers.fleet.middlewares:FleetEventLogMiddleware": "4466ecde96fb2315",
    "flwr.superlink.routers.fleet.node_auth:NodeAuthMiddleware": "36b9ef8b482a1722",
    "flwr.superlink.routers.fleet.node_auth:authenticate_node": "f8e66372d61b3653",
    "flwr.superlink.runtime.run_serverapp:run_serverapp": "2cf00cc3bc7ef87c",
    "flwr.superlink.servicer.runtime.runtime_handlers:pull_task_input": "0cdb599a99a72968",
    "flwr.superlink.servicer.runtime.runtime_handlers:push_task_output": "b3ee32bbe937b4de",
    "flwr.cli.install:install_from_fab": "481bd04cde582322",
    "flwr.cli.install:validate_and_install": "628b69fb852ae858",
    "flwr.common.config:get_project_dir": "155c70517e73e598",
    "flwr.simulation.app:run_simulation_process": "f0e943cce1d4b652",
    "flwr.supercore.protobuf.translation:ProtobufTranslationMiddleware": "5ff23a6fdd06d0f9",
    "flwr.supercore.superexec.executor:ExecutionSpec": "a52aad6399c9a5ec",
    "flwr.supercore.superexec.executor.subprocess_executor:SubprocessExecutor": "9c58435eb28cd789",
    "flwr.supercore.superexec.run_superexec:run_superexec": "91e7a33c5b898f33",
    "flwr.supercore.task_process.agent.run_agentapp:run_agentapp": "a4c21ab72534b241",
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.connection_made": "6efb565ff3d36b91",
}


def test_flower_is_what_was_read_when_its_private_names_were_used():
    assert version("flwr") == "1.42.0"
    read = {name: hashlib.sha256(inspect.getsource(resolve_name(name)).encode()).hexdigest()[:16] for name in SOURCES}
    assert read == SOURCES


@pytest.fixture(scope="module")
def app():
    """Flower's own app, as the command line makes it."""
    made = create_app()
    made.state.enable_supernode_auth = True
    return made


@pytest.fixture(scope="module")
def listeners(app, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Ports of the public and of the private listener of that app, without TLS."""
    folder = tmp_path_factory.mktemp("coordinator")
    public, private = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    server = server_of(Coordinator(folder=folder, addresses=("127.0.0.1",)), app, private, log_level="error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [private, public]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    yield public.getsockname()[1], private.getsockname()[1]
    server.should_exit = True
    thread.join()


def request_of(method: str, target: str, headers: dict[str, str], content: bytes = b"") -> bytes:
    """A request whose target is written as it is."""
    more = {"Host": "127.0.0.1", "Content-Length": str(len(content)), "Connection": "close"}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in {**more, **headers}.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


def asked(
    port: int, method: str, target: str, headers: dict[str, str] = _PROTOBUF, content: bytes = b""
) -> tuple[int, bytes]:
    """Status and body of the answer to a request."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request_of(method, target, headers, content))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def routes(app) -> set[tuple[str, str]]:
    """(method, path) of all that Flower's app answers."""
    contexts = [context.route for context in iter_route_contexts(app.routes)]
    return {(method, route.path) for route in contexts for method in getattr(route, "methods", None) or ()}


@pytest.mark.usefixtures("listeners")
def test_every_middleware_of_flowers_stands_in_its_place(app):
    kinds = [each.args[0] if each.cls is OfOneApi else each.cls for each in app.user_middleware]
    assert kinds == [each.cls for each in _get_middleware()]
    assert sum(each.cls is OfOneApi for each in app.user_middleware) == len(kinds) - 2


def test_exactly_flowers_fleet_api_is_for_nodes_and_whatever_else_it_answers_is_not_there_from_outside(app, listeners):
    assert {route for route in routes(app) if route[1].startswith("/v1/fleet")} == NODE_REQUESTS
    assert len(NODE_REQUESTS) == 12
    assert len(routes(app)) > 80
    for method, path in routes(app) - NODE_REQUESTS:
        assert asked(listeners[0], method, path.replace("{path:path}", "x")) == (404, b""), (method, path)


@pytest.mark.parametrize(
    "target",
    [
        *("//v1/control/list-runs", "/v1//control/list-runs", "/v1/control/list-runs/", "/V1/CONTROL/LIST-RUNS"),
        *("/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/..%2fcontrol/list-runs"),
        *("/v1%2fcontrol%2flist-runs", "/v1/%63ontrol/list-runs", "/v1/fleet/pull-messages/../../control/list-runs"),
        *("/v1/control/list-runs?/v1/fleet/pull-messages", "/v1/control/list-runs;/v1/fleet/pull-messages"),
        *("/v1/control/list-runs%3f/v1/fleet/pull-messages", "/v1/control/list-runs%23/v1/fleet/pull-messages"),
        *("/v1/fleet/pull-messages%00", "/v1/fleet/pull-messages%3fx", "/v1/fleet/pull-messages%20", "/v1/fleet/"),
        *("http://127.0.0.1/v1/control/list-runs", "http://127.0.0.1:1/v1/fleet/../control/list-runs", "/", "/docs/"),
        *("/v1/runtime/acquire-task%0a", "/%76%31/runtime/acquire-task", "/v1/runtime/./acquire-task", "/docs%2f"),
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET", "HEAD", "OPTIONS", "PUT"])
def test_no_spelling_of_a_path_leads_around_the_door(listeners, method, target):
    status, body = asked(listeners[0], method, target)
    assert (status, body) in [(404, b""), (400, b"Invalid HTTP request received.")]


_PARTS = st.sampled_from(
    [
        *("v1", "fleet", "control", "runtime", "pull-messages", "list-runs", "acquire-task", "docs", "openapi.json"),
        *("..", ".", "%2e%2e", "%2f", "%3f", "%23", "%00", "%25", ";", "?", "\\", "", "FLEET", "health"),
    ]
)


@given(
    method=st.sampled_from(["POST", "GET", "HEAD", "OPTIONS"]),
    target=st.lists(_PARTS, min_size=1, max_size=7).map(lambda parts: "/" + "/".join(parts)),
)
@settings(max_examples=150, deadline=None)
def test_whatever_passes_the_door_without_a_signature_is_refused_by_flower(listeners, method, target):
    status, _ = asked(listeners[0], method, target)
    assert status in (400, 401, 404)


_HOSTS = ("a?b", "a/b#", "x@127.0.0.1/v1/control")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        *((_PROTOBUF | host, 401) for host in ({}, *({"Host": host} for host in _HOSTS))),
        ({"Content-Type": "application/json"}, 415),
    ],
)
def test_nodes_get_through_and_must_write_protobuf_and_sign(listeners, headers, expected):
    for _, path in NODE_REQUESTS:
        assert asked(listeners[0], "POST", path, headers)[0] == expected, path


def test_a_key_that_nobody_registered_opens_nothing(app, listeners):
    key = ec.generate_private_key(ec.SECP384R1())
    line = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    timestamp = now().isoformat()
    signature = key.sign(timestamp.encode(), ec.ECDSA(hashes.SHA256()))
    signed = {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(line).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
        TIMESTAMP_HEADER: timestamp,
    }
    for request in NODE_REQUESTS:
        message = PROTOBUF_REQUEST_TYPES[request]()
        if hasattr(message, "public_key"):
            message.public_key = line  # or the signature would not even be compared
        status, body = asked(listeners[0], *request, {**_PROTOBUF, **signed}, message.SerializeToString())
        # Flower believes the signature of those two, and then knows no such node.
        assert 400 <= status < 500, (request, body)
        assert (status != 401) == hasattr(message, "public_key"), (request, body)
    assert not app.state.linkstate_factory.state().get_node_info()


def test_a_websocket_is_not_opened(listeners):
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    for path in ("/v1/control/list-runs", "/v1/fleet/pull-messages", "/docs"):
        assert asked(listeners[0], "GET", path, {**upgrade, "Sec-WebSocket-Key": "x" * 22 + "=="})[0] == 403


def test_the_operators_own_listener_answers_everything_but_users_other_than_the_servers(listeners, monkeypatch):
    requests = (("GET", "/docs"), ("GET", "/openapi.json"), ("POST", "/v1/control/list-runs"))
    assert [asked(listeners[1], *request)[0] for request in requests] == [200] * 3
    monkeypatch.setattr(guarded_superlink, "os", SimpleNamespace(geteuid=lambda: os.geteuid() + 1))
    monkeypatch.setattr(guarded_superlink, "_ROOT", os.geteuid() + 2)
    assert [asked(listeners[1], *request)[0] for request in requests] == [403] * 3


_ASK = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10) as connection:
    connection.sendall(sys.stdin.buffer.read())
    print(connection.recv(65536).split()[1].decode())
"""


def as_nobody(port: int, headers: dict[str, str]) -> int:
    """The status that another user of this machine gets."""
    request = request_of("POST", "/v1/control/list-runs", {**_PROTOBUF, **headers}).decode()
    command = [shutil.which("python3", path="/usr/bin:/bin") or sys.executable, "-I", "-c", _ASK, str(port)]
    options = {"user": "nobody", "group": user_named("nobody").gid, "extra_groups": [], "cwd": "/"}
    done = subprocess.run(command, input=request, timeout=30, check=True, stdout=subprocess.PIPE, text=True, **options)
    return int(done.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_other_users_of_the_machine_are_refused_even_on_loopback(listeners):
    public, private = listeners
    connection = HTTPConnection("127.0.0.1", private)  # of ours, and open: its port must serve nobody else
    connection.connect()
    ours = f"127.0.0.1:{connection.sock.getsockname()[1]}"
    for headers in ({}, {"X-Forwarded-For": ours}, {"X-Forwarded-For": "127.0.0.1", "Forwarded": f"for={ours}"}):
        assert as_nobody(private, headers) == 403
        assert as_nobody(public, headers) == 404
    connection.close()


def test_the_owner_of_a_connection_is_known_while_it_is_open_and_never_later():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")):
            client = socket.socket(family)
            try:
                client.connect((host, listener.getsockname()[1]))
            except OSError:
                continue  # no IPv6 here
            served, peer = listener.accept()
            assert owner(peer, served.getsockname()) == os.geteuid()
            assert owner(served.getsockname(), peer) == os.geteuid()
            client.close()  # the kernel now says root of it, with or without a place in its table
            assert owner(peer, served.getsockname()) is None
            served.close()


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_port_that_another_connection_may_have_by_now_proves_nothing(monkeypatch, is_reset):
    """A stranger resets a connection, and a process of the operator's has its port when the server looks."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        served, _ = listener.accept()

        def look(*_):
            if is_reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            return os.geteuid()

        monkeypatch.setattr(guarded_superlink, "owner", look)
        config = uvicorn.Config(Door(lambda *_: None, served.getsockname()), proxy_headers=False)
        config.load()
        connection = Connection(config, uvicorn.server.ServerState(), {}, _loop=Mock())
        connection.connection_made(Mock(get_extra_info={"socket": served}.get))
        assert connection.app_state == {"connection": connection, "owner": None if is_reset else os.geteuid()}
        served.close()


def test_a_server_that_does_not_say_where_it_was_asked_or_by_whom_admits_nobody():
    sent = []

    async def send(message):
        sent.append(message)

    async def reached(*_):
        raise AssertionError("the app was reached")

    for server in (None, ("127.0.0.1", 2), ("0.0.0.0", 1), ["127.0.0.1", 1], ("127.0.0.1", 1)):
        scope = {"type": "http", "method": "POST", "path": "/v1/control/list-runs", "server": server, "client": None}
        asyncio.run(Door(reached, ("127.0.0.1", 1))(scope, None, send))
    assert [message["status"] for message in sent[::2]] == [404, 404, 404, 404, 403]


class Answering:
    """A door before an app that answers with so many bytes, and lets no stranger in."""

    def __init__(self, **lengths: bytes) -> None:
        self.asked, self.lengths = [], lengths
        self.links = {name: Mock(found_nothing=None, is_let_in=False) for name in (*lengths, "stranger")}
        self._door = Door(self._answer, ("127.0.0.1", 1))

    async def _answer(self, scope, _, send):
        self.asked.append((scope["state"]["connection"], scope["path"]))
        is_stranger = scope["state"]["connection"] is self.links["stranger"]
        headers = [(b"content-length", self.lengths[scope["path"].split("/")[2]])]
        await send({"type": "http.response.start", "status": 401 if is_stranger else 200, "headers": headers})

    async def call(self, api, name, link=None, is_closing=False):
        """A request through the API's own connection, or another's."""
        connection = self.links[link or api]
        connection.transport.is_closing.return_value = is_closing
        state = {"connection": connection, "owner": os.geteuid()}
        scope = {"type": "http", "path": f"/v1/{api}/{name}", "server": ("127.0.0.1", 1), "state": state}
        await self._door(scope, 0, AsyncMock())

    async def held(self, api):
        """A pull that has begun."""
        task = asyncio.create_task(self.call(api, "pull-messages"))
        await asyncio.sleep(0)
        return task


def test_a_pull_after_one_that_found_nothing_waits_for_a_push_and_ends_with_its_connection(monkeypatch):
    app = Answering(fleet=b"0", runtime=b"9")

    async def exchange():
        await app.call("fleet", "pull-messages")
        held = await app.held("fleet")
        await app.call("runtime", "push-messages")
        await app.call("runtime", "push-object")
        await asyncio.sleep(0)
        assert len(app.asked) == 3, "what its messages hold may be on its way"
        for _ in range(2):
            await app.call("fleet", "pull-messages", link="stranger")
        assert len(app.asked) == 5, "who is not let in is never held"
        app.lengths["fleet"] = b"9"
        await app.call("runtime", "pull-messages")
        await held
        await app.call("runtime", "push-messages")
        early = await app.held("fleet")
        assert len(app.asked) == 8, "after messages too, a node waits for what the next ones hold"
        app.lengths["fleet"] = b"0"
        await app.call("runtime", "pull-messages")
        await early
        monkeypatch.setattr(guarded_superlink, "_HELD_SECONDS", 0.01)
        late = await app.held("fleet")
        await app.call("runtime", "push-messages")
        await asyncio.sleep(0.05)
        assert len(app.asked) == 11, "one that was held before they were pushed waits too"
        await app.call("runtime", "pull-messages")
        await late
        await app.call("fleet", "pull-messages")
        await app.call("fleet", "pull-messages", is_closing=True)

    asyncio.run(exchange())
    assert [path.split("/")[2] for _, path in app.asked] == [
        *("fleet", "runtime", "runtime", "fleet", "fleet", "runtime", "fleet"),
        *("runtime", "runtime", "fleet", "runtime", "runtime", "fleet", "fleet"),
    ]


def test_whom_flower_refuses_ends_no_hold_of_another():
    app = Answering(fleet=b"0", runtime=b"0")

    async def exchange():
        await app.call("runtime", "pull-messages")
        held = await app.held("runtime")
        for name, link in (("push", "stranger"), ("pull", "stranger"), ("push", None), ("pull", "stranger")):
            await app.call("fleet", f"{name}-messages", link=link)
        await asyncio.sleep(0)
        assert not held.done()
        await app.call("fleet", "pull-messages")
        await held

    asyncio.run(exchange())
    assert app.asked[-1] == (app.links["runtime"], "/v1/runtime/pull-messages")


@pytest.fixture
def approving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, bytes]:
    """The file of approved bundles, still empty, and a bundle's content; Flower installs below tmp_path / "home"."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    (tmp_path / "approved-fabs").touch()
    return tmp_path / "approved-fabs", bundle()


def test_no_process_gets_a_bundle_that_is_not_approved(approving, tmp_path: Path):
    file, content = approving
    answer = task_input(content)
    handlers = approved_alone(SimpleNamespace(pull_task_input=lambda *_: answer, get_nodes=len), file)
    assert handlers.get_nodes("abc") == 3
    with pytest.raises(FlowerError, match="not approved"):
        handlers.pull_task_input(None, None, None)
    assert not (tmp_path / "home").exists()
    approve(file, hashlib.sha256(content).hexdigest())
    assert handlers.pull_task_input(None, None, None) is answer
    answer.fab.hash_str = "0" * 64  # by which Flower names the folder that it executes
    with pytest.raises(FlowerError, match="another bundle's name"):
        handlers.pull_task_input(None, None, None)
    file.unlink()
    with pytest.raises(FlowerError, match="not approved"):
        handlers.pull_task_input(None, None, None)


def test_what_lies_where_flower_would_install_an_approved_bundle_is_not_executed(approving, tmp_path: Path):
    file, content = approving
    file.write_text(hashlib.sha256(content).hexdigest())
    folder = plant(tmp_path / "home", content)
    handlers = approved_alone(SimpleNamespace(pull_task_input=lambda *_: task_input(content)), file)
    handlers.pull_task_input(None, None, None)
    assert install_from_fab(content, skip_prompt=True) == folder
    assert held(folder) == FILES
    elsewhere = tmp_path / "home" / "elsewhere" / "app.py"
    assert elsewhere.read_text() == "app = 'evil'\n", "another folder's file was touched"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    before = (folder / "server" / "app.py").stat()
    (folder / "pyproject.toml").unlink()
    handlers.pull_task_input(None, None, None)
    assert held(folder) == FILES
    assert (folder / "server" / "app.py").stat() == before, "what is right stays, for the tasks that read it"


@pytest.mark.parametrize(
    ("content", "address", "said"),
    [
        (None, "127.0.0.1:9", "No such file"),
        ("no certificate", "127.0.0.1:9", "certificate"),
        (certifi.contents(), "127.0.0.1:port", "Invalid port"),
        (certifi.contents(), "127.0.0.1:9", "refused"),
    ],
)
def test_what_keeps_the_superlink_from_saying_who_is_online_is_one_error_of_one_line(content, address, said, tmp_path):
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    with pytest.raises(errors.FlowerError, match=rf"which nodes are online \(.*{said}") as caught:
        guarded_superlink.num_online(SimpleNamespace(ca_certificate=tmp_path / "ca.pem"), address)
    assert "\n" not in str(caught.value)
