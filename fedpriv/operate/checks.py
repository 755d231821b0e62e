"""Checks of a machine before it takes part: each gives one line, which says what is wrong and never shows a record."""

from __future__ import annotations

import errno
import platform
import random
import re
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import getproxies

from fedpriv.errors import FlowerError, InputError, LedgerError
from fedpriv.files import software

if TYPE_CHECKING:
    import httpx

CA_CERTIFICATE = "ca.crt"
"""The file with the certificate of the federation's authority, in a coordinator's folder and in each node's."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, which no proxy is asked for."""

_TIMEOUT_SECONDS = 5.0


_PORT_CURES = {
    errno.EADDRINUSE: "stop the program that uses it, or choose another port",
    errno.EACCES: "ports below 1024 are root's: choose another, or run the unit that `units` writes",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}

# X509_V_ERR_... of OpenSSL: https://docs.openssl.org/master/man3/X509_STORE_CTX_get_error/
_NOT_YET_VALID, _EXPIRED = 9, 10
_OTHER_HOST = (62, 64)
_OTHER_CA = (2, 7, 18, 19, 20, 21, 30)

# What a stranger at the coordinator's address might try, and what Flower 1.42 would need to be asked.
_OPERATORS_REQUESTS = {
    "register": ("POST", "/v1/control/register-node"),
    "run": ("POST", "/v1/control/start-run"),
    "list": ("POST", "/v1/control/list-runs"),
    "stop": ("POST", "/v1/control/stop-run"),
    "log": ("POST", "/v1/control/stream-logs"),
    "acquire-task": ("POST", "/v1/runtime/acquire-task"),
    "responses": ("POST", "/v1/runtime/responses"),
    "/docs": ("GET", "/docs"),
    "/openapi.json": ("GET", "/openapi.json"),
}


@dataclass(frozen=True)
class Check:
    """The result of a check: its name, in a word, whether a federation can run with it, and a line on what is right."""

    name: str
    ok: bool
    detail: str

    @staticmethod
    def of(name: str, find: Callable[[], str]) -> Check:
        """A check that is ok with the text that `find` returns, and not ok with the error that it raises."""
        try:
            return Check(name, True, find())
        except (ValueError, LedgerError, FlowerError) as error:
            return Check(name, False, str(error))


def print_checks(checks: Iterable[Check]) -> bool:
    """Print one line per check as it is done, and return whether all are ok."""
    all_ok = True
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<12}  {check.detail}", flush=True)
        all_ok = all_ok and check.ok
    return all_ok


def check_programs() -> Iterator[Check]:
    """Whether this Python is recent enough, and the version of Flower that this fedpriv requires is installed."""
    yield Check("python", sys.version_info >= (3, 11), f"{platform.python_version()} at {sys.executable}")
    yield _check_versions()


def _check_versions() -> Check:
    pinned = _pinned_flower()
    try:
        flower = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        return Check("versions", False, f"flwr is not installed; install flwr=={pinned}")
    others = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "peft"))
    if flower != pinned:
        return Check("versions", False, f"flwr = {flower}: must be {pinned}; {others}")
    return Check("versions", True, f"fedpriv {software()}, flwr {flower}, {others}")


def _pinned_flower() -> str:
    """The version of Flower that fedpriv's own metadata requires."""
    requirement = next(line for line in metadata.requires("fedpriv") or () if line.startswith("flwr=="))
    return requirement.partition(";")[0].removeprefix("flwr==").strip()


def check_server(host: str, port: int, ca: Path) -> Iterator[Check]:
    """The checks of a coordinator's server: its certificate, whether the clocks agree, whether its door is closed."""
    yield check_tls(host, port, ca)
    yield _check_clock(host, port, ca)
    yield _check_door(host, port, ca)


def check_tls(host: str, port: int, ca: Path) -> Check:
    """Whether a server with a certificate from this authority, valid for this host, answers at the address."""

    def valid() -> str:
        try:
            until = sight_of_server(host, port, _context(ca)).valid_until
        except OSError as error:
            raise InputError(f"{host}:{port}: {_no_answer(error, host)}{_by_proxy()}") from None
        return f"{host}:{port}: certificate valid until {datetime.fromtimestamp(until, UTC):%Y-%m-%d %H:%M} UTC"

    return Check.of("tls", valid)


def _no_answer(error: OSError, host: str) -> str:
    """The reason why a server gives no answer."""
    if isinstance(error, socket.gaierror):
        return f"the host name {host!r} is unknown"
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_error(error, host)
    if isinstance(error, (ssl.SSLError, ConnectionResetError)):
        return "speaks no TLS; is this the SuperLink's port?"
    return f"nothing is listening ({error.strerror or str(error) or 'no answer'})"


def _by_proxy() -> str:
    """The proxies that may be why there is no answer, without passwords; empty if there are none."""
    known = {f"{scheme.upper()}_PROXY": url for scheme, url in getproxies().items() if scheme in ("https", "all")}
    shown = ", ".join(f"{name} = {re.sub('//[^@/]*@', '//...@', url)}" for name, url in known.items())
    return f"; {shown} may stand between" if shown else ""


@contextmanager
def _client(context: ssl.SSLContext) -> Iterator[httpx.Client]:
    """The client that Flower's programs use too, so that both take the same way, by the same proxies, or an OSError."""
    import httpx  # Flower brings it

    try:
        with httpx.Client(verify=context, timeout=_TIMEOUT_SECONDS) as client:
            yield client
    except httpx.TransportError as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        found = next((cause for cause in reversed(causes) if isinstance(cause, OSError)), None)
        raise (found or ConnectionError(None, str(error))) from None


