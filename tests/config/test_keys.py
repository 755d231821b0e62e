"""What is declared with a key: its facts, that results depend on it, and its type as a keyword argument of runs."""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from fedpriv import run
from fedpriv.config import KEYS, Fact, RunConfig, RunKeys, SweepKeys
from fedpriv.learning.training.noise_plan import calibrated
from fedpriv.learning.training.workbench import _key
from fedpriv.runs.plan.budget import Setting, lora_choice

# Neither data nor model depend on these, so runs that differ in them alone share both.
SHARED = """
    recipe rounds evaluate_every head_start lora_rounds trained_rank lora_share clients_per_round min_clients
    round_seconds client_weights server_optimizer server_learning_rate server_rate_decay server_momentum
    lora_server_optimizer lora_server_learning_rate relevance_threshold max_update_norm local_steps
    lora_sampling_probability learning_rate lora_learning_rate lora_head_learning_rate clip_norm
    noise_multiplier noise_schedule start_noise_multiplier lora_noise_multiplier target_epsilon target_risk
    target_epsilon_published
    mechanism mechanism_parameters privacy_view budget_epsilon secure_aggregation secure_masks colluding_clients
    delta comparison generated_answers max_new_tokens variant_rounds variant_clients dedup dedup_block_size
    dedup_records dedup_epsilon_bound dedup_utility_bound integral_epsilon out ledger node_keys resume
    table_checks track purpose until
"""


HELD = {
    Fact.LOCATION: "node_keys ledger out resume",
    Fact.OUTSIDE: "table_checks purpose until node_keys track ledger out resume",
    Fact.HIDDEN: "table_checks purpose until node_keys ray_address track ledger out resume",
    Fact.PATH: "model data test_data mechanism_parameters",
    Fact.PRIVACY: """
        noise_multiplier noise_schedule target_epsilon target_risk target_epsilon_published budget_epsilon
    """,
    Fact.BY_SWEEP: "ledger out",
    Fact.RELEASE: """
        model task rank alpha target_modules layers factors max_length normalize_features train test_fraction
        evaluation_noise_multiplier system_prompt prompt_template answers max_choices labels aggregation seed
    """,
    Fact.RECORDS: """
        task data test_data test_fraction separator encoding text_column text_pair_column
        prompt_column response_column messages_column answers choice_columns label_column client_column unit
        person_column labels partition num_clients client_sizes dirichlet_alpha max_records seed data_seed
    """,
}


@pytest.mark.parametrize("fact", HELD)
def test_a_fact_holds_of_these_keys(fact):
    assert RunConfig.keys_with(fact) == tuple(HELD[fact].split())


def test_each_bit_of_a_fact_has_a_name_of_its_own():
    """Python 3.11.2 drops those that have none when facts are joined, and with them what a key must be kept from."""
    values = [fact.value for fact in Fact.__members__.values()]
    named = sum(value for value in values if value.bit_count() == 1)
    assert all(value & named == value for value in values)


def test_runs_share_data_and_model_unless_a_key_differs_on_which_these_depend():
    kept = {key for key, _ in _key(RunConfig(), None)[0]}
    assert set(KEYS) - kept == set(SHARED.split())


def differing(one: RunConfig, other: RunConfig) -> set[str]:
    return {key for key in KEYS if getattr(one, key) != getattr(other, key)}


def test_train_auto_decides_what_is_said_to_be_decided_by_it():
    given = {"lora_rounds": 5, "lora_sampling_probability": 0.5, "lora_server_learning_rate": 1.0}
    setting = Setting.of((5000,) * 5, epsilon=8.0, train="auto", **given)
    chosen, _ = lora_choice(setting)
    assert chosen.num_lora_rounds, "the check would be blind"
    assert differing(chosen.config, replace(setting.config, train="all")) == set(RunConfig.keys_with(Fact.BY_TRAIN))


def test_noise_that_is_not_given_is_calibrated():
    setting = Setting.of((500,) * 5, epsilon=2.3)
    found = calibrated(setting.config, setting.sizes, setting.adapter)
    assert differing(found, setting.config) == {"noise_multiplier", *RunConfig.keys_with(Fact.CALIBRATED)}


def test_digest_ignores_where_results_go_but_not_the_seed_and_no_key_can_be_set():
    base = RunConfig()
    assert replace(base, out="/elsewhere").digest == base.digest
    assert replace(base, seed=1).digest != base.digest
    with pytest.raises(AttributeError):
        base.seed = 1
    assert len({field.name for field in fields(RunConfig)}) == len(KEYS)


