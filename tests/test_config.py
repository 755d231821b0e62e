"""Every key is checked once; what a run resolved to can be read back."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from fedpriv.config import KEYS, RunConfig, parse, parse_overrides, read, to_flower, to_toml
from fedpriv.errors import InputError

ROOT = Path(__file__).resolve().parents[1]

BAD = {
    "task": "CLUSTER",
    "rank": 0,
    "alpha": 0.0,
    "layers": "first-2",
    "max_length": 0,
    "test_fraction": 1.0,
    "client_sizes": [0],
    "partition": "random",
    "num_clients": 0,
    "dirichlet_alpha": 0.0,
    "public_data": "perhaps",
    "rounds": 0,
    "clients_per_round": -1,
    "min_clients": 0,
    "aggregation": "median",
    "local_steps": 0,
    "batch_size": 0,
    "optimizer": "lion",
    "learning_rate": float("inf"),
    "weight_decay": -0.1,
    "clipping": "ghost",
    "clip_norm": 0.0,
    "noise_multiplier": float("nan"),
    "delta": 1.0,
    "target_epsilon": -2.0,
    "privacy_view": "aggregate",
    "seed": "zero",
    "simulate": "maybe",
    "comparison": "maybe",
    "prefix_cache": 7,
    "memory_limit_mb": 0,
    "engine": "teleport",
}


@pytest.mark.parametrize("key", BAD)
def test_bad_value_is_one_line_with_key_and_value(key):
    with pytest.raises(InputError) as caught:
        parse({key: BAD[key]})
    message = str(caught.value)
    assert message.startswith(f"{key} = {BAD[key]!r}: ")
    assert "\n" not in message


def test_unknown_key_suggests_the_closest_one():
    with pytest.raises(InputError, match=r"lerning_rate: unknown configuration key; did you mean learning_rate\?"):
        parse({"lerning_rate": 1.0})
    with pytest.raises(InputError, match="known keys: model, task"):
        parse({"zzz": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"partition": "natural"}, "client_column"),
        ({"partition": "sizes"}, "client_sizes"),
        ({"weight_decay": 0.1}, "weight_decay = 0.1: only adamw"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        parse(values)


CHANGED = {
    "target_modules": ["query", "value"],
    "client_sizes": [30, 20],
    "partition": "sizes",
    "delta": 1e-6,
    "comparison": False,
    "labels": "a,b",
}


@pytest.mark.parametrize("values", [{}, CHANGED])
def test_toml_and_flower_forms_read_back_to_the_same_configuration(values):
    config = parse(values)
    assert parse(tomllib.loads(to_toml(config))) == config
    assert parse(to_flower(config)) == config
    assert all(isinstance(value, str | int | float | bool) for value in to_flower(config).values())


def test_pyproject_lists_every_key_with_its_default_for_flower():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["flwr"]["app"]["config"]
    assert listed == to_flower(replace(RunConfig(), engine="flower"))


def test_documentation_explains_every_key():
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in text and f"`{key}`" not in text] == []


@pytest.mark.parametrize("file", sorted((ROOT / "simulations" / "configs").glob("*.toml")), ids=lambda f: f.stem)
def test_shipped_configurations_are_valid(file):
    parse(read(file))


def test_embedded_configuration_is_the_default():
    assert parse(read(ROOT / "simulations" / "configs" / "embedded.toml")) == RunConfig()


def test_overrides_are_toml_where_they_can_be():
    assert parse_overrides(["rounds=3", "data=a b.csv", "simulate=true", "client_sizes=[1, 2]", "delta="]) == {
        "rounds": 3,
        "data": "a b.csv",
        "simulate": True,
        "client_sizes": [1, 2],
        "delta": "",
    }
    with pytest.raises(InputError, match="-c rounds: must be key=value"):
        parse_overrides(["rounds"])


def test_file_that_is_missing_or_no_toml_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such configuration file"):
        read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(InputError, match=r"bad\.toml: not a TOML file"):
        read(tmp_path / "bad.toml")


def test_digest_ignores_where_results_go_and_nothing_else():
    base = RunConfig()
    assert replace(base, out="/elsewhere").digest == base.digest
    assert replace(base, seed=1).digest != base.digest
    assert len({field.name for field in fields(RunConfig)}) == len(KEYS)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, True),
        ({"data": "x.csv"}, False),
        ({"data": "x.csv", "public_data": True}, True),
        ({"data": "x.csv", "simulate": True}, True),
        ({"comparison": False}, False),
        ({"noise_multiplier": 0.0}, False),
    ],
)
def test_a_comparison_follows_only_where_it_is_allowed(values, expected):
    assert parse(values).compares is expected
