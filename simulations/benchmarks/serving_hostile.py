"""The latency of others while one caller, or one stranger, does its worst to a server.

    python -m simulations.benchmarks.serving_hostile [--seconds 8] [ATTACK ...]

`fedpriv serve` runs in a process of its own, with tokens and MiniLM classifiers, behind the nginx that it configures,
which has to be on this machine. Two others ask it one text after
the other from 127.0.0.2: one over one connection, one over a new connection each time. The attacker is a third process
at 127.0.0.1, of low priority, since it would run on another machine. The latencies of the others are printed without an
attack and during each one, in one run, with the ratio of their p99 to that without. The claim is of the worst attack.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import http.client
import json
import multiprocessing
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError
from fedpriv.models.serving.http.tokens import add_new
from server.deploy.certificates import make_ca, make_server_certificate
from simulations.benchmarks._measuring import claim
from simulations.benchmarks.serving import MINILM, make_run

ATTACKER, OTHERS = "127.0.0.1", "127.0.0.2"
TARGET = 5.0
WORDS = "the patient has had pain in the chest since this morning and a rash on both arms " * 15  # 257 tokens
LONGEST = 2**18 - 200


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server, and what its callers need.

    Attributes:
        port: of loopback.
        authority: PEM file of the certificate that signs its own.
        greedy, modest: tokens.
    """

    port: int
    authority: str
    greedy: str
    modest: str

    @property
    def trust(self) -> ssl.SSLContext:
        """The TLS context of its clients."""
        return ssl.create_default_context(cafile=self.authority)


Attack = Callable[[Target], Awaitable[None]]

# Of the attacker's process: connections that it opened, and answers that it read.
_done: Any = None


def count() -> None:
    """One more."""
    if _done is not None:
        _done.value += 1


def posted(token: str, value: object) -> bytes:
    """A whole request."""
    body = json.dumps(value).encode()
    return head(token, f"Content-Length: {len(body)}") + body


