"""`init` reads a node's records once, registers how many there are, and leaves nothing for a coordinator to decide."""

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from clients.deploy import records
from clients.deploy.folder import Node
from fedpriv.config import ON_NODES, parse
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.learning.data.federated import load_own
from fedpriv.privacy.ledger.ledger import Ledger
from tests.clients.deploy.conftest import heard, kit
from tests.tiny import LABELS
from tests.vaults import write_records

PROMPTS = ("--prompt-column", "note", "--response-column", "department")
ROWS = [("a b", LABELS[0]), ("a", LABELS[0]), ("c", LABELS[1]), ("", LABELS[2]), ("d", "dentistry"), ("e", "")]

# The terms that every node with records must state; those of classifiers name labels too.
BUDGET = ("--budget-epsilon", 4)
TERMS = ("--labels", ",".join(LABELS), *BUDGET)
COUNTED = f"labels: {LABELS[0]} 2, {LABELS[1]} 1, {LABELS[2]} 1"


@pytest.fixture
def init(invite: Callable[..., Path]) -> Callable[..., str]:
    """What `init` says of a node with these records, of the terms that are given."""

    def init(folder: Path, data: Path, *terms: object, code: int = 0) -> str:
        columns = ("--data", data, "--text-column", "note", "--label-column", "department")
        return kit("init", folder, *heard(invite()), *columns, *terms, code=code)

    return init


@pytest.fixture
def data(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("data") / "own.csv", ROWS)


def test_the_whole_file_is_registered_and_what_it_holds_is_said(tmp_path, init, data):
    said = init(tmp_path / "node", data, *TERMS)
    assert "found 6 records, 1 of them empty" in said
    assert COUNTED in said
    assert "1 records have another label and 1 have none" in said
    assert "registered N_k = 6, data set" in said
    vault = Node.read(tmp_path / "node").vault
    assert (vault.labels, vault.budget_epsilon, vault.label_column) == (LABELS, 4.0, "department")
    with Ledger(vault.ledger) as ledger:
        registered = ledger.data_set()
    assert registered is not None
    assert (registered.num_records, registered.client) == (6, "1")
    assert vault.ledger.stat().st_mode & 0o777 == 0o600
    assert vault.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--labels", "a,b"], "--budget-epsilon: is required"),
        ([*BUDGET], "--labels: is required"),
        (["--labels", "a", *BUDGET], "labels = a: must be two or more names"),
        (["--labels", "a,b,a", *BUDGET], "labels = a,b,a: must be"),
        (["--labels", "a,,b", *BUDGET], "labels = a,,b: must be"),
        (["--labels", "a,b", "--budget-epsilon", 0], "budget_epsilon = 0.0"),
        (["--labels", "a,b", "--budget-epsilon", "nan"], "budget_epsilon = nan"),
        (["--label-column", "", *TERMS], "labels: given without a label_column"),
        (["--text-column", "text", *TERMS], "text_column = 'text'"),
        (["--data", "/none/own.csv", *TERMS], "/none/own.csv"),
        (["--prompt-column", "note", *BUDGET], "response_column: required"),
        (["--response-column", "note", "--label-column", "", *BUDGET], "prompt_column: required"),
        ([*PROMPTS, "--messages-column", "note", *BUDGET], "messages_column = 'note': holds prompts and responses"),
        (
            ["--label-column", "", "--text-pair-column", "department", *BUDGET],
            "give --prompt-column and --response-column",
        ),
        ([*PROMPTS, "--labels", "a", *BUDGET], "labels = a: must be two or more"),
        (["--messages-column", "note", *BUDGET], "line 2: cannot be read"),
    ],
)
def test_nothing_is_written_when_something_is_missing_or_does_not_fit(tmp_path, init, data, given, message):
    assert message in init(tmp_path / "node", data, *given, code=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "where", "remedy"),
    [
        ('"two\nlines",cardiology\n', "line 8", "`fedpriv data lines`"),
        ("a,b,c\n", "line 8", "quote fields that hold a comma"),
        ("\n\nx\n", "line 10", "leave no field out"),
        ("Köln,cardiology\n", "line 8", "--encoding"),
    ],
)
def test_a_record_that_cannot_be_read_is_named_before_anything_is_registered(tmp_path, init, data, line, where, remedy):
    file = tmp_path / "own.csv"
    file.write_bytes(data.read_bytes() + line.encode("latin-1"))
    said = init(tmp_path / "node", file, *TERMS, code=2)
    assert (where in said, remedy in said) == (True, True), said
    assert not (tmp_path / "node").exists()


