"""Which keys fit together, and which values follow from those of other keys."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fedpriv.config import BY_RECIPE, ON_NODES, parse, to_flower, to_toml, with_overrides
from fedpriv.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


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


PRIVATE = {"data": "x.csv"}
NODES = {"data": ON_NODES, "labels": "a,b"}
NODES_TESTED = NODES | {"test_data": "test.csv"}


@pytest.mark.parametrize(
    ("values", "is_tested", "compares", "has_baselines"),
    [
        ({}, True, True, True),
        ({"comparison": False}, True, False, True),
        ({"noise_multiplier": 0.0}, True, False, True),
        ({"baselines": False}, True, True, False),
        ({"evaluation_noise_multiplier": 3.0}, False, False, False),
        (PRIVATE, False, False, False),
        (PRIVATE | {"public_data": True}, True, True, True),
        (PRIVATE | {"public_data": True, "task": "CAUSAL_LM"}, True, True, False),
        (PRIVATE | {"simulate": True}, True, True, False),
        (PRIVATE | {"test_data": "test.csv"}, True, False, False),
        (PRIVATE | {"evaluation_noise_multiplier": 3.0}, False, False, False),
        (NODES, False, False, False),
        (NODES | {"simulate": True}, False, False, False),
        (NODES | {"public_data": True}, False, False, False),
        (NODES_TESTED, True, False, False),
        (NODES_TESTED | {"public_data": True}, True, True, True),
        (NODES_TESTED | {"baselines": True}, True, False, True),
    ],
)
def test_what_private_data_allow_is_tested_compared_and_computed(values, is_tested, compares, has_baselines):
    """The server tests on records of its own or on some that are nobody's; a release without noise needs the same."""
    config = parse(values)
    assert (config.has_test_set, config.compares, config.computes_baselines) == (is_tested, compares, has_baselines)


ASKS = {"prompt_column": "q", "response_column": "a"}


@pytest.mark.parametrize("columns", [ASKS, {"messages_column": "m"}])
def test_prompts_imply_a_causal_model_and_the_recipe_that_has_one(columns):
    config = parse(columns)
    assert (config.task, config.recipe, config.instructs) == ("CAUSAL_LM", "instruction", True)


BASELINES = {"baselines": True}
EVALUATED = {"evaluation_noise_multiplier": 2}


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
        (NODES | {"max_records": 5}, "^max_records = 5: with data = on-nodes .* use 0"),
        # What needs a test set, where there is none.
        (PRIVATE | {"dedup": "drd"}, "dedup = drd: validated on the server's test set; give test_data"),
        (EVALUATED | {"comparison": True}, "comparison = true: .* give test_data"),
        (PRIVATE | EVALUATED | {"simulate": True, "comparison": True}, "give test_data"),
        (EVALUATED | {"test_data": "test.csv"}, "with test_data .* leave one of the two out"),
        (EVALUATED | {"noise_on": "upload"}, "no common epsilon"),
        (EVALUATED | {"audit": "tokens", "simulate": True}, "an audit puts canaries"),
        (BASELINES | PRIVATE, "^baselines = true: .*give test_data"),
        (BASELINES | PRIVATE | {"test_data": "test.csv"}, "^baselines = true: .*clients' private records"),
        (BASELINES | PRIVATE | {"simulate": True}, "^baselines = true: .*clients' private records"),
        (BASELINES | EVALUATED, "^baselines = true: .*give test_data"),
        (BASELINES | NODES, "^baselines = true: .*give test_data"),
        (BASELINES | NODES | {"public_data": True}, "^baselines = true: .*give test_data"),
        (BASELINES | PRIVATE | {"public_data": True, "task": "CAUSAL_LM"}, "^baselines = true: .*CAUSAL_LM"),
        # Choices that differ from record to record.
        ({"choice_columns": ["c"]}, "choice_columns = .*: goes with prompt_column"),
        ({"choice_columns": ["c"], "prompt_column": "q"}, "needs response_column"),
        (ASKS | {"choice_columns": ["c"], "answers": ["a", "b"]}, "answers: are the same for all records"),
        ({"choice_columns": ["c"], "messages_column": "m"}, "choice_columns = .*: messages_column"),
        # A unit that no record would be of.
        (PRIVATE | {"person_column": "p", "unit": "record"}, "unit = record: person_column"),
        (PRIVATE | {"unit": "person"}, "unit = person: needs person_column"),
        ({"unit": "person", "noise_on": "upload"}, "noise_on = upload: protects whole clients"),
        ({"unit": "person", "clipping": "batch", "recipe": "per-sample"}, "clipping = batch: clips the mean"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused_in_one_line(values, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(values)
    assert "\n" not in str(caught.value)


def test_a_target_of_risk_stands_in_place_of_one_of_epsilon():
    config = parse({"target_risk": "tpr=0.1@fpr=0.01"})
    assert config.target_epsilon is None, "the recipe's own target yields"
    assert parse({"target_risk": "", "target_epsilon": 4}).target_epsilon == 4
    risk = {"target_risk": "mu=1"}
    for values, problem in (
        (risk | {"target_epsilon": 4}, r"^target_risk = 'mu=1': target_epsilon = 4\.0 is another target"),
        (risk | {"noise_multiplier": 2}, r"^noise_multiplier = 2: target_risk = 'mu=1' says how much"),
        ({"target_risk": "tpr=0.1"}, r"^target_risk = 'tpr=0\.1': must be such as tpr=0\.1@fpr=0\.01"),
    ):
        with pytest.raises(InputError, match=problem):
            parse(values)
    resolved = tomllib.loads(to_toml(replace(config, noise_multiplier=0.7)))
    assert with_overrides(resolved, {"rounds": 5}).get("noise_multiplier") is None, "derived again"
    assert parse({}).digest == parse({"target_risk": ""}).digest
