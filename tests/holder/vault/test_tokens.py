"""The file with a node's tokens: it saves work, says as much as the records do, and decides nothing that leaves."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedpriv.holder.vault import _charging, _records, answer
from fedpriv.holder.vault._records import TokenFile
from fedpriv.holder.wire.frame import REFUSED
from fedpriv.learning.data import records
from fedpriv.learning.data.chat import ChatFormat
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.adversary.nodes import Node, ask, make_node, restart, run_config, training, write_rows
from tests.chats import chat_tokenizer
from tests.marks import slow
from tests.tiny import LABELS, WORDS
from tests.vaults import UNTIMED

pytestmark = pytest.mark.usefixtures("quick_nodes")

ROWS = [(f"{WORDS[i % 13]} {WORDS[i % 7]}", LABELS[i % 2]) for i in range(12)]
CHANGED = [("cough", LABELS[0]), *ROWS[1:]]


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    """Two nodes with the same records answer alike to the byte."""
    monkeypatch.setattr(answer, "_source", lambda _config, client, round_, use: SeededSource(0, client, round_, use))
    restart()


@pytest.fixture
def make(tiny_bert, tmp_path):
    """Makes nodes with as many registered records."""

    def make(name: str, rows=ROWS, **settings: object) -> Node:
        own = {"num_registered": len(ROWS), "models": {"tiny": tiny_bert}, "settings": UNTIMED | settings}
        return make_node(tmp_path / name, rows, **own)

    return make


@pytest.fixture
def node(make):
    return make("node")


@pytest.fixture
def without(make):
    """The same node, whose operator keeps no tokens."""
    return make("without", keep_tokens=False)


@pytest.fixture
def encoded(monkeypatch) -> list[list[str]]:
    """The texts that were tokenised since, but for empty ones."""
    seen, made = [], TokenFile._made

    def watched(file, tokenizer, texts, pairs, max_length):
        seen.extend([list(texts)] if any(texts) else [])
        return made(file, tokenizer, texts, pairs, max_length)

    monkeypatch.setattr(TokenFile, "_made", watched)
    return seen


def uploaded(node: Node, start, *, round_: int = 1) -> bytes:
    """What the restarted node answers."""
    restart()
    answered = ask(node, training(run_config(), start, round_=round_))
    assert answered.code == 0, answered
    return answered.frame


def kept(node: Node) -> Path:
    return node.settings.tokens


def test_a_restarted_node_tokenises_nothing_and_uploads_the_same(node, without, start, encoded):
    first = uploaded(node, start)
    assert encoded == [[text for text, _ in ROWS]]
    second = uploaded(node, start, round_=2)
    assert len(encoded) == 1
    assert [first, second] == [uploaded(without, start), uploaded(without, start, round_=2)]
    assert not kept(without).exists()
    before = kept(node).read_bytes()
    for changed in (node, without):
        write_rows(changed.records, CHANGED)
    assert uploaded(node, start, round_=3) == uploaded(without, start, round_=3)
    assert encoded[1:] == [[text for text, _ in CHANGED]], "they are tokenised again"
    assert kept(node).read_bytes() != before


@pytest.fixture
def while_written(node, monkeypatch) -> list:
    """What is called with the new file's descriptor, before that has its name."""
    calls, fsync = [], os.fsync

    def watched(descriptor):
        new = kept(node).with_name(f"{kept(node).name}.new")
        if new.exists() and new.stat().st_ino == os.fstat(descriptor).st_ino:
            for call in calls:
                call(descriptor)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return calls


def test_nobody_else_may_read_it_at_any_moment(node, start, while_written):
    modes = []
    while_written.append(lambda descriptor: modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode)))
    umask = os.umask(0)
    try:
        uploaded(node, start)
    finally:
        os.umask(umask)
    assert modes == [0o600]
    assert stat.S_IMODE(kept(node).stat().st_mode) == 0o600
    assert not list(node.folder.glob("*.new"))


def turn_a_bit(path, _):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


