"""Studies whose runs are those of sweeps: a line for each run, once, and the tables of such lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from simulations.studies import aggregation, federations, lmo
from simulations.studies.harness import append, lines


def test_a_sweeps_runs_leave_a_line_each_and_are_not_run_again(tmp_path, small_run, monkeypatch, capsys):
    values = {**small_run, "rounds": 1, "local_steps": 1, "grid": {"seed": [0, 1]}}
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(values))
    monkeypatch.setattr(federations, "SWEEPS", tmp_path)
    runs, out = tmp_path / "lines.jsonl", tmp_path / "out"
    federations.run_sweep("tiny", runs, out)
    found = lines(runs)
    assert [line["key"] for line in found] == ["tiny/seed=0", "tiny/seed=1"]
    assert [line["cell"] for line in found] == [{"seed": 0}, {"seed": 1}]
    assert all(line["bytes_up"] > 0 and line["software"]["torch"] for line in found)
    capsys.readouterr()
    federations.run_sweep("tiny", runs, out)
    assert lines(runs) == found
    assert not capsys.readouterr().out


def write(tmp_path: Path, study: object, *found: dict) -> list[list[str]]:
    for line in found:
        append(tmp_path / "lines.jsonl", line)
    study.write(tmp_path / "page.md", tmp_path / "lines.jsonl")
    text = (tmp_path / "page.md").read_text()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("| ")]


def line(sweep: str, accuracy: float, **cell: object) -> dict:
    figures = {"bytes_up": 5.81e6, "bytes_down": 94.24e6, "accuracy_initial": 0.1, "majority_accuracy": 0.3}
    return {"key": f"{sweep}/{cell}", "sweep": sweep, "cell": cell, "accuracy": accuracy, **figures}


def test_accuracies_of_a_rule_are_means_over_seeds_by_noise(tmp_path):
    noisy = [
        line("aggregation-paper", value, aggregation="flora", target_epsilon=2, noise_multiplier=1.88, seed=seed)
        for seed, value in enumerate((0.5, 0.6, 0.7))
    ]
    plain = line("aggregation-paper", 0.8, aggregation="flora", target_epsilon=None, noise_multiplier=0, seed=0)
    weights = line("aggregation-weights", 0.4, aggregation="cmfl", target_epsilon=2, noise_multiplier=1.88)
    real = line("aggregation-medquad", 0.7, aggregation="flora", seed=0)
    rows = write(tmp_path, aggregation, *noisy, plain, weights, real)
    assert ["`flora`", "0.600 ± 0.058", "", "0.800 (one seed)", "5.81", "94.24"] in rows
    assert ["`cmfl`, full weights", "0.400 (one seed)", "", "", "5.81", "94.24"] in rows
    assert ["`flora`", "0.700 (one seed)", "94.24", "not run", ""] in rows
    assert ["largest class", "0.300", "", "", ""] in rows


def test_noise_is_shown_by_its_standard_deviation(tmp_path):
    record = {"epsilon": 3.0, "dimension": 1, "noise": "lmo", "parts": "uniform", "median_absolute": 0.2}
    gaussian = {**record, "noise": "gaussian", "variance": 4.0, "median_absolute": 1.4}
    large = [{**each, "dimension": 9, "variance": 8.0} for each in (record, gaussian)]
    reductions = [{"epsilon": 3.0, "paper": 0.9, "lmo": 0.8, "staircase": 0.85}]
    compared = {"key": "compare", "reductions": reductions}
    compared["records"] = [{**record, "epsilon_at_dimension": 23.88}, gaussian, *large]
    uniform = '{"combination": "mixture", "uniform": {"weight": 1, "low": 0.1, "high": 0.5}}'
    laplace = '{"combination": "mixture", "uniform": {"weight": 1, "low": 1, "high": 1}}'
    trained = [
        line("lmo", 0.5, mechanism_parameters=parameters, target_epsilon=epsilon) | {"noise_multiplier": 2.0}
        for parameters in ("", laplace, uniform)
        for epsilon in lmo.EPSILONS
    ]
    rows = write(tmp_path, lmo, compared, *trained)
    assert ["3", "90.0 %", "80.0 %", "at most 85.0 %", "23.9", "8", "8"] in rows
    assert ["uniform", "0.200"] in rows
    # Laplace noise of scale 1 has variance 2; with u uniform on [a, b] it is 2 / (a b).
    assert ["Laplace, u = 1", *["0.500 (2.83)"] * 3] in rows
    assert ["LMO, u uniform on [0.1, 0.5]", *["0.500 (12.6)"] * 3] in rows


@pytest.mark.parametrize("name", ["aggregation-medquad", "aggregation-sst2"])
def test_sweeps_on_real_data_name_files_of_the_data_folder(name):
    assert set(aggregation.FILES[name]) <= {"data", "test_data"}
    text = (federations.SWEEPS / f"{name}.toml").read_text()
    assert all(f'{key} = "{file}"' in text for key, file in aggregation.FILES[name].items())