def test_with_a_column_of_persons_these_are_registered(tmp_path, init):
    path = tmp_path / "own.csv"
    names = ["P1", "P2", "P1", "P3", "P1", "P2"]
    path.write_text("note,department,who\n" + "".join(f"text {i},{LABELS[i % 3]},{n}\n" for i, n in enumerate(names)))
    more = (*TERMS, "--person-column", "who")
    said = init(tmp_path / "node", path, *more, "--max-records-per-person", 5)
    assert "they are about 3 persons, whom the node protects and registers" in said
    assert "registered N_k = 3, data set" in said
    vault = Node.read(tmp_path / "node").vault
    assert (vault.person_column, vault.max_records_per_person) == ("who", 5)
    with Ledger(vault.ledger) as ledger:
        assert ledger.data_set().num_records == 3
    path.write_text(path.read_text() + f"text 6,{LABELS[0]},P4\n")
    assert "1 person more than registered" in kit("records", tmp_path / "node")
    path.write_text(path.read_text() + f"text 7,{LABELS[0]},p1\n")
    assert "persons: 'p1' differs from 'P1' by case or blanks alone" in init(tmp_path / "other", path, *more, code=2)


@pytest.mark.parametrize(
    ("given", "labels", "prompts", "said"),
    [
        (["--label-column", "", *BUDGET], (), "", "found 6 records"),
        # One is without a response; a prompt may be empty.
        ([*PROMPTS, *BUDGET], (), "note", "found 6 records, 1 of them empty"),
        ([*PROMPTS, *TERMS], LABELS, "note", COUNTED),
    ],
    ids=["causal", "prompts", "prompts with answers in place of labels"],
)
def test_causal_models_need_no_labels(tmp_path, init, data, given, labels, prompts, said):
    assert said in init(tmp_path / "node", data, *given)
    vault = Node.read(tmp_path / "node").vault
    assert (vault.labels, vault.prompt_column) == (labels, prompts)


