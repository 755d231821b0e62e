"""A bundle that does as it likes, with every right of the ClientApp's user: what it opens, and what comes back.

With two users (as root, and a Python that others may run) the attack runs as another user than the vault, as in a
deployment; otherwise as the vault's own, where the system protects no file, and only the answers are looked at.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpriv.config import parse
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import PREFIX_BYTES, REGISTER, TRAIN, FrameError, Request, Response, ask, frame_length
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.ledger.reader import reading, verify_with_head
from tests.adversary.nodes import registering, training
from tests.holder.vault.running import AS_NOBODY, NOBODY, Running, other_python, passable_folder
from tests.marks import slow
from tests.tiny import LABELS, WORDS
from tests.vaults import make_vault, write_records

# The attacker's program: it opens what it is told to, then sends the frames in a file, and writes what came back.
ATTACK = """
import os, socket, struct, sys
vault, frames, answers, *files = sys.argv[1:]
for name in files:
    try:
        print(name, "opened" if open(name, "rb").read(1) else "empty")
    except OSError as error:
        print(name, error.strerror)
def exactly(connection, length):
    content = b""
    while len(content) < length:
        piece = connection.recv(length - len(content))
        if not piece:
            return None
        content += piece
    return content
content, at = open(frames, "rb").read(), 0
connection = None
with open(answers, "wb") as out:
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        frame, at = content[at + 4 : at + 4 + length], at + 4 + length
        if connection is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(300)
            connection.connect(vault)
        try:
            connection.sendall(frame)
            prefix = exactly(connection, 8)
            rest = None if prefix is None else exactly(connection, sum(struct.unpack(">II", prefix)))
        except (BrokenPipeError, ConnectionResetError):
            rest = None
        out.write(struct.pack(">I", 0 if rest is None else 8 + len(rest)))
        if rest is None:
            connection.close()
            connection = None
        else:
            out.write(prefix + rest)
print("user", os.getuid())
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with passable_folder() as path:
        yield path


@pytest.fixture(scope="module")
def settings(folder, tiny_bert) -> VaultSettings:
    rows = [(f"{WORDS[i % 13]} {WORDS[i % 7]} {LABELS[i % 3]}", LABELS[i % 3]) for i in range(40)]
    data = write_records(folder / "own.csv", rows)
    user = {"client_user": "nobody"} if other_python() else {}
    made = make_vault(folder / "node", data, tiny_bert, budget_epsilon=200.0, policy="max_local_steps = 4\n", **user)
    made.folder.chmod(0o711)
    for file in [data, *made.folder.iterdir()]:
        file.chmod(0o600)
    return made


@pytest.fixture(scope="module")
def vault(settings) -> Iterator[Running]:
    running = Running(settings)
    yield running
    assert running.process.poll() is None, "the vault lives"
    running.stop()


@pytest.fixture(scope="module")
def honest(run_on_nodes) -> list[Request]:
    config = parse(run_on_nodes)
    return [registering(config).request, training(config, workbench(config).initial).request]


ODD: tuple[Any, ...] = (
    *("", "x" * 400, "../../etc/passwd", "/etc/passwd", "{}", "[]", "\0", "None", "embedded", "nan", "1e400"),
    *(0, -1, 1, 2, 10**9, 10**30, 0.0, -1.0, 1e-36, 1e-12, 0.5, 1e300, float("nan"), float("inf"), True, False),
)


def generated(honest: list[Request], number: int, seed: int) -> bytes:
    """One frame: honest, with odd values in it, or with bytes changed, cut off or made up."""
    coins = random.Random(f"{seed} {number}")
    request = honest[coins.random() < 0.8]
    config, fields = dict(request.run_config), dict(request.fields)
    arrays = {part: dict(named) for part, named in request.arrays.items()}
    for _ in range(coins.randrange(3)):
        target = coins.choice([config, fields]) if fields else config
        target[coins.choice([*target, *target, "surprise"])] = coins.choice(ODD)
    if arrays and coins.random() < 0.3:
        part = arrays[kinds.ADAPTER]
        name = coins.choice(list(part))
        array = part[name]
        odd = [array.T, array.astype(np.float64), array * 1e38, array * np.nan, np.zeros(0), np.int8(1)]
        part[name] = coins.choice(odd)
        if coins.random() < 0.3:
            arrays[coins.choice(["merged", "signs", "x"])] = part
    kind = request.kind if coins.random() < 0.95 else str(coins.choice(ODD))
    frame = Request.of(kind=kind, run_config=config, fields=fields, arrays=arrays).packed()
    if coins.random() < 0.2:
        at = coins.randrange(len(frame))
        changed = frame[:at] + bytes([coins.randrange(256)]) + frame[at + 1 :]
        frame = coins.choice([frame[:at], changed, coins.randbytes(at % 300)])
    return frame


