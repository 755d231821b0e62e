"""Twelve messy tables: what `data check` says of each, what a run does with it, and that `--fix` mends it."""

import csv
import gzip
import io
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.data import CheckedColumns, Roles, mistakes, read_table, write_lines, write_mended
from fedpriv.runs.plan import preflight
from tests.cli.command_line import as_json, fedpriv
from tests.marks import slow

HEADER = ["text", "label", "site", "dose"]
SITES = ("Nord", "Süd", "West")
Row = list[str]
ROLES = Roles(texts=("text",), label="label", client="site")


def clean_rows(num: int = 180) -> list[Row]:
    """Records of three sites and two labels without a mistake."""
    labels = ("Positive", "Negative")
    return [[f"letter {row} on pain", labels[row % 2], SITES[row % 3], f"{row % 9}.5"] for row in range(num)]


def as_csv(rows: Iterable[Row], separator: str = ",", header: Row = HEADER) -> str:
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=separator, lineterminator="\n").writerows([header, *rows])
    return file.getvalue()


def with_values(column: int, values: dict[int, str]) -> str:
    rows = clean_rows()
    for row, value in values.items():
        rows[row][column] = value
    return as_csv(rows)


def semicolons() -> str:
    return as_csv(([*row[:3], row[3].replace(".", ",")] for row in clean_rows()), ";")


def with_line_breaks() -> str:
    rows = clean_rows()
    for row in rows:
        row[0] = f'{row[0]},\nsaid "{row[3]}"; and\tmore\n'
    rows[5][2] = ""
    return as_csv(rows)


def with_empty_lines() -> str:
    lines = as_csv(clean_rows()).splitlines()
    return "\n".join(["", *lines[:10], "", "   ", ",,,", *lines[10:], ",,,", ""])


def with_ids() -> str:
    rows = [[*row, f"{number:05}", f"p{number % 90}"] for number, row in enumerate(clean_rows())]
    return as_csv(rows, header=[*HEADER, "case", "patient"])


NO_LABELS = dict.fromkeys(range(0, 44, 4), "N/A") | {6: "", 9: "  "}
TYPOS = dict.fromkeys(range(0, 12, 3), "Nrod") | {12: "Nord ", 15: "nord", 1: "Sued", 19: "Süüd"}

# {name: (text, what a run refuses, what it warns of; by kind)}; a text that is no table has one line of its own below.
MESSY: dict[str, tuple[Callable[[], str], set[str], set[str]]] = {
    "semicolons with decimal commas": (semicolons, set(), set()),
    "quotes and newlines in fields": (with_line_breaks, {"empty_clients"}, set()),
    "typos of holders": (lambda: with_values(2, TYPOS), {"variants_of_clients", "misspelt_clients"}, set()),
    "blanks": (lambda: with_values(1, {7: "Negative ", 8: " positive"}), {"variants_of_labels"}, set()),
    "N/A labels": (lambda: with_values(1, NO_LABELS), set(), {"missing_labels", "empty_labels"}),
    "one-record classes": (lambda: with_values(1, {3: "Neutral", 4: "Postive"}), set(), {"rare_labels"}),
    "an id column": (with_ids, set(), {"id_column", "person_column"}),
    "empty lines": (with_empty_lines, {"empty_clients"}, {"empty_texts", "empty_labels"}),
    "byte order mark": (lambda: "\ufeff" + as_csv(clean_rows()), set(), set()),
    "duplicate rows": (lambda: as_csv([*clean_rows(), *clean_rows(5)]), set(), {"repeated_records"}),
}


@pytest.fixture(params=MESSY)
def messy(request, tmp_path):
    """A messy table's file, and the kinds of mistakes that are refused and warned of."""
    text, refused, warned = MESSY[request.param]
    path = tmp_path / "t.csv"
    path.write_bytes(text().encode())
    if text is with_line_breaks:
        write_lines(str(path), path := tmp_path / "t.jsonl")
    return path, refused, warned


@pytest.fixture
def run_of(tiny_bert) -> Callable[..., object]:
    """Looks at a run of a file, as `run` does before it trains."""

    def look(path: Path, **keys: object) -> None:
        columns = {"data": str(path), "client_column": "site", "batch_size": 8}
        preflight.check(parse({"model": str(tiny_bert), **columns, **keys}))

    return look


