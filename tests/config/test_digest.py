"""A run's digest changes with every key that its results depend on."""

from dataclasses import fields, replace

import pytest

from fedpriv.config import KEYS, Fact, RunConfig


def test_digest_ignores_where_results_go_but_not_the_seed():
    base = RunConfig()
    assert replace(base, out="/elsewhere").digest == base.digest
    assert replace(base, seed=1).digest != base.digest
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
