"""The harness of the studies; and every published table, made again from the lines that are stored."""

import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from fedpriv.errors import InputError
from simulations.studies import (
    aggregation,
    benchmarks,
    integral,
    language_models,
    lmo,
    persons,
    reproduce,
    secure_aggregation,
    utility,
)
from simulations.studies.audit import tables as audit_tables
from simulations.studies.dedup.report import figures as dedup_figures
from simulations.studies.dedup.report import page as dedup_page
from simulations.studies.harness import Estimate, Results, append, fill, in_processes, lines, run_missing, table

RESULTS = Path(__file__).resolve().parents[2] / "results"
PAPERS = RESULTS.parent / "docs" / "papers"


@dataclass(frozen=True)
class NumberCell:
    """A number, with the seed that it is measured with."""

    number: int
    seed: int = 0

    @property
    def key(self) -> str:
        """Unique among the cells."""
        return f"{self.number}/{self.seed}"


def squared(cell: NumberCell) -> dict[str, float]:
    """Stands for a measurement; another process imports it."""
    return {"accuracy": cell.number**2 + cell.seed}


def run(path: Path, cells: list[NumberCell], **options: object) -> None:
    run_missing(path, cells, squared, "accuracy {0[accuracy]}".format, **options)


def test_a_cell_has_one_line_with_its_values_and_the_versions_that_made_it(tmp_path, capsys):
    path, cells = tmp_path / "runs.jsonl", [NumberCell(2), NumberCell(3)]
    run(path, cells, until=time.time() - 1)
    assert not lines(path), "no cell is begun when time is up"
    run(path, cells[:1])
    first = path.read_bytes()
    run(path, cells)
    assert path.read_bytes().startswith(first)
    one, other = lines(path)
    assert (one["key"], one["cell"], one["accuracy"]) == ("2/0", {"number": 2, "seed": 0}, 4)
    assert {"fedpriv", "python", "torch"} <= one["software"].keys()
    assert "1 of 1, 3/0: accuracy 9, 0 s" in capsys.readouterr().out
    assert other["seconds"] >= 0


def test_what_all_have_lines_for_is_told_and_a_pattern_chooses(tmp_path, capsys):
    path, cells = tmp_path / "runs.jsonl", [NumberCell(2), NumberCell(2, 1), NumberCell(3)]
    run(path, cells, only=["2/*"])
    assert [line["key"] for line in lines(path)] == ["2/0", "2/1"]
    capsys.readouterr()
    run(path, cells, only=["*/1", "none"])
    told = f"{path}: has a line for each of the cells, 1; none is run again\n2/1: accuracy 5\n"
    assert capsys.readouterr().out == told


def test_a_fragment_goes_and_what_is_no_line_of_a_study_stays(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b'{"key": "1/0"}\n{"key": "2/')
    append(path, {"key": "3/0"})
    assert [line["key"] for line in lines(path)] == ["1/0", "3/0"]
    for content in (b"name,age\nAnna,7", b"no newline at all"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"runs\.jsonl: ends in what is no line of a study"):
            append(path, {"key": "3/0"})
        assert path.read_bytes() == content


def test_older_lines_without_a_key_are_known_by_their_values(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"name": "2/0"}\n')
    run(path, [NumberCell(2), NumberCell(3)], key=lambda line: line.get("name") or line["key"])
    assert [line.get("key") for line in lines(path)] == [None, "3/0"]


@pytest.mark.slow
def test_two_processes_find_what_one_does():
    cells = [NumberCell(each) for each in range(4)]
    alone, together = (list(in_processes(partial(squared), cells, jobs)) for jobs in (1, 2))
    assert sorted(each["accuracy"] for each in together) == [each["accuracy"] for each in alone]


def test_results_are_found_by_cell_and_what_is_missing_is_counted_by_kind():
    cells = [NumberCell(number, seed) for number in (2, 3) for seed in range(3)]
    results = Results({"key": cell.key, **squared(cell)} for cell in cells[:4])
    assert results.by_seed(NumberCell(2)) == {0: 4, 1: 5, 2: 6}
    assert results.by_seed(NumberCell(2), [1]) == {1: 5}
    missing = results.missing(cells, lambda cell: ("number", str(cell.number)))
    assert missing == "Not run: number, 3, 2 of 3."
    assert results.missing(cells[:4], lambda cell: ()) == "Every cell was run."
    assert Estimate.of(results.by_seed(NumberCell(2)).values()).text(sign=True, digits=1) == "+5.0 ± 0.6"


def test_a_table_has_its_headers_and_one_without_rows_says_so():
    assert table(("a", "b"), [(1, "x")]).splitlines() == ["| a | b |", "| --- | --- |", "| 1 | x |"]
    assert table(("a",), []) == "Not run."


def test_only_what_is_between_a_blocks_markers_changes(tmp_path):
    page = tmp_path / "page.md"
    fill(page, {"one": "first", "two": "second"})
    text = page.read_text()
    page.write_text(f"# Kept\n\n{text}\nkept too\n")
    fill(page, {"two": "third"})
    assert page.read_text() == f"# Kept\n\n{text.replace('second', 'third')}\nkept too\n"
    for broken in ("", "<!-- two:begin -->", "<!-- two:end --><!-- two:begin -->", 2 * text):
        page.write_text(broken)
        with pytest.raises(InputError, match="must hold <!-- two:begin -->"):
            fill(page, {"two": "third"})
        assert page.read_text() == broken


def test_long_lines_of_text_are_broken_and_no_others(tmp_path):
    words, long = "word " * 30, "x" * 130
    fill(tmp_path / "page.md", {"one": f"- {words}\n\n| {words}|\n\n```\n{words}\n```\n\n{long}"})
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 120] == [f"| {words}|", words, long]
    assert lines[3].startswith("  word"), "still of the list's item"


WRITE = {
    "aggregation": aggregation.write,
    "audit": lambda page, runs: audit_tables.write(page, lines(runs)),
    "benchmarks": lambda page, runs: benchmarks.write_page(page, benchmarks.newest(lines(runs))),
    "dedup": dedup_page.write,
    "integral": integral.write,
    "language_models": language_models.write,
    "lmo": lmo.write,
    "papers": lambda page, runs: reproduce.write(page, runs.parent, shutil.copytree(PAPERS, page.parent / "papers")),
    "persons": persons.write,
    "secure_aggregation": lambda page, runs: secure_aggregation.write(page, runs, page.with_suffix(".png")),
    "utility": utility.write,
}
LONG = ("integral", "secure_aggregation")


def test_every_page_of_results_has_its_lines():
    pages = {page.stem for page in RESULTS.glob("*.md")}
    assert pages == WRITE.keys() == {path.stem for path in RESULTS.glob("*.jsonl")}


@pytest.mark.parametrize("study", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in WRITE])
def test_the_tables_of_a_page_are_those_of_its_stored_lines(study, tmp_path, monkeypatch):
    monkeypatch.setattr(dedup_figures, "to_png", lambda figure: b"")  # test_dedup_report.py draws one
    page = Path(shutil.copy(RESULTS / f"{study}.md", tmp_path))
    WRITE[study](page, RESULTS / f"{study}.jsonl")
    assert page.read_text() == (RESULTS / f"{study}.md").read_text()
    for written in tmp_path.glob("papers/*.md"):
        assert written.read_text() == (PAPERS / written.name).read_text()
