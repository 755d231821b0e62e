"""The configuration of a run: one flat, frozen list of keys, the same in TOML, after `-c` and with `flwr run`."""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from fedpriv.accounting.sensitivity import clipping_rule
from fedpriv.errors import InputError
from fedpriv.mechanisms.registry import MECHANISMS, with_current_keys
from fedpriv.recipes import Recipe, with_recipe

EMBEDDED = "embedded"
# Every node trains on the data that its own configuration names; the server knows only what the node registers.
ON_NODES = "on-nodes"

Scalar = str | int | float | bool

# Keys that only say where a run's files are. They do not affect its results, so its digest leaves them out.
LOCATION_KEYS = ("out", "ledger", "node_keys", "resume")


def _split(value: object) -> object:
    """Flower's run configuration has no lists: `a,b` stands for one, or a JSON list if an item holds a comma."""
    if isinstance(value, str):
        if value.startswith("["):
            try:
                return tuple(json.loads(value))
            except ValueError:
                raise ValueError(f"{value}: starts like a JSON list but is not one") from None
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _one_for_all(value: object) -> object:
    """A single number holds for all clients."""
    return (value,) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _none_if_empty(value: object) -> object:
    """TOML has no null, so the empty string stands for it."""
    return None if value == "" else value


def _text_of_number(value: object) -> object:
    """In TOML, the index of a single layer is a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _rule_by_any_name(value: object) -> object:
    """Other libraries have other names for the same clipping rules."""
    return clipping_rule(value) if isinstance(value, str) else value


Layers = Annotated[str, BeforeValidator(_text_of_number), Field(pattern=r"^(all|last-[1-9]\d*|\d+(,\d+)*)$")]
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_split)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Budgets = Annotated[tuple[Positive, ...], BeforeValidator(_split), BeforeValidator(_one_for_all)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


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
    rank: Count = 8
    alpha: Positive = 16.0
    target_modules: Names = ()
    layers: Layers = "last-2"
    max_length: Count = 64
    normalize_features: bool = True
    train: Literal["all", "head", "auto"] = "all"

    # the data and who holds them
    data: str = EMBEDDED
    test_data: str = ""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    evaluation_noise_multiplier: Annotated[Positive | None, BeforeValidator(_none_if_empty)] = None
    text_column: str = "text"
    text_pair_column: str = ""
    label_column: str = "label"
    client_column: str = ""
    labels: Names = ()
    partition: Literal["auto", "natural", "iid", "dirichlet", "sizes"] = "auto"
    num_clients: Count = 5
    client_sizes: Sizes = ()
    dirichlet_alpha: Positive = 0.5
    public_data: bool = False

    # the federation
    rounds: Count = 40
    head_start: bool = True
    lora_rounds: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_none_if_empty)] = 8
    clients_per_round: Annotated[int, Field(ge=0)] = 0
    min_clients: Count = 1
    round_seconds: Positive = 3600.0
    registration_seconds: Positive = 300.0
    node_keys: str = ""
    aggregation: Literal["dp-lora", "fedavg", "t-fedavg", "cmfl", "ffa-lora", "fedex-lora", "flora"] = "dp-lora"
    client_ranks: Sizes = ()
    client_weights: Literal["auto", "records", "root-records"] = "auto"
    server_optimizer: Literal["sgd", "momentum", "adam", "yogi"] = "momentum"
    server_learning_rate: Positive = 1.0
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    upload_codec: Literal["float32", "bfloat16", "int8", "ternary"] = "float32"
    relevance_threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    max_update_norm: Annotated[Positive | None, BeforeValidator(_none_if_empty)] = None

    # the local update and its privacy
    local_steps: Count = 1
    batch_size: Count = 64
    sampling_probability: Annotated[Probability | None, BeforeValidator(_none_if_empty)] = 1.0
    lora_sampling_probability: Annotated[Probability | None, BeforeValidator(_none_if_empty)] = 0.1
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: Positive | Literal["auto"] = "auto"
    lora_scale: Positive = 1.0
    weight_decay: NonNegative = 0.0
    clipping: Annotated[Literal["joint", "split", "per-tensor", "batch"], BeforeValidator(_rule_by_any_name)] = "joint"
    clip_norm: Positive = 1.0
    noise_multiplier: NonNegative = 1.0
    start_noise_multiplier: Annotated[NonNegative | None, BeforeValidator(_none_if_empty)] = None
    target_epsilon: Annotated[Positive | None, BeforeValidator(_none_if_empty)] = 2.0
    noise_on: Literal["gradients", "upload"] = "gradients"
    mechanism: str = "gaussian"
    mechanism_parameters: str = ""
    privacy_view: Literal["local", "rho", "aggregate"] = "local"
    budget_epsilon: Budgets = ()
    uploads_hidden: bool = False
    colluding_clients: Annotated[int, Field(ge=0)] = 0
    delta: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, BeforeValidator(_none_if_empty)] = None

    # the variants that a run keeps, and how the server stores them
    variant_rounds: Sizes = ()
    variant_clients: bool = True
    dedup: Literal["", "drd", "dred", "greedy", "mcts", "dedup", "mistique"] = ""
    dedup_block_size: Count = 256
    dedup_records: Annotated[int, Field(ge=0)] = 0
    dedup_epsilon_bound: NonNegative = 0.5
    dedup_utility_bound: Annotated[float, Field(ge=0, le=1)] = 0.01
    integral_epsilon: Annotated[NonNegative | None, BeforeValidator(_none_if_empty)] = None

    # canaries that test the run's epsilon
    audit: Literal["", "tokens", "mislabelled"] = ""
    audit_canaries: Annotated[int, Field(ge=2)] = 50

    # how it is run
    seed: Annotated[int, Field(ge=0)] = 0
    simulate: bool = False
    comparison: Annotated[bool | None, BeforeValidator(_none_if_empty)] = None
    baselines: Annotated[bool | None, BeforeValidator(_none_if_empty)] = None
    prefix_cache: bool = True
    memory_limit_mb: Count = 1024
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    engine: Literal["stacked", "in-process", "ray", "flower"] = "stacked"
    ray_address: str = ""
    ray_workers: Annotated[int, Field(ge=0)] = 0
    ledger: str = ""
    out: str = ""
    resume: str = ""

    @model_validator(mode="before")
    @classmethod
    def _with_recipe(cls, given: ArgsKwargs) -> dict[str, Any]:
        return with_recipe(given.kwargs or {})

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.data == ON_NODES and self.task == "SEQ_CLS" and len(self.labels) < 2:
            raise ValueError("data = on-nodes: needs labels, the classes that all holders agreed on")
        if self.partition == "natural" and not self.client_column:
            raise ValueError("partition = natural: needs client_column, the column that says who holds a record")
        if self.partition == "sizes" and not self.client_sizes:
            raise ValueError("partition = sizes: needs client_sizes, for instance [1200, 1000, 800]")
        if self.audit:
            self._check_audit()
        if self.evaluation_noise_multiplier is not None:
            self._check_private_evaluation()
        if not self.has_test_set:
            self._check_without_test_set()
        if self.baselines:
            self._check_baselines()
        if self.integral_epsilon is not None and self.uploads_hidden:
            raise ValueError("integral_epsilon: compares single uploads; with uploads_hidden = true, nobody sees those")
        if max(self.variant_rounds, default=0) > self.rounds:
            raise ValueError(f"variant_rounds = {list(self.variant_rounds)}: the run has {self.rounds} rounds")
        if self.weight_decay > 0 and self.optimizer == "sgd":
            raise ValueError(f"weight_decay = {self.weight_decay}: only adamw applies it; use 0 with sgd")
        if self.client_ranks and self.aggregation != "flora":
            raise ValueError(
                f"client_ranks = {list(self.client_ranks)}: aggregation = {self.aggregation} averages tensors of one "
                "shape; clients of different ranks need flora"
            )
        if self.aggregation == "t-fedavg" and self.upload_codec not in ("float32", "ternary"):
            raise ValueError(f"upload_codec = {self.upload_codec}: t-fedavg sends ternary codes; leave the key out")
        self._check_mechanism()
        if self.noise_on == "upload" and self.clipping != "joint":
            raise ValueError(
                f"clipping = {self.clipping}: with noise_on = upload the whole update is clipped; use joint"
            )
        return self

    def _check_audit(self) -> None:
        if self.data == ON_NODES:
            raise ValueError(
                "audit: its canaries go into the clients' data, which are on their nodes; audit a simulation instead"
            )
        if self.aggregation in ("fedex-lora", "flora"):
            raise ValueError(f"audit: the global model of aggregation = {self.aggregation} is more than one adapter")
        if self.noise_on == "upload":
            raise ValueError("audit: canaries are records; noise_on = upload protects whole clients")

    def _check_private_evaluation(self) -> None:
        key = f"evaluation_noise_multiplier = {self.evaluation_noise_multiplier}"
        if self.test_data:
            raise ValueError(f"{key}: with test_data the server has a test set of its own; leave one of the two out")
        if self.noise_on == "upload":
            raise ValueError(
                f"{key}: protects records, noise_on = upload whole clients; the two have no common epsilon"
            )
        if self.audit:
            raise ValueError(f"{key}: an audit puts canaries among all of a client's records; leave one of the two out")

    def _check_without_test_set(self) -> None:
        if self.dedup:
            raise ValueError(f"dedup = {self.dedup}: validates on the server's test set; give test_data")
        if self.comparison and (self.data_are_public or self.simulate):  # elsewhere no run without noise is allowed
            raise ValueError("comparison = true: compares accuracies on the server's test set; give test_data")

    def _check_baselines(self) -> None:
        if self.task != "SEQ_CLS":
            raise ValueError(f"baselines = true: are classifiers, which task = {self.task} has none of; leave it out")
        if not self.has_test_set:
            raise ValueError("baselines = true: are tested on the server's test set; give test_data")
        if self.data != ON_NODES and not self.data_are_public:
            raise ValueError(
                "baselines = true: would train on the clients' private records without noise; leave it out, or set "
                "public_data = true if nobody's privacy depends on them"
            )

    def _check_mechanism(self) -> None:
        mechanism = MECHANISMS.named(self.mechanism)
        if mechanism.parameters_hint and not self.mechanism_parameters:
            raise ValueError(f"mechanism = {self.mechanism}: needs mechanism_parameters, {mechanism.parameters_hint}")
        if self.client_ranks and mechanism.cost_depends_on_dimension:
            raise ValueError(
                f"client_ranks: with mechanism = {self.mechanism}, epsilon depends on the adapter's number of values; "
                "use gaussian"
            )
        if self.mechanism_parameters_are_a_file:
            return
        MECHANISMS.checked_parameters(self.mechanism, self.mechanism_parameters, self.noise_multiplier)
        if self.caveat and (self.target_epsilon or self.budget_epsilon):
            raise ValueError(
                f"mechanism_parameters: their cost is no privacy guarantee ({self.caveat}), so no target or budget of "
                "epsilon can be kept"
            )

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
            mechanism="gaussian",
            mechanism_parameters="",
            target_epsilon=None,
            budget_epsilon=(),
            privacy_view="local",
            comparison=False,
            baselines=False,
            variant_rounds=(),
            dedup="",
            integral_epsilon=None,
            ledger="",
            out="",
            resume="",
        )

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all keys except `LOCATION_KEYS`."""
        values = {key: value for key, value in asdict(self).items() if key not in LOCATION_KEYS}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


