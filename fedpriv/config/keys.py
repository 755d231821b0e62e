"""The keys of a run's configuration as keyword arguments: what editors complete and type checkers check.

Written by `make keys` from the sections of `fedpriv.config`. docs/configuration.md explains the keys.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from fedpriv.config import BaseFormat, Encoding, Recipe, Separator, TableChecks, Track, Train


class _CommonKeys(TypedDict, total=False):
    """The keys that mean the same in a run and in a sweep, less those that are arguments of their own."""

    # Recipe
    recipe: Recipe

    # Model and adapter
    task: Literal["SEQ_CLS", "CAUSAL_LM"]
    rank: int
    alpha: float
    target_modules: Sequence[str]
    layers: str
    factors: Literal["weights", "answers", "inputs"]
    max_length: int
    normalize_features: bool
    train: Train

    # Data
    test_fraction: float
    evaluation_noise_multiplier: float | None
    separator: Separator
    encoding: Encoding
    table_checks: TableChecks
    text_column: str
    text_pair_column: str
    prompt_column: str
    response_column: str
    messages_column: str
    system_prompt: str
    prompt_template: str
    answers: Sequence[str]
    choice_columns: Sequence[str]
    max_choices: int
    label_column: str
    client_column: str
    unit: Literal["record", "person"]
    person_column: str
    max_records_per_person: int
    holders_per_person: int
    labels: Sequence[str]
    partition: Literal["auto", "natural", "iid", "dirichlet", "sizes"]
    num_clients: int
    client_sizes: Sequence[int]
    dirichlet_alpha: float
    max_records: int
    public_data: bool

    # Federation
    rounds: int
    head_start: bool
    evaluate_every: int
    lora_rounds: int | None
    trained_rank: int | None
    lora_share: float
    clients_per_round: int
    min_clients: int
    round_seconds: float
    registration_seconds: float
    purpose: str
    until: str
    node_keys: str | Path
    aggregation: str
    client_ranks: Sequence[int]
    client_weights: Literal["auto", "uniform", "records", "root-records"]
    server_optimizer: Literal["sgd", "momentum", "adam", "yogi"]
    server_learning_rate: float
    server_rate_decay: Literal["none", "linear"]
    lora_server_optimizer: Literal["same", "adam"]
    lora_server_learning_rate: float
    server_momentum: float
    upload_codec: Literal["float32", "bfloat16", "int8", "ternary"]
    relevance_threshold: float
    max_update_norm: float | None

    # Local update and privacy
    local_steps: int
    sampling_probability: float | None
    lora_sampling_probability: float | None
    optimizer: Literal["sgd", "adamw"]
    learning_rate: float | Literal["auto"]
    lora_learning_rate: float | Literal["auto"]
    lora_head_learning_rate: float | Literal["auto"]
    weight_decay: float
    clipping: Literal["joint", "split", "per-tensor", "batch"]
    clip_norm: float
    noise_multiplier: float
    start_noise_multiplier: float | None
    lora_noise_multiplier: float | None
    target_epsilon: float | None
    target_risk: str
    target_epsilon_published: float | None
    noise_on: Literal["gradients", "upload"]
    mechanism: str
    mechanism_parameters: str | Path
    privacy_view: Literal["local", "rho", "aggregate"]
    budget_epsilon: float | Sequence[float]
    secure_aggregation: bool
    secure_masks: bool | None
    colluding_clients: int
    delta: float | None

    # Variants and deduplication
    variant_rounds: Sequence[int]
    variant_clients: bool | None
    dedup: Literal["", "drd", "dred", "greedy", "mcts", "dedup", "mistique", "lossless"]
    dedup_block_size: int
    dedup_records: int
    dedup_epsilon_bound: float
    dedup_utility_bound: float
    integral_epsilon: float | None
    generated_answers: int
    max_new_tokens: int
    audit: Literal["", "tokens", "mislabelled"]
    audit_canaries: int
    audit_repeats: int

    # Execution
    seed: int
    data_seed: int | None
    simulate: bool
    comparison: bool | None
    baselines: bool | None
    base_dtype: BaseFormat
    prefix_cache: bool
    activation_checkpointing: bool
    memory_limit_mb: int
    device: str
    engine: Literal["stacked", "in-process", "ray", "flower"]
    ray_address: str
    ray_workers: int
    track: Track
    ledger: str | Path


class RunKeys(_CommonKeys, total=False):
    """The keys of one run."""

    batch_size: int
    model: str | Path | Callable[[], Any]
    data: str | Path | Sequence[Any] | Mapping[str, Any]
    test_data: str | Path | Any
    noise_schedule: Sequence[float | Sequence[float]] | Callable[[int], Any]


class SweepKeys(_CommonKeys, total=False):
    """The keys of every run of a sweep; the batch size `auto` follows each run's smallest client."""

    batch_size: int | Literal["auto"]
    model: str | Path
    data: str | Path
    test_data: str | Path
    noise_schedule: Sequence[float | Sequence[float]]