def _url(host: str, port: int, path: str = "/") -> str:
    return f"https://{f'[{host}]' if ':' in host else host}:{port}{path}"


def _check_clock(host: str, port: int, ca: Path, tolerance_seconds: float = 5) -> Check:
    """Whether this machine's clock agrees with that of the server, whose responses are dated to the second."""

    def apart() -> str:
        try:
            offset = sight_of_server(host, port, _context(ca)).clock_offset
        except OSError:
            raise InputError(f"{host}:{port}: sent no date; see the TLS check") from None
        if offset is None:
            raise InputError(f"{host}:{port}: sent no date; is this the SuperLink's port?")
        detail = f"{abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} {host}"
        if abs(offset) > tolerance_seconds:
            raise InputError(f"{detail}: must be within {tolerance_seconds:g} s; set the clock by NTP")
        return detail

    return Check.of("clock", apart)


@dataclass(frozen=True)
class ServerSight:
    """The certificate and the clock of a server, as this machine sees them.

    Attributes:
        valid_until: end of the certificate's validity, in seconds since the epoch.
        clock_offset: seconds by which this machine's clock is ahead at least, 0 if the time that the answer took may be
            all; None if nothing says.
    """

    valid_until: float
    clock_offset: float | None


def sight_of_server(host: str, port: int, trusted: Path | ssl.SSLContext) -> ServerSight:
    """The certificate and clock of a server that dates responses to the second; OSError without a valid answer."""
    context = ssl.create_default_context(cafile=str(trusted)) if isinstance(trusted, Path) else trusted
    start = time.time()
    with _client(context) as client, client.stream("HEAD", _url(host, port)) as response:
        end = time.time()
        certificate = response.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
        date = response.headers.get("Date", "")
    try:
        dated = parsedate_to_datetime(date).timestamp()  # a second that has begun, somewhere between start and end
        offset = min(max(0.0, start - dated - 1), end - dated)
    except (TypeError, ValueError):
        offset = None
    return ServerSight(ssl.cert_time_to_seconds(certificate["notAfter"]), offset)


def _check_door(host: str, port: int, ca: Path) -> Check:
    """Whether a server refuses strangers what only the coordinator's operator may do.

    Each request is one of Flower's without content, so that it changes nothing where it is let in. A coordinator's door
    answers it with status 404 and no body; Flower itself says more whenever it refuses.
    """
    let_in, kind = [], {"Content-Type": "application/protobuf"}
    try:
        context = _context(ca)
        for name, (method, path) in _OPERATORS_REQUESTS.items():
            with _client(context) as client:
                response = client.request(method, _url(host, port, path), content=b"", headers=kind)
            if (response.status_code, response.content) != (404, b""):
                let_in.append(name)
    except InputError as error:
        return Check("door", False, str(error))
    except OSError:
        return Check("door", False, f"{host}:{port}: gave no answer to {name}; see the TLS check")
    if let_in:
        detail = f"OPEN TO STRANGERS: {', '.join(let_in)}; end it, and start it with `start`"
        return Check("door", False, f"{host}:{port}: {detail}")
    return Check("door", True, f"{host}:{port}: closed to {', '.join(_OPERATORS_REQUESTS)}")


def free_port(ports: range) -> int:
    """One of these ports of loopback, at random, on which nothing listens."""
    while True:
        port = random.SystemRandom().choice(ports)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at an address, `::` standing for every one, IPv4 as well; OSError if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")


def check_port_free(host: str, port: int) -> Check:
    """Whether a server can listen at the address."""
    try:
        listening(host, port).close()
    except OSError as error:
        cure = _PORT_CURES.get(error.errno or 0, "choose another port")
        return Check("port", False, f"{host}:{port}: cannot listen there ({error.strerror}); {cure}")
    return Check("port", True, f"{host}:{port} is free")


def check_private(path: Path) -> Check:
    """Whether only its owner can read a secret file."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError as error:
        return Check("key", False, f"{path}: {error.strerror}")
    if mode & 0o077:
        return Check("key", False, f"{path}: mode {mode:o} lets others read it; chmod 600 {path}")
    return Check("key", True, f"{path}: mode {mode:o}")


def check_disk(path: Path, min_bytes: int) -> Check:
    """Whether the file system of a path has enough free space."""
    free = shutil.disk_usage(path).free
    detail = f"{free / 2**30:.1f} GiB free at {path}"
    if free < min_bytes:
        return Check("disk", False, f"{detail}: must be at least {min_bytes / 2**30:.1f} GiB")
    return Check("disk", True, detail)


def _context(ca: Path) -> ssl.SSLContext:
    """A context that trusts only this authority; InputError if its file cannot be used."""
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError:
        raise InputError(f"ca = {ca}: is missing or not a certificate; use the coordinator's ca.crt") from None


def _certificate_error(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code in _OTHER_HOST:
        return f"certificate not valid for {host}; use an address that it names, or make a certificate for this address"
    if error.verify_code == _EXPIRED:
        return "certificate expired; the coordinator must renew it"
    if error.verify_code == _NOT_YET_VALID:
        return "certificate not yet valid; check this machine's clock"
    if error.verify_code in _OTHER_CA:
        return "certificate signed by another CA; use the ca.crt of this coordinator"
    return f"certificate refused ({error.verify_message})"