KEYS = tuple(field.name for field in fields(RunConfig))


def parse(values: Mapping[str, Any]) -> RunConfig:
    """The configuration that the values describe.

    Raises:
        InputError: one line that names the key, the value and what would be right.
    """
    values = with_current_keys(values)
    for key in values:
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(KEYS)}"
            raise InputError(f"{key}: unknown configuration key{hint}")
    try:
        return RunConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        # Our own validators name key and value; pydantic's messages need both in front.
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise InputError(message) from None
        key = str(first["loc"][0])
        raise InputError(f"{key} = {values[key]!r}: {message[0].lower()}{message[1:]}") from None


def read(path: Path) -> dict[str, Any]:
    """The key-value pairs of a TOML file, not yet checked.

    Raises:
        InputError: the file is missing or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such configuration file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a TOML file ({error})") from None


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """The values of `key=value` pairs as given after `-c`; a value that is not TOML is text.

    Raises:
        InputError: a pair has no `=`.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign:
            raise InputError(f"-c {pair}: must be key=value, for instance rounds=5")
        try:
            values[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = text.strip()
    return values


def to_toml(config: RunConfig) -> str:
    """The resolved configuration as TOML; `parse` of it gives the same configuration."""
    return tomli_w.dumps({key: list(v) if isinstance(v, tuple) else v for key, v in _without_null(config)})


def to_flower(config: RunConfig) -> dict[str, Scalar]:
    """The configuration as Flower's run configuration, which holds scalars only."""
    return {key: _joined(v) if isinstance(v, tuple) else v for key, v in _without_null(config)}


def _joined(values: tuple[Any, ...]) -> str:
    """`a,b`, or a JSON list if `a,b` would be read as something else."""
    text = ",".join(map(str, values))
    return text if _split(text) == tuple(map(str, values)) else json.dumps(list(values))


def _without_null(config: RunConfig) -> list[tuple[str, Any]]:
    """Keys and values, with the empty string for None."""
    return [(key, "" if value is None else value) for key, value in asdict(config).items()]