def is_whole(frame: bytes) -> bool:
    """Whether a frame has the length that it states; after any other, a connection is out of step and is left."""
    try:
        return len(frame) >= PREFIX_BYTES and frame_length(frame[:PREFIX_BYTES]) == len(frame) - PREFIX_BYTES
    except FrameError:
        return True


def secrets(settings: VaultSettings) -> list[Path]:
    """What the attacker may not open."""
    return [settings.data, settings.ledger, settings.key, settings.folder / "node.key", settings.policy]


def attack(folder: Path, settings: VaultSettings, frames: list[bytes]) -> tuple[str, list[Response]]:
    """What the attacker prints, and what the vault answered."""
    sent, answers, python = folder / "frames", folder / "answers", other_python()
    sent.write_bytes(b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames))
    sent.chmod(0o644)
    answers.write_bytes(b"")
    answers.chmod(0o666)
    arguments = map(str, (settings.socket, sent, answers, *secrets(settings)))
    command = [python or sys.executable, "-c", ATTACK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, **(AS_NOBODY if python else {}))
    content, responses = answers.read_bytes(), []
    while content:
        length = int.from_bytes(content[:4], "big")
        if length:
            responses.append(Response(content[4 : 4 + length]))
        content = content[4 + length :]
    return done.stdout, responses


def check_paid(settings: VaultSettings, responses: list[Response]) -> int:
    """How many uploads there are, each of them charged; nothing else holds an array."""
    with reading(settings.ledger) as db:
        verify_with_head(db, settings.ledger)
        charged = [entry for entry in db.entries() if entry.phase == "charged"]
    uploads = [response for response in responses if response.arrays]
    assert all(kinds.answer_of(TRAIN, response) and not response.code for response in uploads)
    distinct = {min((n, a.tobytes()) for n, a in r.arrays[kinds.ADAPTER].items()) for r in uploads}
    assert len(distinct) <= len(charged)
    events = {json.dumps(json.loads(entry.event), sort_keys=True) for entry in charged}
    assert {json.dumps(json.loads(str(r.fields["event"])), sort_keys=True) for r in uploads} <= events
    for response in responses:
        if not response.arrays and not response.code:
            assert kinds.answer_of(REGISTER, response).num_records == 40
    return len(uploads)


@pytest.mark.parametrize("number", [40, *slow(10_000)])
def test_whatever_frames_it_sends_nothing_unpaid_comes_back(folder, settings, vault, honest, number):
    frames = [frame for index in range(number) if is_whole(frame := generated(honest, index, seed=number))]
    assert len(frames) > 0.8 * number
    printed, responses = attack(folder, settings, frames)
    if other_python():
        for file in secrets(settings):
            assert f"{file} Permission denied" in printed
        assert f"user {NOBODY}" in printed
    assert len(responses) > 0.9 * len(frames)
    assert check_paid(settings, responses) > 0
    assert {response.code for response in responses} >= {0, 100, 101}
    assert not settings.closed.exists()
    if other_python() is None:
        pytest.skip("one user: the answers were looked at, whether it can open the files was not")


@pytest.mark.parametrize("num", [70, *slow(200)])
def test_many_at_once_are_all_answered(settings, vault, honest, num):
    with ThreadPoolExecutor(num) as pool:
        responses = list(pool.map(lambda index: ask(settings.socket, honest[index % 2]), range(num)))
    assert len(responses) == num
    assert check_paid(settings, responses) in (0, num // 2)