# Another value for every key that cannot be increased by one, extended by a letter or negated.
OTHER = {
    **{"task": "CAUSAL_LM", "layers": "all", "partition": "iid", "clipping": "split", "privacy_view": "rho"},
    **{"engine": "flower", "device": "cpu", "upload_codec": "int8", "noise_on": "upload", "audit": "tokens"},
    **{"dedup": "dred", "optimizer": "sgd", "recipe": "fedpriv", "train": "head", "base_dtype": "bfloat16"},
    **{"client_weights": "root-records", "server_optimizer": "sgd", "lora_server_optimizer": "adam"},
    **{"server_rate_decay": "linear", "unit": "person", "factors": "weights", "separator": "tab"},
    **{"encoding": "latin-1", "target_risk": "mu=1", "prompt_template": "Q: {}"},
    **dict.fromkeys(("comparison", "baselines", "variant_clients", "secure_masks"), True),
    **dict.fromkeys(("data_seed", "trained_rank"), 1),
    **dict.fromkeys(("target_epsilon", "target_epsilon_published", "max_update_norm"), 2.0),
    **dict.fromkeys(("start_noise_multiplier", "lora_noise_multiplier", "evaluation_noise_multiplier"), 3.0),
    **dict.fromkeys(("lora_learning_rate", "lora_head_learning_rate"), 3.0),
    **dict.fromkeys(("sampling_probability", "lora_sampling_probability", "test_fraction"), 0.3),
    **dict.fromkeys(("integral_epsilon", "lora_share", "lora_server_learning_rate"), 0.1),
    **{"delta": 1e-7, "relevance_threshold": 0.7, "dedup_utility_bound": 0.02, "server_momentum": 0.8},
    **{"budget_epsilon": (4.0,), "client_ranks": (4,), "variant_rounds": (1,), "client_sizes": (3,)},
    **{"labels": ("a",), "answers": ("a", "b"), "choice_columns": ("a", "b"), "target_modules": ("q",)},
    "noise_schedule": (1.0,) * 10,
}

# {keys: a configuration in which they may be changed}, where that is not the default one.
ASKS = {"prompt_column": "q", "response_column": "a"}
LMO = {"mechanism": "lmo", "mechanism_parameters": "lmo.json"}
BASES = {
    "train head_start lora_rounds server_optimizer server_learning_rate server_rate_decay lora_server_optimizer": {
        "lora_rounds": 2
    },
    "prompt_column response_column system_prompt prompt_template answers choice_columns": ASKS,
    "person_column max_records_per_person": {"unit": "person"},
    "holders_per_person": {"unit": "person", "data": "t.csv", "person_column": "p", "client_column": "c"},
    "factors": ASKS | {"answers": ("a", "b"), "learning_rate": 1.0},
    "trained_rank": {"aggregation": "fed-sb"},
    "messages_column": {"messages_column": "m"},
    "secure_aggregation": {"mechanism": "discrete-gaussian", "min_clients": 5},
    "mechanism mechanism_parameters": LMO,
    "target_epsilon_published": LMO | {"optimizer": "adamw", "aggregation": "flora"},
    "audit": {"optimizer": "adamw", "aggregation": "cmfl"},
}
BASE_OF = {key: base for keys, base in BASES.items() for key in keys.split()}


@pytest.mark.parametrize("key", sorted(set(KEYS) - {*RunConfig.keys_with(Fact.OUTSIDE), "aggregation"}))
def test_digest_depends_on_every_key_but_those_outside(key):
    base = RunConfig(**BASE_OF.get(key, {"optimizer": "adamw", "aggregation": "flora"}))
    old = getattr(base, key)
    new = OTHER.get(key, f"{old}x" if isinstance(old, str) else not old if isinstance(old, bool) else None)
    changes = {key: old + 1 if new is None else new}
    if key == "mechanism":
        changes = {"mechanism": "gaussian", "mechanism_parameters": ""}
    assert replace(base, **changes).digest != base.digest


# Arguments of their own.
ARGUMENTS = inspect.signature(run).parameters.keys() & set(KEYS)

# What a run takes beyond its key's type, since a file could hold nothing else.
PATHS = {"model", "data", "test_data", "mechanism_parameters", "node_keys", "ledger"}
ALSO: dict[str, Any] = {**dict.fromkeys(PATHS, Path), "budget_epsilon": float}
# What a program may give to a run in place of a name.
GIVEN: dict[str, Any] = {
    "model": Callable[[], Any],
    "data": Sequence[Any] | Mapping[str, Any],
    "test_data": Any,
    "noise_schedule": Callable[[int], Any],
}


def plain(declared: Any) -> frozenset[Any]:
    """The members of a type, without what checks or reads its values; lists are as good as tuples."""
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is Annotated:
        return plain(arguments[0])
    if origin in (Union, types.UnionType):
        return frozenset().union(*map(plain, arguments))
    if origin in (tuple, Sequence):
        return frozenset({(Sequence, plain(arguments[0]))})
    return frozenset((Literal, value) for value in arguments) if origin is Literal else frozenset({declared})


@pytest.mark.parametrize("kind", [RunKeys, SweepKeys])
def test_every_key_of_a_configuration_is_a_keyword_of_its_type(kind):
    configured = get_type_hints(RunConfig, include_extras=True)
    keywords = get_type_hints(kind)
    assert not kind.__required_keys__
    assert tuple(key for key in KEYS if key not in ARGUMENTS) == tuple(key for key in KEYS if key in keywords)
    assert keywords.keys() <= set(KEYS)
    for key, type_ in keywords.items():
        expected = plain(configured[key]) | ({ALSO[key]} if key in ALSO else set())
        if kind is RunKeys and key in GIVEN:
            expected |= plain(GIVEN[key])
        if kind is SweepKeys and key == "batch_size":
            expected |= {(Literal, "auto")}
        assert plain(type_) == expected, key
