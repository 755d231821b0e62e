"""The papers' rows: each has a command that can be typed, and a figure that stored lines give."""

import argparse
import importlib
import json
import random
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedpriv import apps
from fedpriv.errors import InputError
from simulations.studies import public_data, reproduce
from simulations.studies._integral_runs import SOURCES
from simulations.studies.harness import lines
from simulations.studies.language_models import TASKS
from simulations.studies.reproduce import RESULTS, STATUSES, Row, papers
from tests.cli.command_line import fedpriv
from tests.test_docs_code import check

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
ROWS = {row.key: row for rows in papers().values() for row in rows.values()}


def test_every_row_has_a_figure_of_stored_lines_or_says_what_is_missing():
    for row in ROWS.values():
        assert row.status in STATUSES, row.key
        is_shown = row.figure() != "not run"
        assert is_shown == (row.status not in ("not run", "missing")), row.key
        assert is_shown or row.why, row.key
        assert row.command or not is_shown, row.key
        assert "{" in row.ours or not any(map(str.isdigit, row.ours)), f"{row.key}: a figure without a line"


class ParsedError(Exception):
    """The arguments were understood, and nothing is to be run."""


def test_every_command_can_be_typed(monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser, *given):
        parse(parser, *given)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    for command in dict.fromkeys(row.command for row in ROWS.values() if row.command):
        words = shlex.split(command)
        if words[0] == "fedpriv":
            check("fedpriv", words[1:], whole=True)
        else:
            assert words[:2] == ["python", "-m"], command
            module = words[2] if "dedup" not in words[2] else f"{words[2]}.__main__"
            monkeypatch.setattr(sys, "argv", words[2:])
            with pytest.raises(ParsedError):
                importlib.import_module(module).main()


def test_lines_of_one_pattern_are_averaged_and_of_several_are_numbered(tmp_path):
    (tmp_path / "study.jsonl").write_text('{"key": "a/0", "x": {"y": [1, 2]}}\n{"key": "a/1", "x": {"y": [2, 5]}}\n')
    own = {"paper": "p", "name": "n", "item": "", "theirs": "", "lines": [["study", "a/*"], ["study", "a/1"]]}
    assert Row(**own, ours="{x[y][1]:.1f} {1[x][y][1]}").figure(tmp_path) == "3.5 5"
    assert Row(**own | {"lines": [["study", "b"]]}, ours="{x}").figure(tmp_path) == "not run"


def test_a_row_is_listed_run_and_told(tmp_path):
    assert f"dp-lora: {len(papers()['dp-lora'])} rows: " in fedpriv("reproduce", folder=tmp_path)[0]
    said, _ = fedpriv("reproduce", "lmo-dp", folder=tmp_path)
    assert "figure-6a (justified): Figure 6 (a)" in said
    row = ROWS["integral-privacy/size-ai4i"]
    said, _ = fedpriv("reproduce", "integral-privacy", "size-ai4i", "--out", "here", folder=tmp_path)
    assert said.endswith(f"theirs: {row.theirs}\nours: {row.figure()}\nok\n")
    assert [line["key"] for line in lines(tmp_path / "here" / "papers.jsonl")] == [row.key]
    said, _ = fedpriv("reproduce", "integral-privacy", "table-2-adult-dnn-1", "--stored", folder=tmp_path)
    assert "ours: 34 of 34, 0.8499" in said
    _, refused = fedpriv("reproduce", "dp-lora", "table-99", folder=tmp_path, code=2)
    assert "ROW = 'table-99': must be one of" in refused
    with pytest.raises(InputError, match="nothing here computes it"):
        replace(row, command="").run(tmp_path, tmp_path)


def test_an_installed_fedpriv_says_that_it_needs_a_clone(monkeypatch):
    monkeypatch.setattr(apps, "CHECKOUT", None)
    with pytest.raises(InputError, match="run it in a clone of the repository"):
        apps.program("simulations.studies.reproduce")


