"""Attacks on the server of a page: by names, other sites, addresses, many streams, slow readers; and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpriv.errors import InputError
from fedpriv.runs.show._live_server import check_host
from fedpriv.serving.http.server import Address
from tests.live.conftest import Watched, begin, end, grow, plan, watched
from tests.reports.conftest import write_finished_run

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A server of a sweep with one run."""
    folder = tmp_path_factory.mktemp("sweep")
    plan(folder, KEY)
    begin(folder / KEY)
    (folder / "secret.txt").write_text("a secret")
    with watched(folder) as found:
        yield found


def ask(server: Watched, path: str = "/", *, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    """The answer, read to its end."""
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    for name, value in {"Host": f"127.0.0.1:{server.address[1]}", **named}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    answer.body = answer.read().decode()
    connection.close()
    return answer


def stream(server: Watched, path: str = "/events") -> socket.socket:
    """A connection that has asked for a stream."""
    found = socket.create_connection(server.address, timeout=10)
    found.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return found


def changes(connection: socket.socket) -> Iterator[dict[str, str]]:
    """The messages of a stream."""
    with connection.makefile("rb") as file:
        for line in file:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8001", "127.0.0.1.evil.example", "localhost.evil", ""])
def test_a_page_that_gives_its_own_name_to_this_machine_learns_nothing(server: Watched, host: str) -> None:
    for path in ("/", "/events", f"/runs/{KEY}/"):
        answer = ask(server, path, Host=host)
        assert answer.status == 421
        assert "ranks" not in answer.body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST:8001"])
def test_this_machines_own_names_are_answered(server: Watched, host: str) -> None:
    assert "ranks" in ask(server, Host=host).body


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_may_link_here_and_nothing_else(server: Watched, site: str) -> None:
    for mode in ("cors", "no-cors", "websocket", "navigate"):
        assert ask(server, "/events", Sec_Fetch_Site=site, Sec_Fetch_Mode=mode).status == 403
        expected = 200 if mode == "navigate" else 403
        assert ask(server, "/", Sec_Fetch_Site=site, Sec_Fetch_Mode=mode).status == expected
    linked = ask(server, "/", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate")
    assert linked.status == 200
    assert linked.getheader("Access-Control-Allow-Origin") is None
    assert linked.getheader("Cross-Origin-Resource-Policy") == "same-origin"
    policy = linked.getheader("Content-Security-Policy")
    assert "frame-ancestors 'none'" in policy
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"])
def test_there_is_nothing_but_reading(server: Watched, method: str) -> None:
    assert ask(server, "/", method=method).status == 405


@pytest.mark.parametrize(
    "path",
    [
        *("/secret.txt", "/../secret.txt", "/%2e%2e/secret.txt", "/runs/../secret.txt", "/runs/%2e%2e/"),
        *("/runs/..%2f..%2fetc/", "/runs/secret.txt/", "/runs/0000000000000000/", f"/runs/{KEY}/config.toml"),
        *(f"/runs/{KEY}%00/", f"/runs/{KEY}/../../secret.txt", "//etc/passwd", "/docs", "/openapi.json"),
    ],
)
def test_no_address_leads_to_a_file(server: Watched, path: str) -> None:
    answer = ask(server, path)
    assert answer.status == 404
    assert "a secret" not in answer.body


def test_a_stream_gives_all_pieces_first_and_then_what_changes(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run")
    with watched(writer.path) as server, stream(server) as connection:
        messages = changes(connection)
        assert {"head", "clients", "events"} <= next(messages).keys()
        grow(writer, 1)
        found: dict[str, str] = {}
        while "1 of 10 rounds" not in found.get("head", ""):
            found |= next(messages)
        end(writer.path)
        while "The whole report" not in found.get("notes", ""):
            found |= next(messages)


def test_a_run_of_a_sweep_has_a_page_and_a_stream_of_its_own(server: Watched) -> None:
    assert f'href="runs/{KEY}/"' in ask(server).body
    assert "0 of 10 rounds" in ask(server, f"/runs/{KEY}/").body
    with stream(server, f"/runs/{KEY}/events") as connection:
        assert "0 of 10 rounds" in next(changes(connection))["head"]


def test_hundreds_of_streams_leave_the_page_to_others_and_are_counted_off_when_they_end(tmp_path: Path) -> None:
    with watched(begin(tmp_path / "run").path, most_streams=5) as server:
        streams = [stream(server) for _ in range(200)]
        accepted = [b" 200 " in connection.recv(2000).partition(b"\r\n")[0] for connection in streams]
        assert sum(accepted) == 5
        assert ask(server).status == 200
        refused = ask(server, "/events")
        assert (refused.status, refused.getheader("Retry-After")) == (503, "5")
        for connection in streams:
            connection.close()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with stream(server) as connection:
                if b" 200 " in connection.recv(2000):
                    return
        pytest.fail("streams that ended are still counted")


def test_the_report_of_a_finished_run_is_made_from_its_tables_and_may_run_nothing(tmp_path: Path) -> None:
    write_finished_run(tmp_path / "run", num_clients=2, num_rounds=2, changes={})
    (tmp_path / "run" / "report.html").write_text("<script>alert(1)</script>")
    with watched(tmp_path / "run") as server:
        report = ask(server, "/report")
        assert report.status == 200
        assert "alert(1)" not in report.body
        assert report.getheader("Content-Security-Policy").endswith("sandbox")
    with watched(begin(tmp_path / "begun").path) as server:
        assert ask(server, "/report").status == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::", "elsewhere.example"])
def test_other_machines_are_let_in_by_demand_alone(host: str) -> None:
    with pytest.raises(InputError, match="other machines could read along"):
        check_host(Address(host=host, port=8001), insecure=False)
    check_host(Address(host=host, port=8001), insecure=True)


def test_beyond_loopback_too_a_name_of_another_site_is_refused(server: Watched, monkeypatch) -> None:
    monkeypatch.setattr(
        "fedpriv.runs.show._live_server.check_local_name", lambda scope: None
    )  # as if it came from elsewhere
    assert ask(server, Host="evil.example").status == 421
    assert ask(server, Host="192.0.2.7:8001").status == 200


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_where_it_is_and_ends_with_0_though_a_page_is_open(tmp_path: Path, number: int) -> None:
    begin(tmp_path / "run")
    code = "from fedpriv.cli.main import main; main()"
    command = [sys.executable, "-c", code, "watch", str(tmp_path / "run"), "--port", "0", "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
    try:
        told = json.loads(process.stdout.readline())
        assert told["folder"] == str(tmp_path / "run")
        with stream(Watched(told["url"], None)) as connection:
            next(changes(connection))
            process.send_signal(number)
            rest, errors = process.communicate(timeout=20)
        assert (process.returncode, rest, errors) == (0, b"", b"")
    finally:
        process.kill()
        process.wait()