def head(token: str, *headers: str) -> bytes:
    """The head of a POST request."""
    lines = ["POST /v1/classify HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    return "\r\n".join([*lines, *headers, "", ""]).encode()


async def connected(target: Target, *, tls: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of the attacker's."""
    name = {"ssl": target.trust, "server_hostname": "localhost"} if tls else {}
    count()
    return await asyncio.open_connection("127.0.0.1", target.port, local_addr=(ATTACKER, 0), **name)  # type: ignore[arg-type]


async def answered(reader: asyncio.StreamReader) -> None:
    """Read one whole answer."""
    lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    length = next(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
    await reader.readexactly(length)
    count()
    if b"connection: close" in lines:
        raise ConnectionError


def again(data: bytes, num: int, *, reads: bool = True, tls: bool = True, pause: float = 0.0) -> Attack:
    """The attack of sending this through so many connections, again and again."""

    async def one(target: Target) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, StopIteration):
                reader, writer = await connected(target, tls=tls)
                try:
                    while True:
                        writer.write(data)
                        await writer.drain()
                        if reads:
                            await answered(reader)
                        elif not data:
                            await reader.read()
                        if pause or not reads:
                            break
                finally:
                    writer.transport.abort()
            await asyncio.sleep(pause or 0.001)

    async def attack(target: Target) -> None:
        await asyncio.gather(*(one(target) for _ in range(num)))

    return attack


def trickle(token_of: Callable[[Target], str]) -> Attack:
    """The attack of a body without end, in chunks of a byte."""

    async def attack(target: Target) -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await connected(target)
                writer.write(head(token_of(target), "Transfer-Encoding: chunked"))
                while not writer.transport.is_closing():
                    writer.write(b"1\r\nx\r\n" * 10_000)
                    await writer.drain()
                    await asyncio.sleep(0.08)
            await asyncio.sleep(0.01)

    return attack


def by_token(make: Callable[[str], Attack]) -> Attack:
    """An attack that needs the greedy token."""

    async def attack(target: Target) -> None:
        await make(target.greedy)(target)

    return attack


def texts(*given: str) -> dict[str, object]:
    """A request to classify them."""
    return {"model": "client-0", "input": list(given)}


ATTACKS: dict[str, Attack] = {
    "caller: 32 texts of 256 KiB": by_token(lambda t: again(posted(t, texts("a b " * (LONGEST // 4))), 32)),
    "caller: 32 texts of 256 KiB of spaces": by_token(lambda t: again(posted(t, texts("a" + " " * LONGEST + "b")), 32)),
    "caller: 32 lists of 64 long texts": by_token(lambda t: again(posted(t, texts(*["a b " * 1000] * 64)), 32)),
    "caller: 32 lists of 50,000 texts": by_token(lambda t: again(posted(t, texts(*["a"] * 50_000)), 32)),
    "caller: full texts, 64 at once": by_token(lambda t: again(posted(t, texts("a b " * 250)), 64)),
    "caller: 400 connections": by_token(
        lambda t: again(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {t}\r\n\r\n".encode(), 400)
    ),
    "caller: cancels at once": by_token(lambda t: again(posted(t, texts(WORDS)), 64, reads=False)),
    "caller: chunks of a byte": trickle(lambda target: target.greedy),
    "stranger: chunks of a byte": trickle(lambda target: ""),
    "stranger: 64 connections, GET": again(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 64),
    "stranger: long heads": again(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 50_000 + b"\r\n", 64),
    "stranger: 1300 silent sockets": again(b"", 1300, reads=False, tls=False, pause=0.5),
    "stranger: handshakes": again(b"x", 64, reads=False),
}


def attacking(name: str, target: Target, done: Any) -> None:
    """Attack until killed."""
    global _done
    _done = done
    os.nice(19)
    asyncio.run(ATTACKS[name](target))  # type: ignore[arg-type]


@contextmanager
def attacked(name: str, target: Target) -> Iterator[Any]:
    """Within this context the attack goes on; counts the connections that it opens and the answers that it reads."""
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0, lock=False)
    process = context.Process(target=attacking, args=(name, target, done), daemon=True)
    process.start()
    while not done.value:
        time.sleep(0.1)
    time.sleep(1.0)
    try:
        yield done
    finally:
        process.kill()
        process.join()


def latencies(target: Target, seconds: float) -> tuple[list[float], int]:
    """The latencies of the others, and the number of their requests that were not answered."""
    found: list[float] = []
    failed = 0
    body = json.dumps(texts(WORDS))
    headers = {"Authorization": f"Bearer {target.modest}", "Content-Type": "application/json"}
    ends = time.monotonic() + seconds

    def ask(*, keeps: bool) -> None:
        nonlocal failed
        connection: http.client.HTTPSConnection | None = None
        while time.monotonic() < ends:
            started = time.perf_counter()
            try:
                if connection is None:
                    connection = http.client.HTTPSConnection(
                        "localhost", target.port, context=target.trust, timeout=60, source_address=(OTHERS, 0)
                    )
                connection.request("POST", "/v1/classify", body, headers)
                answer = connection.getresponse()
                answer.read()
                failed += answer.status != 200
            except (OSError, http.client.HTTPException):
                failed, connection = failed + 1, None
            found.append(time.perf_counter() - started)
            if not keeps and connection is not None:
                connection.close()
                connection = None
            time.sleep(0.01)

    threads = [threading.Thread(target=ask, kwargs={"keeps": keeps}) for keeps in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found), failed


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextmanager
def nginx(folder: Path, port: int) -> Iterator[ssl.SSLContext]:
    """An nginx with the configuration `folder`/fedpriv.conf, as Debian includes it; gives what its clients trust.

    Raises:
        InputError: there is no nginx on this machine.
    """
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise InputError("there is no nginx on this machine; run apt-get install nginx-light")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"user {getpass.getuser()}; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;\n"
        f"worker_processes auto; events {{ worker_connections 768; }}\n"
        f"http {{ access_log off; {temporary} include {folder}/fedpriv.conf; }}\n"
    )
    process = subprocess.Popen([program, "-p", folder, "-e", folder / "nginx.log", "-c", folder / "nginx.conf"])
    try:
        for _ in range(500):
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            if process.poll() is not None:
                raise InputError((folder / "nginx.log").read_text())
            time.sleep(0.02)
        yield ssl.create_default_context(cafile=str(folder / "ca.crt"))
    finally:
        process.terminate()
        process.wait()


def options_of_nginx(folder: Path, port: int) -> list[str]:
    """The options of `fedpriv serve` by which it writes `folder`/fedpriv.conf, with a certificate that it makes."""
    make_ca(folder, 10)
    make_server_certificate(folder, ["localhost"], 10)
    files = {"--nginx": "fedpriv.conf", "--certificate": "server.crt", "--key": "server.key"}
    named = [word for option, name in files.items() for word in (option, str(folder / name))]
    return ["--socket", str(folder / "socket"), "--nginx-port", str(port), *named]


@contextmanager
def server(folder: Path) -> Iterator[Target]:
    """A server in a process of its own, with an nginx in front."""
    run = make_run(folder / "run", 4, {"model": MINILM})
    tokens = [add_new(folder / "tokens.toml", name, ["*"]) for name in ("greedy", "modest")]
    port = free_port()
    code = "from fedpriv.cli.main import main; main()"
    options = ["--tokens", str(folder / "tokens.toml"), *options_of_nginx(folder, port)]
    command = [sys.executable, "-c", code, "serve", "run", str(run), "--json", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # As many files as a login shell gives.
    command = ["bash", "-c", 'ulimit -n 1024; exec "$@"', "serve", *command]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        with nginx(folder, port):
            yield Target(port=port, authority=str(folder / "ca.crt"), greedy=tokens[0], modest=tokens[1])
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Print a row for the quiet server and for each attack, and a JSON line for the worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", default=list(ATTACKS), metavar="ATTACK")
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    print("| attack | p50, ms | p99, ms | p99 / quiet | answers | failed | of the attacker |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        quiet, worst, num_failed = 0.0, (0.0, ""), 0
        with server(Path(name)) as target:
            latencies(target, 2.0)
            for attack in ("", *arguments.attacks, ""):
                with attacked(attack, target) if attack else contextlib.nullcontext() as done:
                    found, failed = latencies(target, arguments.seconds)
                    num_done = done.value if done is not None else 0
                p50, p99 = (found[int(share * (len(found) - 1))] for share in (0.5, 0.99))
                quiet = quiet or p99
                figures = (
                    f"{1e3 * p50:.0f} | {1e3 * p99:.0f} | {p99 / quiet:.1f} | {len(found)} | {failed} | {num_done}"
                )
                print(f"| {attack or 'none'} | {figures} |", flush=True)
                worst, num_failed = max(worst, (p99 / quiet, attack)), num_failed + failed
                time.sleep(1.0)
    ratio, attack = worst
    text = f"p99 of another caller under the worst of {len(arguments.attacks)} attacks ({attack or 'none'}) / quiet"
    claim(text, at_most=TARGET, holds=not num_failed, ratio=ratio, failed=num_failed)


if __name__ == "__main__":
    main()
