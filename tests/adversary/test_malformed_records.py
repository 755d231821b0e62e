"""A record that cannot be read is one record: the others are summed as without it."""

import json
import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pandas as pd
import pytest
import tomli_w

from fedpriv.config import RunConfig
from fedpriv.learning.data import federated
from fedpriv.learning.data._tables import Table, to_text
from fedpriv.learning.data.text import DataSource, FederatedData, TextData
from tests.adversary.exchanges import N_K, ROWS
from tests.adversary.nodes import ask, make_node, restart, run_config, training
from tests.adversary.stand_ins import StandIns, Sum, largest_excess, standing_in
from tests.tiny import LABELS
from tests.vaults import UNTIMED

CSV = {
    "three fields": b"a,b,c\r\n",
    "latin-1": b"caf\xe9,hiv\r\n",
    "unclosed quote": b'"unclosed,x\r\n',
    "nothing": b"\r\n",
}
JSON = {
    "broken": b"{broken\n",
    "no brace": b'{"text": "x"\n',
    "list": b"[1]\n",
    "fraction among integers": b'{"text": "a cough", "label": 0.5}\n',
    "text among integers": b'{"text": "a cough", "label": "x"}\n',
    "object as text": b'{"text": {"a": 1}, "label": 0}\n',
    "surrogate": b'{"text": "\\ud800", "label": 0}\n',
    "deep": b"[" * 100_000 + b"\n",
}


def sums_of(folder: Path, approved, start, suffix: str, last: bytes) -> list[Sum]:
    """What a node was about to noise, with the shared rows in a file of that format, and then a line of its own."""
    node = make_node(folder, ROWS, num_registered=N_K, models=approved)
    config = run_config()
    if suffix == ".jsonl":
        names = [str(index) for index in range(len(LABELS))]
        rows = [json.dumps({"text": text, "label": LABELS.index(label)}) for text, label in ROWS]
        path = node.records.with_suffix(suffix)
        path.write_text("".join(f"{row}\n" for row in rows))
        settings = node.settings
        values = {"partition_id": 0, "name": "St. Anna", "data": str(path), "labels": names}
        (settings.folder / "vault.toml").write_text(tomli_w.dumps({**values, **UNTIMED, "budget_epsilon": 1000.0}))
        config = run_config(labels=",".join(names))
    with node.records.with_suffix(suffix).open("ab") as file:
        file.write(last)
    restart()
    with standing_in(partial(StandIns, watched=len(ROWS))()) as seen:
        assert ask(node, training(config, start)).code == 0
    return seen.sums


@pytest.fixture(scope="module")
def without(approved, starts, tmp_path_factory) -> Callable[[str], list[Sum]]:
    """The sums of a node without the malformed record, in a file of each format."""
    return cache(
        lambda suffix: sums_of(tmp_path_factory.mktemp("node") / "other", approved, starts["tiny"], suffix, b"")
    )


@pytest.mark.parametrize(
    ("suffix", "last"),
    [(".csv", line) for line in CSV.values()] + [(".jsonl", line) for line in JSON.values()],
    ids=[*CSV, *JSON],
)
def test_one_malformed_record_does_not_silence_the_others(approved, starts, tmp_path, suffix, last, without):
    one, other = sums_of(tmp_path / "one", approved, starts["tiny"], suffix, last), without(suffix)
    assert any(sum_.values.any() for sum_ in other), "no record counts, so nothing was tried"
    assert largest_excess(one, other) <= 1 + 1e-9


def as_a_whole(config: RunConfig, source: DataSource) -> FederatedData:
    """The records as a parser of whole tables reads them, which infers a type for each column."""
    read = pd.read_csv(source.data) if source.data.endswith(".csv") else pd.read_json(source.data, lines=True)
    table = Table(source.data, read.to_dict("list"))
    return FederatedData((to_text(table, config),), ("",), TextData((), ()), config.labels)


@pytest.mark.parametrize(
    ("suffix", "last"),
    [(".csv", CSV["three fields"]), (".csv", CSV["latin-1"]), (".jsonl", JSON["fraction among integers"])],
)
def test_a_node_that_reads_its_table_as_a_whole_is_caught(approved, starts, tmp_path, monkeypatch, suffix, last):
    monkeypatch.setattr(federated, "load_own", as_a_whole)
    one = sums_of(tmp_path / "one", approved, starts["tiny"], suffix, last)
    other = sums_of(tmp_path / "other", approved, starts["tiny"], suffix, b"")
    assert largest_excess(one, other) > 1.5


def test_a_node_none_of_whose_records_say_anything_answers_like_any_and_tells_its_operator(
    approved, starts, tmp_path, caplog
):
    """A word without an embedding is in all of its texts; the other node has such a word in all texts but one."""
    told, events, answers = [], [], []
    for name, texts in {"none": ["jane"] * N_K, "some": ["jane"] * (N_K - 1) + ["pain"]}.items():
        rows = [(text, LABELS[0]) for text in texts]
        node = make_node(tmp_path / name, rows, num_registered=N_K, models=approved)
        restart()
        caplog.clear()
        logging.disable(logging.NOTSET)
        answers.append(ask(node, training(run_config(model="beyond", batch_size=N_K), starts["tiny"])))
        told.append([line for line in caplog.messages if "noise alone" in line])
        events.append([json.loads(line)["event"] for line in node.settings.events.read_text().splitlines()])
    assert told == [["round 1: 1 of 1 updates are noise alone: no record had a gradient"], []]
    none, some = answers
    assert (none.code, some.code, len(none.frame)) == (0, 0, len(some.frame))
    assert none.response.fields.keys() == some.response.fields.keys()
    assert events[0] == events[1]
