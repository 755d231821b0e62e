"""The SuperLink of a federation: it runs in the foreground and reports how many nodes are online."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from logging.handlers import RotatingFileHandler
from pathlib import Path

from fedpriv.deployment import certificates
from fedpriv.deployment.checks import Check, check_port_free, check_tls
from fedpriv.deployment.flower import (
    EXIT_CODES,
    FlowerError,
    environment,
    logged_exit_code,
    num_online,
    run_in_foreground,
)
from fedpriv.errors import InputError
from server.deploy.folder import ROOT, Coordinator

WARN_BEFORE = timedelta(days=14)

# How many nodes are online is asked when the log says that one came or went, and for those that vanish after this time.
_UNTOLD_SECONDS = 30.0
_COME_OR_GONE = re.compile(r"\.(Activate|Deactivate|Register|Unregister)Node\]")
_LOG_BYTES, _NUM_OLD_LOGS = 10 * 2**20, 3

# Where Linux says which user holds which connection.
_SOCKETS = Path("/proc/net/tcp")

# One line per poll of each node would drown out the others.
_POLL_LINE = re.compile(r'"(GET|POST|HEAD) \S+ HTTP/[\d.]+" 2\d\d')


def command(coordinator: Coordinator) -> list[str]:
    """The command that starts the SuperLink, behind its door."""
    return [sys.executable, "-m", "server.deploy.guarded_superlink", str(coordinator.folder)]


def variables(coordinator: Coordinator) -> dict[str, str]:
    """The SuperLink's environment, with this checkout's modules."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return environment(coordinator.flower_home, PYTHONPATH=os.pathsep.join(paths))


def start(coordinator: Coordinator, say: Callable[[str], None]) -> int:
    """Run the SuperLink until a signal or an error ends it, and return its exit code.

    Args:
        coordinator: whose SuperLink to run.
        say: prints a line: when it answers, how many nodes are online whenever that changes, and why it ended.

    Raises:
        FlowerError: its port is taken.
        InputError: its certificate is missing or has expired, the authority's key is not encrypted, or
            this is no Linux.
    """
    if not _SOCKETS.exists():
        raise InputError(f"{_SOCKETS}: no such file; the SuperLink needs Linux, to know which user of a machine asks")
    if not (key := check_authority(coordinator)).ok:
        raise InputError(f"key = {key.detail}")
    if certificates.valid_until(coordinator.server_certificate) < datetime.now(UTC):
        raise InputError(f"certificate = {coordinator.server_certificate}: has expired; run `renew`")
    if not (port := check_port_free(coordinator.bind_host, coordinator.port)).ok:
        raise FlowerError(f"port = {port.detail}")
    if warning := expiry_warning(coordinator):
        say(f"warning: {warning}")
    coordinator.approved.touch()  # a folder of an earlier version has none
    say(f"starting the SuperLink; its log: {coordinator.log}")
    nodes = _Nodes(coordinator, say)
    nodes.start()
    log = RotatingFileHandler(coordinator.log, maxBytes=_LOG_BYTES, backupCount=_NUM_OLD_LOGS)
    reasons: list[int] = []

    def on_line(line: str) -> None:
        if not _POLL_LINE.search(line):
            log.emit(logging.makeLogRecord({"msg": line}))
        if _COME_OR_GONE.search(line):
            nodes.changed()
        if (code := logged_exit_code(line)) is not None:
            reasons.append(code)

    code = run_in_foreground(
        command(coordinator),
        variables=variables(coordinator),
        folder=coordinator.folder,
        on_line=on_line,
    )
    nodes.end()
    meaning = "".join(f": {EXIT_CODES[reason]}" for reason in reasons[-1:] if reason in EXIT_CODES)
    say(f"SuperLink ended with exit code {code}{meaning}; its log: {coordinator.log}")
    return code


def check_authority(coordinator: Coordinator) -> Check:
    """Whether no code that runs here can sign with the authority's key."""
    key = coordinator.ca_key
    if not os.access(key, os.R_OK):
        return Check("ca.key", True, "kept elsewhere; `renew --ca-key FILE` takes it from there")
    if not certificates.is_encrypted(key):
        folder = shlex.quote(str(coordinator.folder))
        return Check("ca.key", False, f"{key}: the code of a run could read it; run `encrypt-key {folder}`")
    return Check("ca.key", True, f"{key}: encrypted; it may also be kept elsewhere")


def expiry_warning(coordinator: Coordinator) -> str:
    """A warning if the server certificate expires soon, else an empty string."""
    until = certificates.valid_until(coordinator.server_certificate)
    if until - datetime.now(UTC) > WARN_BEFORE:
        return ""
    return f"the certificate is valid until {until:%Y-%m-%d %H:%M} UTC only; run `renew` and restart the SuperLink"


class _Nodes(threading.Thread):
    """Reports when the SuperLink answers, and then how many nodes are online."""

    def __init__(self, coordinator: Coordinator, say: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self._coordinator, self._say = coordinator, say
        self._changed, self._ended = threading.Event(), threading.Event()

    def changed(self) -> None:
        """A node came or went."""
        self._changed.set()

    def end(self) -> None:
        """Report nothing more."""
        self._ended.set()
        self._changed.set()

    def run(self) -> None:
        coordinator = self._coordinator
        while not check_tls(coordinator.local_host, coordinator.port, coordinator.ca_certificate).ok:
            if self._ended.wait(0.5):
                return
        until = certificates.valid_until(coordinator.server_certificate)
        self._say(f"SuperLink answers at https://{coordinator.address}, certificate valid until {until:%Y-%m-%d}")
        last_reported = ""
        while not self._ended.is_set():
            self._changed.clear()
            if (state := _online(coordinator)) != last_reported and not self._ended.is_set():
                self._say(state)
                last_reported = state
            self._changed.wait(_UNTOLD_SECONDS)


def _online(coordinator: Coordinator) -> str:
    try:
        online = num_online(coordinator.flower_home, folder=coordinator.folder)
    except FlowerError as error:
        return f"nodes online: unknown ({error})"
    return f"nodes online: {online} of {len(coordinator.registered())} registered"
