"""Sweeps: what they run, that nothing finished is repeated, and what all runs cost together."""

import io
import json
import math
import re
import shutil
from pathlib import Path

import dp_accounting
import pandas as pd
import pytest
import tomli_w
from dp_accounting import pld
from rich.console import Console

from fedpriv.config import parse
from fedpriv.errors import InputError, LedgerError
from fedpriv.privacy.ledger.reader import reading
from fedpriv.runs import files
from fedpriv.runs.files import write_json
from simulations.api import federate
from simulations.sweeps import plots, result
from simulations.sweeps.command import _pivot_table, _SweepDisplay, sweep
from simulations.sweeps.plan import _ACCURACY, _PERPLEXITY, expand, metric_of, read
from simulations.sweeps.result import SweepSpending, total
from simulations.sweeps.runner import attempts
from tests.foreign import planted
from tests.integration.test_kill import killed_after
from tests.marks import slow
from tests.runs.test_presence import other_process

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def base(small_run) -> dict[str, object]:
    return {**small_run, "rounds": 1, "local_steps": 1}


@pytest.fixture
def write(tmp_path):
    """Writes a sweep's file."""

    def write(**values: object) -> Path:
        path = tmp_path / "study.toml"
        path.write_text(tomli_w.dumps(values))
        return path

    return write


def run(path: Path, out: Path, **options: object) -> bool:
    planned = read(path, options.pop("overrides", None))
    return sweep(planned, out, console=Console(quiet=True), **{"max_parallel": 1, **options}).is_finished


def test_a_grid_is_the_product_of_its_lists_and_of_every_run(write):
    runs = [{"optimizer": "sgd"}, {"optimizer": "adamw", "learning_rate": 0.01}]
    plan = read(write(rounds=3, runs=runs, grid={"rank": [2, 4], "seed": [0, 1, 2, 0]}))
    assert plan.keys == ("optimizer", "learning_rate", "rank", "seed")
    assert len({run.key for run in plan.runs}) == len(plan.runs) == 12, "a point that occurs twice is run once"
    first = [(run.config.optimizer, run.config.rank, run.config.seed) for run in plan.runs[:4]]
    assert first == [("sgd", 2, 0), ("sgd", 2, 1), ("sgd", 2, 2), ("sgd", 4, 0)]
    assert all(run.config.rounds == 3 for run in plan.runs)
    assert plan.runs[0].varied["learning_rate"] == "auto", "what only other runs name is the default"


def test_auto_batch_is_a_quarter_of_the_smallest_client_and_at_most_64(write, tmp_path):
    plan = read(write(partition="iid", batch_size="auto", grid={"num_clients": [5, 20, 100]}))
    assert [run.placed(tmp_path).batch_size for run in plan.runs] == [64, 50, 10]
    # A key of every run is changed from outside.
    plan = read(write(data="elsewhere.csv", grid={"rank": [2, 4]}), {"data": "here.csv"})
    assert [run.config.data for run in plan.runs] == ["here.csv"] * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"grid": {"rang": [2]}}, "rang: unknown configuration key; did you mean rank?"),
        ({"grid": {"rank": [2, -1]}}, "rank = -1"),
        ({"grid": {"rank": []}}, "grid.rank"),
        ({"grid": {"rank": 4}}, "grid.rank = 4"),
        ({"runs": []}, "runs = "),
        ({"ledger": "a.sqlite"}, "ledger = 'a.sqlite': the sweep sets it for every run"),
        ({"runs": [{"out": "x"}]}, "out = 'x'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(write, values, message):
    with pytest.raises(InputError, match=re.escape(message)):
        read(write(**values))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "simulations" / "configs" / "sweeps").glob("*.toml")), ids=lambda p: p.stem
)
def test_every_study_that_is_shipped_expands(path):
    plan = read(path)
    assert len(plan.runs) >= 3
    assert all(run.config.privacy_view == "local" for run in plan.runs)
    # Under the paper's clipping rule noise is not divided by the batch size, and hides any difference between noises.
    assert not path.stem.startswith("lmo") or {run.config.clipping for run in plan.runs} == {"joint"}
    # The studies of classifiers have small and full forms; those of rules, LMO noise and language models one.
    alone = path.stem.startswith(("aggregation", "lmo", "medical", "sentiment")) or path.stem.endswith("-full")
    assert alone or path.with_name(f"{path.stem}-full.toml").exists()


