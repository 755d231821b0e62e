"""Frames that anyone has changed, at the vault and at the server: refused in one line, and nothing is left of them."""

import hashlib
import random
import re

import pytest

from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder
from fedpriv.holder.wire import frame
from fedpriv.holder.wire.frame import Request
from fedpriv.privacy.ledger.reader import reading, verify
from server.exchange import MalformedError, read_reply
from tests.adversary.nodes import Node, make_node, run_config, training
from tests.adversary.test_over_time import N_K, ROWS
from tests.holder.wire.test_frame import with_header
from tests.server.test_strategy import ADAPTER, make_strategy
from tests.server.test_strategy import answer as reply_of
from tests.server.test_strategy import ask as ask_clients
from tests.wire import records_of, response_in, with_body


def mutated(sent: bytes, coins: random.Random) -> bytes:
    """The frame with a byte changed, with bytes cut out, doubled or made up, or with another number in its header."""
    at = coins.randrange(len(sent))
    header = coins.randrange(frame.PREFIX_BYTES + int.from_bytes(sent[:4], "big"))
    return coins.choice(
        [
            lambda: sent[:at] + bytes([sent[at] ^ 1 << coins.randrange(8)]) + sent[at + 1 :],
            lambda: sent[:header] + bytes([coins.randrange(256)]) + sent[header + 1 :],
            lambda: sent[:at] + sent[at + coins.randrange(1, 40) :],
            lambda: sent[:at] + sent[at : at + coins.randrange(1, 40)] + sent[at:],
            lambda: sent[:at] + coins.randbytes(coins.randrange(1, 40)) + sent[at:],
            lambda: with_header(
                sent, lambda text: re.sub(r"\d", lambda _: str(coins.randrange(10)), text, count=at % 30)
            ),
            lambda: with_body(sent, lambda body: coins.randbytes(8) + body[8:]),
        ]
    )()


def state_of(node: Node) -> dict[str, str]:
    """The digest of each file of a node, less its log of what it refused; of its ledger, that of the last entry."""
    files = {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(node.folder.rglob("*"))
        if file.is_file() and file.suffix != ".jsonl" and not file.name.startswith("ledger.sqlite")
    }
    with reading(node.settings.ledger) as db:
        return files | {"ledger": verify(db, node.settings.ledger).digest}


@pytest.mark.parametrize("number", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_vault_refuses_frames_that_anyone_has_changed_in_one_line_and_writes_nothing(
    approved, starts, tmp_path, number
):
    """Of those that it reads, one that asks for something else is another request, which is charged."""
    node, coins = make_node(tmp_path / "node", ROWS, num_registered=N_K, models=approved), random.Random(number)
    holder, honest = Holder.of(node.settings), training(run_config(), starts["tiny"]).request
    refused = 0
    before = state_of(node)
    for _ in range(number):
        changed = mutated(honest.frame, coins)
        response = answer(Request(frame=changed, run_config=honest.run_config), holder)
        if response.code:
            refused += 1
            assert "\n" not in response.reason
            assert state_of(node) == before, changed[:200]
        before = state_of(node)
    assert refused > 0.9 * number


@pytest.mark.parametrize("number", [500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("as_a_task")
def test_a_server_takes_nothing_from_a_frame_that_anyone_has_changed_but_what_was_sent(number):
    """What a changed header may still say is a receipt, which nobody has signed."""
    strategy, coins = make_strategy(), random.Random(number)
    (message, *_) = ask_clients(strategy)
    reply, expected = reply_of(strategy, message, 3.0), strategy._expected_reply(0)
    honest, refused = response_in(reply).frame, list[str]()
    for _ in range(number):
        changed = mutated(honest, coins)
        reply.content = records_of(changed)
        try:
            read = read_reply(reply, expected)
        except MalformedError as error:
            refused.append(str(error))
            continue
        assert read.digest == hashlib.sha256(changed).hexdigest()
        assert all((read.content[name] == 3.0).all() for name in ADAPTER)
    assert len(refused) > 0.9 * number
    assert not any("\n" in reason for reason in refused)
