"""A table means what its file says: values as written, holders apart, and one line for what cannot be read."""

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets
import pytest

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.data import _tables
from fedpriv.learning.data._tables import read_strictly, read_table, to_text, write_lines
from fedpriv.learning.data.federated import load
from fedpriv.learning.data.text import DataSource
from tests.marks import slow

ROOT = Path(__file__).resolve().parents[3]


def write(path: Path, header: str, rows) -> str:
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def federation(source: str, **changes):
    return load(parse({"data": source, "batch_size": 1, "num_clients": 2, **changes}))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("r.jsonl", b""),
        ("r.csv", b""),
        ("r.csv.gz", gzip.compress(b"")),
        ("r.csv.gz", b"text,label\na,b\n"),
        ("r.parquet", b"no parquet"),
        ("r.jsonl", b'{"text": \n'),
        ("r.csv", "text,label\ncafé,a\n".encode("latin-1")),
        ("r.csv", b"text,label\n"),
    ],
    ids=["empty jsonl", "empty csv", "empty gzip", "no gzip", "no parquet", "no json", "no utf-8", "no records"],
)
def test_unreadable_file_is_one_line_with_its_name(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_table(str(path))
    assert str(caught.value).startswith(f"data = '{path}': ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "row"),
    [
        (["PRIVATE,1,2"], "line 2: has 3 fields"),
        (["", "PRIVATE,1,"], "line 3: has 3 fields"),
        (["PRIVATE,1,2,3", "b,1"], "line 2: has 4 fields"),
        (["a,1", "PRIVATE,1,2"], "line 3: has 3 fields"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_record_with_more_fields_than_the_header_shifts_no_column(tmp_path, rows, row, suffix):
    text = "\n".join(["text,label", *rows, ""])
    path = tmp_path / f"r{suffix}"
    path.write_text(text if suffix == ".csv" else text.replace(",", "\t"))
    with pytest.raises(InputError, match=rf"^data = '{path}': {row}") as caught:
        read_table(str(path))
    assert "\n" not in str(caught.value)
    assert "PRIVATE" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nowhere/none.csv", "no such file"),
        ("none.jsonl", "no such file"),
        (str(ROOT), "is a folder"),
        ("nobody/nothing", "neither a file nor a data set"),  # which alone is looked up on the Hub
    ],
)
def test_what_is_no_file_is_one_line_naming_the_key(source, message):
    with pytest.raises(InputError, match=f"^test_data = '{source}': {message}") as caught:
        read_table(source, key="test_data")
    assert "\n" not in str(caught.value)


def test_csv_values_stay_as_written_and_a_missing_label_renames_no_other(tmp_path):
    data = to_text(read_table(write(tmp_path / "r.csv", "text,label", ["NA,007", "007,NA"])), parse({}))
    assert (data.texts, data.labels) == (("NA", "007"), ("007", "NA"))
    source = write(tmp_path / "r.csv", "text,label", [*(f"r{i},{i % 2}" for i in range(20)), "last,"])
    assert federation(source).label_names == ("0", "1")


def test_holders_whose_names_differ_by_leading_zeros_stay_apart(tmp_path):
    source = write(tmp_path / "r.csv", "text,label,site", [f"r{i},{i % 2},{('007', '7')[i // 10]}" for i in range(20)])
    with pytest.raises(InputError, match=r"clients: '7' differs from '007' by zeros alone .* table_checks = .warn."):
        federation(source, client_column="site")
    assert federation(source, client_column="site", table_checks="warn").client_names == ("007", "7")


@pytest.mark.parametrize("names", [("a", "b"), ("1", "2")], ids=["words", "numbers"])
def test_a_record_without_a_holder_or_with_one_that_is_no_name_is_refused(tmp_path, names):
    rows = [f"r{i},{i % 2},{(*names, '')[i % 3]}" for i in range(30)]
    source = write(tmp_path / "r.csv", "text,label,site", rows)
    with pytest.raises(InputError, match="clients: nobody holds some records"):
        federation(source, client_column="site")
    with pytest.raises(InputError, match="client_column = 'site'"):
        federation(source, client_column="site", table_checks="warn")
    rows = [json.dumps({"text": f"r{i}", "label": str(i % 2), "site": [i % 2]}) for i in range(20)]
    (tmp_path / "r.jsonl").write_text("\n".join(rows))
    with pytest.raises(InputError, match="client_column = 'site'"):
        federation(str(tmp_path / "r.jsonl"), client_column="site")


def test_a_data_set_on_the_hub_and_a_parquet_file_have_their_values_and_the_names_of_their_classes(
    tmp_path, monkeypatch
):
    text = datasets.Value("string")
    chat = [{"role": "user", "content": "x"}]
    features = {"text": text, "label": datasets.ClassLabel(names=["no", "yes"])}
    features["messages"] = [{"role": text, "content": text}]
    values = {"text": ["a", None], "label": [1, None], "messages": [chat, chat]}
    found = datasets.Dataset.from_dict(values, features=datasets.Features(features))
    monkeypatch.setattr(_tables, "hub_problem", lambda *_: "")
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: {("some/name", "test"): found}[name, split])
    assert read_table("some/name:test").columns == values | {"label": ["yes", None]}
    found.to_parquet(tmp_path / "r.parquet")
    assert read_table(str(tmp_path / "r.parquet")).names_of("label") == ["yes", None]


def test_missing_texts_count_as_empty_and_pairs_stay_aligned(tmp_path):
    rows = ['{"text": null, "label": "a", "other": "x"}', '{"text": "t", "label": "b", "other": null}']
    (tmp_path / "r.jsonl").write_text("\n".join(rows))
    data = to_text(read_table(str(tmp_path / "r.jsonl")), parse({"text_pair_column": "other"}))
    assert (data.texts, data.pairs, data.labels) == (("", "t"), ("x", ""), ("a", "b"))


def test_missing_column_names_key_column_and_what_there_is(tmp_path):
    table = read_table(write(tmp_path / "r.csv", "text,label", ["a,b"]))
    with pytest.raises(InputError, match=r"label_column = 'class': .*r\.csv has no such column; it has text, label"):
        table.require([("text_column", "text"), ("label_column", "class")])
    (tmp_path / "r.jsonl").write_text('{"text": "a", "": 1}\n')
    read_table(str(tmp_path / "r.jsonl")).require([("text_column", "text"), ("text_pair_column", "")])


BREAKS = b'text,label\nx,0\n"a letter\nof two lines",1\n'
# {case: (file, content, what is refused, texts of the file that `data lines` writes)}
SAME = {
    "line breaks": ("r.csv", BREAKS, r"line 3: a quote .*`fedpriv data lines`", ["x", "a letter\nof two lines"]),
    "one list": ("r.json", b'[\n{"text": "x", "label": "0"}]', r"line 1: cannot be read", ["x"]),
    "no such key": ("r.jsonl", b'{"text": "x", "label": "0"}\n{"text": "y"}\n', r"line 2.* has no", None),
    "fields": ("r.csv", b"text,label\nx,0\nx\n", r"line 3: has 1 field by comma, .* names 2; leave no", None),
    "latin-1": ("r.csv", "text,label\nx,0\ncafé,1\n".encode("latin-1"), r"line 3: .*--encoding latin-1", None),
}


@pytest.mark.parametrize("case", SAME)
def test_a_run_and_a_node_refuse_a_file_in_the_same_words_until_it_is_written_anew(tmp_path, case):
    name, content, words, texts = SAME[case]
    (tmp_path / name).write_bytes(content)
    source = str(tmp_path / name)
    with pytest.raises(InputError, match=words):
        read_strictly(DataSource(data=source))
    with pytest.raises(InputError, match=words):
        federation(source, table_checks="warn")
    if texts is not None:
        out = tmp_path / "lines.jsonl"
        write_lines(source, out)
        assert [record.text for record in read_strictly(DataSource(data=str(out)))] == texts
        assert read_table(str(out)).columns["text"] == texts


LOADS = """
from fedpriv.config import parse
from fedpriv.learning.data.federated import load
for rule in ({"client_column": "site"}, {"num_clients": 3}, {"partition": "dirichlet", "dirichlet_alpha": 5.0}):
    load(parse({"data": SOURCE, "batch_size": 1, **rule}))
"""


@pytest.mark.parametrize("in_own_process", [False, *slow(True)])
def test_no_file_written_while_loading_holds_a_private_record(tmp_path, monkeypatch, in_own_process):
    """In a process of its own, folders that libraries fix at import are under the test's eyes too."""
    source = write(tmp_path / "r.csv", "text,label,site", [f"PRIVATE{i},{i % 2},s{i % 3}" for i in range(60)])
    homes = [tmp_path / name for name in ("TMPDIR", "HF_HOME", "HOME", "XDG_CACHE_HOME")]
    for folder in homes:
        folder.mkdir()
        monkeypatch.setenv(folder.name, str(folder))
    code = LOADS.replace("SOURCE", repr(source))
    if in_own_process:
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(homes[0]))
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", homes[1])
        exec(code, {})
    files = [file for folder in homes for file in folder.rglob("*") if file.is_file()]
    assert not [file for file in files if b"PRIVATE" in file.read_bytes() or "fedpriv" in file.name]