HARMS = {
    "a turned bit": turn_a_bit,
    "a link": lambda path, other: (path.unlink(), path.symlink_to(other)),
    "cut off": lambda path, other: path.write_bytes(path.read_bytes()[:-7]),
    "empty": lambda path, other: path.write_bytes(b""),
    "of other records": lambda path, other: path.write_bytes(other.read_bytes()),
    "grown": lambda path, other: path.write_bytes(path.read_bytes() + bytes(10**6)),
    "open to all": lambda path, other: path.chmod(0o644),
    "a pipe": lambda path, other: (path.unlink(), os.mkfifo(path, 0o600)),
}


@pytest.mark.parametrize("harm", ["a turned bit", "a link", *slow(*list(HARMS)[2:])])
def test_a_file_that_is_not_just_right_counts_for_nothing(make, node, without, start, encoded, harm):
    other = make("other", CHANGED)
    uploaded(other, start)
    assert uploaded(node, start) == uploaded(without, start)
    sound = kept(node).read_bytes()
    HARMS[harm](kept(node), kept(other))
    num = len(encoded)
    assert uploaded(node, start, round_=2) == uploaded(without, start, round_=2)
    assert encoded[num:] == [[text for text, _ in ROWS]]
    assert (kept(node).is_symlink(), kept(node).read_bytes()) == (False, sound)
    assert stat.S_IMODE(kept(node).stat().st_mode) == 0o600


def test_a_poisoned_token_is_no_more_than_an_unusable_record(node, start, monkeypatch):
    """Even where somebody has also made the key and the checksum fit."""
    packed = _records._Layout.packed

    def poisoned(layout, rows, key):
        return packed(layout, [{name: [10**6] * 3 for name in rows[0]}, *rows[1:]], key)

    monkeypatch.setattr(_records._Layout, "packed", poisoned)
    uploaded(node, start)
    unusable, tokenize = [], records.tokenize

    def watched(*arguments, **options):
        found = tokenize(*arguments, **options)
        unusable.append(found.unusable)
        return found

    monkeypatch.setattr("fedpriv.learning.training.workbench.tokenize", watched)
    uploaded(node, start, round_=2)
    # The texts on which tokenising is timed pass here too.
    (marked,) = [marks for marks in unusable if marks is not None and len(marks) == len(ROWS)]
    assert marked.tolist() == [True] + [False] * (len(ROWS) - 1)


def logged(caplog) -> list[str]:
    """What the node's operator is told of records."""
    return [record.getMessage() for record in caplog.records if record.name == _records.__name__]


def test_a_full_disk_costs_a_line_in_the_log_and_no_upload(node, without, start, while_written, caplog):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    while_written.append(full)
    assert uploaded(node, start) == uploaded(without, start)
    assert logged(caplog) == [f"{kept(node)}: the tokens are not kept (No space left on device)"]
    assert not [path for path in node.folder.iterdir() if path.name.startswith("tokens")]


def test_tokens_that_do_not_fit_the_file_are_used_all_the_same(node, without, start, monkeypatch, caplog):
    packed = _records._Layout.packed

    def refusing(self, rows, key):
        if rows:
            raise ValueError("cannot copy sequence with size 9 to array axis with dimension 8")
        return packed(self, rows, key)

    with monkeypatch.context() as patch:
        patch.setattr(_records._Layout, "packed", refusing)
        assert uploaded(node, start) == uploaded(without, start)
    assert logged(caplog) == [f"{kept(node)}: the tokens are not kept (ValueError)"]
    size = kept(node).stat().st_size
    assert uploaded(node, start, round_=2) == uploaded(without, start, round_=2)
    assert kept(node).stat().st_size == size, "one record decides whether all fit, and others see the size"


def test_it_is_opened_after_the_charge_alone(node, start, monkeypatch):
    uploaded(node, start)
    order, charge, read = [], _charging.charge, _records._read
    monkeypatch.setattr(_charging, "charge", lambda *a, **k: (order.append("charge"), charge(*a, **k))[1])
    monkeypatch.setattr(_records, "_read", lambda *a: (order.append("read"), read(*a))[1])
    uploaded(node, start, round_=2)
    assert order == ["charge", "read"]
    restart()
    assert ask(node, training(run_config(), start, round_=10**6)).code == REFUSED
    assert order == ["charge", "read"]


