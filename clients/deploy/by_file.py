"""A node without a network: it takes a coordinator's request from a file, and writes the vault's answer to another.

The vault checks, charges and answers as it does over the network, and its answer comes at its public time; only then is
there a file of it. Who carries the files reads none of them, and cannot make the node answer anybody but its
coordinator, twice differently, or what is older than what it has answered.
"""

from __future__ import annotations

import ipaddress
import json
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from clients.deploy.folder import Node
from fedpriv.errors import FlowerError, InputError
from fedpriv.files import owner_for, read_text, replace_file
from fedpriv.holder.wire.frame import REFUSED, FrameError, Request, Response, ask
from fedpriv.operate import approvals, sealed
from fedpriv.privacy.ledger import keys
from fedpriv.texts import printable

_ASKED = {"kind": str, "run": str, "number": int, "client": int, "bundle": str, "answer_to": str, "certificate": str}

# A vault that has died is started again within this time.
_RETRY_SECONDS = 30.0


def answer(node: Node, request: Path, out: Path, *, retry_seconds: float = _RETRY_SECONDS) -> str:
    """Write the node's answer to the request in a file, and return what it is, in one line.

    Args:
        node: whose vault runs.
        request: as the coordinator's `post` wrote it.
        out: a new file.
        retry_seconds: for how long to look for a vault that does not listen.

    Raises:
        InputError: the request is not this node's coordinator's to this node, or it is older than one that was
            answered; or there is a file already. The vault was not asked.
        FlowerError: no vault answers.
    """
    if os.path.lexists(out) or not out.absolute().parent.is_dir():
        raise InputError(f"--out = {out}: must be a new file in a folder that exists")
    letter, own = sealed.read(request), _node_key(node.key)
    if {name: type(value) for name, value in letter.header.items()} != _ASKED or letter.header["kind"] != "request":
        raise InputError(f"{letter.name}: is no request")
    content = letter.opened(own, _sender(letter, node))
    run, number, client = (letter.header[name] for name in ("run", "number", "client"))
    if client != node.vault.partition_id:
        raise InputError(f"{letter.name}: is for partition {client}, this node is partition {node.vault.partition_id}")
    try:
        reader = sealed.Public.from_encoded_point(sealed.CURVE, bytes.fromhex(letter.header["answer_to"]))
    except ValueError:
        raise InputError(f"{letter.name}: names no key for the answer") from None
    _check_newest(node, letter.name, run, number)
    response = _response(node, letter, content, retry_seconds)
    header = {"kind": "reply", "run": run, "number": number, "client": client}
    try:
        replace_file(out, sealed.seal(header, response.frame, reader=reader, writer=own), mode=None)
    except OSError as error:
        raise InputError(f"--out = {out}: {error.strerror}; answer again, at no further charge") from None
    said = printable(response.reason) if response.code else "answered"
    return f"request {number}: {said}; to the coordinator: {out}"


def _sender(letter: sealed.Sealed, node: Node) -> sealed.Public:
    """The key of the coordinator's server, by the certificate that the node knows, as it is checked over the network.

    Raises:
        InputError: the certificate in the request is another's, or has expired.
    """
    host = node.superlink_host
    try:
        subject: x509.IPAddress | x509.DNSName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        subject = x509.DNSName(host)
    try:
        known = x509.load_pem_x509_certificates(node.ca_certificate.read_bytes())
        shown = x509.load_pem_x509_certificate(letter.header["certificate"].encode())
        PolicyBuilder().store(Store(known)).build_server_verifier(subject).verify(shown, [])
    except (VerificationError, ValueError):
        raise InputError(
            f"{letter.name}: is of somebody whom {node.ca_certificate} does not vouch for as {host}, or whose "
            "certificate has expired"
        ) from None
    key = shown.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError(f"{letter.name}: its certificate has a key of another kind")
    return key


def _check_newest(node: Node, name: str, run: str, number: int) -> None:
    """Note the newest request of each run that the node was asked to answer, and refuse an older one.

    The run has gone on since: an answer would be charged, and count nothing.
    """
    path = node.folder / "answered-by-file.json"
    try:
        newest = dict(json.loads(read_text(path))) if path.exists() else {}
    except ValueError:
        raise InputError(f"{path}: is damaged; delete it, if nobody brings old requests") from None
    if number < newest.get(run, 0):
        raise InputError(f"{name}: is request {number}, and this node has answered request {newest[run]} of the run")
    if number > newest.get(run, 0):
        replace_file(path, json.dumps({**newest, run: number}).encode(), mode=0o600, owner=owner_for(node.folder))


def _response(node: Node, letter: sealed.Sealed, content: bytes, retry_seconds: float) -> Response:
    """The vault's answer, or that the code of the run is not approved."""
    bundle = letter.header["bundle"]
    if bundle not in approvals.approved(node.approved):
        reason = f"refused: the bundle {printable(bundle)} is not approved; review it, then `fedpriv node approve` it"
        return Response.of(code=REFUSED, reason=reason)
    try:
        request = Request.unpacked(content)
        return ask(node.vault.socket, request, retry_seconds=retry_seconds)
    except FrameError as error:
        raise InputError(f"{letter.name}: {error}") from None
    except OSError:
        raise FlowerError(
            f"{node.vault.socket}: no vault answers; start it with `fedpriv node start DIR --by-file`"
        ) from None


def _node_key(path: Path) -> sealed.Private:
    key = keys.private_key(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"key = {path}: must be on secp384r1, as `new-key --node` makes it")
    return key
