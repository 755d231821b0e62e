"""A node's own records: each is read on its own, so none decides how, or whether, another is read."""

import csv
import gzip
import io
import json
from collections import Counter
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.config import ON_NODES, parse
from fedpriv.errors import InputError
from fedpriv.learning.data import Roles, write_mended
from fedpriv.learning.data._tables import read_strictly, read_table, write_lines
from fedpriv.learning.data.federated import load_own
from fedpriv.learning.data.text import DataSource, TextData
from tests.marks import slow

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


def counted(data: TextData) -> Counter[tuple[str, str]]:
    return Counter(zip(data.texts, data.labels, strict=True))


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
    return sum(((counted(one) - counted(other)) + (counted(other) - counted(one))).values())


def as_bytes(line: str | bytes) -> bytes:
    return (line.encode() if isinstance(line, str) else line) + b"\n"


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
    lines = FILES[name]
    num_headers = 0 if name.endswith("jsonl") else 1
    place = {"first": num_headers, "second": num_headers + 1, "last": len(lines)}[where]
    without = own(written(tmp_path / name, lines))
    with_it = own(written(tmp_path / f"more-{name}", [*lines[:place], as_bytes(bad), *lines[place:]]))
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
        assert [record.label for record in read_strictly(DataSource(data=str(file)))] == kept


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
    assert [record.label for record in read_strictly(DataSource(data=str(path)))][-3:] == ["1", "01", "1"]


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


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("r.csv", b"note,label\na,0\n", r"text_column = 'text': .* has no such column; it has note, label"),
        ("r.parquet", b"x", "cannot be read"),
        ("r.csv.gz", b"x", "cannot be read"),
        ("r.txt", b"x", "unknown format"),
        ("r.csv", b"text,label\n\n", "holds no records"),
    ],
)
def test_what_no_record_decides_is_an_error(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=reason):
        read_strictly(DataSource(data=str(tmp_path / name)))


@pytest.mark.parametrize("name", ["r.csv", "r.tsv", "r.csv.gz", "r.parquet"])
def test_a_file_with_line_breaks_within_fields_is_read_right_once_it_is_written_anew(tmp_path, name):
    rows = [*RECORDS, ("two\r\nlines\n\nand, more", "1"), ('"\n', "0")]
    path = tmp_path / name
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]}), path)
    else:
        with gzip.open(path, "wt", newline="") if path.suffix == ".gz" else path.open("w", newline="") as file:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([("text", "label"), *rows])
        with pytest.raises(InputError, match=r"line 7: .* `fedpriv data lines`"):
            read_strictly(DataSource(data=str(path)))
    out = tmp_path / "lines.jsonl"
    assert write_lines(str(path), out) == len(rows)
    assert [(record.text, record.label) for record in read_strictly(DataSource(data=str(out)))] == rows
    assert out.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InputError, match="exists"):
        write_lines(str(path), out)
