"""With fixed secrets every message of an attempt has the bytes of the first code that spoke this protocol.

So nodes of one version sum with those of another. The digests are of that code, whose shares came from pycryptodome and
which made each key and mask by itself.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpriv.holder.sums import Identity, Terms, server
from fedpriv.holder.sums import _client as node_side
from fedpriv.holder.sums import _messages as messages
from fedpriv.privacy.ledger import keys
from tests.holder.sums.attempts import make_terms, make_values, with_participant

NUM_CLIENTS, DROPPED = 20, (0, 3, 19)

# {exchange: digest}, under a modulus of 32 or 64 bits and, of those that hold neither sums nor terms, under both.
EITHER = {"check": "ca275d3512d9d7cde92275a86679297d", "reveal": "63a6a75f289d0c8494c06d3a8c5c3176"}
GOLDEN = {
    32: {
        "advertise": "7750353e4d3721fae6496760f4c4f498",
        "share": "6a1684bce030013b6cdc3d018add8058",
        "mask": "79ad43b47771ac63748ed7bf99aca446",
        "confirm": "94d86b8f36ea243de502e386f6b71447",
    },
    64: {
        "advertise": "71bb1d6387d8dea11edb8b3b869b88ad",
        "share": "4b2faad3c579e6398aebaa356b171477",
        "mask": "01389761588f526f3f78e6d336bf04d1",
        "confirm": "9fcbd5f2b7c4fc3f87ed21fbaee9f6ba",
    },
}


def identity(client: int) -> Identity:
    """A node whose key is a function of its number."""
    key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"node %d" % client).digest())
    sign = lambda message: messages._encoded(key.sign(message))  # noqa: E731
    return Identity(public_line=keys.line_of(key), sign=sign)


def stream() -> Callable[[int], bytes]:
    """Bytes in one fixed order, in pieces of any size."""
    drawn, place = hashlib.shake_256(b"fixed secrets").digest(2**18), 0

    def draw(size: int) -> bytes:
        nonlocal place
        place += size
        assert place <= len(drawn)
        return drawn[place - size : place]

    return draw


def transcript(terms: Terms, nodes: list[Identity], draw: Callable[[int], bytes]) -> dict[str, str]:
    """{exchange: digest of all its messages, those of the nodes before those of the server}."""
    digests: dict[str, str] = {}

    def told(exchange: str, *parts: str | bytes) -> None:
        whole = hashlib.sha256()
        for part in parts:
            whole.update(hashlib.sha256(part.encode() if isinstance(part, str) else part).digest())
        digests[exchange] = whole.hexdigest()[:32]

    begun = {k: node_side.advertise(terms, k, sign=nodes[k].sign, approved=None, draw=draw) for k in terms.by_client}
    texts = {k: messages.advertisement_text(each) for k, (_, each) in begun.items()}
    u1 = server.collect_advertisements(terms, texts)
    told("advertise", *texts.values(), u1.message())
    shared = {k: node_side.share(begun[k][0], messages.advertisements_from_text(u1.message())) for k in begun}
    dealt = {k: messages.sealed_text(sent) for k, (_, sent) in shared.items()}
    u2 = server.collect_shares(u1, dealt)
    sealed = {k: messages.sealed_from_text(u2.message(k)) for k in shared}
    told("share", *dealt.values(), *map(u2.message, shared))
    checked = {k: messages.complaint_text(node_side.check(shared[k][0], sealed[k])) for k in shared}
    u2 = server.collect_checks(u2, checked)
    told("check", *checked.values())
    values = make_values(terms)
    masked = {k: node_side.mask(shared[k][0], sealed[k], values[k]) for k in shared if k not in DROPPED}
    u3 = server.collect_masked(u2, {k: vector for k, (_, vector) in masked.items()})
    told("mask", *(vector.tobytes() for _, vector in masked.values()), u3.message())
    listed = messages.survivors_from_text(u3.message())
    signed = {k: node_side.confirm(state, listed) for k, (state, _) in masked.items()}
    texts = {k: messages.signature_text(signature) for k, (_, signature) in signed.items()}
    u4 = server.collect_signatures(u3, texts)
    told("confirm", *texts.values(), u4.message())
    shown = messages.signatures_from_text(u4.message())
    revealed = {k: messages.reveal_text(node_side.reveal(state, shown)) for k, (state, _) in signed.items()}
    told("reveal", *revealed.values())
    total = server.recover(u4, revealed).values
    np.testing.assert_array_equal(total, sum(values[k] for k in masked))
    return digests


@pytest.mark.parametrize("bits", [32, 64])
def test_messages_have_the_bytes_that_they_always_had(bits, monkeypatch):
    draw, nodes = stream(), [identity(k) for k in range(NUM_CLIENTS)]
    terms = make_terms(NUM_CLIENTS, colluding=2, modulus_bits=bits, dimension=37)
    for client, node in enumerate(nodes):
        terms = with_participant(terms, client, identity=node.public_line)
    monkeypatch.setattr("os.urandom", draw)
    assert transcript(terms, nodes, draw) == GOLDEN[bits] | EITHER
