"""Records come and go over the years: the operator is told and decides, and the coordinator sees none of it."""

import io
import logging
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from clients.deploy.admission import approve_model
from clients.deploy.folder import Node
from fedpriv.holder.vault import answer
from fedpriv.holder.vault._records import TokenFile
from fedpriv.holder.vault.holder import Holder
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.holder.wire.frame import REFUSED
from fedpriv.holder.wire.kinds import ADAPTER
from fedpriv.learning.data import read_strictly
from fedpriv.learning.training.workbench import load_model
from fedpriv.operate.processes import only_start
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.ledger.entries import CHARGED, Entry
from fedpriv.privacy.ledger.reader import reading, verify_with_head
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.adversary.nodes import Answer, Question, ask, registering, restart, run_config, training
from tests.cli.command_line import as_json, fedpriv
from tests.clients.deploy.conftest import check, kit
from tests.marks import slow
from tests.tiny import LABELS, WORDS
from tests.vaults import write_records

pytestmark = pytest.mark.usefixtures("quick_nodes")

N_K = 20
ROWS = [(f"{WORDS[i % 13]} {WORDS[i % 7]}", LABELS[i % 2]) for i in range(N_K)]
NEW = [(f"fever {WORDS[i % 13]} {WORDS[i % 5]}", LABELS[i % 2]) for i in range(9)]
CONFIG = run_config(num_clients=2, rounds=5)


class Site:
    """A node with its kit, and what its vault did."""

    def __init__(self, node: Node, start: dict) -> None:
        self.folder, self._start = node.folder, start
        node.vault.coordinator.unlink()  # which nobody plays here
        self.records = Path(str(node.vault.data))

    @property
    def settings(self):
        return Node.read(self.folder).vault

    def write(self, rows: Sequence[tuple[str, str]]) -> None:
        write_records(self.records, rows)

    def kit(self, command: str, *options: object, code: int = 0) -> str:
        return kit(command, self.folder, *options, code=code)

    def asked(self, question: Question, held: Holder | None = None) -> Answer:
        """The answer of a vault that has just been started, unless it runs already."""
        if held is None:
            restart()
        return ask(self, question, held)

    def train(self, round_: int, held: Holder | None = None) -> Answer:
        return self.asked(training(CONFIG, self._start, round_=round_), held)

    def ledger(self) -> list[Entry]:
        with reading(self.settings.ledger) as db:
            verify_with_head(db, self.settings.ledger)
            return list(db.entries())

    def charges(self) -> list[tuple[str, str | None, int | None]]:
        return [(each.data_set, each.event, each.round) for each in self.ledger() if each.phase == CHARGED]

    def epsilons(self) -> list[float]:
        """What each data set has spent, in the order of their registration."""
        with reading(self.settings.ledger) as db:
            return [
                epsilon_of([release.event for release in db.releases(each.id)], each.delta).epsilon
                for each in db.data_sets()
            ]


@pytest.fixture
def site(tmp_path, make_node, tiny_bert, monkeypatch) -> Callable[..., Site]:
    """Makes nodes with these records; nodes with the same records upload the same in the same round."""
    monkeypatch.setattr(answer, "_source", lambda _, client, round_, purpose: SeededSource(0, client, round_, purpose))
    start = load_model(replace(CONFIG, model=str(tiny_bert)), labels=LABELS)[1].initial
    columns = {"text_column": "note", "label_column": "department", "labels": LABELS, "reply_seconds": 1e-3}

    def make(name: str = "node", rows: Sequence[tuple[str, str]] = ROWS) -> Site:
        data = write_records(tmp_path / f"{name}.csv", rows)
        node = make_node(name, data=data, budget_epsilon=100.0, **columns)
        approve_model(node.vault, str(tiny_bert), name="tiny")
        return Site(node, start)

    return make


