"""`fedpriv lmo`: one JSON object each, and one line for what is wrong."""

import json
import math
from pathlib import Path

import pytest

from tests.cli.command_line import as_json, fedpriv, refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lmo")
    files = {
        "uniform.json": {"combination": "mixture", "uniform": {"weight": 1, "low": 0.1, "high": 0.5}},
        "gamma.json": {"combination": "mixture", "gamma": {"weight": 1, "shape": 1, "scale": 0.3}},
        "weights.json": {"combination": "mixture", "uniform": {"weight": 0.7, "low": 0.1, "high": 0.5}},
        "empty-range.json": {"shape": [3, 2]},
        "odd-range.json": {"colour": [1, 2]},
        "tiny-scale.json": {"low": [5, 6], "high": [5, 6]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "broken.json").write_text("{")
    return folder


# The reference values for u uniform on [0.1, 0.5].
@pytest.mark.parametrize(
    ("order", "scalar", "vector"), [(2, 0.0896, 0.1033), (8, 0.2557, 0.4131), (32, 0.3969, 1.6523)]
)
def test_account_gives_both_curves(folder, order, scalar, vector):
    options = ["--params", "uniform.json", "--order", str(order), "--dimension", "74883"]
    values = as_json("lmo", "account", *options, folder=folder)
    assert values["published"] == pytest.approx(scalar, abs=5e-5)
    assert values["sound"] == pytest.approx(vector, abs=5e-5)
    assert values["second_moment_limit"] == pytest.approx(order * 0.31 / 3 / 2)
    assert values["fisher_limit"] == pytest.approx(order * 0.09198 / 2, rel=1e-4)
    assert not values["published_is_guarantee"]


# Theorem A.2 by hand: E[u] = 0.3, and E[u e^-u] = 0.21380 by quadrature.
def test_account_of_an_observer_of_the_noise_alone_is_theorem_a_2(folder):
    options = ["--params", "uniform.json", "--observer", "noise-only"]
    scalar = as_json("lmo", "account", *options, folder=folder)
    assert scalar["pure_epsilon"] == pytest.approx(0.33868, abs=5e-5)
    assert scalar["effective_noise_multiplier"] == pytest.approx(math.sqrt(2 / math.pi) * 0.3 / (0.31 / 3))
    vector = as_json("lmo", "account", *options, "--dimension", "10000", folder=folder)
    assert vector["pure_epsilon"] == pytest.approx(100 * 0.31 / 0.9, rel=5e-3), "sqrt(d) E[u^2] / E[u]"
    assert vector["effective_noise_multiplier"] == scalar["effective_noise_multiplier"]


def test_search_writes_what_account_reads(folder):
    options = ["--epsilon", "2", "--combination", "linear", "--part", "gamma", "--part", "uniform"]
    options += ["--objective", "variance", "--out", "found.json"]
    values = as_json("lmo", "search", *options, folder=folder)
    assert 1.99 < values["epsilon"] <= 2
    assert (values["valid_dimension"], values["is_guarantee"]) == (1, True)
    assert json.loads((folder / "found.json").read_text()) == values["parameters"]
    assert "exists; name another file" in refused("lmo", "search", *options, folder=folder)
    text, _ = fedpriv("lmo", "account", "--params", "found.json", "--order", "8", folder=folder)
    assert text.startswith("order")


def test_search_under_the_published_curve_is_marked(folder):
    options = ["--epsilon", "2", "--accounting", "published", "--dimension", "100", "--part", "exponential"]
    values = as_json("lmo", "search", *options, folder=folder)
    assert (values["valid_dimension"], values["is_guarantee"]) == (1, False)
    assert values["variance"] == "inf", "an exponential part in a mixture has none"


@pytest.mark.slow
def test_compare_and_its_plots(folder):
    options = ["--epsilon", "2", "--dimension", "100", "--ablations", "--plots", "plots"]
    values = as_json("lmo", "compare", *options, folder=folder)
    assert {record["noise"] for record in values["records"]} == {"gaussian", "laplace", "lmo"}
    assert len({record["parts"] for record in values["records"] if record["noise"] == "lmo"}) == 7
    (row,) = values["reductions"]
    assert row["paper"] == 0.8771
    assert row["lmo"] <= row["laplace"] + 1e-6 < row["staircase"]
    assert {path.name for path in (folder / "plots").iterdir()} == {Path(path).name for path in values["plots"]}


def test_coverage_prints_a_table(folder):
    options = ["--num-samples", "16", "--quantisation", "0.1", "--domain-size", "5"]
    text, _ = fedpriv("lmo", "coverage", *options, folder=folder)
    assert text.splitlines()[0].split()[:2] == ["quantisation", "domain_size"]
    assert len(text.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["account", "--params", "gamma.json", "--order", "8"], "order = 8"),
        (["account", "--params", "uniform.json", "--order", "1"], "order = 1.0"),
        (["account", "--params", "uniform.json"], "order: is missing"),
        (["account", "--params", "uniform.json", "--observer", "noise-only", "--sensitivity", "0"], "sensitivity = 0"),
        (["account", "--params", "uniform.json", "--observer", "nobody"], "observer"),
        (["account", "--params", "uniform.json", "--order", "2", "--sensitivity", "0"], "sensitivity = 0.0"),
        (["account", "--params", "weights.json", "--order", "2"], "weights sum to 0.7"),
        (["account", "--params", "broken.json", "--order", "2"], "must be JSON"),
        (["search", "--epsilon", "2", "--ranges", "empty-range.json"], "shape = [3, 2]"),
        (["search", "--epsilon", "2", "--ranges", "odd-range.json"], "must be a JSON object with some of"),
        (["search", "--epsilon", "2", "--ranges", "tiny-scale.json", "--part", "uniform"], "meets it"),
        (["search", "--epsilon", "1e-9"], "epsilon = 1e-09"),
        (["search", "--epsilon", "2", "--delta", "0"], "delta = 0"),
        (["search", "--epsilon", "2", "--part", "normal"], "'normal'"),
        (["search", "--epsilon", "2", "--accounting", "hopeful"], "accounting = 'hopeful'"),
        (["compare", "--combination", "sum"], "combination = 'sum'"),
        (["coverage", "--quantisation", "2"], "quantisation = 2.0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, arguments, part):
    assert part in refused("lmo", *arguments, folder=folder)