def test_check_names_each_mistake_and_a_run_refuses_or_warns(messy, run_of, capsys):
    path, refused, warned = messy
    values = as_json("data", "check", path, "--client", "site", "--model", "", code=int(bool(refused)))
    found = values["mistakes"]
    assert {each["kind"] for each in found if each["refused"]} == refused
    assert {each["kind"] for each in found if not each["refused"]} == warned
    if refused:
        with pytest.raises(InputError, match=r"`fedpriv data check .*--fix OUT.*table_checks = .warn.") as caught:
            run_of(path)
        assert "\n" not in str(caught.value)
        run_of(path, client_column="", num_clients=2, table_checks="warn")
    else:
        run_of(path)
    said = capsys.readouterr().err
    assert all(each["message"] in said for each in found if not each["refused"])


@pytest.mark.parametrize("name", ["fixed.csv", *slow("fixed.jsonl")])
def test_a_fixed_copy_is_what_a_run_accepts(messy, run_of, tmp_path, name):
    path, refused, _ = messy
    out = (tmp_path / name).with_suffix(".jsonl" if path.suffix == ".jsonl" else Path(name).suffix)
    values = as_json("data", "check", path, "--client", "site", "--model", "", "--fix", out)
    assert bool(values["fixed"]["changes"]) >= bool(refused)
    assert not [each for each in values["mistakes_left"] if each["refused"]]
    run_of(out)
    assert {*read_table(str(out)).columns["site"]} == {*SITES}
    assert oct(out.stat().st_mode)[-3:] == "600"


def test_latin_1_is_read_by_name_alone(tmp_path, run_of):
    path = tmp_path / "t.csv"
    path.write_bytes(as_csv(clean_rows()).encode("latin-1"))
    with pytest.raises(InputError, match=r"line 3: holds byte 0xfc, which is not UTF-8; .*--encoding latin-1"):
        run_of(path)
    run_of(path, encoding="latin-1")
    assert as_json("data", "check", path, "--client", "site", "--encoding", "latin-1", "--model", "")["clients"]["Süd"]


def test_names_are_numbered_where_the_header_has_none_and_never_guessed(tmp_path, run_of):
    path = tmp_path / "t.csv"
    path.write_text("text;label;;\na;b;;\n")
    assert list(read_table(str(path)).columns) == ["text", "label", "column 3", "column 4"]
    path.write_text(as_csv(clean_rows(), ";", header=["text", "label", "site", "dose, mg"]))
    with pytest.raises(InputError, match=r"2 columns by comma and 4 columns by semicolon; name .*--separator"):
        run_of(path)
    run_of(path, separator="semicolon")