def test_points_are_picked_by_what_varies_and_the_others_stay_to_be_run(write, base, tmp_path):
    path, out = write(**base, grid={"rank": [2, 4], "seed": [0, 1]}), tmp_path / "out"
    printed = io.StringIO()
    picked = read(path, {"rank": 4, "seed": 1})
    assert sweep(picked, out, console=Console(file=printed, width=200), max_parallel=1).is_finished
    table = pd.read_csv(out / "sweep.csv")
    assert table["status"].tolist() == ["not run", "not run", "not run", "done"]
    assert re.fullmatch(r"rank-4-seed-1-[0-9a-f]{8}", table["folder"][3])
    assert printed.getvalue().splitlines()[:2] == ["run 4/4 rank=4, seed=1: running", "run 4/4 rank=4, seed=1: done"]
    assert len({run.key for run in read(path).runs} & {path.name for path in out.iterdir()}) == 1
    with pytest.raises(InputError, match=r"rank = 8: no run of .*study.toml has it; there are rank: 2, 4"):
        read(path, {"rank": 8})
    # What an earlier plan has released still counts.
    narrow = read(write(**base, grid={"rank": [2], "seed": [0]}))
    assert len(attempts(narrow, out)) == 1
    with pytest.raises(InputError, match=r"study.toml: is a sweep, .*; fedpriv sweep .*study.toml runs it"):
        federate(path, {})


def test_a_sweep_in_one_process_can_be_watched(write, base, tmp_path):
    planned = read(write(**base, grid={"rank": [2, 4]}))
    pipe, screen = io.StringIO(), io.StringIO()
    display = _SweepDisplay(Console(file=pipe, width=200), planned, tmp_path)
    running, waiting = (run.key for run in planned.runs)
    display.update({running: "running", waiting: "waiting"})
    display.progressed(planned.runs[0], "round 1, training 20%")
    assert len(pipe.getvalue().splitlines()) == 1, "no more often than every eight seconds"
    display._printed -= 9
    display.progressed(planned.runs[0], "round 1, training 40%")
    assert pipe.getvalue().splitlines()[-1] == "run 1/2 rank=2: round 0 of 1, round 1, training 40%"
    with _SweepDisplay(Console(file=screen, width=100, force_terminal=True), planned, tmp_path) as live:
        live.update({running: "running", waiting: "waiting"})
        live.progressed(planned.runs[0], "round 1, training 40%")
    assert "rank=2: round 1, training 40%" in screen.getvalue()


def test_finished_runs_stay_and_failures_are_recorded_and_not_fatal(write, base, tmp_path):
    out = tmp_path / "out"
    path = write(**base, grid={"max_length": [32, 4000]})
    assert not run(path, out)
    frame = pd.read_csv(out / "sweep.csv")
    assert frame["status"].tolist() == ["done", "failed"]
    assert "max_length = 4000" in frame["error"][1]
    assert "Traceback" in (out / f"{frame['folder'][1]}.txt").read_text()
    assert pd.read_parquet(out / "sweep.parquet")["accuracy"][0] == frame["accuracy"][0]
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/summary.json")}
    assert not run(path, out)
    assert {p: p.stat().st_mtime_ns for p in out.glob("*/summary.json")} == before


def test_runs_without_an_accuracy_have_their_row_and_no_plot(write, base, tmp_path):
    private = {key: value for key, value in base.items() if key not in ("simulate", "comparison")}
    out = tmp_path / "out"
    assert run(write(**private, grid={"rank": [2]}), out)
    (row,) = pd.read_csv(out / "sweep.csv").to_dict("records")
    assert row["status"] == "done"
    assert math.isnan(row["accuracy"])
    assert row["epsilon_local_max"] > 0
    assert pd.read_parquet(out / "sweep.parquet")["accuracy"].dtype == float
    assert not list(out.glob("*.png"))


@pytest.mark.slow
def test_runs_on_ray_give_what_they_give_in_this_process(write, base, tmp_path):
    pytest.importorskip("ray", reason="needs the extra ray")
    path = write(**base, grid={"rank": [2, 4], "seed": [0, 1]})
    assert run(path, tmp_path / "alone")
    assert run(path, tmp_path / "parallel", max_parallel=2)
    alone, parallel = (pd.read_csv(tmp_path / name / "sweep.csv") for name in ("alone", "parallel"))
    columns = ["rank", "seed", "status", "accuracy", "epsilon_local_max", "epsilon_sum", "num_runs_in_sum", "folder"]
    pd.testing.assert_frame_equal(alone[columns], parallel[columns])
    pivoted = pd.read_csv(tmp_path / "alone" / "pivot.csv")
    assert pivoted["rank"].tolist() == [2, 4]
    assert pivoted["mean"][0] == pytest.approx(alone["accuracy"][:2].mean())
    assert (tmp_path / "alone" / "accuracy-against-rank.png").stat().st_size > 5000


