"""`init` reads a node's records once, registers how many there are, and leaves nothing for a coordinator to decide."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from clients.deploy import __main__ as kit
from clients.deploy import records
from clients.deploy.folder import Node
from fedpriv.config import ON_NODES, parse
from fedpriv.errors import InputError
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.learning.data.federated import load_own
from fedpriv.privacy.ledger.ledger import Ledger
from simulations.sites import run_in_process
from tests.clients.deploy.conftest import heard
from tests.tiny import LABELS
from tests.vaults import write_records

PROMPTS = ("--prompt-column", "note", "--response-column", "department")
ROWS = [("a b", LABELS[0]), ("a", LABELS[0]), ("c", LABELS[1]), ("", LABELS[2]), ("d", "dentistry"), ("e", "")]


def init(folder: Path, invite: Callable[..., Path], data: Path, *more: object) -> subprocess.CompletedProcess[str]:
    columns = ("--data", data, "--text-column", "note", "--label-column", "department")
    return run_in_process(kit.app, "fedpriv node", "init", folder, *heard(invite()), *columns, *more)


@pytest.fixture
def data(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("data") / "own.csv", ROWS)


def test_the_whole_file_is_registered_and_what_it_holds_is_said(tmp_path, invite, data):
    done = init(tmp_path / "node", invite, data, "--labels", ",".join(LABELS), "--budget-epsilon", 4)
    assert done.returncode == 0, done.stderr
    assert "found 6 records, 1 of them empty" in done.stdout
    assert f"labels: {LABELS[0]} 2, {LABELS[1]} 1, {LABELS[2]} 1" in done.stdout
    assert "1 records have another label and 1 have none" in done.stdout
    assert "registered N_k = 6, data set" in done.stdout
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
        (["--budget-epsilon", 4], "--labels: is required"),
        (["--labels", "a", "--budget-epsilon", 4], "labels = a: must be two or more names"),
        (["--labels", "a,b,a", "--budget-epsilon", 4], "labels = a,b,a: must be"),
        (["--labels", "a,,b", "--budget-epsilon", 4], "labels = a,,b: must be"),
        (["--labels", "a,b", "--budget-epsilon", 0], "budget_epsilon = 0.0"),
        (["--labels", "a,b", "--budget-epsilon", "nan"], "budget_epsilon = nan"),
        (["--label-column", "", "--labels", "a,b", "--budget-epsilon", 4], "labels: given without a label_column"),
        (["--text-column", "text", "--labels", "a,b", "--budget-epsilon", 4], "text_column = 'text'"),
        (["--data", "/none/own.csv", "--labels", "a,b", "--budget-epsilon", 4], "/none/own.csv"),
        (["--prompt-column", "note", "--budget-epsilon", 4], "response_column: required"),
        (["--response-column", "note", "--label-column", "", "--budget-epsilon", 4], "prompt_column: required"),
        (
            [*PROMPTS, "--messages-column", "note", "--budget-epsilon", 4],
            "messages_column = 'note': holds prompts and responses",
        ),
        (
            ["--label-column", "", "--text-pair-column", "department", "--budget-epsilon", 4],
            "give --prompt-column and --response-column",
        ),
        ([*PROMPTS, "--labels", "a", "--budget-epsilon", 4], "labels = a: must be two or more"),
        (["--messages-column", "note", "--budget-epsilon", 4], "line 2: cannot be read"),
    ],
)
def test_nothing_is_written_when_something_is_missing_or_does_not_fit(tmp_path, invite, data, given, message):
    done = init(tmp_path / "node", invite, data, *given)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "where", "remedy"),
    [
        ('"two\nlines",cardiology\n', "line 8", "`fedpriv data lines`"),
        ("a,b,c\n", "line 8", "quote fields that hold a comma"),
        ("\n\nx\n", "line 10", "leave no field out"),
    ],
)
def test_a_record_that_cannot_be_read_is_named_before_anything_is_registered(
    tmp_path, invite, data, line, where, remedy
):
    file = tmp_path / "own.csv"
    file.write_bytes(data.read_bytes() + line.encode())
    done = init(tmp_path / "node", invite, file, "--labels", ",".join(LABELS), "--budget-epsilon", 4)
    assert done.returncode == 2
    assert where in done.stderr
    assert remedy in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "node").exists()


def test_with_a_column_of_persons_these_are_registered(tmp_path, invite):
    path = tmp_path / "own.csv"
    names = ["P1", "P2", "P1", "P3", "P1", "P2"]
    path.write_text("note,department,who\n" + "".join(f"text {i},{LABELS[i % 3]},{n}\n" for i, n in enumerate(names)))
    more = ("--labels", ",".join(LABELS), "--budget-epsilon", 4, "--person-column", "who")
    done = init(tmp_path / "node", invite, path, *more, "--max-records-per-person", 5)
    assert done.returncode == 0, done.stderr
    assert "they are about 3 persons, whom the node protects and registers" in done.stdout
    assert "registered N_k = 3, data set" in done.stdout
    vault = Node.read(tmp_path / "node").vault
    assert (vault.person_column, vault.max_records_per_person) == ("who", 5)
    with Ledger(vault.ledger) as ledger:
        assert ledger.data_set().num_records == 3
    path.write_text(path.read_text() + f"text 6,{LABELS[0]},P4\n")
    done = run_in_process(kit.app, "fedpriv node", "records", tmp_path / "node")
    assert "1 person more than registered" in done.stdout, done.stderr
    path.write_text(path.read_text() + f"text 7,{LABELS[0]},p1\n")
    done = init(tmp_path / "other", invite, path, *more)
    assert done.returncode == 2
    assert "persons: 'p1' differs from 'P1' by case or blanks alone" in done.stderr


def test_causal_models_need_no_labels(tmp_path, invite, data):
    done = init(tmp_path / "node", invite, data, "--label-column", "", "--budget-epsilon", 4)
    assert done.returncode == 0, done.stderr
    assert Node.read(tmp_path / "node").vault.labels == ()
    assert "found 6 records" in done.stdout


def test_prompts_with_responses_need_no_labels(tmp_path, invite, data):
    done = init(tmp_path / "node", invite, data, *PROMPTS, "--budget-epsilon", 4)
    assert done.returncode == 0, done.stderr
    vault = Node.read(tmp_path / "node").vault
    assert (vault.prompt_column, vault.response_column, vault.labels) == ("note", "department", ())
    assert "found 6 records, 1 of them empty" in done.stdout  # one without a response; a prompt may be empty


def test_with_answers_in_their_place_the_labels_are_counted(tmp_path, invite, data):
    done = init(tmp_path / "node", invite, data, *PROMPTS, "--labels", ",".join(LABELS), "--budget-epsilon", 4)
    assert done.returncode == 0, done.stderr
    assert f"labels: {LABELS[0]} 2, {LABELS[1]} 1, {LABELS[2]} 1" in done.stdout
    assert "1 records have another label and 1 have none" in done.stdout


def test_on_a_terminal_what_is_required_is_asked_for(tmp_path, invite, data, monkeypatch):
    answers = iter([",".join(LABELS), "2.5"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "prompt", lambda _: next(answers))
    done = init(tmp_path / "node", invite, data)
    assert done.returncode == 0, done.stderr
    vault = Node.read(tmp_path / "node").vault
    assert (vault.labels, vault.budget_epsilon) == (LABELS, 2.5)


def test_a_ledger_that_was_there_before_keeps_what_it_registered(tmp_path, invite, data):
    path = tmp_path / "kept" / "ledger.sqlite"
    with Ledger(path) as ledger:
        before = ledger.register("1", 6, 1e-6)
    more = ("--labels", ",".join(LABELS), "--budget-epsilon", 4, "--ledger", path)
    done = init(tmp_path / "node", invite, data, *more)
    assert done.returncode == 0, done.stderr
    assert f"registered N_k = 6, data set {before.id}" in done.stdout
    with Ledger(path) as ledger:
        assert ledger.data_set() == before


def test_the_ledger_of_other_records_is_not_taken_as_one_s_own(tmp_path, invite, data):
    options = ("--labels", ",".join(LABELS), "--budget-epsilon", 4)
    path = tmp_path / "ledger.sqlite"
    assert init(tmp_path / "anna", invite, data, *options, "--ledger", path).returncode == 0
    with Ledger(path) as ledger:
        before, known = ledger.last, ledger.data_set()
    # As many records, with the same number in another federation.
    other = write_records(tmp_path / "other.csv", [(f"other {row}", LABELS[0]) for row in range(6)])
    done = init(tmp_path / "bruno", invite, other, *options, "--ledger", path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"ledger = '{path}': was kept for other records than those in {other}" in done.stderr
    assert not (tmp_path / "bruno").exists()
    assert init(tmp_path / "bruno", invite, other, *options).returncode == 0, "the cure: a ledger of their own"
    # A delta that is not the registered one; its cure is to leave it.
    done = init(tmp_path / "again", invite, data, *options, "--ledger", path, "--delta", 1e-7)
    assert "delta = 1e-07: " in done.stderr
    assert f"with {known.delta!r}, which stays" in done.stderr
    # Its own records again, and more of them.
    more = write_records(tmp_path / "more.csv", [*ROWS, ("f", LABELS[0])])
    done = init(tmp_path / "again", invite, more, *options, "--ledger", path)
    assert done.returncode == 0, done.stderr
    assert "had registered this number before, and it stays" in done.stdout
    with Ledger(path) as ledger:
        assert ledger.last == before
    # Without a note on the records, what was registered decides.
    with Ledger(tmp_path / "bare.sqlite") as ledger:
        ledger.register("1", 5, 1e-5)
    done = init(tmp_path / "bare", invite, data, *options, "--ledger", tmp_path / "bare.sqlite")
    assert "num_records = 6: " in done.stderr


def registered(node: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return run_in_process(kit.app, "fedpriv node", "register", node, *more)


def test_records_that_an_earlier_data_set_held_are_not_registered_again(tmp_path, invite, data):
    """In another file, after others were registered in between, and with new ones after them."""
    done = init(tmp_path / "node", invite, data, "--labels", ",".join(LABELS), "--budget-epsilon", 4)
    assert done.returncode == 0, done.stderr
    vault = Node.read(tmp_path / "node").vault
    copy = tmp_path / "copy.csv"
    other = write_records(tmp_path / "other.csv", [(f"other {row}", LABELS[0]) for row in range(7)])
    text = (tmp_path / "node" / "vault.toml").read_text()

    def holds(file: Path) -> None:
        (tmp_path / "node" / "vault.toml").write_text(text.replace(str(data), str(file)))

    holds(other)
    done = registered(tmp_path / "node", "--disjoint", "admissions of 2027")
    assert done.returncode == 0, done.stderr
    assert "registered N_k = 7, data set" in done.stdout
    holds(copy)
    with Ledger(vault.ledger) as ledger:
        before = ledger.last
    for more in ("", "f,cardiology\n"):
        copy.write_bytes(data.read_bytes() + more.encode())
        done = registered(tmp_path / "node", "--disjoint", "others")
        assert done.returncode == 2
        assert "holds the same records as data set" in done.stderr
        assert done.stderr.count("\n") == 1
    with Ledger(vault.ledger) as ledger:
        assert ledger.last == before


@pytest.mark.parametrize(
    "wanted", [{"labels": LABELS}, {"label_column": ""}, {"labels": LABELS, "text_pair_column": "note"}]
)
def test_what_is_noted_of_the_records_is_what_a_run_notes(tmp_path, data, wanted):
    vault = VaultSettings(
        folder=tmp_path,
        partition_id=0,
        name="n",
        data=data,
        **({"text_column": "note", "label_column": "department"} | wanted),
    )
    task = {"task": "SEQ_CLS", "labels": ",".join(LABELS)} if "labels" in wanted else {"task": "CAUSAL_LM"}
    config = parse({"model": "tiny", "data": ON_NODES, "test_data": "test.csv", "num_clients": 1, **task})
    assert records.find(vault).content(None) == repr(load_own(config, vault.source).clients[0]).encode()


def test_a_further_data_set_needs_a_statement(tmp_path, invite, data):
    done = init(tmp_path / "node", invite, data, "--labels", ",".join(LABELS), "--budget-epsilon", 4)
    assert done.returncode == 0, done.stderr
    done = registered(tmp_path / "node", "--disjoint", " ")
    assert done.returncode == 2
    assert "--disjoint: must not be empty" in done.stderr


def test_a_ledger_that_cannot_be_used_leaves_no_folder(tmp_path, invite, data):
    path = tmp_path / "broken.sqlite"
    path.write_bytes(b"no ledger" * 100)
    more = ("--labels", ",".join(LABELS), "--budget-epsilon", 4, "--ledger", path)
    done = init(tmp_path / "node", invite, data, *more)
    assert done.returncode == 1
    assert not (tmp_path / "node").exists()
    assert not list(tmp_path.glob(".node*"))


def test_a_node_of_the_corpus_registers_nothing(make):
    made = make()
    assert (made.found, made.data_set) == (None, None)
    assert not made.node.vault.ledger.exists()  # how many records it has, its first run says


@pytest.mark.parametrize("wrong", [{"budget_epsilon": None}, {"labels": ()}, {"labels": ("a", "a")}])
def test_terms_left_open_are_refused(tmp_path, data, wrong):
    values = {"partition_id": 0, "name": "n", "data": data, "labels": LABELS, "budget_epsilon": 1.0}
    records.check_terms(VaultSettings(folder=tmp_path, **values))
    with pytest.raises(InputError, match=next(iter(wrong))):
        records.check_terms(VaultSettings(folder=tmp_path, **(values | wrong)))


def test_likely_mistakes_are_told_to_the_operator_alone_and_nothing_is_registered(tmp_path, invite, capfd):
    rows = [(f"note {row}", LABELS[row % 3]) for row in range(60)]
    rows[4], rows[7], rows[9] = ("note", f"{LABELS[1]} "), ("note", LABELS[1].upper()), ("note", "#N/A")
    path = write_records(tmp_path / "own.csv", rows)
    done = init(tmp_path / "node", invite, path, "--labels", ",".join(LABELS), "--budget-epsilon", 4)
    assert done.returncode == 2
    assert f"labels: '{LABELS[1]} ' differs from '{LABELS[1]}' by case or blanks alone (1 record, line " in done.stderr
    assert "and 1 likely mistake more" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "node").exists()

    options = ("--labels", ",".join(LABELS), "--budget-epsilon", 4, "--table-checks", "warn")
    done = init(tmp_path / "node", invite, path, *options)
    assert done.returncode == 0, done.stderr
    assert f"warning: data = '{path}': labels: '#N/A' looks like a missing one (1 record, line 11)" in done.stdout
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
def test_a_node_reads_separators_by_the_header_and_encodings_by_name(
    tmp_path, invite, name, separator, encoding, options
):
    rows = [("note", "department"), *((f"Köln {row}", LABELS[row % 3]) for row in range(6))]
    (tmp_path / name).write_text("".join(separator.join(row) + "\n" for row in rows), encoding=encoding)
    given = ("--labels", ",".join(LABELS), "--budget-epsilon", 4)
    done = init(tmp_path / "node", invite, tmp_path / name, *given, *options)
    assert done.returncode == 0, done.stderr
    vault = Node.read(tmp_path / "node").vault
    config = parse({"data": ON_NODES, "test_data": "t.csv", "labels": ",".join(LABELS), "num_clients": 1})
    assert load_own(config, vault.source).clients[0].texts == tuple(f"Köln {row}" for row in range(6))


def test_a_node_that_names_no_encoding_is_told_the_line(tmp_path, invite):
    path = tmp_path / "own.csv"
    path.write_bytes(f"note,department\na,{LABELS[0]}\nKöln,{LABELS[1]}\n".encode("latin-1"))
    done = init(tmp_path / "node", invite, path, "--labels", ",".join(LABELS), "--budget-epsilon", 4)
    assert done.returncode == 2
    assert "line 3" in done.stderr
    assert "--encoding" in done.stderr