def test_blanks_are_visible_and_lines_are_those_of_the_file_and_its_form_is_said(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(with_empty_lines().replace(",Positive,", ",Positive ,", 1))
    out, _ = fedpriv("data", "check", path, "--client", "site", "--model", "", code=1)
    assert "  'Positive '  1\n" in out
    assert "labels: 'Positive ' differs from 'Positive' by case or blanks alone (1 record, line 3)" in out
    assert "clients: nobody holds some records (2 records, lines 14, 186)" in out
    path.write_text(semicolons())
    out, _ = fedpriv("data", "check", path, "--client", "site", "--model", "")
    assert "separator       semicolon" in out
    assert "decimal_commas  dose" in out


def findings(**columns: object) -> dict[str, str]:
    """{kind: message} of the mistakes in columns."""
    lists = [*columns.values(), *columns.get("others", {}).values()]
    size = max(len(values) for values in lists if isinstance(values, list))
    texts = {"text": [f"text {row}" for row in range(size)]}
    return {finding.kind: finding.message for finding in mistakes(CheckedColumns(**({"texts": texts} | columns)))}


@pytest.mark.parametrize(
    "names", ["Nord|Nrod", "Nord|Nordd", "Klinik Nord|Klinik Nort", "St. Anna|St Anna", "Nord|Nor", "Süd|Sued"]
)
def test_a_slip_of_one_letter_is_found(names):
    one, other = names.split("|")
    found = findings(clients=[one] * 100 + [other] * 20 + ["Elsewhere"] * 100)
    assert f"{other!r} is likely a misspelt {one!r}" in found["misspelt_clients"]


MANY_HOLDERS = [f"{a}{b}{c}ian Hospital" for a in "abcdefghij" for b in "klmnopqrst" for c in "uvwxyzabcd"]
TWO_HOLDERS = {"Ward 1": "Ward 2", "site-10": "site-11", "N1rd": "N2rd"}
TWO_HOLDERS |= {"St. A": "St. B", "Nord": "Nordost", "Ost": "Ist"}
TWO_LABELS = {"250.1": "250.10", "1.000": "1", "A01": "A1", "10": "100", "1": "-1"}


def test_names_that_are_meant_to_be_two_pass():
    for columns in (
        *({"clients": [one] * 100 + [other] * 20} for one, other in TWO_HOLDERS.items()),
        *({"labels": [one] * 30 + [other] * 20} for one, other in TWO_LABELS.items()),
        {"clients": ["Nord"] * 100 + ["Nort"] * 21},  # close, with as many records
        {"clients": MANY_HOLDERS * 3},
        {"persons": [f"{row // 4 - 1}" for row in range(200)]},  # numbered from zero on
    ):
        assert findings(**columns) == {}


def test_labels_agreed_on_are_right_and_what_is_close_to_them_is_not():
    labels = ["yes"] * 20 + ["Yes"] * 30 + ["YES "] * 2 + ["other"] * 3 + ["N/A"] * 20
    found = findings(labels=labels, classes=["yes", "Yes", "N/A"])
    assert list(found) == ["variants_of_labels"]
    assert "'YES ' differs from 'yes'" in found["variants_of_labels"]


@pytest.mark.parametrize("role", ["clients", "labels", "persons"])
@pytest.mark.parametrize(("one", "other"), [("1", "1.0"), ("123", "000123"), ("-1", "-1.0"), ("0", "00")])
def test_a_number_with_other_zeros_is_the_same_name(role, one, other):
    found = findings(**{role: [one] * 30 + [other] * 20 + ["5"] * 50})[f"variants_of_{role}"]
    assert f"{other!r} differs from {one!r} by zeros alone (20 records" in found


NOBODY = ["<NA>", "NaT", "\\N", "(null)", "#REF!", "0", "-1", "999999", "N.N.", "anonymous", "not recorded"]


@pytest.mark.parametrize("name", NOBODY)
def test_a_placeholder_is_no_person_and_a_fixed_copy_is_without_it(name, tmp_path):
    rows = [["a" if row % 2 else "b", name if row % 10 == 0 else f"P{row // 3:05}"] for row in range(200)]
    path, out = tmp_path / "t.csv", tmp_path / "fixed.csv"
    path.write_text(as_csv([[f"t{n}", *row] for n, row in enumerate(rows)], header=["text", "label", "person"]))
    roles = Roles(texts=("text",), label="label", person="person")
    (finding,) = (each for each in mistakes(CheckedColumns.of(read_table(str(path)), roles)) if each.refuses)
    assert f"persons: {name!r} looks like a missing one (20 records" in finding.message
    mended = write_mended(read_table(str(path)), roles, out)
    assert not [each for each in mended.left if each.refuses]
    assert mended.num_records == 180
    kept = write_mended(read_table(str(path)), roles, tmp_path / "kept.csv", keep=[name])
    assert kept.num_records == 200


@pytest.mark.parametrize("role", ["clients", "labels"])
def test_a_column_of_persons_is_no_column_of_clients_or_labels_and_measurements_are_no_ids(role):
    others = {"id": [f"{row}" for row in range(50)], "dose": [f"{row}.5" for row in range(50)]}
    assert findings(others=others).keys() == {"id_column"}
    values = [f"p{row // 2 * 3}" for row in range(10)] + [f"q{row}" for row in range(30)]
    assert "look like ids or persons, 35 different ones in 40 records" in findings(**{role: values})[f"{role}_are_ids"]


def test_every_change_is_listed_with_its_lines(tmp_path):
    path, out = tmp_path / "t.csv", tmp_path / "fixed.csv"
    path.write_text(with_values(2, {0: "Nrod", 3: "nord", 6: ""}) + as_csv(clean_rows()[10:11]).split("\n", 1)[1])
    mended = write_mended(read_table(str(path)), ROLES, out)
    assert mended.changes == [
        "renamed client 'Nrod' to 'Nord', likely misspelt; --keep 'Nrod' leaves it (1 record, line 2)",
        "renamed client 'nord' to 'Nord' (1 record, line 5)",
        "dropped records without a client (1 record, line 8)",
        "dropped records that repeat an earlier one in every column (1 record, line 182)",
    ]
    assert mended.num_records == 179
    kept = write_mended(read_table(str(path)), ROLES, tmp_path / "kept.csv", keep=["Nrod"])
    assert [finding.kind for finding in kept.left if finding.refuses] == ["misspelt_clients"], "so it is still refused"
    assert "Nrod" in read_table(str(tmp_path / "kept.csv")).columns["site"]
    path.write_text(as_csv(clean_rows()))
    assert write_mended(read_table(str(path)), ROLES, tmp_path / "same.csv").changes == []
    assert read_table(str(tmp_path / "same.csv")).columns == read_table(str(path)).columns
    for name, message in (("same.csv", "exists"), ("t.parquet", "must end in .csv or .jsonl")):
        with pytest.raises(InputError, match=message):
            write_mended(read_table(str(path)), ROLES, tmp_path / name)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 9\n"
SCANS = pa.array([b"\xff", b"\xfe"])
TABLE = pa.table(
    {"text": [b"a", b"caf\xc3\xa9"], "label": [1.0, float("nan")], "scan": SCANS, "note": SCANS.view(pa.string())}
)


def as_parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", gzip.compress(b"text,label\na,b\n"), r"is compressed with gzip; let its name end in .gz"),
        ("t.jsonl", gzip.compress(b'{"text": "a"}\n'), r"is compressed with gzip; let its name end in .gz"),
        ("t.csv", b"PK\x03\x04\x14\x00", r"is an Excel workbook or a ZIP archive; save its table as CSV in UTF-8"),
        ("t.jsonl", as_parquet(TABLE), r"is a Parquet file; let its name end in .parquet"),
        ("t.csv", LFS, r"is a pointer of Git LFS .*; fetch that with `git lfs pull`"),
        ("t.parquet", LFS, r"is a pointer of Git LFS .*; fetch that with `git lfs pull`"),
        ("t.csv", "text\na\n".encode("utf-16"), r"line 1: begins with the mark of UTF-16; save the file as UTF-8.*"),
    ],
    ids=["gzip", "gzip of lines", "xlsx", "parquet", "lfs", "lfs of parquet", "utf-16"],
)
def test_a_file_that_is_another_than_its_name_says_is_told(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"^data = .*{name}': {message}$"):
        read_table(str(path))
    if "let its name end in" in message:
        right = path.rename(tmp_path / ("t.parquet" if "Parquet" in message else f"{name}.gz"))
        assert read_table(str(right)).columns["text"][0] == "a"