def test_its_size_says_nothing_about_the_records(make, start):
    """What else can be written on a disk that is nearly full is then the same, whichever record a node has."""
    rows = {
        "short": [("pain", LABELS[0])] * 12,
        "long": [(" ".join(WORDS * 5), LABELS[0])] * 12,
        "fewer": [("pain", LABELS[0])] * 11,
        "more": [("pain", LABELS[0])] * 13,
        "unknown label": [("pain", "measles")] * 12,
    }
    sizes = {}
    for name, of_node in rows.items():
        uploaded(made := make(name, of_node), start)
        sizes[name] = kept(made).stat().st_size
    assert len(set(sizes.values())) == 1, sizes


class Words:
    """A tokenizer that refuses a word, finds nothing in another, and knows pairs."""

    def __call__(self, texts, pairs=None, **_):
        if "rash" in texts:
            raise ValueError("rash")
        rows = [[len(word) for word in text.split() if word != "the"] for text in texts]
        if pairs is None:
            return {"input_ids": rows}
        seconds = [[len(word) for word in text.split()] for text in pairs]
        return {
            "input_ids": [a + b for a, b in zip(rows, seconds, strict=True)],
            "token_type_ids": [[0] * len(a) + [1] * len(b) for a, b in zip(rows, seconds, strict=True)],
        }


@pytest.mark.parametrize("pairs", [None, ["no", "a b", "", "yes it is", "x"]])
@pytest.mark.parametrize("num_records", [5, 9, 3, 1])
def test_what_is_read_is_what_the_tokenizer_gave(tiny_bert, tmp_path, encoded, pairs, num_records):
    texts = ["cough and pain", "rash", "the", "a very long text of ten words or rather more", "pain"]
    file = TokenFile(path=tmp_path / "t", num_records=num_records, model=tiny_bert, most_bytes=2**20)
    fresh = records.encode(Words(), texts, pairs, 6)
    assert [row is None for row in fresh] == [False, True, False, False, False]
    assert file.encode(Words(), texts, pairs, 6) == fresh
    encoded.clear()
    assert file.encode(Words(), texts, pairs, 6) == fresh
    assert sorted({text for texts in encoded for text in texts}) == sorted(texts[num_records:])
    assert file.encode(Words(), texts, pairs, 5) == records.encode(Words(), texts, pairs, 5)
    beyond = TokenFile(path=tmp_path / "beyond", num_records=1000, model=tiny_bert, most_bytes=4 * 1000 * 6)
    assert beyond.encode(Words(), texts, pairs, 6) == fresh
    assert not beyond.path.exists(), "of what the memory limit allows"


def test_chats_are_kept_with_what_is_learned_of_them_and_only_for_the_same_prompts(tiny_bert, tmp_path, encoded):
    texts, pairs = ["What is flu?", "", "a rash"], ["A viral disease.", "", "cough " * 90]

    def read(chat):
        file = TokenFile(path=tmp_path / "t", num_records=4, model=tiny_bert, most_bytes=2**20, encoder=chat)
        assert file.encode(chat_tokenizer(), texts, pairs, 60) == chat.encode(chat_tokenizer(), texts, pairs, 60)

    for chat in (ChatFormat(), ChatFormat(system_prompt="You are kind."), ChatFormat(prompt_template="answer {}")):
        encoded.clear()
        for _ in range(2):
            read(chat)
        assert encoded == [texts]


def test_another_tokenizer_is_another_key(tiny_bert, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weights": np.zeros(1)}, folder / "model.safetensors")
    before = _records._key(folder, ["pain"], None, 8)
    save_file({"others": np.zeros(1)}, folder / "model.safetensors")
    assert np.array_equal(_records._key(folder, ["pain"], None, 8), before)
    (folder / "tokenizer.json").write_text("{ }")
    assert not np.array_equal(_records._key(folder, ["pain"], None, 8), before)
    texts = (["pain"], ["pa", "in"], ["pain", ""])
    assert len({_records._key(folder, column, pairs, 8).tobytes() for column in texts for pairs in (None, [""])}) == 6
