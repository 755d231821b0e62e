"""A node behind a proxy: it reaches its coordinator through that alone, and its own processes without it."""

import os
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from unittest.mock import patch

import httpx
import pytest

from fedpriv.operate.checks import check_tls
from fedpriv.operate.flower import environment, use_proxies
from server.deploy import certificates
from simulations.sites import CLIENT, SERVER, Service, free_port, kit, wait_until
from tests.deployment.tls_server import serving

ELSEWHERE = "127.0.0.2"
"""Loopback as well, but none of the names that no proxy is asked for."""


class Proxy(socketserver.ThreadingTCPServer):
    """An HTTP proxy that knows CONNECT alone, and keeps where it was asked to connect to."""

    daemon_threads = allow_reuse_address = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Tunnel)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Tunnel(socketserver.StreamRequestHandler):
    """One connection through the proxy."""

    server: Proxy

    def handle(self) -> None:
        method, where, _ = self.rfile.readline().decode().split()
        while self.rfile.readline().strip():
            pass
        self.server.asked.append(f"{method} {where}")
        host, _, port = where.rpartition(":")
        with socket.create_connection((host, int(port))) as there:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=relay, args=(there, self.connection), daemon=True)
            back.start()
            relay(self.connection, there)
            back.join()


def relay(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture(autouse=True)
def _no_other_proxies() -> Iterator[None]:
    with patch.dict(os.environ):
        for variable in [name for name in os.environ if name.lower().endswith("_proxy")]:
            del os.environ[variable]
        yield


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.shutdown()


def test_programs_of_this_machine_find_each_other_without_a_proxy(monkeypatch, tmp_path):
    monkeypatch.setenv("NO_PROXY", "intranet.example.org")
    variables = environment(tmp_path)
    assert variables["NO_PROXY"] == variables["no_proxy"] == "intranet.example.org,127.0.0.1,localhost,::1"


@pytest.mark.parametrize(
    ("name", "value", "read", "note"),
    [
        ("NO_PROXY", "a.org,fe80::/10, ::1", "a.org,::1,127.0.0.1,localhost", "'fe80::/10' is left out"),
        ("NO_PROXY", "localhost,[::1]", "localhost,::1,127.0.0.1", None),
        ("no_proxy", "10.0.0.0/8,https://a.org:9", "10.0.0.0/8,https://a.org:9,127.0.0.1,localhost,::1", None),
        ("NO_PROXY", "a.org:b", "127.0.0.1,localhost,::1", "'a.org:b' is left out"),
        ("ALL_PROXY", "socks://127.0.0.1:1080/", "", "ALL_PROXY: is left out"),
        ("https_proxy", "127.0.0.1:3128", None, None),
    ],
)
def test_entries_that_flowers_client_cannot_read_are_left_out_and_named(monkeypatch, tmp_path, name, value, read, note):
    monkeypatch.setenv(name, value)
    said: list[str] = []
    assert environment(tmp_path)[name] == (value if read is None else read)
    use_proxies(said.append)
    httpx.Client(verify=False).close()
    assert [note in line for line in said] == [True] if note else not said


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_check_takes_the_proxy_that_flowers_client_takes(monkeypatch, tmp_path, proxy, variable, scheme):
    certificates.make_ca(tmp_path, 9)
    certificates.make_server_certificate(tmp_path, [ELSEWHERE], 9)
    monkeypatch.setenv(variable, f"{scheme}127.0.0.1:{proxy.server_address[1]}")
    with serving(tmp_path, host=ELSEWHERE) as port:
        assert check_tls(ELSEWHERE, port, tmp_path / "ca.crt").ok
        trusted = ssl.create_default_context(cafile=tmp_path / "ca.crt")
        with httpx.Client(verify=trusted) as client:
            assert client.head(f"https://{ELSEWHERE}:{port}/").status_code == 404
    assert proxy.asked == [f"CONNECT {ELSEWHERE}:{port}"] * 2


def test_a_proxy_that_is_not_there_is_named_without_its_password(monkeypatch, tmp_path):
    certificates.make_ca(tmp_path, 9)
    port = free_port()
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@127.0.0.1:{port}")
    found = check_tls(ELSEWHERE, 9, tmp_path / "ca.crt")
    assert (found.ok, f"HTTPS_PROXY = http://...@127.0.0.1:{port} may" in found.detail) == (False, True), found


@pytest.mark.deployment
@pytest.mark.nightly
def test_a_node_behind_a_proxy_takes_part(proxy, tmp_path, monkeypatch):
    coordinator, node, port = tmp_path / "coordinator", tmp_path / "node", free_port()
    kit(SERVER, "init", coordinator, "--address", ELSEWHERE, "--port", port)
    services = [Service(tmp_path / "superlink.log", SERVER, "start", coordinator)]
    try:
        services[0].wait_for("SuperLink answers")
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_address[1]}")
        heard = kit(SERVER, "invite", coordinator, "St. Anna").split()[-1]
        invitation = ("--invite", coordinator / "invitations" / "0.toml", "--fingerprint", heard)
        told = kit(CLIENT, "init", node, *invitation, "--approve").splitlines()
        vault = next(line.split()[-1] for line in told if line.startswith("fingerprint of vault.key"))
        kit(SERVER, "admit", coordinator, node / "application.toml", "--fingerprint", vault)
        assert not proxy.asked, "the coordinator's own commands stay on its machine"
        found = kit(CLIENT, "doctor", node)
        assert "certificate valid until" in found
        assert set(proxy.asked) == {f"CONNECT {ELSEWHERE}:{port}"}
        services.append(Service(tmp_path / "node.log", CLIENT, "start", node))
        services[0].wait_for("nodes online: 1 of 1", 120)
        run = [SERVER, "run", str(coordinator), "-c", "rounds=2", "-c", "noise_multiplier=1.5", "-c", "lora_rounds=0"]
        # The corpus has five clients, of which four never come.
        services.append(Service(tmp_path / "run.log", *run, "-c", "min_clients=1", "-c", "registration_seconds=30"))
        wait_until(lambda: services[-1].process.poll() is not None, "the run", 300)
        assert services[-1].process.returncode == 0, services[-1].text()[-2000:]
        assert set(proxy.asked) == {f"CONNECT {ELSEWHERE}:{port}"}
    finally:
        for service in reversed(services):
            service.stop()
