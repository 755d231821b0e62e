"""The configuration of a run: one flat, frozen list of keys, the same in TOML, after `-c` and with `flwr run`."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from fedpriv.config_checks import check
from fedpriv.config_types import EMBEDDED as EMBEDDED
from fedpriv.config_types import ON_NODES as ON_NODES
from fedpriv.config_types import (
    Aggregation,
    BaseFormat,
    Budgets,
    Clipping,
    Count,
    Layers,
    Maybe,
    Names,
    NonNegative,
    Positive,
    Probability,
    Sizes,
    Track,
    Train,
    split,
)
from fedpriv.config_values import LOCATION_KEYS as LOCATION_KEYS
from fedpriv.config_values import OUTSIDE_KEYS as OUTSIDE_KEYS
from fedpriv.config_values import is_resolved, two_noises
from fedpriv.config_values import parse_overrides as parse_overrides
from fedpriv.config_values import read as read
from fedpriv.config_values import with_overrides as with_overrides
from fedpriv.errors import InputError
from fedpriv.mechanisms.registry import MECHANISMS, with_current_keys
from fedpriv.recipes import Recipe, with_recipe

Scalar = str | int | float | bool


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RunConfig:
    """Everything that a run depends on, except its data. docs/configuration.md explains each key.

    Raises:
        pydantic.ValidationError: a value has the wrong type or is out of range; `parse` turns it into one line.
    """

    # the keys that belong together and are not given
    recipe: Recipe = "fedpriv"

    # the model and its adapter
    model: str = "all-MiniLM-L6-v2"
    task: Literal["SEQ_CLS", "CAUSAL_LM"] = "SEQ_CLS"
    rank: Count = 4
    alpha: Positive = 8.0
    target_modules: Names = ()
    layers: Layers = "last-1"
    max_length: Count = 64
    normalize_features: bool = True
    train: Train = "all"

    # the data and who holds them
    data: str = EMBEDDED
    test_data: str = ""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    evaluation_noise_multiplier: Annotated[Positive | None, Maybe] = None
    text_column: str = "text"
    text_pair_column: str = ""
    prompt_column: str = ""
    response_column: str = ""
    messages_column: str = ""
    system_prompt: str = ""
    prompt_template: str = ""
    answers: Names = ()
    label_column: str = "label"
    client_column: str = ""
    labels: Names = ()
    partition: Literal["auto", "natural", "iid", "dirichlet", "sizes"] = "auto"
    num_clients: Count = 5
    client_sizes: Sizes = ()
    dirichlet_alpha: Positive = 0.5
    max_records: Annotated[int, Field(ge=0)] = 0
    public_data: bool = False

    # the federation
    rounds: Count = 40
    head_start: bool = True
    evaluate_every: Count = 1
    lora_rounds: Annotated[Annotated[int, Field(ge=0)] | None, Maybe] = 4
    lora_share: Annotated[float, Field(gt=0, lt=0.8)] = 0.02
    clients_per_round: Annotated[int, Field(ge=0)] = 0
    min_clients: Count = 1
    round_seconds: Positive = 3600.0
    registration_seconds: Positive = 300.0
    node_keys: str = ""
    aggregation: Aggregation = "dp-lora"
    client_ranks: Sizes = ()
    client_weights: Literal["auto", "records", "root-records"] = "auto"
    server_optimizer: Literal["sgd", "momentum", "adam", "yogi"] = "momentum"
    server_learning_rate: Positive = 1.0
    server_rate_decay: Literal["none", "linear"] = "none"
    lora_server_optimizer: Literal["same", "adam"] = "same"
    lora_server_learning_rate: Positive = 0.02
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    upload_codec: Literal["float32", "bfloat16", "int8", "ternary"] = "float32"
    relevance_threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    max_update_norm: Annotated[Positive | None, Maybe] = None

    # the local update and its privacy
    local_steps: Count = 1
    batch_size: Count = 64
    sampling_probability: Annotated[Probability | None, Maybe] = 1.0
    lora_sampling_probability: Annotated[Probability | None, Maybe] = 0.125
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: Positive | Literal["auto"] = "auto"
    lora_learning_rate: Positive | Literal["auto"] = "auto"
    lora_head_learning_rate: Positive | Literal["auto"] = "auto"
    weight_decay: NonNegative = 0.0
    clipping: Clipping = "joint"
    clip_norm: Positive = 0.8
    noise_multiplier: NonNegative = 1.0
    start_noise_multiplier: Annotated[NonNegative | None, Maybe] = None
    lora_noise_multiplier: Annotated[NonNegative | None, Maybe] = None
    target_epsilon: Annotated[Positive | None, Maybe] = 2.3
    noise_on: Literal["gradients", "upload"] = "gradients"
    mechanism: str = "gaussian"
    mechanism_parameters: str = ""
    privacy_view: Literal["local", "rho", "aggregate"] = "local"
    budget_epsilon: Budgets = ()
    secure_aggregation: bool = False
    secure_masks: Annotated[bool | None, Maybe] = None
    colluding_clients: Annotated[int, Field(ge=0)] = 0
    delta: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, Maybe] = None

    # the variants that a run keeps, and how the server stores them
    variant_rounds: Sizes = ()
    variant_clients: bool = True
    dedup: Literal["", "drd", "dred", "greedy", "mcts", "dedup", "mistique", "shared-basis"] = ""
    dedup_block_size: Count = 256
    dedup_records: Annotated[int, Field(ge=0)] = 0
    dedup_epsilon_bound: NonNegative = 0.5
    dedup_utility_bound: Annotated[float, Field(ge=0, le=1)] = 0.01
    integral_epsilon: Annotated[NonNegative | None, Maybe] = None

    # what a language model is asked before and after
    generated_answers: Annotated[int, Field(ge=0)] = 50
    max_new_tokens: Count = 96

    # canaries that test the run's epsilon
    audit: Literal["", "tokens", "mislabelled"] = ""
    audit_canaries: Annotated[int, Field(ge=2)] = 50

    # how it is run
    seed: Annotated[int, Field(ge=0)] = 0
    simulate: bool = False
    comparison: Annotated[bool | None, Maybe] = None
    baselines: Annotated[bool | None, Maybe] = None
    base_dtype: BaseFormat = "auto"
    prefix_cache: bool = True
    activation_checkpointing: bool = False
    memory_limit_mb: Count = 1024
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    engine: Literal["stacked", "in-process", "ray", "flower"] = "stacked"
    ray_address: str = ""
    ray_workers: Annotated[int, Field(ge=0)] = 0
    track: Track = "none"
    ledger: str = ""
    out: str = ""
    resume: str = ""

    @model_validator(mode="before")
    @classmethod
    def _with_recipe(cls, given: ArgsKwargs) -> dict[str, Any]:
        return with_recipe(given.kwargs or {})

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        check(self)
        return self

    @property
    def mechanism_parameters_are_a_file(self) -> bool:
        """Whether the mechanism's parameters are still to be read from a file."""
        takes_parameters = bool(MECHANISMS[self.mechanism].parameters_hint)
        return takes_parameters and not self.mechanism_parameters.lstrip().startswith("{")

    @property
    def caveat(self) -> str:
        """Why the run's epsilon, as it is accounted for, is no privacy guarantee; empty if it is one."""
        return MECHANISMS[self.mechanism].caveat(self.mechanism_parameters)

    @property
    def instructs(self) -> bool:
        """Whether records are prompts with responses, which alone are learned."""
        return bool(self.prompt_column or self.messages_column)

    @property
    def data_are_public(self) -> bool:
        """Whether nobody's privacy depends on the data: the embedded corpus is synthetic."""
        return self.public_data or self.data == EMBEDDED

    @property
    def has_test_set(self) -> bool:
        """Whether the server evaluates on records of its own, or on some that nobody's privacy depends on."""
        if self.test_data:
            return True
        splits_off = self.data != ON_NODES and (self.data_are_public or self.simulate)
        return splits_off and self.evaluation_noise_multiplier is None

    def budget_of(self, client: int) -> float | None:
        """A client's budget of epsilon, by partition id; None if it has none."""
        if not self.budget_epsilon:
            return None
        return self.budget_epsilon[client if len(self.budget_epsilon) > 1 else 0]

    def rank_of(self, client: int) -> int:
        """The rank of a client's adapter, by partition id."""
        return self.client_ranks[client] if self.client_ranks else self.rank

    @property
    def compares(self) -> bool:
        """Whether a comparison run follows; by default, wherever releases without noise are allowed and tested."""
        if self.noise_multiplier == 0:
            return False
        if self.comparison is not None:
            return self.comparison
        return self.has_test_set and (self.data_are_public or self.simulate)

    @property
    def generates_answers(self) -> bool:
        """Whether the run answers prompts: it needs prompts, a test set and leave to."""
        return self.instructs and self.has_test_set and self.generated_answers > 0

    @property
    def weighs_records(self) -> bool:
        """Whether the clients' weights are rho_k = N_k / N, rather than in proportion to N_k^1.5."""
        return self.client_weights == "records" or (self.client_weights == "auto" and self.secure_aggregation)

    @property
    def masks(self) -> bool:
        """Whether uploads are masked, or simulated clients send what the masks would cancel out to."""
        return self.secure_masks if self.secure_masks is not None else self.data == ON_NODES

    @property
    def computes_baselines(self) -> bool:
        """Whether plain classifiers stand beside the run's accuracy; by default, wherever public data are tested on."""
        if self.baselines is not None:
            return self.baselines
        return self.task == "SEQ_CLS" and self.has_test_set and self.data_are_public

    @property
    def partition_rule(self) -> str:
        """How records are split among clients; `auto` means `natural` if a client column is set, else `iid`."""
        if self.partition != "auto":
            return self.partition
        return "natural" if self.client_column else "iid"

    @property
    def noise_source(self) -> str:
        """`seeded` in a run marked `simulate`, otherwise `secure`."""
        return "seeded" if self.simulate else "secure"

    @property
    def without_noise(self) -> RunConfig:
        """The configuration of the comparison run: z = 0, clipping kept, since clipping is part of the optimiser."""
        return replace(
            self,
            noise_multiplier=0.0,
            start_noise_multiplier=0.0 if self.head_start else None,
            lora_noise_multiplier=None if self.lora_rounds is None else 0.0,
            mechanism="gaussian",
            mechanism_parameters="",
            target_epsilon=None,
            budget_epsilon=(),
            privacy_view="local",
            secure_aggregation=False,
            secure_masks=None,
            client_weights="records" if self.weighs_records else self.client_weights,
            comparison=False,
            baselines=False,
            variant_rounds=(),
            dedup="",
            integral_epsilon=None,
            track="none",
            ledger="",
            out="",
            resume="",
        )

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all keys except `OUTSIDE_KEYS`."""
        values = {key: value for key, value in asdict(self).items() if key not in OUTSIDE_KEYS}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


KEYS = tuple(field.name for field in fields(RunConfig))


def parse(values: Mapping[str, Any]) -> RunConfig:
    """The configuration that the values describe.

    Raises:
        InputError: one line that names the key, the value and what would be right.
    """
    config, problems = checked(values)
    if config is None:
        raise InputError(problems[0])
    return config


def checked(values: Mapping[str, Any]) -> tuple[RunConfig | None, list[str]]:
    """The configuration that the values describe, or None; and what is wrong with them, one line for each problem.

    Keys that do not fit together are found only once every single one is right.

    Raises:
        InputError: a key of an earlier version has no current form.
    """
    values = with_current_keys(values)
    problems = [_unknown(key) for key in values if key not in KEYS]
    if not is_resolved(values):
        problems += two_noises(values)
    known = {key: value for key, value in values.items() if key in KEYS}
    try:
        config = RunConfig(**known)
    except ValidationError as error:
        return None, problems + _lines(error, known)
    return (None if problems else config), problems


def _unknown(key: str) -> str:
    close = difflib.get_close_matches(key, KEYS, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(KEYS)}"
    return f"{key}: unknown configuration key{hint}"


def _lines(error: ValidationError, values: Mapping[str, Any]) -> list[str]:
    """One line for each key, or set of keys, that is wrong."""
    lines: dict[str, str] = {}
    for each in error.errors():
        message = each["msg"].removeprefix("Value error, ")
        if not each["loc"]:  # of all keys together: our own checks name them and their values
            cause = each.get("ctx", {}).get("error")
            return list(getattr(cause, "lines", None) or [" ".join(message.split())])
        key = str(each["loc"][0])
        value = values.get(key, each["input"])  # a recipe may derive it from a key that is wrong too
        lines.setdefault(key, f"{key} = {value!r}: {message[:1].lower()}{message[1:]}")
    return list(lines.values())


def to_toml(config: RunConfig) -> str:
    """The resolved configuration as TOML; `parse` of it gives the same configuration."""
    return tomli_w.dumps({key: list(v) if isinstance(v, tuple) else v for key, v in _without_null(config)})


def to_flower(config: RunConfig) -> dict[str, Scalar]:
    """The configuration as Flower's run configuration, which holds scalars only."""
    return {key: _joined(v) if isinstance(v, tuple) else v for key, v in _without_null(config)}