@pytest.fixture
def tokenised(monkeypatch) -> list[str]:
    """The texts that were tokenised since it was last emptied."""
    seen, made = [], TokenFile._made

    def watched(file, tokenizer, texts, pairs, max_length):
        seen.extend(texts)
        return made(file, tokenizer, texts, pairs, max_length)

    monkeypatch.setattr(TokenFile, "_made", watched)
    return seen


def test_new_records_train_along_until_they_get_a_data_set_and_a_budget_of_their_own(site, tokenised, caplog):
    caplog.set_level(logging.WARNING)
    node = site()
    assert node.train(1).code == 0
    tokenised.clear()

    # The file grows. The operator is told by a command, by the vault's log once a run has read it, and then by doctor.
    node.write([*ROWS, *NEW])
    told = node.kit("records")
    assert f"found {N_K + 9} records" in told
    assert "9 records more than registered: from the next start on all train" in told
    assert f"fedpriv node register {node.folder} --disjoint TEXT" in told
    assert "see `records`" not in check(node, "registered").detail
    answered = node.train(2)
    assert tokenised == [text for text, _ in NEW], "the others were kept"
    assert f"found {N_K + 9} records to train on, more than N_k = {N_K}: all of them count" in caplog.text
    assert "see `records`" in check(node, "registered").detail
    (first, event, _), second = node.charges()
    assert second == (first, event, 2), "the same account pays the same for all of them"
    assert f"holds the same records as data set {first}" in node.kit("register", "--disjoint", "new ones", code=2)
    assert answered.code == 0

    # They get a file and a data set of their own. The vault that runs refuses until it is started again.
    before, held = node.epsilons(), Holder.of(node.settings)
    node.write(NEW)
    assert "registered N_k = 9, data set" in node.kit("register", "--disjoint", "admissions of 2027")
    assert node.train(3, held).code == REFUSED
    assert node.epsilons() == [*before, 0.0]
    assert node.train(3).code == 0
    assert node.charges()[-1][0] != first
    first_epsilon, second_epsilon = node.epsilons()
    assert first_epsilon == before[0]
    # A person in both data sets: the releases on both compose, at the sum of both deltas.
    with reading(node.settings.ledger) as db:
        sets = db.data_sets()
        events = [release.event for each in sets for release in db.releases(each.id)]
    both = epsilon_of(events, sum(each.delta for each in sets)).epsilon
    assert max(first_epsilon, second_epsilon) < both <= first_epsilon + second_epsilon
    assert "as many as registered" in node.kit("records")

    # The earlier file again: nothing may depend on it but what the operator reads.
    node.write(ROWS)
    assert f"warning: these are records of data set {first}, which had been registered before" in node.kit("records")
    caplog.clear()
    assert node.train(4).code == 0
    assert f"the records are those of data set {first}" in caplog.text


@pytest.fixture
def alike(monkeypatch, site) -> Callable[[str], Site]:
    """Makes nodes whose keys and ids are the same, so that whatever differs in what leaves them is their records'."""
    monkeypatch.setattr("fedpriv.privacy.ledger.ledger.secrets.token_hex", lambda _: "d" * 32)
    monkeypatch.setattr(ReceiptWatch, "sign", lambda _, chain: chain.newest)
    keys: list[bytes] = []

    def make(name: str) -> Site:
        node = site(name)
        key = node.settings.key
        keys.append(key.read_bytes())
        key.write_bytes(keys[0])
        return node

    return make


@pytest.mark.parametrize("rows", [[*ROWS, *NEW], ROWS[1:]], ids=["grown", "erased"])
def test_the_coordinator_sees_neither_that_records_are_new_nor_that_one_is_erased(alike, rows):
    """Registrations are equal to the byte, and of a reply all but its noised values."""
    seen = []
    for name, now in (("same", ROWS), ("other", rows)):
        node = alike(name)
        assert node.train(1).code == 0
        node.write(now)
        registered = node.asked(registering(CONFIG))
        replied = node.train(2)
        reply = replied.response
        shapes = {name: (array.shape, array.dtype) for name, array in reply.arrays[ADAPTER].items()}
        seen.append((registered.frame, reply.code, reply.fields, shapes, len(replied.frame), node.charges()))
    assert seen[0] == seen[1]


