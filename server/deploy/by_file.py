"""The coordinator's side of rounds by file: signed requests, sealed for one node each, and the answers to them.

Who carries the files may change, swap, repeat or lose them. An answer counts if the node that was asked has signed it,
for the very request that is open, and the first that does is the only one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_ssh_public_key,
)

from fedpriv.errors import InputError
from fedpriv.files import read_text, replace_file
from fedpriv.holder.wire.frame import FrameError, Response
from fedpriv.operate import sealed
from fedpriv.privacy.ledger import keys
from fedpriv.texts import holder_label, printable
from server.deploy import certificates, membership
from server.deploy.folder import Coordinator
from server.mailbox import Asked, Mailbox

_POLL_SECONDS = 0.5
# Between two exchanges the server adds up, tests the model and writes a checkpoint.
_LONGEST_SECONDS = 600.0


def post(run: Path, to: Path, say: Callable[[str], None], *, seconds: float = _LONGEST_SECONDS) -> list[Path]:
    """Write the file of each request that is open, and return the files; once there is one.

    A request that was posted before is the same file again.

    Args:
        run: the run's folder.
        to: a folder, for instance on a memory stick.
        say: prints a line.
        seconds: to wait for a request.

    Raises:
        InputError: the run has ended, or asks nobody by file in this time, or a file cannot be written.
    """
    mailbox = Mailbox.of(run)
    coordinator = Coordinator.read(mailbox.node_keys.parent)
    if not to.is_dir():
        raise InputError(f"--to = {to}: must be a folder")
    files = []
    for asked in _open(mailbox, say, seconds):
        content, file = mailbox.content(asked.number)
        path = to / f"{asked.number:04}-node-{asked.client}.request"
        try:
            file = file or _posted(coordinator, mailbox, asked, content)
            replace_file(path, file, mode=None)  # a stick may know neither modes nor links
        except OSError as error:
            raise InputError(f"--to = {path}: {error.strerror}") from None
        say(f"to {_label(coordinator, asked.client)}: {path}")
        files.append(path)
    return files


def _open(mailbox: Mailbox, say: Callable[[str], None], seconds: float) -> list[Asked]:
    """The requests that are open; waits for one."""
    deadline = time.monotonic() + seconds
    has_said = False
    while not (found := [asked for asked in mailbox.asked().values() if asked.state == "open"]):
        if mailbox.is_over:
            raise InputError(f"RUN = {mailbox.path.with_suffix('')}: has ended; `fedpriv status` says how")
        if time.monotonic() > deadline:
            raise InputError(f"RUN = {mailbox.path.with_suffix('')}: has asked nobody by file for {seconds:g} s")
        if not has_said:
            say("waiting until the run asks")
            has_said = True
        time.sleep(_POLL_SECONDS)
    return found


def _posted(coordinator: Coordinator, mailbox: Mailbox, asked: Asked, content: bytes) -> bytes:
    """The file of a request, which the mailbox keeps with the key that opens its answer."""
    key = ec.generate_private_key(sealed.CURVE)
    header = {
        "kind": "request",
        **_named(mailbox, asked),
        "bundle": mailbox.bundle,
        "answer_to": sealed.encoded(key.public_key()).hex(),
        "certificate": read_text(coordinator.server_certificate),
    }
    reader, writer = _node_key(coordinator, asked.client), _server_key(coordinator)
    file = sealed.seal(header, content, reader=reader, writer=writer)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return mailbox.post(asked.number, private, file)


def collect(run: Path, source: Path, say: Callable[[str], None], *, goes_on: bool = False) -> list[str]:
    """Take the answers in a folder, and return the names of the files that were refused.

    Args:
        run: the run's folder.
        source: a folder with files named `*.reply`; all others are left alone.
        say: prints a line for each.
        goes_on: whether the run goes on without the answers that are then missing.

    Raises:
        InputError: there is no such run, or folder.
    """
    mailbox = Mailbox.of(run)
    coordinator = Coordinator.read(mailbox.node_keys.parent)
    if not source.is_dir():
        raise InputError(f"--from = {source}: must be a folder")
    refused = []
    for path in sorted(source.glob("*.reply")):
        try:
            say(f"{printable(path.name)}: {_taken(coordinator, mailbox, path)}")
        except InputError as error:
            refused.append(printable(path.name))
            say(f"refused: {error}")
    missing = [asked for asked in mailbox.asked().values() if asked.state == "open"]
    for asked in missing:
        who = f"{_label(coordinator, asked.client)}, request {asked.number}"
        say(f"the run goes on without {who}" if goes_on else f"the run waits for {who}")
        if goes_on:
            mailbox.leave(asked.number)
    return refused


def _taken(coordinator: Coordinator, mailbox: Mailbox, path: Path) -> str:
    """Put the answer in a file into the mailbox, and return what it is.

    Raises:
        InputError: it is none that counts.
    """
    letter = sealed.read(path)
    number = letter.header.get("number")
    asked = mailbox.asked().get(number) if type(number) is int else None
    if asked is None or letter.header != {"kind": "reply", **_named(mailbox, asked)}:
        raise InputError(f"{letter.name}: answers no request of this run to this node")
    digest = hashlib.sha256(letter.head + letter.body + letter.signature).hexdigest()
    who = f"{_label(coordinator, asked.client)}, request {asked.number}"
    if asked.taken == digest:
        return f"of {who}, was taken before"
    if asked.taken:
        raise InputError(f"{letter.name}: is another answer of {who}; the first counts")
    if asked.state != "open" or asked.key is None:
        raise InputError(f"{letter.name}: of {who}, is late: the run went on without it, or asks again")
    private = load_pem_private_key(asked.key, password=None)
    assert isinstance(private, ec.EllipticCurvePrivateKey), "as `_posted` made it"
    frame = letter.opened(private, _node_key(coordinator, asked.client))
    try:
        response = Response(frame)
        said = f"refuses: {printable(response.reason)}" if response.code else "answers"
    except FrameError as error:
        raise InputError(f"{letter.name}: {error}") from None
    if not mailbox.answer(asked.number, frame, digest):
        raise InputError(f"{letter.name}: of {who}, is late: the run went on meanwhile")
    return f"{who}: {said}"


def _named(mailbox: Mailbox, asked: Asked) -> dict[str, str | int]:
    """The part of a header that request and answer have in common."""
    return {"run": mailbox.run, "number": asked.number, "client": asked.client}


def _label(coordinator: Coordinator, client: int) -> str:
    invitation = membership.invited(coordinator).get(client)
    return holder_label(client, invitation.name if invitation else None)


def _node_key(coordinator: Coordinator, client: int) -> sealed.Public:
    """The key by which the node was admitted."""
    line = keys.read_public_line(coordinator.nodes / f"{client}.pub", keys.NODE)
    key = load_ssh_public_key(line.encode())
    assert isinstance(key, ec.EllipticCurvePublicKey), "as keys of this kind are"
    return key


def _server_key(coordinator: Coordinator) -> sealed.Private:
    """The key of the certificate by which nodes know the coordinator."""
    path, remedy = coordinator.server_key, "`renew` makes it again"
    key = certificates.read_key(path, use=remedy, form=f"; {remedy}")
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"key = {path}: must be on secp384r1; {remedy}")
    return key