def test_the_sum_composes_a_clients_releases_over_all_runs_and_attempts(write, base, tmp_path):
    out = tmp_path / "out"
    # Three equal clients, so that one of them is composed by hand.
    path = write(
        **{**base, "client_column": "", "partition": "iid"}, num_clients=3, grid={"noise_multiplier": [1.0, 2.0]}
    )
    assert run(path, out)
    plan = read(path)
    lost = out / "unfinished" / "some-1"
    lost.mkdir(parents=True)
    for name in ("ledger.sqlite", "ledger.sqlite.head", "config.toml"):
        shutil.copy(out / plan.runs[0].key / name, lost)
    found = total(attempts(plan, out))
    assert found.num_runs == 3
    with reading(out / plan.runs[0].key / "ledger.sqlite") as db:
        (delta,) = {data_set.delta for data_set in db.data_sets()}
        ((release,),) = {tuple(each.event for each in db.releases(data_set.id)) for data_set in db.data_sets()}
    accountant = pld.PLDAccountant()
    for z, count in ((1.0, 2), (2.0, 1)):
        gaussian = dp_accounting.GaussianDpEvent(z)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(release.sampling_probability, gaussian), count)
    assert found.epsilon == pytest.approx(accountant.get_epsilon(delta), rel=1e-3)
    assert found.epsilon > max(
        json.loads((out / r.key / "summary.json").read_text())["epsilon_local_max"] for r in plan.runs
    )
    (lost / "ledger.sqlite.head").unlink()
    with pytest.raises(LedgerError, match="adopt-head"):
        total(attempts(plan, out))


@pytest.mark.parametrize(
    "runs",
    [[{"num_clients": 2}, {"num_clients": 4}], *slow([{"evaluation_noise_multiplier": 4.0}, {"simulate": True}])],
)
def test_groups_that_share_records_out_differently_add_up(write, base, tmp_path, runs):
    path, out = write(**{**base, "client_column": "", "partition": "iid"}, runs=runs), tmp_path / "out"
    assert run(path, out)
    folders = [out / planned.key for planned in read(path).runs]
    one, other = (total([folder]) for folder in folders)
    both = SweepSpending(epsilon=one.epsilon + other.epsilon, delta=one.delta + other.delta, num_runs=2)
    assert total(folders) == both


