"""Recipes: named sets of configuration keys that belong together. docs/recipes.md explains them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedpriv.config._federation_and_privacy import RULE_FACTS
from fedpriv.config._model_and_data import OWN_MODEL
from fedpriv.config._section import ConfigSection, split
from fedpriv.privacy.mechanisms.registry import FOR_SUMS, MECHANISMS

Recipe = Literal["fedpriv", "per-sample", "dp-lora-paper", "instruction"]
"""Names of recipes."""

RECIPES: Mapping[Recipe, str] = {
    "fedpriv": "classifiers: the head starts from class means, noise and learning rates follow from an epsilon of 2.3",
    "per-sample": "plain DP-SGD on A, B and head: each sample is clipped, in several local steps on small batches",
    "dp-lora-paper": "the DP-LoRA paper's Algorithm 1 and settings to the letter, for comparison: it hardly learns",
    "instruction": "language models that answer: one frozen factor, Adam at the server; prompts or messages imply it",
}
"""{name of a recipe: what it is for}."""

BY_RECIPE = "by recipe"
"""The value that leaves a key to the recipe, where each key must have one, as in Flower's project file."""

# The default of `num_clients`.
_NUM_CLIENTS = 5

# The defaults of `RunConfig` are the recipe `fedpriv`; these are what the others have in their place. Its batches are
# full: with q = 0.1, noise per unit of signal is 12, 26 and 95 % higher at epsilon 1, 2 and 8 (39 steps, delta 1e-5).
_ONE_PHASE: Mapping[str, Any] = {"normalize_features": False, "head_start": False, "lora_rounds": ""}

_PER_SAMPLE: Mapping[str, Any] = {
    **_ONE_PHASE,
    **{"rank": 8, "alpha": 16.0, "layers": "last-2", "rounds": 10, "local_steps": 3, "sampling_probability": ""},
    **{"learning_rate": 0.5, "clip_norm": 1.0, "noise_multiplier": 1.88, "target_epsilon": ""},
    **{"client_weights": "records", "server_optimizer": "sgd"},
}

# Table 2 of Liu et al. 2023; T, rho_k, even parts, rank and rule of its sections 5.2, 5.3 and 4.2. K is the default.
# It names no alpha, modules or layers: its product A B is not scaled, and its adapters are in all layers.
_DP_LORA_PAPER: Mapping[str, Any] = {
    **_PER_SAMPLE,
    **{"rank": 512, "alpha": 512.0, "layers": "all", "rounds": 50, "local_steps": 1, "batch_size": 8},
    **{"learning_rate": 5e-4, "clipping": "batch", "clip_norm": 10.0, "noise_multiplier": 2.0},
    **{"client_weights": "uniform", "partition": "iid"},
}

# No value depends on the size of a model's gradients, which could not be looked up without a release: in SmolLM2-135M
# their norms differ by a factor of five between choices of layers.
_INSTRUCTION: Mapping[str, Any] = {
    **_ONE_PHASE,
    **{"layers": "last-2", "max_length": 256, "aggregation": "ffa-lora", "factors": "inputs"},
    **{"rounds": 12, "sampling_probability": 0.2, "learning_rate": 1000.0, "clip_norm": 0.01},
    **{"server_optimizer": "adam", "server_learning_rate": 0.05},
}

# R between the factors for the answers is the weight matrix of a head, and is trained as one.
_WITH_ANSWERS: Mapping[str, Any] = {
    **{"layers": "last-1", "aggregation": "fed-sb", "factors": "answers"},
    **{"rounds": 30, "sampling_probability": 0.5, "learning_rate": "auto", "clip_norm": 0.8},
    **{"server_optimizer": "momentum", "server_learning_rate": 1.0},
}

_PRESETS: Mapping[Recipe, Mapping[str, Any]] = {
    "fedpriv": {},
    "per-sample": _PER_SAMPLE,
    "dp-lora-paper": _DP_LORA_PAPER,
    "instruction": _INSTRUCTION,
}

# Keys that ask for what `fedpriv` has no part in, and the values with which they do not.
_ONLY_IN_FEDPRIV: Mapping[str, tuple[Any, ...]] = {
    "task": ("SEQ_CLS",),
    "optimizer": ("sgd",),
    "local_steps": (1,),
    "noise_on": ("gradients",),
    "clipping": ("joint", "flat"),
    "batch_size": (),
}

WITH_AUTO: Mapping[str, Any] = {
    **{"aggregation": "fed-sb", "rank": 64, "alpha": 256.0, "layers": "all", "rounds": 214}, "evaluate_every": 4
}  # fmt: skip
"""The keys for R between frozen factors of every layer: the most of R, and of rounds, that `train = auto` chooses; and
fewer tests, each of which reads all records again once R has changed, and may take as long as a round."""

# What A's and B's product is scaled by there, whatever the rank.
_SCALE_WITH_AUTO = 4.0

_WITH_SECURE_AGGREGATION: Mapping[str, Any] = {"mechanism": FOR_SUMS, "privacy_view": "aggregate"}

LEFT_TO_RECIPES = frozenset(
    {
        *("recipe", "task", "unit", "min_clients"),
        *_WITH_SECURE_AGGREGATION,
        *WITH_AUTO,
        *_WITH_ANSWERS,
        "prompt_template",
        *(key for preset in _PRESETS.values() for key in preset),
        *(key for key, without_effect in _ONLY_IN_FEDPRIV.items() if not without_effect),
    }
)
"""Keys whose value, where they are not given, depends on others."""


