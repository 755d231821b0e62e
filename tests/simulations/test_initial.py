"""`fedpriv init` writes a configuration that `config check` accepts and `run` runs."""

import contextlib
import csv
import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpriv.config import parse, read
from fedpriv.runs.plan import preflight
from server.observer import LogObserver
from simulations import initial
from simulations.__main__ import app
from simulations.engines import federation
from tests.tiny import write_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def letters(tmp_path):
    """A table with a column that looks like each of the three, and others that do not."""
    rows = [["id", "body", "ward", "hospital", "sex"]]
    for row in range(120):
        text = f"the patient says number {row} hurts since {row % 7} days, and asks what to do"
        rows.append([row, text, ("skin", "heart", "bone")[row % 3], f"St. {'ABCD'[row % 4]}", "mf"[row % 2]])
    return write_rows(tmp_path / "letters.csv", rows)


def init(folder, *options):
    """(exit code, stdout and stderr) of the command, where nobody can answer."""
    with contextlib.chdir(folder):
        result = CliRunner().invoke(app, ["init", *map(str, options)])
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def made(folder, *options, file):
    """The configuration that the command writes, and what it says."""
    code, said = init(folder, *options)
    assert code == 0, said
    return parse(read(folder / file)), said


def test_columns_are_proposed_and_the_file_is_what_a_run_takes(letters, tmp_path):
    """With advice for a private table, and without a statement, a record or a class; what to run next can be pasted."""
    config, said = made(tmp_path, letters, "--label", "ward", "--out", file := "a study; of $HOME.toml", file=file)
    (line,) = [line for line in said.splitlines() if line.startswith("next: ")]
    assert shlex.split(line)[1:] == ["fedpriv", "run", file]
    text = (tmp_path / file).read_text()
    assert (config.text_column, config.label_column, config.client_column) == ("body", "ward", "hospital")
    assert (config.target_epsilon, config.data) == (2.3, str(letters))
    preflight.check(config)
    assert not [
        key for key in ("test_data", "evaluation_noise_multiplier", "public_data") if f"\n# {key} = " not in text
    ]
    assert not config.data_are_public
    assert not [word for word in ("patient", "skin", "heart", "St. A") if word in text]


def test_a_budget_comes_with_a_ledger_and_bounds_the_run(letters, tmp_path):
    config, _ = made(tmp_path, letters, "--label", "ward", "--budget", 1.5, file="letters.toml")
    assert (config.budget_epsilon, config.target_epsilon) == ((1.5,), 1.5)
    assert config.ledger == str(tmp_path / "letters-ledger.sqlite")
    assert not Path(config.ledger).exists()


