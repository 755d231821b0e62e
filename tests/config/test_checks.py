"""Which keys fit together, and which values follow from those of other keys."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fedpriv.config import BY_RECIPE, ON_NODES, parse, to_flower, to_toml, with_overrides
from fedpriv.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"partition": "natural"}, "client_column"),
        ({"partition": "sizes"}, "client_sizes"),
        ({"weight_decay": 0.1}, "weight_decay = 0.1: only adamw"),
        ({"client_ranks": [2, 4]}, r"client_ranks = \[2, 4\]: .*need flora"),
        ({"client_ranks": [2, 4], "aggregation": "fedex-lora"}, "aggregation = fedex-lora averages"),
        ({"upload_codec": "int8", "aggregation": "t-fedavg"}, "t-fedavg sends ternary codes"),
        ({"recipe": "fedpriv", "aggregation": "t-fedavg"}, "head_start = true: t-fedavg is ternary"),
        ({"train": "head", "aggregation": "t-fedavg"}, "train = head: t-fedavg is ternary"),
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
    assert parse({"recipe": "per-sample", "target_epsilon": 8}).target_epsilon == 8, "the recipe's own noise yields"
    assert parse({"noise_multiplier": 0}).target_epsilon is None, "the recipe's own target yields"


def test_flower_s_values_are_refused_together_only_where_somebody_chose_both():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    with pytest.raises(InputError, match="give one of the two"):
        parse(project | BOTH)
    parse(to_flower(parse({"target_epsilon": 8})))


def test_a_run_s_own_file_holds_the_noise_that_its_target_came_to():
    resolved = tomllib.loads(to_toml(replace(parse({"target_epsilon": 8}), noise_multiplier=0.7)))
    assert parse(resolved).noise_multiplier == 0.7
    # Whoever runs it anew with another target has the noise derived anew; with another noise, they chose both.
    assert with_overrides(resolved, {"target_epsilon": 4}).get("noise_multiplier") is None
    with pytest.raises(InputError, match=r"^noise_multiplier = 3: target_epsilon = 8"):
        with_overrides(resolved, {"noise_multiplier": 3})
    assert with_overrides(resolved, {"noise_multiplier": 3, "target_epsilon": ""})["noise_multiplier"] == 3
    assert parse(with_overrides(resolved, {"target_epsilon": ""})).noise_multiplier == 0.7, "no target, so the file's"


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
        (ASKS | {"answers": "yes,no", "labels": "1,1"}, "^labels = 1,1: name each class once"),
        (ASKS | {"labels": "1,0"}, "^labels = 1,0: .*needs answers"),
        (ASKS | {"factors": "answers"}, "^factors = answers: needs answers"),
        (ASKS | {"factors": "answers", "answers": "yes,no", "aggregation": "ffa-lora"}, "use fed-sb, not ffa-lora"),
        (ASKS | {"factors": "inputs", "base_dtype": "nf4"}, "^factors = inputs: with base_dtype = nf4"),
        ({"factors": "inputs"}, "^factors = inputs: B is trained behind them; use ffa-lora, not dp-lora"),
        ({"data": ON_NODES, "labels": "a,b", "max_records": 5}, "^max_records = 5: with data = on-nodes .* use 0"),
    ],
)
def test_prompts_responses_and_answers_that_do_not_fit_are_refused(values, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(values)
    assert "\n" not in str(caught.value)


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
        (PRIVATE | {"dedup": "drd"}, "dedup = drd: validated on the server's test set; give test_data"),
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


def test_a_target_of_risk_stands_in_place_of_one_of_epsilon():
    config = parse({"target_risk": "tpr=0.1@fpr=0.01"})
    assert config.target_epsilon is None, "the recipe's own target yields"
    assert parse({"target_risk": "", "target_epsilon": 4}).target_epsilon == 4
    for values, problem in (
        (
            {"target_risk": "mu=1", "target_epsilon": 4},
            r"^target_risk = 'mu=1': target_epsilon = 4\.0 is another target",
        ),
        ({"target_risk": "mu=1", "noise_multiplier": 2}, r"^noise_multiplier = 2: target_risk = 'mu=1' says how much"),
        ({"target_risk": "tpr=0.1"}, r"^target_risk = 'tpr=0\.1': must be such as tpr=0\.1@fpr=0\.01"),
    ):
        with pytest.raises(InputError, match=problem):
            parse(values)
    resolved = tomllib.loads(to_toml(replace(config, noise_multiplier=0.7)))
    assert with_overrides(resolved, {"rounds": 5}).get("noise_multiplier") is None, "derived again"
    assert parse({}).digest == parse({"target_risk": ""}).digest
