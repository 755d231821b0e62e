"""Facts are declared with a key, and every list of keys is made of them."""

from dataclasses import replace

import pytest

from fedpriv.config import KEYS, Fact, RunConfig
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


@pytest.mark.parametrize(
    ("fact", "keys"),
    [
        (Fact.LOCATION, "node_keys ledger out resume"),
        (Fact.OUTSIDE, "table_checks purpose until node_keys track ledger out resume"),
        (Fact.HIDDEN, "table_checks purpose until node_keys ray_address track ledger out resume"),
        (Fact.PATH, "model data test_data mechanism_parameters"),
        (
            Fact.PRIVACY,
            "noise_multiplier noise_schedule target_epsilon target_risk target_epsilon_published budget_epsilon",
        ),
        (Fact.BY_SWEEP, "ledger out"),
        (
            Fact.RELEASE,
            "model task rank alpha target_modules layers factors max_length normalize_features train test_fraction "
            "evaluation_noise_multiplier system_prompt prompt_template answers max_choices labels aggregation seed",
        ),
        (
            Fact.RECORDS,
            "task data test_data test_fraction separator encoding text_column text_pair_column "
            "prompt_column response_column messages_column answers choice_columns label_column client_column unit "
            "person_column labels partition num_clients client_sizes dirichlet_alpha max_records seed data_seed",
        ),
    ],
)
def test_a_fact_holds_of_these_keys(fact, keys):
    assert RunConfig.keys_with(fact) == tuple(keys.split())


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