def test_on_a_terminal_what_is_required_is_asked_for(tmp_path, init, data, monkeypatch):
    answers = iter([",".join(LABELS), "2.5"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "prompt", lambda _: next(answers))
    init(tmp_path / "node", data)
    vault = Node.read(tmp_path / "node").vault
    assert (vault.labels, vault.budget_epsilon) == (LABELS, 2.5)


def test_the_ledger_of_other_records_is_not_taken_as_one_s_own_and_one_s_own_stays_as_it_was(tmp_path, init, data):
    path = tmp_path / "ledger.sqlite"
    kept_there = (*TERMS, "--ledger", path)
    init(tmp_path / "anna", data, *kept_there)
    with Ledger(path) as ledger:
        before, known = ledger.last, ledger.data_set()
    # As many records, with the same number in another federation.
    other = write_records(tmp_path / "other.csv", [(f"other {row}", LABELS[0]) for row in range(6)])
    said = init(tmp_path / "bruno", other, *kept_there, code=2)
    assert f"ledger = '{path}': was kept for other records than those in {other}" in said
    assert not (tmp_path / "bruno").exists()
    init(tmp_path / "bruno", other, *TERMS)  # the cure: a ledger of their own
    # A delta that is not the registered one; its cure is to leave it.
    said = init(tmp_path / "again", data, *kept_there, "--delta", 1e-7, code=2)
    assert "delta = 1e-07: " in said
    assert f"with {known.delta!r}, which stays" in said
    # Its own records again, and more of them.
    more = write_records(tmp_path / "more.csv", [*ROWS, ("f", LABELS[0])])
    assert "had registered this number before, and it stays" in init(tmp_path / "again", more, *kept_there)
    with Ledger(path) as ledger:
        assert ledger.last == before
    # Without a note on the records, what was registered decides.
    for num_records, said in ((5, "num_records = 6: "), (6, "registered N_k = 6, data set")):
        path = tmp_path / f"bare-{num_records}.sqlite"
        with Ledger(path) as ledger:
            bare = ledger.register("1", num_records, 1e-6)
        assert said in init(tmp_path / path.stem, data, *TERMS, "--ledger", path, code=0 if num_records == 6 else 2)
    with Ledger(path) as ledger:
        assert ledger.data_set() == bare
    path.write_bytes(b"no ledger" * 100)
    init(tmp_path / "broken", data, *TERMS, "--ledger", path, code=1)
    assert not list(tmp_path.glob("*broken*"))


def test_records_that_an_earlier_data_set_held_are_not_registered_again(tmp_path, init, data):
    """In another file, after others were registered in between, and with new ones after them."""
    node = tmp_path / "node"
    init(node, data, *TERMS)
    assert "--disjoint: must not be empty" in kit("register", node, "--disjoint", " ", code=2)
    copy = tmp_path / "copy.csv"
    other = write_records(tmp_path / "other.csv", [(f"other {row}", LABELS[0]) for row in range(7)])
    text = (node / "vault.toml").read_text()

    def holds(file: Path) -> None:
        (node / "vault.toml").write_text(text.replace(str(data), str(file)))

    holds(other)
    assert "registered N_k = 7, data set" in kit("register", node, "--disjoint", "admissions of 2027")
    holds(copy)
    with Ledger(Node.read(node).vault.ledger) as ledger:
        before = ledger.last
    for more in ("", "f,cardiology\n"):
        copy.write_bytes(data.read_bytes() + more.encode())
        said = kit("register", node, "--disjoint", "others", code=2)
        assert "holds the same records as data set" in said
    with Ledger(Node.read(node).vault.ledger) as ledger:
        assert ledger.last == before


@pytest.mark.parametrize(
    "wanted", [{"labels": LABELS}, {"label_column": ""}, {"labels": LABELS, "text_pair_column": "note"}]
)
def test_what_is_noted_of_the_records_is_what_a_run_notes(tmp_path, data, wanted):
    columns = {"text_column": "note", "label_column": "department"} | wanted
    vault = VaultSettings(folder=tmp_path, partition_id=0, name="n", data=data, **columns)
    task = {"task": "SEQ_CLS", "labels": ",".join(LABELS)} if "labels" in wanted else {"task": "CAUSAL_LM"}
    config = parse({"model": "tiny", "data": ON_NODES, "test_data": "test.csv", "num_clients": 1, **task})
    assert records.find(vault).content(None) == repr(load_own(config, vault.source).clients[0]).encode()


def test_a_node_of_the_corpus_registers_nothing(make):
    made = make()
    assert (made.found, made.data_set) == (None, None)
    assert not made.node.vault.ledger.exists()  # how many records it has, its first run says


def test_likely_mistakes_are_told_to_the_operator_alone_and_nothing_is_registered(tmp_path, init):
    rows = [(f"note {row}", LABELS[row % 3]) for row in range(60)]
    rows[4], rows[7], rows[9] = ("note", f"{LABELS[1]} "), ("note", LABELS[1].upper()), ("note", "#N/A")
    path = write_records(tmp_path / "own.csv", rows)
    said = init(tmp_path / "node", path, *TERMS, code=2)
    assert f"labels: '{LABELS[1]} ' differs from '{LABELS[1]}' by case or blanks alone (1 record, line " in said
    assert "and 1 likely mistake more" in said
    assert not (tmp_path / "node").exists()

    said = init(tmp_path / "node", path, *TERMS, "--table-checks", "warn")
    assert f"warning: data = '{path}': labels: '#N/A' looks like a missing one (1 record, line 11)" in said
    kept = b"".join(file.read_bytes() for file in (tmp_path / "node").rglob("*") if file.is_file())
    assert b"differs from" not in kept
    assert b"#N/A" not in kept  # no character of a key in Base64


@pytest.mark.parametrize(
    ("name", "separator", "encoding", "options"),
    [
        ("own.csv", ";", "utf-8-sig", []),
        ("own.csv", "\t", "latin-1", ["--encoding", "latin-1"]),
        ("own.tsv", ";", "utf-8", ["--separator", "semicolon"]),
    ],
)
def test_a_node_reads_separators_by_the_header_encodings_by_name(tmp_path, init, name, separator, encoding, options):
    rows = [("note", "department"), *((f"Köln {row}", LABELS[row % 3]) for row in range(6))]
    (tmp_path / name).write_text("".join(separator.join(row) + "\n" for row in rows), encoding=encoding)
    init(tmp_path / "node", tmp_path / name, *TERMS, *options)
    vault = Node.read(tmp_path / "node").vault
    config = parse({"data": ON_NODES, "test_data": "t.csv", "labels": ",".join(LABELS), "num_clients": 1})
    assert load_own(config, vault.source).clients[0].texts == tuple(f"Köln {row}" for row in range(6))
