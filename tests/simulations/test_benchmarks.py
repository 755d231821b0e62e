"""Every benchmark runs and ends with its claims, which lines keep, and the page is made of the newest of each."""

import importlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedpriv.errors import InputError
from fedpriv.learning.training.workbench import Workbench
from simulations.benchmarks import _parts
from simulations.studies import benchmarks
from tests.models.serving.running import needs_nginx

FOLDER = Path(__file__).resolve().parents[2] / "simulations" / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
SMALL = {
    "accounting_scale": ["--clients", "12"],
    "busy_machine": ["--loops", "0", "1", "--repeats", "1", "--setting", "rounds=2", 'train="head"'],
    "dedup_distance": ["--models", "2", "--values", "200000"],
    "dedup_resume": ["--variants", "2", "--kills", "1"],
    "dedup_loading": ["--variants", "3", "--queries", "4", "--repeats", "1"],
    "deployed_round": ["--nodes", "3", "--rounds", "2", "--setting", "lora_rounds=0", 'train="head"'],
    "discrete_gaussian": ["--repeats", "2"],
    "lossless_store": ["--models", "MiniLM-bfloat16", "--steps", "1"],
    "dp_step": ["--steps", "4"],
    "end_to_end": ["--setting", "tiny", "--rounds", "1"],
    "engine_cost": ["--clients", "2", "--rounds", "1"],
    "integral_training": ["--models", "80", "--epochs", "1", "--repeats", "1"],
    "language_model_memory": ["--repeats", "1", "--cases", "long"],
    "node_step": ["--tokens", "8", "--records", "4", "--filled", "0", "--repeats", "1"],
    "pfl_research": ["--clients", "4", "--rounds", "1"],
    "prefix_cache": ["--repeats", "1"],
    "registered_clients": ["--registered", "40", "--sampled", "5", "--rounds", "1"],
    "secure_aggregation": ["--clients", "5", "--dimension", "1000", "--repeats", "1"],
    "serving": ["--variants", "4", "--requests", "8", "--repeats", "1", "--tokens", "12"],
    "serving_hostile": ["--seconds", "1"],
    "serving_language": ["--requests", "2", "--variants", "2", "--tokens", "2", "--repeats", "1"],
    "serving_soak": ["--minutes", "0.05", "--variants", "6"],
    "small_cnn": ["--seeds", "1", "--steps", "2"],
    "stacked_clients": ["--clients", "2", "--repeats", "1"],
}
# What these do every day: whole where that takes seconds, or one of their arms.
SMALLEST = {
    "accounting_scale": ["--clients", "1"],
    "dedup_distance": SMALL["dedup_distance"],
    "discrete_gaussian": SMALL["discrete_gaussian"],
    "secure_aggregation": SMALL["secure_aggregation"],
}
ONE_ARM = {
    "dp_step": ["--memory-of", "dp", "--layers", "last-2"],
    "registered_clients": ["--one", "4", "--sampled", "2", "--rounds", "1"],
}
CLAIM = {"claim": "one over other", "ratio": 1.2345, "target": 1.1, "met": False}
MADE = {"date": "2026-11-27", "machine": {"processor": "P", "cores": 2, "gib": 23}}
SOFTWARE = {"torch": "2.13.0", "commit": "0123456789"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Runs a benchmark in this process and gives what it printed; undoes what it sets for a process of its own."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    levels = {name: logging.getLogger(name).level for name in ("flwr", "ray")}

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        importlib.import_module(f"simulations.benchmarks.{name}").main()
        return capsys.readouterr().out

    yield run
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_the_parts_of_a_run_are_where_they_are_looked_for_and_add_up():
    plain = Workbench.evaluate
    with _parts.measured() as clock:
        assert Workbench.evaluate is not plain
        started = time.perf_counter()
        with clock.part("steps"):
            time.sleep(0.02)
            with clock.part("cache filling"):
                time.sleep(0.04)
                clock.timed("evaluation", time.sleep)(0.08)
        taken = time.perf_counter() - started
    assert Workbench.evaluate is plain
    assert sum(clock.seconds.values()) == pytest.approx(taken, abs=0.01)
    assert [clock.seconds[part] >= least for part, least in [("steps", 0.02), ("cache filling", 0.04)]] == [True] * 2
    assert clock.seconds["evaluation"] >= 0.08 > clock.seconds["steps"]
    assert _parts.shown({"steps": 1.0, "ledger": 0.01, "start": 2.0}, 3.5) == "start 2.0, steps 1.0, other 0.5"


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_nginx if n == "serving_hostile" else ()) for n in NAMES])
def test_benchmark_runs_to_its_claim(name):
    command = [sys.executable, "-m", f"simulations.benchmarks.{name}", *SMALL[name]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1], timeout=3600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["claim"]


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_takes_its_arguments(run, name):
    with pytest.raises(SystemExit, match="0"):
        run(name, *SMALL[name], "--help")


@pytest.mark.parametrize("name", SMALLEST)
def test_benchmark_at_its_smallest_runs_to_its_claim(run, name):
    assert json.loads(run(name, *SMALLEST[name]).splitlines()[-1])["claim"]


@pytest.mark.parametrize("name", [pytest.param("dp_step", marks=pytest.mark.slow), "registered_clients"])
def test_one_arm_of_a_benchmark_runs_to_its_figures(run, name):
    assert json.loads(run(name, *ONE_ARM[name]).splitlines()[-1])


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


@pytest.mark.parametrize("asked", [["--lines", "mine.jsonl", "dp_step"], ["dp-step"]])
def test_another_benchmark_than_was_asked_for_never_runs(asked, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "run", *asked])
    monkeypatch.setattr(benchmarks, "measured", pytest.fail)
    with pytest.raises(SystemExit, match="2"):
        benchmarks.main()
    assert f"{asked[0]}: must be a benchmark" in capsys.readouterr().err


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


def test_a_benchmark_that_fails_leaves_no_line(tmp_path, monkeypatch):
    kept = tmp_path / "lines.jsonl"
    arguments = ["benchmarks", "--lines", str(kept), "run", "accounting_scale", "--no-such"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(InputError, match="accounting_scale: exit code 2, 0 claims; nothing is kept of it"):
        benchmarks.main()
    assert not kept.exists()
