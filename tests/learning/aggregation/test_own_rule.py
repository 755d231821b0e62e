"""A rule that exists only in these tests, registered at run time: all that a new aggregation rule requires."""

import dataclasses
import re

import pytest
import torch
from safetensors.torch import load_file

from fedpriv.config import parse, why_recipe
from fedpriv.errors import InputError
from fedpriv.learning.aggregation import RULES, Rule, weighted_average
from server.observer import LogObserver
from simulations.api import federate
from simulations.engines import federation
from tests.house import ROOT


def median(model, uploads, weights):
    """Each value's median over the clients, whatever their weights."""
    assert sum(weights) == pytest.approx(1)
    names = uploads[0]
    middle = {name: torch.stack([upload[name] for upload in uploads]).median(dim=0).values for name in names}
    return dataclasses.replace(model, adapter=middle)


def average(model, uploads, weights):
    return dataclasses.replace(model, adapter=weighted_average(uploads, weights))


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setitem(RULES, "median", Rule(aggregate=median))


def test_a_federation_runs_with_a_rule_that_was_registered_at_run_time(own, small_run, tmp_path):
    config = parse({**small_run, "aggregation": "median", "rounds": 1, "out": str(tmp_path / "run")})
    federation.run(config, LogObserver())
    folders = (tmp_path / "run" / "variants").iterdir()
    variants = {folder.name: load_file(folder / "adapter_model.safetensors") for folder in folders}
    result = variants.pop("global")
    assert len(variants) == 3
    uploads = {name: torch.stack([each[name] for each in variants.values()]) for name in result}
    for name, tensor in result.items():
        torch.testing.assert_close(tensor, uploads[name].median(dim=0).values)
    assert any((tensor - uploads[name].mean(dim=0)).abs().max() > 1e-4 for name, tensor in result.items())


def test_what_a_rule_does_not_state_is_refused_as_for_any_other(own):
    for key, value in {"secure_aggregation": True, "server_optimizer": "adam", "client_ranks": [2, 4]}.items():
        with pytest.raises(InputError, match="aggregation = median"):
            parse({"aggregation": "median", "recipe": "per-sample", key: value})
    with pytest.raises(InputError, match=r"train = auto: may choose adam .* = median is no weighted sum"):
        parse({"aggregation": "median", "train": "auto"})


def test_a_rule_of_ones_own_keeps_the_default_recipe_with_the_servers_step_that_fits_it(own):
    default, config = parse({}), parse({"aggregation": "median"})
    assert dataclasses.replace(config, aggregation="dp-lora", server_optimizer="momentum") == default
    assert config.server_optimizer == "sgd"
    assert not why_recipe({"aggregation": "median"})


def test_what_implies_another_recipe_is_said():
    for given, values in {
        "batch_size = 64": {"rounds": 5, "batch_size": 64},
        "local_steps = 3": {"local_steps": 3},
        "aggregation = flora": {"aggregation": "flora"},
        "mechanism = lmo": {"mechanism": "lmo"},
        "a model of your own": {"model": "own:", "data": "in-memory"},
        "prompt_column = question": {"prompt_column": "question"},
    }.items():
        assert f"which {given} implies: " in why_recipe(values)
    for values in ({"batch_size": "by recipe"}, {"batch_size": 64, "recipe": "per-sample"}):
        assert not why_recipe(values)
    assert not why_recipe({"rounds": 5, "local_steps": 1})


def test_it_is_the_first_line_of_a_run(small_run, tmp_path, capsys):
    with pytest.raises(InputError, match="no such file"):
        federate(None, small_run | {"data": str(tmp_path / "nowhere.csv")}, out=tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("recipe = per-sample, which local_steps = 2 implies: most defaults differ")


def test_a_linear_rule_of_ones_own_has_what_those_of_the_library_have_which_are_registered_alike(monkeypatch):
    monkeypatch.setitem(RULES, "mine", Rule(aggregate=average, linear=True))
    config = parse({"aggregation": "mine", "secure_aggregation": True, "num_clients": 4})
    assert (config.recipe, config.privacy_view, config.rule) == ("fedpriv", "aggregate", RULES["mine"])
    assert parse({"aggregation": "mine"}).server_optimizer == "momentum"
    linear = {name: rule for name, rule in RULES.items() if rule.linear and name != "mine"}
    for name, rule in linear.items():
        monkeypatch.setitem(RULES, f"again-{name}", rule)
    assert len(linear) > 2


def from_the_model_before(model, uploads, weights):
    half = weighted_average(uploads, weights)
    return dataclasses.replace(model, adapter={name: (t + model.adapter[name]) / 2 for name, t in half.items()})


def equally(model, uploads, weights):
    return average(model, uploads, [1 / len(uploads)] * len(uploads))


@pytest.mark.parametrize("aggregate", [median, from_the_model_before, equally])
def test_a_rule_that_claims_to_be_a_weighted_sum_and_is_none_is_refused(aggregate):
    """Else its noise would be counted as a sum's, and the `aggregate` view would state too little."""
    with pytest.raises(InputError, match=r"^aggregation = 'liar': is not the weighted sum of the uploads"):
        RULES["liar"] = Rule(aggregate=aggregate, linear=True)
    assert "liar" not in RULES
    with pytest.raises(ValueError, match="aggregation = 'dp-lora': is registered already; delete it first"):
        RULES["dp-lora"] = Rule(aggregate=average)


# The registry, its room's example, the facts, the meaning of the key, a recipe's choice, and a table of a paper.
NAMES_RULES = {
    "fedpriv/learning/aggregation/__init__.py",
    "fedpriv/learning/aggregation/rules.py",
    "fedpriv/config/_federation_and_privacy.py",
    "fedpriv/config/_recipes.py",
    "fedpriv/runs/plan/communication.py",
}


def test_a_rule_is_named_in_its_own_files_and_the_registry_alone():
    rules = sorted(set(RULES) - {"dp-lora"})  # the default is named in advice on what to use instead
    named = re.compile(rf"""(["'`]|aggregation = )({"|".join(rules)})(["'`]|:)""")
    for package in ("fedpriv", "clients", "server", "simulations/engines", "simulations/sweeps"):
        for path in (ROOT / package).rglob("*.py"):
            file = path.relative_to(ROOT)
            if named.search(path.read_text()):
                assert str(file) in NAMES_RULES, file
