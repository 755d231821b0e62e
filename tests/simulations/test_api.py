"""Runs and sweeps from Python: the same as from the command line, typed, quiet on request, and refused in one line."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w
from matplotlib.colors import to_hex

from fedpriv.config import parse
from fedpriv.errors import InputError
from simulations import FinishedSweep, api, run, sweep
from simulations.sweeps.result import SweepSpending


@pytest.fixture(scope="module")
def finished(small_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return run(**{**small_run, "data": Path(str(small_run["data"]))}, out=folder / "one", progress=False)


@pytest.fixture(scope="module")
def one_round(small_run) -> dict[str, object]:
    return {**{key: value for key, value in small_run.items() if key != "rank"}, "rounds": 1}


@pytest.fixture(scope="module")
def swept(one_round, tmp_path_factory) -> FinishedSweep:
    out = tmp_path_factory.mktemp("sweeps") / "two"
    return sweep(**one_round, grid={"rank": np.array([2, 4])}, out=out, max_parallel=1, progress=False)


def test_keywords_give_the_run_that_a_file_of_the_same_keys_gives_and_progress_is_shown_or_nothing_is(
    finished, small_run, one_round, tmp_path, capfd
):
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(small_run))
    again = run(path, out=tmp_path / "again", progress=False)
    assert capfd.readouterr() == ("", "")
    same = [name for name in finished.rounds if name != "seconds"]
    assert again.rounds[same].equals(finished.rounds[same])
    assert again.config.digest == finished.config.digest
    run(**one_round, out=tmp_path / "loud")
    assert "round 1" in capfd.readouterr().out


@pytest.mark.parametrize(
    "values",
    [
        {"client_sizes": np.array([30, 20])},
        {"labels": pd.Series(["a", "b"])},
        {"budget_epsilon": [np.float32(2)], "rank": np.int64(8), "simulate": np.bool_(True)},
        {"labels": [Path("a"), "b"], "variant_rounds": range(1, 3)},
    ],
    ids=lambda values: next(iter(values)),
)
def test_values_of_numpy_pandas_and_pathlib_are_as_good_as_python_s_own(values):
    parse(api._plain(values))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ronds": 3}, "ronds: unknown configuration key; did you mean rounds?"),
        ({"rounds": 0}, "rounds = 0: "),
        ({"engine": "flower"}, "engine = 'flower'"),
        ({"data": "on-nodes", "labels": ["a", "b"]}, "data = 'on-nodes': is for deployments"),
        ({"resume": "{folder}", "rounds": 3}, "a run keeps the configuration it began with"),
        ({"resume": "{folder}/nowhere"}, "no such configuration file"),
        ({"out": "{folder}"}, "already holds"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_changes_nothing(finished, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in finished.folder.iterdir()}
    values = {k: v.format(folder=finished.folder) if isinstance(v, str) else v for k, v in arguments.items()}
    with pytest.raises(InputError) as refused:
        run(**{"out": "new", **values} if "resume" not in values else values)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())
    assert {path: path.stat().st_mtime_ns for path in finished.folder.iterdir()} == before


def test_a_sweep_has_a_row_a_run_and_the_cost_of_all_of_them(swept, one_round):
    assert swept.is_finished
    assert swept.table["rank"].tolist() == [2, 4]
    assert [each.config.rank for each in swept.runs] == [2, 4]
    assert swept.pivot is not None
    assert swept.spending.num_runs == 2
    assert swept.spending.epsilon > max(each.epsilon() for each in swept.runs)
    assert all(path.suffix == ".png" and path.is_file() for path in swept.plots)
    assert "2 of 2 runs finished" in repr(swept)
    assert "<table" in swept._repr_html_()
    # The same grid as a tuple: nothing is run again.
    before = {path: path.stat().st_mtime_ns for path in swept.folder.glob("*/summary.json")}
    assert sweep(**one_round, grid={"rank": (2, 4)}, out=swept.folder, max_parallel=1, progress=False).is_finished
    assert {path: path.stat().st_mtime_ns for path in swept.folder.glob("*/summary.json")} == before


def test_figures_are_those_of_matplotlib_in_colours_that_white_paper_shows(finished, swept):
    drawn = {
        colour
        for what in ("loss", "epsilon")
        for line in finished.plot(what).axes[0].lines
        if (colour := line.get_color())
    }
    assert drawn
    assert not any(to_hex(colour).startswith("#0102") for colour in drawn), "a placeholder is left"
    assert swept.plot().axes[0].get_xlabel() == "LoRA rank"
    for wrong in ("speed", "perplexity"):
        with pytest.raises(InputError, match=f"plot = '{wrong}'"):
            finished.plot(wrong)
    with pytest.raises(InputError, match="against-rank"):
        swept.plot("accuracy-against-epsilon")


def test_no_text_of_a_sweep_can_run_in_a_notebook(tmp_path):
    attack = "<img src=x onerror=alert(1)>"
    page = FinishedSweep(
        folder=tmp_path / attack,
        title=attack,
        plots=(),
        spending=SweepSpending(epsilon=0.0, delta=0.0, num_runs=0),
        is_finished=False,
        errors={attack: attack},
        _table=pd.DataFrame({attack: [attack], "status": ["failed"]}, index=[attack]),
        _pivot=None,
        _figures=dict,
    )._repr_html_()
    assert "<img" not in page
    assert page.count("&lt;img") == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": {"rank": 4}}, "grid.rank = 4: must be a list"),
        ({"grid": {"rang": [4]}}, "rang: unknown configuration key"),
        ({"grid": {"rank": [2, 4]}, "rank": 8}, "rank = 8: no run of grid has it; there are rank: 2, 4"),
        ({"runs": [{"rank": 2}], "max_parallel": 0}, "max_parallel = 0"),
        ({"grid": {"engine": ["stacked", "flower"]}}, "engine = 'flower'"),
        ({"grid": {"rank": [2, 4]}, "data": "on-nodes", "labels": ["a", "b"]}, "data = 'on-nodes'"),
        ({"config": "study.toml", "grid": {"rank": [2, 4]}}, "study.toml has its own; change it there"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_before_it_runs(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("study.toml").write_text("[grid]\nseed = [0, 1]\n")
    config = arguments.get("config")
    with pytest.raises(InputError) as refused:
        sweep(config, out="none", progress=False, **{key: each for key, each in arguments.items() if key != "config"})
    assert message in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]
