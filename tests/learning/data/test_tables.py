"""A table means what its file says: values as written, holders apart, and one line for what cannot be read.

A node reads each of its own records by itself, so none decides how, or whether, another is read.
"""

import csv
import gzip
import io
import json
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.config import ON_NODES, parse
from fedpriv.errors import InputError
from fedpriv.learning.data import Roles, _tables, write_mended
from fedpriv.learning.data._tables import read_strictly, read_table, to_text, write_lines
from fedpriv.learning.data.federated import load, load_own
from fedpriv.learning.data.text import DataSource, TextData
from tests.marks import slow

ROOT = Path(__file__).resolve().parents[3]


def write(path: Path, header: str, rows) -> str:
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def federation(source: str, **changes):
    return load(parse({"data": source, "batch_size": 1, "num_clients": 2, **changes}))


def as_a_node(source: str):
    return read_strictly(DataSource(data=source))


# A simulation refuses them whatever it lets pass otherwise.
READERS = (read_table, as_a_node, partial(federation, table_checks="warn"))
# {rows: what is said of the one with too many fields}
TOO_MANY = {
    "PRIVATE,1,2": "line 2: has 3 fields",
    "\nPRIVATE,1,": "line 3: has 3 fields",
    "PRIVATE,1,2,3\nb,1": "line 2: has 4 fields",
    "a,1\nPRIVATE,1,2": "line 3: has 3 fields",
}
UNREADABLE = [
    *(("r.csv", content, "holds no records") for content in ("", "text,label\n", "text,label\n\n")),
    *(("r.jsonl", "", "holds no records"), ("r.csv.gz", gzip.compress(b"", mtime=0), "holds no records")),
    *(("r.csv.gz", content, "cannot be read") for content in ("x", "text,label\na,b\n")),
    *(("r.parquet", content, "cannot be read") for content in ("x", "no parquet")),
    *(("r.txt", "x", "unknown format"), ("r.jsonl", '{"text": \n', "line 1: cannot be read")),
    ("r.csv", "text,label\nx,0\ncafé,1\n".encode("latin-1"), "line 3: .*--encoding latin-1"),
    *(("r.csv", f"text,label\n{rows}\n", said) for rows, said in TOO_MANY.items()),
    *(("r.tsv", f"text,label\n{rows}\n".replace(",", "\t"), said) for rows, said in TOO_MANY.items()),
    ("r.csv", "text,label\na,b,c\n", "line 2: has 3 fields by comma, .* names 2; quote fields that hold a comma"),
    ("r.csv", "text,label\na,b\n\nc\n", "line 4: has 1 field by comma, but the header names 2; leave no field out"),
    ("r.csv", "text;label\na;b\nc,d\n", "line 3: has 1 field by semicolon, .* names 2; .* separated by comma"),
    ("r.csv", 'text,label\na,b\n"c\nd,e\n', "line 3: a quote opens here and is not closed"),
    ("r.csv", 'text,label\n"a b",b\n"c" d,e\n', "line 3: cannot be read"),
    ("r.csv", "text,label,text\na,b,c\n", "line 1: the header names 'text' twice"),
]