def test_an_existing_file_stays_unless_forced(letters, tmp_path):
    (tmp_path / "letters.toml").write_text("mine")
    code, said = init(tmp_path, letters)
    assert code == 2
    assert "exists; name another file, or replace it with --force" in said
    assert (tmp_path / "letters.toml").read_text() == "mine"
    forced = ("--label", "ward", "--public-data", "--client", "", "--force")
    config, _ = made(tmp_path, letters, *forced, file="letters.toml")
    assert config.public_data
    assert (config.client_column, config.partition, config.num_clients) == ("", "iid", 5), "dealt out without a holder"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none.csv"], "file = 'none.csv': no such file"),
        ([], "file: name the file"),
        (["letters.csv", "--text", "txt"], "text = 'txt': no such column; there are id, body, ward"),
        (["letters.csv", "--label", "body"], "must be different ones"),
        (["letters.csv", "--label", "ward", "--epsilon", "-1"], "target_epsilon = -1"),
        (["letters.csv", "--label", "ward", "--test-data", "none.csv"], "none.csv': no such file"),
        (["letters.csv", "--label", "ward", "--test-data", "letters.csv"], "letters.csv': is the file of data"),
        (["letters.csv", "--label", "ward", "--out", "nowhere/x.toml"], "nowhere/x.toml': cannot be written"),
        (["letters.csv", "--label", "ward", "--out", "place", "--force"], "cannot be written (Is a directory)"),
        (["letters.csv"], "label: 'sex' may hold the class to be predicted; say so with --label"),
        (["letters.csv", "--client", "hospital", "--clients", "3"], "but client = 'hospital' says who holds them"),
        (["t.jsonl", "--label", "ward"], "there are te\ufffdxt, \ufffd[2Jlabel"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(letters, tmp_path, options, message):
    """Names of columns do not steer the terminal either."""
    (tmp_path / "place").mkdir()
    (tmp_path / "t.jsonl").write_text(json.dumps({"te\nxt": "words", "\x1b[2Jlabel": "a"}))
    before = sorted(tmp_path.rglob("*"))
    code, said = init(tmp_path, *options)
    assert code == 2
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_names_cannot_break_out_of_their_line(tmp_path):
    """Whoever names a column in the file cannot add a key, such as a statement that the data are public."""
    evil = 'x"\npublic_data = true\ny = "'
    rows = [json.dumps({"text": f"some words {row}", evil: "ab"[row % 2]}) for row in range(40)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    config, _ = made(tmp_path, "t.jsonl", "--label", evil, "--client", "", file="t.toml")
    assert (config.label_column, config.public_data) == (evil, False)


@pytest.mark.slow
def test_a_person_is_asked_a_question_for_each_column_and_the_result_runs(letters, tmp_path, tiny_bert):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "simulations", "init"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"letters.csv\nbody\nward\n\nbudget 3\n")
    said = b""
    while process.poll() is None or b"next:" not in said:
        try:
            said += os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
    assert process.wait() == 0, said
    assert said.count(b"?") == 5
    assert b"Which holds the class to be predicted? A guess: sex; type its name" in said
    assert b"Which says who holds a record (- for none)? A guess: hospital" in said
    assert b"  ward      skin | heart | bone" in said
    config = parse(read(tmp_path / "letters.toml") | {"out": str(tmp_path / "run"), "model": str(tiny_bert)})
    assert config.budget_epsilon == (3.0,)
    federation.run(parse(read(tmp_path / "letters.toml") | {"out": config.out, "model": config.model}), LogObserver())
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.fixture
def visits(letters):
    """The same with a column of patients, of whom each has three letters to one hospital."""
    header, *rows = csv.reader(letters.read_text().splitlines())
    return write_rows(letters, [[*header, "mrn"], *([*row, f"{int(row[0]) % 40:04}"] for row in rows)])


def test_a_column_of_persons_makes_these_the_unit_and_a_person_is_asked_for_it(visits, tmp_path, monkeypatch):
    columns = ("--text", "body", "--label", "ward", "--client", "hospital")
    config, said = made(tmp_path, visits, *columns, file="letters.toml")
    assert "column 'mrn': looks like persons, 40 in 120 records" in said
    assert config.unit == "record"
    config, said = made(tmp_path, visits, *columns, "--person", "mrn", "--force", file="letters.toml")
    assert (config.unit, config.person_column) == ("person", "mrn")
    assert "each person of 'mrn' protected" in said
    assert "looks like persons" not in said
    code, said = init(tmp_path, visits, *columns, "--person", "nobody", "--force")
    assert (code, "person = 'nobody': no such column" in said) == (2, True)

    asked = []
    monkeypatch.setattr(initial, "_ask", lambda question, default, **_: (asked.append(question), default)[1])
    table = initial._table(visits, parse({}))
    given = initial._Answers(data=visits, layout=parse({}), text="body", label="ward", client="hospital")
    assert initial._with_person(given, table, None, asks=True).person == "mrn"
    assert initial._with_person(given, table, "", asks=True).person == ""
    assert len(asked) == 1


def stranger(path, **more):
    """A table whose names of columns tell little, {column: its values in turn}."""
    columns = {"Farbe": ["rot", "blau", "gelb"], **more}
    with path.open("w", newline="") as file:
        rows = csv.writer(file, delimiter=";")
        rows.writerow(["Befund", *columns])
        for row in range(240):
            rows.writerow(
                [f"Befund Nummer {row} von heute", *(values[row % len(values)] for values in columns.values())]
            )
    return path


CITIES, SEXES, AGES = ["Ulm", "Köln", "Bonn", "Jena", "Kiel"], ["m", "f"], [str(age) for age in range(20, 50)]


def test_the_column_of_clients_is_found_by_its_values(tmp_path):
    path = stranger(tmp_path / "s.csv", Ort=CITIES, Sex=SEXES, Alter=AGES)
    config, said = made(tmp_path, path, "--label", "Farbe", file="s.toml")
    assert (config.text_column, config.client_column) == ("Befund", "Ort")
    assert "client 'Ort'" in said
    preflight.check(config)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "no column seems to say who holds a record"),
        ({"Sex": SEXES, "Alter": AGES}, "no column seems to say who holds a record"),
        ({"Ort": CITIES, "Stadt": CITIES[:4]}, "'Ort' (5 values), 'Stadt' (4 values) could say who holds a record"),
    ],
)
def test_without_a_terminal_no_partition_is_guessed(tmp_path, more, message):
    code, said = init(tmp_path, stranger(tmp_path / "s.csv", **more), "--label", "Farbe")
    assert code == 2
    assert said == f"error: client: {message}; give --client COLUMN, or --client '' to deal records out at random\n"
    assert not (tmp_path / "s.toml").exists()


