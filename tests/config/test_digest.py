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
OTHER = {"task": "CAUSAL_LM", "layers": "all", "partition": "iid", "clipping": "split", "privacy_view": "rho"}
OTHER |= {
    "engine": "flower",
    "device": "cpu",
    "comparison": True,
    "baselines": True,
    "delta": 1e-7,
    "target_epsilon": 2.0,
    "target_epsilon_published": 2.0,
    "target_risk": "mu=1",
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
    "variant_clients": True,
    "integral_epsilon": 0.1,
    "audit": "tokens",
    "dedup": "dred",
    "dedup_utility_bound": 0.02,
    "labels": ("a",),
    "answers": ("a", "b"),
    "choice_columns": ("a", "b"),
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
    "data_seed": 1,
    "lora_server_optimizer": "adam",
    "lora_server_learning_rate": 0.1,
    "lora_learning_rate": 3.0,
    "lora_head_learning_rate": 3.0,
    "secure_masks": True,
    "separator": "tab",
    "encoding": "latin-1",
    "unit": "person",
    "factors": "weights",
    "trained_rank": 2,
    "noise_schedule": (1.0,) * 10,
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


@pytest.mark.parametrize("key", sorted(set(KEYS) - {*RunConfig.keys_with(Fact.OUTSIDE), "aggregation"}))
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
    if key == "target_epsilon_published":
        base = replace(base, mechanism="lmo", mechanism_parameters="lmo.json")
    if key in ("prompt_column", "response_column", "system_prompt", "prompt_template", "answers", "choice_columns"):
        base = RunConfig(prompt_column="q", response_column="a")
    if key in ("person_column", "max_records_per_person"):
        base = RunConfig(unit="person")
    if key == "holders_per_person":
        base = RunConfig(unit="person", data="t.csv", person_column="p", client_column="c")
    if key == "factors":
        base = RunConfig(prompt_column="q", response_column="a", answers=("a", "b"), learning_rate=1.0)
    if key == "trained_rank":
        base = RunConfig(aggregation="fed-sb")
    if key == "messages_column":
        base = RunConfig(messages_column="m")
    if key == "secure_aggregation":
        base = RunConfig(mechanism="discrete-gaussian", min_clients=5)
    old = getattr(base, key)
    new = OTHER.get(key, f"{old}x" if isinstance(old, str) else not old if isinstance(old, bool) else None)
    assert replace(base, **{key: old + 1 if new is None else new}).digest != base.digest