def _joined(values: tuple[Any, ...]) -> str:
    """`a,b`, or a JSON list if `a,b` would be read as something else."""
    text = ",".join(map(str, values))
    return text if split(text) == tuple(map(str, values)) else json.dumps(list(values))


def _without_null(config: RunConfig) -> list[tuple[str, Any]]:
    """Keys and values, with the empty string for None."""
    return [(key, "" if value is None else value) for key, value in asdict(config).items()]


def schema(*, sweep: bool = False) -> dict[str, Any]:
    """JSON Schema of a configuration file; see `fedpriv.config_schema.schema`, which describes every key."""
    from fedpriv import config_schema  # deferred: it needs this module

    return config_schema.schema(sweep=sweep)


def with_mechanism_parameters(config: RunConfig) -> RunConfig:
    """The configuration with the mechanism's parameters in place of their file's name, as one canonical line.

    Raises:
        InputError: there is no such file, or it holds none that the mechanism takes.
    """
    text = config.mechanism_parameters
    if config.mechanism_parameters_are_a_file:
        try:
            text = Path(text.strip()).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "no text"
            raise InputError(f"mechanism_parameters = {text!r}: cannot be read ({reason})") from None
    text = MECHANISMS.checked_parameters(config.mechanism, text, config.noise_multiplier)
    return config if text == config.mechanism_parameters else parse(asdict(config) | {"mechanism_parameters": text})
