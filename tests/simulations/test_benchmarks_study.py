"""Lines of benchmarks hold what was printed with what made it, and the page is made of the newest of each."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from fedpriv.errors import InputError
from simulations.studies import benchmarks
from simulations.studies.harness import lines

RESULTS = Path(__file__).parents[2] / "results"

CLAIM = {"claim": "one over other", "ratio": 1.2345, "target": 1.1, "met": False}
MADE = {"date": "2026-11-27", "machine": {"processor": "P", "cores": 2, "gib": 23}}
SOFTWARE = {"torch": "2.13.0", "commit": "0123456789"}


def line(name: str, *claims: dict) -> dict:
    command = f"python -m simulations.benchmarks.{name}"
    return {
        "name": name,
        "command": command,
        "claims": list(claims),
        "output": ["one over other", "| arm | ms |", "| --- | --- |", "| one | 12 |"],
        "software": SOFTWARE,
    } | MADE


def test_a_benchmark_leaves_a_line_and_the_page_shows_it(tmp_path, monkeypatch, capsys):
    kept, page = tmp_path / "lines.jsonl", tmp_path / "page.md"
    page.write_text("# Mine\n<!-- summary:begin -->\n<!-- summary:end -->\n")
    places = ["--lines", str(kept), "--page", str(page)]
    for step in ([*places, "run", "discrete_gaussian", "--repeats", "2"], [*places, "tables"]):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *step])
        benchmarks.main()
    (made,) = map(json.loads, kept.read_text().splitlines())
    assert made["command"] == "python -m simulations.benchmarks.discrete_gaussian --repeats 2"
    assert made["claims"][0]["claim"] in capsys.readouterr().out, "shown as it comes"
    assert {"date", "machine", "software", "seconds"} <= made.keys()
    text = page.read_text()
    assert text.startswith("# Mine\n")
    claim = made["claims"][0]
    assert f"| `discrete_gaussian --repeats 2` | {claim['claim']} | {claim['ratio']:.3g} |" in text
    assert f"\n{made['machine']['processor']}, " in text
    assert f", {made['date']}. Each line of benchmarks.jsonl has its commit." in " ".join(text.split())


def test_the_newest_line_of_each_command_counts_and_the_others_are_named(tmp_path):
    unjudged = {"claim": "a small one over other", "ratio": 1.6, "target": 1.1, "met": None}
    older, newer = (line("dp_step", CLAIM | {"ratio": ratio}, unjudged) for ratio in (2.0, 1.2345))
    other = line("dp_step", CLAIM | {"ratio": 1.05}) | {"command": older["command"] + " --layers last-2"}
    page = tmp_path / "page.md"
    benchmarks.write_page(page, benchmarks.newest([other, older, newer]))
    text = page.read_text()
    assert "| `dp_step` | one over other | 1.23 | **missed**: 1.1 |" in text
    assert "| `dp_step --layers last-2` | one over other | 1.05 |" in text
    assert "a small one" not in text
    assert "| 2 |" not in text
    assert "Without a line yet: `accounting_scale`, " in text


def test_benchmarks_of_another_machine_than_most_are_named(tmp_path):
    found = [line(name, CLAIM) for name in ("dp_step", "engine_cost", "prefix_cache")]
    found[0] |= {"date": "2026-11-28"}
    found[-1] |= {"machine": MADE["machine"] | {"cores": 4}}
    benchmarks.write_page(tmp_path / "page.md", found)
    text = " ".join((tmp_path / "page.md").read_text().split())
    made = "GiB, torch 2.13.0, 2026-11-27"
    assert f"P, 2 cores, 23 {made} to 2026-11-28. P, 4 cores, 23 {made}: `prefix_cache`. Each line" in text


def test_a_table_that_a_benchmark_printed_stands_where_the_page_names_it(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name}:begin --><!-- {name}:end -->\n" for name in ("summary", "dp_step")))
    benchmarks.write_page(page, [line(name, CLAIM) for name in ("dp_step", "engine_cost")])
    shown = "<!-- dp_step:begin -->\n\n| arm | ms |\n| --- | --- |\n| one | 12 |\n\n<!-- dp_step:end -->"
    assert shown in page.read_text()
    assert page.read_text().count("| one | 12 |") == 1


@pytest.mark.parametrize(
    ("claim", "shown"),
    [
        ({"seconds": 61.0, "target": 60.0, "met": False}, ("61 seconds", "60 seconds")),
        ({"mebibytes": 1200.0, "target": 1228.8, "met": True}, ("1,200 mebibytes", "1,228.8 mebibytes")),
        ({"ratio": 4.0, "target": None, "met": True}, ("4", "")),
        ({"value": 0, "of": 6, "met": True}, ("0", "")),
        ({"met": True, "skipped": "`make llm`"}, ("`make llm`", "")),
    ],
)
def test_figures_have_their_unit(claim, shown):
    assert benchmarks._figure_and_target(claim) == shown


def test_the_page_is_that_of_its_stored_lines(tmp_path):
    page = Path(shutil.copy(RESULTS / "benchmarks.md", tmp_path))
    benchmarks.write_page(page, benchmarks.newest(lines(RESULTS / "benchmarks.jsonl")))
    assert page.read_text() == (RESULTS / "benchmarks.md").read_text()


def test_a_benchmark_that_fails_leaves_no_line(tmp_path, monkeypatch):
    kept = tmp_path / "lines.jsonl"
    arguments = ["benchmarks", "--lines", str(kept), "run", "accounting_scale", "--no-such"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(InputError, match="accounting_scale: exit code 2, 0 claims; nothing is kept of it"):
        benchmarks.main()
    assert not kept.exists()