def test_bytes_are_texts_and_nan_is_missing_and_a_column_nobody_reads_is_no_matter(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_bytes(as_parquet(TABLE))
    table = read_table(str(path))
    assert (table.columns["text"], table.names_of("label")) == (["a", "café"], ["1.0", None])
    table.require([("text_column", "text")])
    for column in ("scan", "note"):  # of bytes, and said to be text
        with pytest.raises(InputError, match=f"text_column = '{column}': .* has bytes there that are no text in UTF-8"):
            table.require([("text_column", column)])


def test_a_folder_of_shards_is_joined_by_the_command_that_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (shards := tmp_path / "shards").mkdir()
    for number in range(2):
        (shards / f"part-{number}.parquet").write_bytes(as_parquet(TABLE))
    with pytest.raises(InputError, match="is a folder; join its Parquet files with") as caught:
        read_table("shards")
    *interpreter, code = shlex.split(str(caught.value).partition("with ")[2])
    assert interpreter == ["python", "-c"]
    exec(code, {})
    assert read_table("all.parquet").columns["text"] == ["a", "café"] * 2


@pytest.mark.parametrize("mark", ["sep=;\n", "SEP=;\r\n"])
def test_the_separator_that_excel_declares_is_that_of_the_file(tmp_path, mark, run_of):
    path = tmp_path / "t.csv"
    path.write_text(mark + semicolons(), newline="")
    table = read_table(str(path))
    assert (table.separator, table.lines[0], [*table.columns]) == ("semicolon", 3, HEADER)
    run_of(path)
    path.write_text(mark.replace(";", "|") + semicolons(), newline="")
    with pytest.raises(InputError, match=r"line 1: sep=\| is none of comma, semicolon, tab"):
        read_table(str(path))


@pytest.mark.parametrize("title", ["Export of 2024", "Export of 2024,,,", "Export of 2024, all"])
@pytest.mark.parametrize("separator", [",", ";"])
def test_a_title_above_the_names_is_told(tmp_path, title, separator, run_of):
    path = tmp_path / "t.csv"
    path.write_text(f"{title}\n{as_csv(clean_rows(), separator)}")
    with pytest.raises(InputError, match=r"title.*delete it"):
        run_of(path)