@pytest.mark.parametrize(("name", "content", "message"), UNREADABLE)
def test_what_cannot_be_read_is_one_line_with_the_file_and_the_place_and_no_value(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    for read in READERS:
        with pytest.raises(InputError, match=f"^data = '{path}': {message}") as caught:
            read(str(path))
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


def test_values_stay_as_written_missing_texts_are_empty_and_a_missing_label_renames_no_other(tmp_path):
    data = to_text(read_table(write(tmp_path / "r.csv", "text,label", ["NA,007", "007,NA"])), parse({}))
    assert (data.texts, data.labels) == (("NA", "007"), ("007", "NA"))
    first, *rest = ['{"text": null, "label": "a", "other": "x"}', '{"text": "t", "label": "b", "other": null}']
    data = to_text(read_table(write(tmp_path / "r.jsonl", first, rest)), parse({"text_pair_column": "other"}))
    assert (data.texts, data.pairs, data.labels) == (("", "t"), ("x", ""), ("a", "b"))
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


def test_a_data_set_on_the_hub_and_a_parquet_file_have_their_values_and_names_of_classes(tmp_path, monkeypatch):
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


def test_missing_column_names_key_column_and_what_there_is(tmp_path):
    table = read_table(write(tmp_path / "r.csv", "text,label", ["a,b"]))
    with pytest.raises(InputError, match=r"label_column = 'class': .*r\.csv has no such column; it has text, label"):
        table.require([("text_column", "text"), ("label_column", "class")])
    (tmp_path / "r.jsonl").write_text('{"text": "a", "": 1}\n')
    read_table(str(tmp_path / "r.jsonl")).require([("text_column", "text"), ("text_pair_column", "")])
    (tmp_path / "r.jsonl").write_text('{"text": "x", "label": "0"}\n{"text": "y"}\n')
    for read in READERS[1:]:
        with pytest.raises(InputError, match=r"line 2.* has no"):
            read(str(tmp_path / "r.jsonl"))
    with pytest.raises(InputError, match=r"text_column = 'text': .* has no such column; it has note, label"):
        as_a_node(write(tmp_path / "r.csv", "note,label", ["a,0"]))


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


# ---------------------------------------------------------------- records of a node

LABELS = ("0", "1")
RECORDS = [("a cough", "0"), ('fever, and\ta "cold"', "1"), ("", "0"), ("naïve  text ", "1"), ("7", "0")]

CSV = ["a,b,c", b"caf\xe9,0", '"unclosed,0', 'z,"unclosed', '"a"b,0', "nul\x00,0", "a", "a\rb,0", '","', '"', "x,0"]
CSV += [f"{'x' * 200_000},1", '"two"",0', '"",', ",", "\ufeffa,0"]
JSON = ["{broken", '{"text": "x"', "[1]", "7", '{"text": "a"}', '{"label": "0"}', "[" * 100_000, "9" * 5000]
JSON += ['{"text": {"a": [1, null]}, "label": "0"}', '{"text": "a", "label": 0.5}', '{"text": 7, "label": true}']
JSON += [b"PK\x03\x04", b"\x1f\x8b\x08", "version https://git-lfs.github.com/spec/v1", '{"text": "a", "label": NaN}']
JSON += ['{"text": "\\ud800", "label": 0}', '{"text": "a", "label": 0, "x": {"y": 1}}', '{"text": null, "label": null}']
JSON += ['{"text": "x", "label": 1e400}', b'{"text": "caf\xe9", "label": 0}', '\ufeff{"text": "a", "label": 0}']


def own(path: Path, **columns: str) -> TextData:
    """The node's records as a run with these labels has them."""
    config = parse({"data": ON_NODES, "test_data": "t.csv", "labels": ",".join(LABELS), "num_clients": 1})
    return load_own(config, DataSource(data=str(path), **columns)).clients[0]


def csv_lines(delimiter: str = ",") -> list[bytes]:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows([("text", "label"), *RECORDS])
    return [line.encode() + b"\n" for line in file.getvalue().split("\n")[:-1]]


def json_lines(*, numbers: bool) -> list[bytes]:
    rows = [{"text": text, "label": int(label) if numbers else label} for text, label in RECORDS]
    return [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]


def written(path: Path, lines: list[bytes]) -> Path:
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        file.writelines(lines)
    return path


def difference(one: TextData, other: TextData) -> int:
    """How many records are in one and not in the other, or the other way round."""
    here, there = (Counter(zip(data.texts, data.labels, strict=True)) for data in (one, other))
    return ((here - there) + (there - here)).total()


FILES = {
    "r.csv": csv_lines(),
    "r.tsv": csv_lines("\t"),
    "r.csv.gz": csv_lines(),
    "r.jsonl": json_lines(numbers=False),
    "numbers.jsonl": json_lines(numbers=True),
    "r.json.gz": json_lines(numbers=True),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_records_in_their_order(tmp_path, name):
    data = own(written(tmp_path / name, FILES[name]))
    assert list(zip(data.texts, data.labels, strict=True)) == RECORDS


@pytest.mark.parametrize("where", ["second", *slow("first", "last")])
@pytest.mark.parametrize(
    ("name", "bad"),
    [("r.csv", line) for line in CSV]
    + [("r.tsv", line.replace(",", "\t") if isinstance(line, str) else line.replace(b",", b"\t")) for line in CSV]
    + [(name, line) for name in ("r.jsonl", "numbers.jsonl") for line in JSON],
    ids=lambda value: repr(value)[:40],
)
def test_one_line_changes_what_one_record_is(tmp_path, name, bad, where):
    lines, line = FILES[name], bad.encode() if isinstance(bad, str) else bad
    num_headers = 0 if name.endswith("jsonl") else 1
    place = {"first": num_headers, "second": num_headers + 1, "last": len(lines)}[where]
    without = own(written(tmp_path / name, lines))
    with_it = own(written(tmp_path / f"more-{name}", [*lines[:place], line + b"\n", *lines[place:]]))
    assert len(without) == len(RECORDS)
    assert difference(with_it, without) <= 1


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(line=st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), place=st.integers(0, len(RECORDS)))
def test_no_line_whatever_changes_more_than_one_record(tmp_path_factory, name, line, place):
    lines, folder = FILES[name], tmp_path_factory.mktemp("lines")
    place += len(lines) - len(RECORDS)
    with_it = own(written(folder / name, [*lines[:place], line + b"\n", *lines[place:]]))
    assert difference(with_it, own(written(folder / f"more-{name}", lines))) <= 1


def test_two_unclosed_quotes_do_not_swallow_what_is_between_them(tmp_path):
    lines = FILES["r.csv"]
    middle = len(lines) // 2
    between = [lines[0], b'z,"open\n', *lines[1:middle], b'"\n', *lines[middle:], b'"close,0\n']
    assert difference(own(written(tmp_path / "r.csv", between)), own(written(tmp_path / "o.csv", lines))) == 0


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (['"2024-01-05"', '"2024-01-05 00:00:00"', '"2024-01-05T00:00:00Z"'], None),
        (["98765432109876543210", "98765432109876543211"], None),
        (["90071992547409931", "90071992547409932", "0.5"], None),
        (["250.1", "250.10", "1e3", "1e400"], None),
        (["7", '"a"', '"01"', '"NA"'], None),
        (["true", '"yes"'], ["True", "yes"]),
        (["null", "NaN", '"a"'], [None, None, "a"]),
    ],
)
def test_a_run_a_node_and_what_is_written_again_have_the_values_as_written(tmp_path, written, read):
    path, lines, fixed = (tmp_path / name for name in ("r.jsonl", "lines.jsonl", "fixed.jsonl"))
    rows = [f'{{"text": "t{row}", "label": {value}}}' for row, value in enumerate(written)]
    path.write_text("\n".join(rows) + "\n")
    expected = read or [value.strip('"') for value in written]
    write_lines(str(path), lines)
    write_mended(read_table(str(path)), Roles(("text",), label="label"), fixed)
    for file in (path, lines, fixed):
        kept = [label for label in expected if label is not None or file != fixed]
        assert read_table(str(file)).names_of("label") == kept
        assert [record.label for record in as_a_node(str(file))] == kept