def test_an_erased_record_is_in_no_later_upload_and_not_in_the_file_of_tokens(site, tokenised):
    node, never = site("node"), site("never")  # never reads the record that the other erases
    registered = node.ledger()[:2]
    assert node.train(1).code == 0
    before = node.settings.tokens.read_bytes()
    for each in (node, never):
        each.write(ROWS[1:])
    assert "1 record fewer than registered: N_k stays, and so does what was charged" in node.kit("records")
    tokenised.clear()
    first, second = (each.train(2).response.arrays[ADAPTER] for each in (node, never))
    assert {name: array.tobytes() for name, array in first.items()} == {n: a.tobytes() for n, a in second.items()}
    assert tokenised == 2 * [text for text, _ in ROWS[1:]]
    after = node.settings.tokens.read_bytes()
    assert after == never.settings.tokens.read_bytes()
    assert len(after) == len(before)
    assert node.ledger()[:2] == registered
    ((_, event, _),) = never.charges()
    assert [each[1:] for each in node.charges()] == [(event, 1), (event, 2)]


def written(path: Path, persons: Sequence[str]) -> Path:
    """A table with a record for each of these persons, in any format."""
    notes = [(f'{WORDS[i]}, "{WORDS[-i]}"', LABELS[i % 2], person) for i, person in enumerate(persons)]
    frame = pd.DataFrame(notes, columns=["note", "department", "patient"])
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".gz":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("name", ["own.csv", "own.parquet", *slow("own.jsonl.gz")])
def test_a_person_is_erased_in_one_command_and_the_day_alone_is_noted(name, tmp_path, make_node, monkeypatch):
    data = written(tmp_path / name, ["P1", "P2", "P1", "P3", "", "P2"])
    data.chmod(0o640)
    columns = {"text_column": "note", "label_column": "department", "person_column": "patient", "labels": LABELS}
    site = Site(make_node("node", data=data, budget_epsilon=100.0, table_checks="warn", **columns), {})
    site.settings.tokens.write_bytes(b"tokens of records")
    before, entries = read_strictly(site.settings.source), site.ledger()

    def erase(person: str, *options: object, code: int = 0) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{person}\n"))
        return site.kit("erase", *options, code=code)

    for wrong, said in ((("P9",), "nobody of this name"), (("P1", "--column", "ward"), "ward"), (("",), "nobody of")):
        assert said in erase(*wrong, code=2)
    with only_start(site.folder, (), print):
        assert "another `start` of this folder runs" in erase("P1", code=2)
    assert (read_strictly(site.settings.source), site.settings.tokens.exists()) == (before, True)
    assert "P1" not in erase("P1")
    assert read_strictly(site.settings.source) == [record for record in before if record.person != "P1"]
    assert (data.stat().st_mode & 0o777, site.settings.tokens.exists()) == (0o640, False)
    assert site.ledger() == entries, "N_k and all that was charged stays"
    noted = site.folder / "erasures"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d\n", noted.read_text())
    assert noted.stat().st_mode & 0o777 == 0o600
    erase("P2")
    assert len(noted.read_text().splitlines()) == 2
    written(data, ["P3", "P3"])
    assert "nobody else is" in erase("P3", code=2)
    assert sorted(path.name for path in tmp_path.glob(".*")) == [], "a copy is left"

    today = noted.read_text().split()[0]
    own = fedpriv("ledger", "statement", site.settings.ledger, "--client", "1", "--erasures")[0]
    assert f"Erasures at this node, not to be handed on: {today}, {today}" in own
    assert "rasure" not in fedpriv("ledger", "statement", site.settings.ledger, "--client", "1")[0]
    as_json("evidence", site.folder, "--out", tmp_path / "bundle.zip")
    with zipfile.ZipFile(tmp_path / "bundle.zip") as bundle:
        assert not [name for name in bundle.namelist() if "erasure" in name or b"rasure" in bundle.read(name)]
