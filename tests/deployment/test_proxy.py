"""A node behind a proxy: it reaches its coordinator through that alone, and its own processes without it."""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from fedpriv.operate.flower import environment
from simulations.sites import CLIENT, SERVER, Service, free_port, kit, wait_until

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


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.shutdown()


def test_programs_of_this_machine_find_each_other_without_a_proxy(monkeypatch, tmp_path):
    monkeypatch.setenv("NO_PROXY", "intranet.example.org")
    variables = environment(tmp_path)
    assert variables["NO_PROXY"] == variables["no_proxy"] == "intranet.example.org,127.0.0.1,localhost,::1"


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
