"""The keys of a run's configuration: their types, their defaults, and what follows from their values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt

from fedpriv.accounting.sensitivity import clipping_rule
from fedpriv.config._recipes import Recipe
from fedpriv.mechanisms.registry import MECHANISMS

EMBEDDED = "embedded"
"""The value of `data` that stands for the synthetic corpus inside the package."""

ON_NODES = "on-nodes"
"""The value of `data` with which every node trains on the data that its own configuration names.

The server then knows only what the node registers.
"""


def split(value: object) -> object:
    """The items of a list written as `a,b`, or as JSON if one holds a comma: Flower's configuration has no lists."""
    if isinstance(value, str):
        if value.startswith("["):
            try:
                return tuple(json.loads(value))
            except (ValueError, RecursionError):
                raise ValueError(f"{value}: starts like a JSON list but is not one") from None
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _one_for_all(value: object) -> object:
    """The number in a tuple: a single one holds for all clients."""
    return (value,) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _none_if_empty(value: object) -> object:
    """None for the empty string, which stands for it in TOML, where there is no null."""
    return None if value == "" else value


def _text_of_number(value: object) -> object:
    """The text of a number: in TOML, the index of a single layer is one."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _rule_by_any_name(value: object) -> object:
    """The clipping rule, by its own name or by that of other libraries."""
    return clipping_rule(value) if isinstance(value, str) else value


Aggregation = Literal[
    "dp-lora", "fedavg", "t-fedavg", "cmfl", "ffa-lora", "rolora", "fedsvd", "fed-sb", "fedex-lora", "flora"
]
"""The aggregation rules of fedpriv/aggregation/rules.py."""

BaseFormat = Literal["auto", "float32", "bfloat16", "nf4"]
"""Formats of the frozen weights."""

Train = Literal["all", "head", "auto"]
"""Which of the adapter and the head a run trains."""

Track = Literal["none", "mlflow", "tensorboard", "wandb"]
"""Trackers that show a run's figures while it goes on."""

# How a JSON Schema describes values that take several forms: a list as one text, and the index of a single layer.
_List = Annotated[str, Field(pattern=r"^[\s\d.,eE+\[\]-]*$")]
_LAYERS = r"^(all|last-[1-9]\d*|\d+(,\d+)*)$"
_LayersInput = Annotated[str, Field(pattern=_LAYERS)] | NonNegativeInt
Layers = Annotated[str, BeforeValidator(_text_of_number, json_schema_input_type=_LayersInput), Field(pattern=_LAYERS)]
Names = Annotated[tuple[str, ...], BeforeValidator(split, json_schema_input_type=tuple[str, ...] | str)]
_Size = Annotated[int, Field(ge=1)]
Sizes = Annotated[tuple[_Size, ...], BeforeValidator(split, json_schema_input_type=tuple[_Size, ...] | _List)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Budgets = Annotated[
    tuple[Positive, ...],
    BeforeValidator(split),
    BeforeValidator(_one_for_all, json_schema_input_type=tuple[Positive, ...] | Positive | _List),
]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Clipping = Annotated[
    Literal["joint", "split", "per-tensor", "batch"],
    BeforeValidator(
        _rule_by_any_name,
        json_schema_input_type=Literal["joint", "split", "per-tensor", "batch", "flat", "per-layer"],
    ),
]
Maybe = BeforeValidator(_none_if_empty)


@dataclass(frozen=True, kw_only=True)
class ConfigValues:
    """A value for every key, and what follows from them. Nothing is checked here: `RunConfig` does that."""

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
        """Whether plain classifiers are compared with the run; by default, wherever public data are tested on."""
        if self.baselines is not None:
            return self.baselines
        return self.task == "SEQ_CLS" and self.has_test_set and self.data_are_public

    @property
    def partition_rule(self) -> str:
        """The rule that splits records among clients; `auto` means `natural` if a client column is set, else `iid`."""
        if self.partition != "auto":
            return self.partition
        return "natural" if self.client_column else "iid"

    @property
    def noise_source(self) -> str:
        """`seeded` in a run marked `simulate`, otherwise `secure`."""
        return "seeded" if self.simulate else "secure"