def test_a_refused_table_gets_a_file_that_says_what_to_mend_and_no_value_of_a_cell(tmp_path):
    path = stranger(tmp_path / "s.csv", Ort=["Bonn"] * 20 + ["Bnon"] + ["Jena"] * 3)
    code, said = init(tmp_path, path, "--label", "Farbe", "--client", "Ort")
    assert code == 1
    assert "'Bnon' is likely a misspelt 'Bonn'" in said
    assert f"fedpriv data check {path} --text Befund --label Farbe --client Ort" in said
    assert "next:" not in said
    text = (tmp_path / "s.toml").read_text()
    assert '# - misspelt clients: column "Ort", lines 22, 46, 70' in text
    assert not [word for word in ("Bnon", "Bonn", "Jena", "blau") if word in text]
    assert parse(read(tmp_path / "s.toml")).client_column == "Ort"


@pytest.mark.parametrize(
    ("text", "label", "holder"),
    [
        ("Befund", "Diagnose", "Klinik"),
        ("compte_rendu", "Catégorie", "Hôpital"),
        ("Descripción", "Diagnóstico", "centro"),
    ],
)
def test_usual_names_are_known_in_four_languages_with_and_without_accents(tmp_path, text, label, holder):
    rows = [f"some words number {row},{'abc'[row % 3]},site {row % 4}" for row in range(120)]
    (tmp_path / "t.csv").write_text("\n".join([f"{text},{label},{holder}", *rows]) + "\n")
    _, said = made(tmp_path, "t.csv", file="t.toml")
    assert f"text {text!r}, label {label!r}, client {holder!r}" in said


def test_records_are_dealt_out_as_told_and_a_person_may_be_at_two_holders(visits, tmp_path):
    columns = ("--text", "body", "--label", "ward")
    dealt, _ = made(tmp_path, visits, *columns, "--clients", 3, "--partition", "dirichlet", file="letters.toml")
    assert (dealt.partition, dealt.num_clients, dealt.client_column) == ("dirichlet", 3, "")
    more = ("--client", "hospital", "--person", "mrn", "--holders", 2, "--force")
    assert made(tmp_path, visits, *columns, *more, file="letters.toml")[0].holders_per_person == 2


def test_how_a_table_is_read_is_written_down(tmp_path):
    path = stranger(tmp_path / "s.csv", Ort=CITIES)
    path.write_bytes(path.read_text().encode("latin-1"))
    assert "--encoding latin-1" in init(tmp_path, path, "--label", "Farbe")[1]
    how = ("--encoding", "latin-1", "--separator", "semicolon")
    config, _ = made(tmp_path, path, "--label", "Farbe", *how, file="s.toml")
    assert (config.encoding, config.separator) == ("latin-1", "semicolon")
    preflight.check(config)
