"""Every key is checked, and a resolved configuration can be read back."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from fedpriv.config import BY_RECIPE, KEYS, RunConfig, checked, parse, parse_overrides, read, to_flower, to_toml
from fedpriv.errors import InputError
from fedpriv.learning.aggregation.rules import RULES

ROOT = Path(__file__).resolve().parents[2]

# {keys: a value that each of them refuses}, for all keys but those of free text.
REFUSED = {
    """
    audit_repeats dedup_block_size rank max_length num_clients max_records_per_person max_choices max_new_tokens
    holders_per_person rounds min_clients local_steps batch_size memory_limit_mb trained_rank evaluate_every
    """: 0,
    """
    dedup_records max_records generated_answers clients_per_round colluding_clients seed data_seed ray_workers
    lora_rounds
    """: -1,
    """
    alpha evaluation_noise_multiplier dirichlet_alpha round_seconds clip_norm max_update_norm lora_learning_rate
    lora_sampling_probability lora_server_learning_rate lora_head_learning_rate
    """: 0.0,
    "weight_decay start_noise_multiplier lora_noise_multiplier target_epsilon target_epsilon_published": -1.0,
    "sampling_probability relevance_threshold dedup_utility_bound": 1.5,
    """
    mechanism audit dedup task partition aggregation optimizer clipping privacy_view noise_on engine device upload_codec
    track recipe train factors client_weights server_optimizer lora_server_optimizer server_rate_decay
    """: "no such name",
    """
    variant_clients public_data secure_aggregation secure_masks simulate comparison baselines activation_checkpointing
    normalize_features head_start
    """: "perhaps",
}
BAD = {key: bad for keys, bad in REFUSED.items() for key in keys.split()}
BAD |= {"layers": "first-2", "audit_canaries": 1, "test_fraction": 1.0, "delta": 1.0, "lora_share": 0.9}
BAD |= {"learning_rate": float("inf"), "noise_multiplier": float("nan"), "prefix_cache": 7}
BAD |= {"variant_rounds": ["zero"], "client_sizes": [0], "client_ranks": [0]}
BAD |= {"noise_schedule": [1.0, 0.0], "budget_epsilon": [0.0]}


@pytest.mark.parametrize("key", BAD)
def test_a_bad_value_is_refused_in_one_line_with_key_and_value(key):
    with pytest.raises(InputError) as caught:
        parse({key: BAD[key]})
    message = str(caught.value)
    assert message.startswith(f"{key} = {BAD[key]!r}: ")
    assert "\n" not in message


def test_every_aggregation_rule_can_be_configured_and_an_unknown_one_lists_them():
    assert [parse({"aggregation": name}).aggregation for name in RULES] == list(RULES)
    with pytest.raises(InputError, match=rf"^aggregation = 'median': .*must be one of {', '.join(RULES)}$"):
        parse({"aggregation": "median"})


def test_everything_wrong_is_told_and_the_first_of_it_raised():
    config, problems = checked({"ronds": 1, "rank": 0, "optimizer": "lion"})
    assert config is None
    assert [line.split(" ")[0] for line in problems] == ["ronds:", "rank", "optimizer"]
    for right in ("did you mean rounds?", "greater than or equal to 1", "'sgd' or 'adamw'"):
        assert sum(right in problem for problem in problems) == 1
    with pytest.raises(InputError, match="known keys: recipe, model, task"):
        parse({"zzz": 1})
    assert checked({"rank": 8}) == (parse({"rank": 8}), [])
    with pytest.raises(InputError, match=r"^recipe = "):
        parse({"recipe": ["fedpriv"]})


CHANGED = {"target_modules": ["query", "value"], "client_sizes": [30, 20], "partition": "sizes", "delta": 1e-6}
CHANGED |= {"comparison": False, "labels": "a,b"}


# Real label names contain commas ("Diseases, rare"); Flower's form of the list is a single text.
LABELS = (["rare, old", "new"], [" padded", "b"], ["", "b"])


@pytest.mark.parametrize("values", [{}, CHANGED, *({"labels": labels} for labels in LABELS)])
def test_toml_and_flower_forms_read_back_to_the_same_configuration(values):
    config = parse(values)
    assert parse(tomllib.loads(to_toml(config))) == config
    assert parse(to_flower(config)) == config
    assert all(isinstance(value, str | int | float | bool) for value in to_flower(config).values())


def test_the_recipe_of_the_dp_lora_paper_is_its_algorithm_1_with_table_2():
    """Liu et al. 2023, Table 2; sections 5.2 (K, T, rho_k), 5.3 (rank) and 4.2 (one step of gradient descent)."""
    config = parse({"recipe": "dp-lora-paper"})
    assert (config.batch_size, config.noise_multiplier, config.learning_rate, config.clip_norm) == (8, 2, 5e-4, 10)
    assert (config.num_clients, config.rounds, config.client_weights, config.rank) == (5, 50, "uniform", 512)
    assert config.partition == "iid", "evenly among all K nodes"
    assert (config.local_steps, config.optimizer, config.clipping) == (1, "sgd", "batch")
    assert config.alpha == config.rank, "W + A B, and nothing in front of it"
    assert parse({"recipe": "dp-lora-paper", "rank": 64}).alpha == 64
    assert config.sampling_probability is config.target_epsilon is None, "B is a number, and so is sigma"
    assert (config.aggregation, config.server_optimizer, config.train) == ("dp-lora", "sgd", "all")
    assert parse({"recipe": "dp-lora-paper", "target_epsilon": 2}).target_epsilon == 2


@pytest.mark.parametrize("answers", [["no", "yes"], "no,yes", '["no", "yes"]'])
def test_answers_imply_that_r_chooses_between_them_and_a_prompt_that_asks_for_one(answers):
    asked = {"prompt_column": "q", "response_column": "a", "answers": answers}
    config = parse(asked)
    assert (config.recipe, config.aggregation, config.factors) == ("instruction", "fed-sb", "answers")
    assert (config.layers, config.prompt_template) == ("last-1", "{}\n\nAnswer with one of: no, yes.")
    own = {**asked, "system_prompt": "Say no or yes."}
    assert parse(own).prompt_template == ""
    sampled = parse({**own, "batch_size": 8})
    assert (sampled.batch_size, sampled.sampling_probability) == (8, None)
    assert parse({**own, "aggregation": "ffa-lora"}).factors == "inputs"


FACTORS = {"by recipe": "inputs", "ffa-lora": "inputs", "fed-sb": "weights", "dp-lora": "weights"}


@pytest.mark.parametrize(("rule", "factors"), FACTORS.items())
def test_free_answers_are_learned_behind_what_the_layers_read_where_b_alone_is_trained(rule, factors):
    assert parse({"prompt_column": "q", "response_column": "a", "aggregation": rule}).factors == factors


@pytest.mark.parametrize(
    ("given", "every"),
    [
        ({}, 1),
        ({"train": "auto"}, 4),
        ({"train": "auto", "evaluate_every": 1}, 1),
        ({"train": "auto", "evaluate_every": "by recipe"}, 4),
        ({"train": "auto", "aggregation": "dp-lora"}, 1),
    ],
)
def test_where_r_may_be_trained_the_model_is_tested_every_fourth_round_unless_told_otherwise(given, every):
    assert parse(given).evaluate_every == every


def test_pyproject_lists_every_key_with_its_default_for_flower():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["flwr"]["app"]["config"]
    assert listed.keys() == to_flower(RunConfig()).keys()
    assert parse(listed) == replace(RunConfig(), engine="flower")
    # What recipes differ in is left to the recipe, so that `flwr run` can name one.
    other = parse(listed | {"recipe": "per-sample"})
    assert other == parse({"recipe": "per-sample", "engine": "flower"})
    # What only other keys leave open: a task, a unit, a batch size, what secure sums need, and other recipes'.
    not_in_it = ("task", "unit", "batch_size", "min_clients", "mechanism", "privacy_view", "clipping", "partition")
    not_in_it += ("max_length", "aggregation", "server_learning_rate", "factors", "prompt_template", "evaluate_every")
    differing = [key for key in KEYS if getattr(other, key) != getattr(parse(listed), key)]
    assert differing == [key for key in KEYS if listed[key] == BY_RECIPE and key not in not_in_it]


@pytest.mark.parametrize("file", sorted((ROOT / "simulations" / "configs").glob("*.toml")), ids=lambda f: f.stem)
def test_shipped_configurations_are_valid_and_the_embedded_one_is_the_default(file):
    assert (parse(read(file)) == RunConfig()) == (file.stem == "embedded")


def test_overrides_are_read_as_toml_or_else_as_text_and_the_last_one_wins():
    assert parse_overrides(["rounds=3", " rounds = 4 ", "model='a=b'"]) == {"rounds": 4, "model": "a=b"}
    assert parse(parse_overrides(["layers=3"])).layers == "3", "a single layer"
    found = parse_overrides(["rounds=3", "data=a b.csv", "simulate=true", "client_sizes=[1, 2]", "delta="])
    assert found == {"rounds": 3, "data": "a b.csv", "simulate": True, "client_sizes": [1, 2], "delta": ""}
    with pytest.raises(InputError, match="-c rounds: must be key=value"):
        parse_overrides(["rounds"])


def test_a_file_that_is_missing_or_not_toml_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such configuration file"):
        read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(InputError, match=r"bad\.toml: not a TOML file"):
        read(tmp_path / "bad.toml")
    with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"):
        read(tmp_path)


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
    assert set(KEYS) - set(BAD) - set(FLOATS) - set(TEXTS) == {"target_modules", "labels", "answers", "choice_columns"}
    for key in ("target_modules", "labels", "choice_columns", "answers"):
        with pytest.raises(InputError, match=rf"^{key} = 5: "):
            parse({key: 5})
    for answers in (5, "[no", [1, 2]):
        with pytest.raises(InputError, match=r"^answers = "):
            parse({"prompt_column": "q", "response_column": "a", "answers": answers})


@pytest.mark.parametrize("more", [{}, {"prompt_column": "p", "response_column": "r", "answers": ["x", "y", "z"]}])
def test_labels_that_name_a_class_twice_are_refused(more):
    with pytest.raises(InputError, match=r"labels = a,b,a: name each class once"):
        parse({"labels": ["a", "b", "a"], **more})
    assert parse({"labels": ["a", "b", "A"], **more}).labels == ("a", "b", "A")


@pytest.mark.parametrize("secure", [{}, {"secure_aggregation": True}])
@pytest.mark.parametrize("value", [None, [], {}, "[", "[" * 100_000, "abc", -1, 10**400, True, b"x", "{"])
def test_no_value_of_a_key_ends_in_a_traceback(value, secure):
    for key in KEYS:
        config, problems = checked({**secure, key: value})
        assert config is None or not problems
        assert not any("\n" in problem for problem in problems)


@pytest.mark.parametrize("error", [ValueError("recipe = x: is none"), AssertionError(""), ValueError("two\nlines")])
def test_an_error_before_keys_are_checked_is_one_line_whatever_its_type(monkeypatch, error):
    def fail(values):
        raise error

    monkeypatch.setattr("fedpriv.config._run_config.with_recipe", fail)
    _, (line,) = checked({})
    assert "\n" not in line
    assert str(error).split()[-1:] == line.split()[-1:] or not str(error)


@pytest.mark.parametrize(
    ("asked", "num_clients", "kept"), [(None, 100, True), (None, 101, False), (True, 101, True), (False, 2, False)]
)
def test_uploads_of_few_clients_are_kept_unless_the_configuration_says_otherwise(asked, num_clients, kept):
    assert RunConfig(variant_clients=asked).keeps_uploads_of(num_clients) is kept


def phased(**changes) -> RunConfig:
    return parse({"noise_multiplier": 2.0, "sampling_probability": 0.5, "rounds": 10, "learning_rate": 3.0} | changes)


def test_the_last_rounds_have_noise_sampling_and_rates_of_their_own():
    own = {"lora_noise_multiplier": 1.0, "lora_learning_rate": 4.0, "lora_head_learning_rate": 5.0}
    start, head, everything = phased(**own).phases
    assert (start.name, start.num_rounds, start.noise_multiplier) == ("start", 1, None)
    assert (head.name, head.num_rounds, head.learning_rate, head.lora_learning_rate) == ("head", 5, 3.0, None)
    assert (head.noise_multiplier, head.sampling_probability) == (2.0, 0.5)
    assert (everything.name, everything.num_rounds) == ("all", 4)
    assert (everything.noise_multiplier, everything.sampling_probability) == (1.0, 0.125)
    assert (everything.learning_rate, everything.lora_learning_rate) == (5.0, 4.0)
    with pytest.raises(ValueError, match=r"^start_noise_multiplier: has not been derived yet"):
        _ = start.known_noise
    head, everything = phased(lora_sampling_probability="", head_start=False).phases
    assert (head.num_rounds, everything.num_rounds) == (6, 4)
    assert (everything.noise_multiplier, everything.sampling_probability) == (2.0, 0.5), "those of the head"


@pytest.mark.parametrize(
    ("changes", "name"), [({"train": "head"}, "head"), ({"lora_rounds": 0}, "head"), ({"lora_rounds": ""}, "all")]
)
def test_rounds_that_are_alike_are_one_phase(changes, name):
    (phase,) = phased(head_start=False, **changes).phases
    assert (phase.name, phase.num_rounds) == (name, 10)
    assert phased(**changes).lora_phase.num_rounds == 0
