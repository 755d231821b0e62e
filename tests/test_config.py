"""Every key is checked, and a resolved configuration can be read back."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from fedpriv.aggregation.rules import RULES
from fedpriv.config import (
    KEYS,
    ON_NODES,
    OUTSIDE_KEYS,
    RunConfig,
    checked,
    parse,
    parse_overrides,
    read,
    to_flower,
    to_toml,
    with_overrides,
)
from fedpriv.errors import InputError
from fedpriv.recipes import BY_RECIPE

ROOT = Path(__file__).resolve().parents[1]

BAD = {
    "mechanism": "laplace",
    "audit": "listen",
    "audit_canaries": 1,
    "variant_rounds": ["zero"],
    "variant_clients": "perhaps",
    "dedup": "magic",
    "dedup_block_size": 0,
    "dedup_records": -1,
    "dedup_utility_bound": 2.0,
    "task": "CLUSTER",
    "rank": 0,
    "alpha": 0.0,
    "layers": "first-2",
    "max_length": 0,
    "test_fraction": 1.0,
    "evaluation_noise_multiplier": 0.0,
    "client_sizes": [0],
    "partition": "random",
    "num_clients": 0,
    "dirichlet_alpha": 0.0,
    "public_data": "perhaps",
    "max_records": -1,
    "generated_answers": -1,
    "max_new_tokens": 0,
    "rounds": 0,
    "clients_per_round": -1,
    "min_clients": 0,
    "round_seconds": 0.0,
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
    "privacy_view": "global",
    "noise_on": "paper",
    "budget_epsilon": [0.0],
    "secure_aggregation": "maybe",
    "secure_masks": "maybe",
    "colluding_clients": -1,
    "seed": "zero",
    "simulate": "maybe",
    "comparison": "maybe",
    "baselines": "maybe",
    "prefix_cache": 7,
    "activation_checkpointing": "some",
    "memory_limit_mb": 0,
    "engine": "teleport",
    "device": "tpu",
    "client_ranks": [0],
    "upload_codec": "zip",
    "relevance_threshold": 1.5,
    "max_update_norm": 0.0,
    "ray_workers": -1,
    "track": "paper",
    "recipe": "secret",
    "normalize_features": "perhaps",
    "train": "body",
    "head_start": "soon",
    "lora_rounds": -1,
    "client_weights": "equal",
    "server_optimizer": "lion",
    "sampling_probability": 1.5,
    "lora_sampling_probability": 0.0,
    "start_noise_multiplier": -1.0,
    "lora_noise_multiplier": -1.0,
    "lora_share": 0.9,
    "evaluate_every": 0,
    "lora_server_optimizer": "lion",
    "server_rate_decay": "cosine",
    "lora_server_learning_rate": 0.0,
    "lora_learning_rate": 0.0,
    "lora_head_learning_rate": 0.0,
}


@pytest.mark.parametrize("key", BAD)
def test_a_bad_value_is_refused_in_one_line_with_key_and_value(key):
    with pytest.raises(InputError) as caught:
        parse({key: BAD[key]})
    message = str(caught.value)
    assert message.startswith(f"{key} = {BAD[key]!r}: ")
    assert "\n" not in message


def test_unknown_aggregation_rule_lists_the_known_ones():
    with pytest.raises(InputError) as caught:
        parse({"aggregation": "median"})
    assert str(caught.value).startswith("aggregation = 'median': ")
    assert all(repr(name) in str(caught.value) for name in RULES)


def test_every_aggregation_rule_can_be_configured():
    assert [parse({"aggregation": name}).aggregation for name in RULES] == list(RULES)


def test_unknown_key_suggests_the_closest_one():
    with pytest.raises(InputError, match=r"lerning_rate: unknown configuration key; did you mean learning_rate\?"):
        parse({"lerning_rate": 1.0})
    with pytest.raises(InputError, match="known keys: recipe, model, task"):
        parse({"zzz": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"partition": "natural"}, "client_column"),
        ({"partition": "sizes"}, "client_sizes"),
        ({"weight_decay": 0.1}, "weight_decay = 0.1: only adamw"),
        ({"client_ranks": [2, 4]}, r"client_ranks = \[2, 4\]: .*need flora"),
        ({"client_ranks": [2, 4], "aggregation": "fedex-lora"}, "aggregation = fedex-lora averages"),
        ({"upload_codec": "int8", "aggregation": "t-fedavg"}, "t-fedavg sends ternary codes"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        parse(values)


BOTH = {"target_epsilon": 8, "noise_multiplier": 1.5}


def test_a_noise_multiplier_and_the_target_that_would_derive_it_are_refused_together():
    with pytest.raises(InputError, match=r"^noise_multiplier = 1\.5: target_epsilon = 8 says how much .* give one"):
        parse(BOTH)
    assert parse({"target_epsilon": 8}).target_epsilon == 8
    for left_out in ({"noise_multiplier": BY_RECIPE}, {"target_epsilon": ""}, {"target_epsilon": BY_RECIPE}):
        parse(BOTH | left_out)
    assert parse({"recipe": "dp-lora-paper", "target_epsilon": 8}).target_epsilon == 8, "the recipe's own noise yields"
    assert parse({"noise_multiplier": 0}).target_epsilon is None, "the recipe's own target yields"


def test_flower_s_values_are_refused_together_only_where_somebody_chose_both():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    with pytest.raises(InputError, match="give one of the two"):
        parse(project | BOTH)
    parse(to_flower(parse({"target_epsilon": 8})))


def test_a_run_s_own_file_holds_the_noise_that_its_target_came_to():
    resolved = tomllib.loads(to_toml(replace(parse({"target_epsilon": 8}), noise_multiplier=0.7)))
    assert parse(resolved).noise_multiplier == 0.7
    older = {key: value for key, value in resolved.items() if key != "train"}
    assert parse(older).noise_multiplier == 0.7, "a file of an earlier version lacks later keys"
    # Whoever runs it anew with another target has the noise derived anew; with another noise, they chose both.
    assert with_overrides(resolved, {"target_epsilon": 4}).get("noise_multiplier") is None
    with pytest.raises(InputError, match=r"^noise_multiplier = 3: target_epsilon = 8"):
        with_overrides(resolved, {"noise_multiplier": 3})
    assert with_overrides(resolved, {"noise_multiplier": 3, "target_epsilon": ""})["noise_multiplier"] == 3
    assert parse(with_overrides(resolved, {"target_epsilon": ""})).noise_multiplier == 0.7, "no target, so the file's"


def test_everything_wrong_is_told_and_the_first_of_it_raised():
    config, problems = checked({"ronds": 1, "rank": 0, "optimizer": "lion"})
    assert config is None
    assert [line.split(" ")[0] for line in problems] == ["ronds:", "rank", "optimizer"]
    assert checked({"rank": 8}) == (parse({"rank": 8}), [])
    with pytest.raises(InputError, match=r"^recipe = "):
        parse({"recipe": ["fedpriv"]})


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
    assert listed.keys() == to_flower(RunConfig()).keys()
    assert parse(listed) == replace(RunConfig(), engine="flower")
    # What recipes differ in is left to the recipe, so that `flwr run` can name one.
    paper = parse(listed | {"recipe": "dp-lora-paper"})
    assert paper == parse({"recipe": "dp-lora-paper", "engine": "flower"})
    # What only other keys leave open: a task, a batch size, what secure aggregation needs, and another recipe's.
    not_in_paper = ("task", "batch_size", "min_clients", "mechanism", "privacy_view")
    not_in_paper += ("max_length", "aggregation", "server_learning_rate")
    assert [key for key in KEYS if getattr(paper, key) != getattr(parse(listed), key)] == [
        key for key in KEYS if listed[key] == BY_RECIPE and key not in not_in_paper
    ]


@pytest.mark.parametrize("file", sorted((ROOT / "simulations" / "configs").glob("*.toml")), ids=lambda f: f.stem)
def test_shipped_configurations_are_valid(file):
    parse(read(file))


def test_embedded_configuration_is_the_default():
    assert parse(read(ROOT / "simulations" / "configs" / "embedded.toml")) == RunConfig()


def test_overrides_are_read_as_toml_or_else_as_text():
    assert parse_overrides(["rounds=3", "data=a b.csv", "simulate=true", "client_sizes=[1, 2]", "delta="]) == {
        "rounds": 3,
        "data": "a b.csv",
        "simulate": True,
        "client_sizes": [1, 2],
        "delta": "",
    }
    with pytest.raises(InputError, match="-c rounds: must be key=value"):
        parse_overrides(["rounds"])


def test_a_file_that_is_missing_or_not_toml_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such configuration file"):
        read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(InputError, match=r"bad\.toml: not a TOML file"):
        read(tmp_path / "bad.toml")


def test_digest_ignores_where_results_go_but_not_the_seed():
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
def test_a_comparison_follows_by_default_only_where_releases_without_noise_are_allowed(values, expected):
    assert parse(values).compares is expected


ON_NODES_TESTED = {"data": ON_NODES, "labels": "a,b", "test_data": "test.csv"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, True),
        ({"baselines": False}, False),
        ({"evaluation_noise_multiplier": 2.0}, False),
        ({"data": "x.csv"}, False),
        ({"data": "x.csv", "simulate": True}, False),
        ({"data": "x.csv", "test_data": "test.csv"}, False),
        ({"data": "x.csv", "public_data": True}, True),
        ({"data": "x.csv", "public_data": True, "task": "CAUSAL_LM"}, False),
        (ON_NODES_TESTED, False),
        (ON_NODES_TESTED | {"baselines": True}, True),
        (ON_NODES_TESTED | {"public_data": True}, True),
    ],
)
def test_baselines_are_computed_by_default_only_where_public_data_are_tested_on(values, expected):
    assert parse(values).computes_baselines is expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": "x.csv"}, "give test_data"),
        ({"data": "x.csv", "test_data": "test.csv"}, "clients' private records"),
        ({"data": "x.csv", "simulate": True}, "clients' private records"),
        ({"evaluation_noise_multiplier": 2.0}, "give test_data"),
        ({"data": ON_NODES, "labels": "a,b"}, "give test_data"),
        ({"data": ON_NODES, "labels": "a,b", "public_data": True}, "give test_data"),
        ({"data": "x.csv", "public_data": True, "task": "CAUSAL_LM"}, "CAUSAL_LM"),
    ],
)
def test_baselines_that_would_need_private_records_or_have_no_test_set_are_refused(values, message):
    with pytest.raises(InputError, match=f"^baselines = true: .*{message}") as caught:
        parse(values | {"baselines": True})
    assert "\n" not in str(caught.value)


ASKS = {"prompt_column": "q", "response_column": "a"}


@pytest.mark.parametrize("columns", [ASKS, {"messages_column": "m"}])
def test_prompts_imply_a_causal_model_and_the_recipe_that_has_one(columns):
    config = parse(columns)
    assert (config.task, config.recipe, config.instructs) == ("CAUSAL_LM", "instruction", True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "CAUSAL_LM", "text_pair_column": "answer"}, "^text_pair_column = answer: .*prompt_column and resp"),
        ({"prompt_column": "q"}, "^prompt_column = q: needs response_column"),
        ({"response_column": "a"}, "^response_column = a: goes with prompt_column"),
        ({"system_prompt": "s"}, "^system_prompt = s: goes with prompt_column"),
        ({"answers": "yes,no"}, "^answers = .*: goes with prompt_column"),
        (ASKS | {"task": "SEQ_CLS"}, "^task = SEQ_CLS: .*CAUSAL_LM"),
        (ASKS | {"messages_column": "m"}, "^prompt_column = q: messages_column holds"),
        ({"messages_column": "m", "prompt_template": "{}"}, "^prompt_template = {}: messages_column holds"),
        (ASKS | {"prompt_template": "Positive?"}, "^prompt_template = 'Positive.': must have {} once"),
        (ASKS | {"prompt_template": "{} or {}"}, "must have {} once"),
        (ASKS | {"answers": ["yes", "yes "]}, "^answers = yes,yes : must be two or more texts, each once"),
        (ASKS | {"answers": ["yes"]}, "two or more"),
        (ASKS | {"answers": ["yes", "n" * 1001]}, "^answers: 1001 characters in one text; must be at most 1000"),
        (ASKS | {"system_prompt": " " * 20_001}, "^system_prompt: 20001 characters"),
        (ASKS | {"prompt_template": "{}" + " " * 20_000}, "^prompt_template: 20002 characters"),
        (ASKS | {"answers": ["yes", " "]}, "two or more"),
        (ASKS | {"answers": "yes,no", "labels": "1,0,2"}, "^labels = 1,0,2: must be as many as answers = yes,no"),
        (ASKS | {"answers": "yes,no", "labels": "1,1"}, "each once"),
        (ASKS | {"labels": "1,0"}, "^labels = 1,0: .*needs answers"),
        ({"data": ON_NODES, "labels": "a,b", "max_records": 5}, "^max_records = 5: with data = on-nodes .* use 0"),
    ],
)
def test_prompts_responses_and_answers_that_do_not_fit_are_refused(values, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(values)
    assert "\n" not in str(caught.value)


FLOATS = [field.name for field in fields(RunConfig) if isinstance(field.default, float)]
FLOATS += ["delta", "learning_rate", "integral_epsilon"]
NUMBERS_OR_TEXT = ("layers", "learning_rate", "lora_learning_rate", "lora_head_learning_rate")
TEXTS = [f.name for f in fields(RunConfig) if isinstance(f.default, str) and f.name not in NUMBERS_OR_TEXT]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0], ids=str)
@pytest.mark.parametrize("key", FLOATS)
def test_no_float_key_accepts_nan_infinity_or_a_negative_number(key, bad):
    with pytest.raises(InputError, match=rf"^{key} = "):
        parse({key: bad})


@pytest.mark.parametrize("key", TEXTS)
def test_no_text_key_accepts_a_number(key):
    with pytest.raises(InputError, match=rf"^{key} = 3: "):
        parse({key: 3})


def test_every_key_is_tested_with_a_bad_value():
    assert set(KEYS) - set(BAD) - set(FLOATS) - set(TEXTS) == {"target_modules", "labels", "answers"}
    for key in ("target_modules", "labels", "answers"):
        with pytest.raises(InputError, match=rf"^{key} = 5: "):
            parse({key: 5})


@pytest.mark.parametrize(
    ("key", "right"),
    [("rank", "greater than or equal to 1"), ("optimizer", "'sgd' or 'adamw'"), ("test_fraction", "less than 1")],
)
def test_a_refusal_says_what_would_be_right(key, right):
    with pytest.raises(InputError, match=right):
        parse({key: BAD[key]})


def test_a_negative_seed_is_refused():
    with pytest.raises(InputError, match="seed = -1"):
        parse({"seed": -1})


# Real label names contain commas ("Diseases, rare"); Flower's form of the list is a single text.
@pytest.mark.parametrize("labels", [["rare, old", "new"], [" padded", "b"], ["", "b"]])
def test_any_label_survives_the_flower_form(labels):
    config = parse({"labels": labels})
    assert parse(to_flower(config)) == config


PRIVATE = {"data": "records.csv"}


@pytest.mark.parametrize(
    ("settings", "tested"),
    [
        ({}, True),
        (PRIVATE, False),
        (PRIVATE | {"public_data": True}, True),
        (PRIVATE | {"simulate": True}, True),
        (PRIVATE | {"test_data": "test.csv"}, True),
        (PRIVATE | {"evaluation_noise_multiplier": 3.0}, False),
        ({"evaluation_noise_multiplier": 3.0}, False),
        ({"data": ON_NODES, "labels": "a,b"}, False),
        ({"data": ON_NODES, "labels": "a,b", "simulate": True}, False),
        ({"data": ON_NODES, "labels": "a,b", "public_data": True}, False),
        ({"data": ON_NODES, "labels": "a,b", "test_data": "test.csv"}, True),
    ],
)
def test_the_server_tests_on_records_of_its_own_or_on_some_that_are_nobody_s(settings, tested):
    config = parse(settings)
    assert config.has_test_set == tested
    assert config.compares in (False, tested)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (PRIVATE | {"dedup": "drd"}, "dedup = drd: validates on the server's test set; give test_data"),
        ({"evaluation_noise_multiplier": 2, "comparison": True}, "comparison = true: .* give test_data"),
        (PRIVATE | {"simulate": True, "evaluation_noise_multiplier": 2, "comparison": True}, "give test_data"),
        ({"test_data": "test.csv", "evaluation_noise_multiplier": 2}, "with test_data .* leave one of the two out"),
        ({"noise_on": "upload", "evaluation_noise_multiplier": 2}, "no common epsilon"),
        ({"audit": "tokens", "simulate": True, "evaluation_noise_multiplier": 2}, "an audit puts canaries"),
    ],
)
def test_what_needs_a_test_set_is_refused_in_one_line_where_there_is_none(settings, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(settings)
    assert "\n" not in str(caught.value)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(AttributeError):
        RunConfig().rounds = 3


def test_a_later_override_wins_and_spaces_around_it_are_ignored():
    assert parse_overrides(["rounds=3", " rounds = 4 ", "model='a=b'"]) == {"rounds": 4, "model": "a=b"}


def test_an_override_may_give_a_single_layer_as_a_number():
    assert parse(parse_overrides(["layers=3"])).layers == "3"


# Another value for every key that cannot be increased by one, extended by a letter or negated.
OTHER = {"task": "CAUSAL_LM", "layers": "all", "partition": "iid", "clipping": "split", "privacy_view": "rho"}
OTHER |= {
    "engine": "flower",
    "device": "cpu",
    "comparison": True,
    "baselines": True,
    "delta": 1e-7,
    "target_epsilon": 2.0,
    "test_fraction": 0.3,
    "evaluation_noise_multiplier": 4.0,
}
OTHER |= {
    "budget_epsilon": (4.0,),
    "client_ranks": (4,),
    "upload_codec": "int8",
    "relevance_threshold": 0.7,
    "max_update_norm": 2.0,
    "noise_on": "upload",
    "variant_rounds": (1,),
    "integral_epsilon": 0.1,
    "audit": "tokens",
    "dedup": "dred",
    "dedup_utility_bound": 0.02,
    "labels": ("a",),
    "answers": ("a", "b"),
    "prompt_template": "Q: {}",
    "target_modules": ("q",),
    "client_sizes": (3,),
    "optimizer": "sgd",
    "recipe": "fedpriv",
    "train": "head",
    "base_dtype": "bfloat16",
    "client_weights": "root-records",
    "server_optimizer": "sgd",
    "server_rate_decay": "linear",
    "server_momentum": 0.8,
    "sampling_probability": 0.3,
    "lora_sampling_probability": 0.3,
    "start_noise_multiplier": 3.0,
    "lora_noise_multiplier": 3.0,
    "lora_share": 0.1,
    "lora_server_optimizer": "adam",
    "lora_server_learning_rate": 0.1,
    "lora_learning_rate": 3.0,
    "lora_head_learning_rate": 3.0,
    "secure_masks": True,
}
FOR_SGD_ALONE = (
    "train",
    "head_start",
    "lora_rounds",
    "server_optimizer",
    "server_learning_rate",
    "server_rate_decay",
    "lora_server_optimizer",
)


@pytest.mark.parametrize("key", sorted(set(KEYS) - {*OUTSIDE_KEYS, "aggregation"}))
def test_digest_depends_on_every_key_but_those_outside(key):
    base = RunConfig(optimizer="adamw", aggregation="cmfl" if key == "audit" else "flora")
    if key in FOR_SGD_ALONE:
        base = RunConfig(lora_rounds=2)
    if key in ("mechanism", "mechanism_parameters"):
        base = replace(base, mechanism="lmo", mechanism_parameters="lmo.json")
        changes = {
            "mechanism": {"mechanism": "gaussian", "mechanism_parameters": ""},
            "mechanism_parameters": {"mechanism_parameters": "other.json"},
        }
        assert replace(base, **changes[key]).digest != base.digest
        return
    if key in ("prompt_column", "response_column", "system_prompt", "prompt_template", "answers"):
        base = RunConfig(prompt_column="q", response_column="a")
    if key == "messages_column":
        base = RunConfig(messages_column="m")
    if key == "secure_aggregation":
        base = RunConfig(mechanism="discrete-gaussian", min_clients=5)
    old = getattr(base, key)
    new = OTHER.get(key, f"{old}x" if isinstance(old, str) else not old if isinstance(old, bool) else None)
    assert replace(base, **{key: old + 1 if new is None else new}).digest != base.digest