def test_values_are_as_written_whatever_other_records_hold(tmp_path):
    rows = [b'{"text": "2020-01-01", "label": 0}', b'{"text": 1.0, "label": "1"}', b'{"text": true, "label": 0.0}']
    data = own(written(tmp_path / "r.jsonl", [row + b"\n" for row in rows]))
    assert (data.texts, data.labels) == (("2020-01-01", "1.0"), ("0", "1"))


def test_a_record_needs_the_columns_that_its_run_names(tmp_path):
    rows = [b'{"a": "x", "b": "y", "c": "0"}\n', b'{"a": "x", "c": "0"}\n', b'{"a": null, "b": "z", "c": "1"}\n']
    data = own(written(tmp_path / "r.jsonl", rows), text_column="a", text_pair_column="b", label_column="c")
    assert (data.texts, data.pairs, data.labels) == (("x", ""), ("y", "z"), ("0", "1"))
    path = written(tmp_path / "r.csv", [b"text\n", b"a\n", b'"b\n', b"c\n"])
    config = parse({"data": ON_NODES, "test_data": "t.csv", "task": "CAUSAL_LM", "num_clients": 1})
    assert load_own(config, DataSource(data=str(path))).clients[0] == TextData(("a", "c"), ()), "no label"


def test_a_late_type_or_column_that_no_run_reads_changes_nothing(tmp_path):
    """Beyond 10 MB, where libraries have decided on the types of a file's columns."""
    rows = [{"text": f"t{row} {'x' * 20_000}", "label": row % 2, "note": None} for row in range(600)]
    rows += [{"text": "t", "label": "01", "note": "late"}, {"text": "t", "label": 1}]
    path = written(tmp_path / "r.jsonl", [json.dumps(row).encode() + b"\n" for row in rows])
    assert path.stat().st_size > 10 * 2**20
    table = read_table(str(path))
    table.require([("text_column", "text"), ("label_column", "label")])
    assert table.names_of("label")[-3:] == ["1", "01", "1"]
    assert [record.label for record in as_a_node(str(path))][-3:] == ["1", "01", "1"]


def test_a_bad_value_in_parquet_is_one_record(tmp_path):
    """Text that is not UTF-8, and a label beyond the classes' names: converted at once, the column would be lost."""
    texts = [text.encode() for text, _ in RECORDS] + [b"caf\xe9", b"a"]
    labels = [int(label) for _, label in RECORDS] + [0, 99]
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["0", "1"])})
    schema = features.arrow_schema
    strings = pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())
    pq.write_table(pa.Table.from_arrays([strings, pa.array(labels, pa.int64())], schema=schema), tmp_path / "r.parquet")
    data = own(tmp_path / "r.parquet")
    assert list(zip(data.texts, data.labels, strict=True)) == RECORDS


@pytest.mark.parametrize("name", ["r.csv", "r.tsv", "r.csv.gz", "r.json", "r.parquet"])
def test_a_run_and_a_node_refuse_line_breaks_within_a_record_until_the_file_is_written_anew(tmp_path, name):
    rows = [*RECORDS, ("two\r\nlines\n\nand, more", "1"), ('"\n', "0")]
    path, out = tmp_path / name, tmp_path / "lines.jsonl"
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]}), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"text": text, "label": label} for text, label in rows]).replace("[", "[\n"))
    else:
        with gzip.open(path, "wt", newline="") if path.suffix == ".gz" else path.open("w", newline="") as file:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([("text", "label"), *rows])
    said = r"line 1: cannot be read" if name == "r.json" else r"line 7: a quote .*`fedpriv data lines`"
    for read in READERS[1:] if name != "r.parquet" else ():
        with pytest.raises(InputError, match=said):
            read(str(path))
    assert write_lines(str(path), out) == len(rows)
    assert [(record.text, record.label) for record in as_a_node(str(out))] == rows
    assert [text or "" for text in read_table(str(out)).columns["text"]] == [text for text, _ in rows]
    assert out.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InputError, match="exists"):
        write_lines(str(path), out)