def test_raw_public_files_become_the_tables_that_studies_read(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    record = ", ".join(["39", *["x"] * 13])
    (raw / "adult.data").write_text(f"{record}, <=50K\n")
    (raw / "adult.test").write_text(f"|1x3 Cross validator\n{record}, >50K.\n")
    (raw / "train.tsv").write_text('sentence\tlabel\n"kids , spirit\t1\n')
    (raw / "Sentences_50Agree.txt").write_text("a@b rose .@positive\n")
    for part, score in (("headline", -0.6), ("post", -0.2)):
        told = {"sentence": part, "info": [{"sentiment_score": str(score)}, {"sentiment_score": "0.2"}]}
        (raw / f"task1_{part}_ABSA_train.json").write_text(json.dumps({"1": told}))
    (raw / "piqa").mkdir()
    (raw / "piqa" / "valid.jsonl").write_text('{"goal": "g", "sol1": "x", "sol2": "y"}\n')
    (raw / "piqa" / "valid-labels.lst").write_text("1\n")
    asked = "<MESSAGE> Why ? </MESSAGE><NIST-PARAPHRASE/><RefAnswer><ANSWER> So\n. </ANSWER></RefAnswer>"
    (raw / "TREC-2017-LiveQA-Medical-Test.xml").write_text(f"<L><NLM-QUESTION>{asked}</NLM-QUESTION></L>")
    pair = "<Question qtype='causes'>Why ?</Question><Answer>Key \n points</Answer>"
    (raw / "1.xml").write_text(f"<Document source='NIH'><Focus>ALL</Focus><QAPair>{pair}</QAPair></Document>")
    said = dict(line.split(": ", 1) for line in public_data.prepare(tmp_path))
    assert said["Adult, training"] == "1 records in adult.csv.gz; the studies had 32561"
    assert said["SUSY"].startswith("SUSY.csv.gz is missing; https://")
    adult = public_data.pd.read_csv(tmp_path / "adult_whole.csv.gz")
    assert adult[["age", "income"]].to_dict("list") == {"age": [39, 39], "income": ["<=50K", ">50K"]}
    for name, records in (
        ("fpb", [["a@b rose .", "positive"]]),
        ("fiqa", [["headline", "negative"], ["post", "neutral"]]),
        ("piqa", [["g", "x", "y", 1]]),
        ("liveqa", [["Why ?", "So ."]]),
    ):
        assert public_data.pd.read_csv(tmp_path / f"{name}.csv.gz").values.tolist() == records
    assert public_data.pd.read_csv(tmp_path / "sst2_train.csv.gz")["text"].tolist() == ['"kids , spirit']
    (medquad,) = public_data.pd.read_csv(tmp_path / "medquad.csv.gz").to_dict("records")
    assert medquad == {
        "answer": "Key points", "question_type": "causes", "source": "NIH", "question": "Why ?", "focus": "ALL",
    }  # fmt: skip
    assert "Adult, whole: adult_whole.csv.gz is there" in public_data.prepare(tmp_path)


def in_small(row: Row) -> Row | None:
    """The row with the cheapest of its lines alone, if that takes 20 s at most; a command of `fedpriv` as it is.

    None also where a table is not at hand.
    """
    if "{" not in row.ours or not row.command:
        return None
    read = [word.removeprefix("FOLDER/") for word in shlex.split(row.command) if word.startswith("FOLDER/")]
    if not all((DATA / name).is_file() for name in read):
        return None
    if not row.study:
        return row
    known = {str(line.get("key")): line for line in lines(RESULTS / f"{row.study}.jsonl")}
    patterns = [pattern for study, pattern in row.places if study == row.study]
    found = {key: line for key, line in known.items() if reproduce.is_asked(key, patterns)}
    key = min(found, key=lambda key: found[key].get("seconds", 1e9), default=None)
    if row.study == "dedup" or key is None or found[key].get("seconds", 1e9) > 20:
        return None
    name = key.split("/")[1] if row.study == "integral" else key.split("/")[0]
    read = SOURCES[name].file if row.study == "integral" else TASKS.get(name, {"data": ""})["data"]
    if not (DATA / read).exists():
        return None
    command = f"python -m simulations.studies.{row.study} run --data FOLDER --only {shlex.quote(key)}"
    return replace(row, command=command, ours="{seconds}", lines=())


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="needs the public data in ../shared/data")
def test_twelve_rows_run_in_small(tmp_path):
    small = [row for row in map(in_small, ROWS.values()) if row]
    for row in random.Random(len(ROWS)).sample(small, 12):
        folder = tmp_path / row.key  # two papers may have rows of one name
        row.run(DATA, folder)
        assert row.figure(folder) != "not run", row.key