def test_plots_and_tables_manage_without_a_finished_run(write, tmp_path):
    plan = read(write(grid={"rank": [2, 4]}))
    frame = result.tidy(
        plan, tmp_path, {plan.runs[0].key: "no reason"}, SweepSpending(epsilon=0.0, delta=0.0, num_runs=0)
    )
    assert frame["status"].tolist() == ["failed", "not run"]
    assert result.pivot(frame, plan) is None
    assert plots.write(frame, plan, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(("num_runs", "finished"), [(3, 1), (12, 5)])
def test_a_sweep_that_is_killed_half_way_repeats_nothing_that_was_finished(write, base, tmp_path, num_runs, finished):
    path, out = write(**base, grid={"seed": list(range(num_runs))}), tmp_path / "out"
    so_far = lambda: len(list(out.glob("*/summary.json"))) >= finished  # noqa: E731
    with killed_after(so_far, "sweep", str(path), "--out", str(out), "--max-parallel", "1"):
        pass
    before = {p: json.loads(p.read_text())["run_id"] for p in out.glob("*/summary.json")}
    assert finished <= len(before) < num_runs
    said = io.StringIO()
    assert sweep(read(path), out, max_parallel=1, console=Console(file=said, width=200)).is_finished
    assert said.getvalue().count("was finished before") == len(before)
    after = {p: json.loads(p.read_text())["run_id"] for p in out.glob("*/summary.json")}
    assert len(after) == num_runs
    assert before.items() <= after.items()
    frame = pd.read_csv(out / "sweep.csv")
    assert (frame["status"] == "done").all()
    # The attempt that was killed counts if it had charged.
    assert frame["num_runs_in_sum"][0] in (num_runs, num_runs + 1)


def test_a_sweep_that_another_process_runs_is_refused_by_its_number_and_nothing_of_it_is_moved(write, base, tmp_path):
    path, out = write(**base, grid={"seed": [0, 1]}), tmp_path / "out"
    under_way = out / read(path).runs[1].key
    under_way.mkdir(parents=True)
    for folder, what in ((out, "sweep"), (under_way, "run")):
        write_json(out / files.SWEEP_PLAN, {"runs": []})
        with other_process(folder) as process:
            before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
            with pytest.raises(
                InputError, match=rf"{folder.name}: another process runs this {what}, process {process.pid};"
            ):
                run(path, out)
            assert {p: p.read_bytes() for p in before} == before
            assert not (out / files.UNFINISHED).exists()


def test_what_others_keep_in_a_sweeps_folder_stays_and_lists_vary_as_any_value_does(write, base, tmp_path):
    path, out = write(**base, grid={"target_modules": [["query"], ["query", "value"]]}), tmp_path / "out"
    begun = out / read(path).runs[1].key
    foreign = [planted(out, tmp_path / "a"), planted(out / "unfinished" / f"{begun.name}-1", tmp_path / "b")]
    (out / "sweep.csv").symlink_to(tmp_path / "a" / "patients.csv")
    planted(begun, tmp_path / "c")
    assert run(path, out)
    for each in foreign:
        each.check()
    assert (out / "unfinished" / f"{begun.name}-2" / "patients.csv").exists(), "moved as a whole with its attempt"
    tables = pd.read_csv(out / "sweep.csv"), pd.read_parquet(out / "sweep.parquet"), pd.read_csv(out / "pivot.csv")
    for table in tables:
        assert table["target_modules"].tolist() == ["query", "query, value"]


def test_ray_within_ray_is_refused(write, base, tmp_path):
    with pytest.raises(InputError, match="engine = ray"):
        run(write(**base, grid={"seed": [0, 1]}), tmp_path / "out", overrides={"engine": "ray"}, max_parallel=2)
    assert parse({"engine": "ray"}).engine == "ray"


def test_several_ways_to_say_how_private_a_run_is_are_one_column(write):
    path = write(
        runs=[{"target_epsilon": 2.0}, {"target_epsilon": 8.0}, {"noise_multiplier": 0.0}],
        grid={"aggregation": ["dp-lora", "flora"], "seed": [0, 1]},
    )
    plan = read(path)
    accuracy = [0.5 + 0.01 * place for place in range(12)]
    figures = {"status": "done", "chance_accuracy": 0.1, "accuracy_non_private": None, "delta_max": 1e-5}
    frame = pd.DataFrame([run.varied for run in plan.runs]).assign(accuracy=accuracy, **figures)
    frame["epsilon_local_max"] = frame["target_epsilon"]
    found, keys = result.settings(frame, plan)
    assert keys == ["privacy", "aggregation"]
    assert found["privacy"].tolist() == ["epsilon 2"] * 4 + ["epsilon 8"] * 4 + ["no noise"] * 4
    assert result.pivot(frame, plan).loc["epsilon 8", ("mean", "flora")] == pytest.approx(0.5 + 0.01 * 6.5)
    figure = plots._metric_against(frame, plan, "epsilon_local_max", "epsilon")
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["2", "8", "no noise"]


def test_runs_of_different_noise_schedules_are_told_apart():
    rows = [{"noise_multiplier": 1.0, "noise_schedule": text} for text in ("3, 2", "2, 3", "")]
    assert [result._privacy(row) for row in rows] == ["z by round: 3, 2", "z by round: 2, 3", "z 1"]


@pytest.mark.parametrize(("answers", "metric"), [([], _PERPLEXITY), (["good", "bad"], _ACCURACY)])
def test_language_models_that_answer_freely_are_compared_by_perplexity(write, tmp_path, answers, metric):
    asked = {"prompt_column": "question", "response_column": "answer", "answers": answers}
    plan = read(write(task="CAUSAL_LM", grid={"rank": [2, 4]}, **asked))
    figures = {"accuracy": [0.6, 0.7], "perplexity": [9.0, 7.0], "perplexity_initial": 11.0, "delta_max": 1e-5}
    figures |= {"status": "done", "bytes_up": 1, "bytes_down": 1}
    frame = pd.DataFrame([run.varied for run in plan.runs]).assign(**figures)
    assert metric_of(plan) == metric
    assert result.pivot(frame, plan).loc[4, "mean"] == frame[metric.name][1]
    assert [path.name for path in plots.write(frame, plan, tmp_path)] == [f"{metric.name}-against-rank.png"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_names_in_brackets_are_shown_and_not_taken_for_markup(tmp_path, is_terminal):
    planned = expand({"grid": {"data": ["[red].csv", "[/b].csv"]}}, source="grid", title="[/t]")
    text = io.StringIO()
    with _SweepDisplay(Console(file=text, force_terminal=is_terminal, width=80), planned, tmp_path) as display:
        display.update(dict.fromkeys((run.key for run in planned.runs), "done"))
    assert {"data=[red].csv", "data=[/b].csv"} == set(re.findall(r"data=\S+csv", text.getvalue()))
    pivoted = pd.DataFrame({"mean": [0.5], "std": [0.1], "count": [2]}, index=pd.Index(["[/b].csv"], name="data"))
    Console(file=text).print(_pivot_table(pivoted, _ACCURACY))
    assert "[/b].csv" in text.getvalue().splitlines()[-1] + text.getvalue().splitlines()[-2]