@dataclass(frozen=True, kw_only=True)
class RecipeSection(ConfigSection, title="Recipe"):
    """The keys that belong together and are not given."""

    recipe: Recipe = "fedpriv"
    """values for keys that belong together ([recipes](recipes.md)); a key that you give wins"""


def with_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with those of their recipe in place of what they leave out.

    Without a `recipe` it is `fedpriv`, unless a value asks for what that has no part in: a batch size, several local
    steps, another optimizer, clipping rule or mechanism, noise on the upload, a rule that is no sum of LoRA, or a
    program's own model.
    Columns of prompts or chat messages imply a causal model, and the recipe `instruction`; one of persons implies that
    these are the unit. With `answers` that recipe is another, and prompts end by asking for one of them.
    `train = auto` is about R between frozen factors of every layer, unless another rule is named. There, and with
    `dp-lora-paper`, alpha follows the rank.
    A noise multiplier, a noise schedule or another target without a `target_epsilon` leaves out the recipe's target;
    secure aggregation has the noise and the view that it is for, and needs every client's upload. A rule that is no
    weighted sum has no optimizer at the server. The value `by recipe` is that of a key that is left out.
    """
    values = {key: value for key, value in values.items() if value != BY_RECIPE}
    if values.get("prompt_column") or values.get("messages_column"):
        values.setdefault("task", "CAUSAL_LM")
    if values.get("person_column"):
        values.setdefault("unit", "person")
    recipe = values.setdefault("recipe", _implied(values)[0])
    presets = dict(_PRESETS[recipe]) if recipe in list(RECIPES) else {}
    other_rule = values.get("aggregation") not in (None, _INSTRUCTION["aggregation"])
    if recipe == "instruction" and (other_rule or values.get("base_dtype") == "nf4"):
        presets.pop("factors")
    if recipe == "instruction" and values.get("answers") and values.get("aggregation") in (None, "fed-sb"):
        presets |= _WITH_ANSWERS
        if values.get("prompt_column") and not values.get("system_prompt"):
            presets["prompt_template"] = _asking_for(values["answers"])
    if recipe == "instruction" and "batch_size" in values:
        presets["sampling_probability"] = ""
    scale = 1.0 if recipe == "dp-lora-paper" else 0.0
    if recipe == "fedpriv" and values.get("train") == "auto" and values.get("aggregation") in (None, "fed-sb"):
        presets |= WITH_AUTO
        scale = _SCALE_WITH_AUTO
    if scale and isinstance(rank := values.get("rank"), int):  # any other is refused by name
        presets["alpha"] = scale * rank
    others = ("target_risk", "target_epsilon_published", "noise_schedule")
    if "noise_multiplier" in values or any(map(values.get, others)):
        presets["target_epsilon"] = ""
    if values.get("noise_schedule"):
        presets["noise_multiplier"] = 1.0
    if recipe == "fedpriv" and (rule := values.get("aggregation")) in list(RULE_FACTS) and not RULE_FACTS[rule].linear:
        presets["server_optimizer"] = "sgd"
    if values.get("secure_aggregation") is True:
        presets |= _WITH_SECURE_AGGREGATION
        if not values.get("client_column"):
            presets["min_clients"] = values.get("clients_per_round") or values.get("num_clients", _NUM_CLIENTS)
    return presets | values


def _asking_for(answers: object) -> str:
    """The prompt with the answers that are allowed; nothing around it where these are no texts, which is refused."""
    try:
        texts = split(answers)
    except ValueError:
        return ""
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        return ""
    return f"{{}}\n\nAnswer with one of: {', '.join(texts)}."


def why_recipe(values: Mapping[str, Any]) -> str:
    """A line on each choice that surprises: a key that implies another recipe than `fedpriv`, and the paper's clipping.

    Empty if the values name a recipe, or none, and clip each sample.
    """
    values = {key: value for key, value in values.items() if value != BY_RECIPE}
    (recipe, key), lines = _implied(values), []
    if "recipe" not in values and key:
        given = "a model of your own" if key == "model" else f"{key} = {values[key]}"
        lines.append(f"recipe = {recipe}, which {given} implies: most defaults differ from those of recipe = fedpriv")
    if with_recipe(values).get("clipping") == "batch":
        lines.append(
            "clipping = batch, as in the DP-LoRA paper: noise of z C on every value is not divided by batch_size, and "
            "the gradient that it hides has length C at most, so the model hardly learns; clipping = joint clips each "
            "sample and divides by batch_size"
        )
    return "\n".join(lines)


def _implied(values: Mapping[str, Any]) -> tuple[Recipe, str]:
    """The recipe of values that name none, and the key that asks for it; none asks for `fedpriv`."""
    for key in ("prompt_column", "messages_column"):
        if values.get(key):
            return "instruction", key
    rule, name = values.get("aggregation"), values.get("mechanism")
    foreign = {
        "model": str(values.get("model", "")).startswith(OWN_MODEL),
        **{key: key in values and values[key] not in known for key, known in _ONLY_IN_FEDPRIV.items()},
        "aggregation": rule is not None and not (rule in list(RULE_FACTS) and RULE_FACTS[rule].combines_lora),
        "mechanism": name is not None and not (name in list(MECHANISMS) and MECHANISMS[name].noise_adds_up),
    }
    key = next((key for key, is_foreign in foreign.items() if is_foreign), "")
    return ("per-sample" if key else "fedpriv"), key
