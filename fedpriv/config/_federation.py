"""The sections of a configuration on rounds and clients, on the variants that a run keeps, and on its machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedpriv.aggregation.rules import RULES, Rule
from fedpriv.config._section import ConfigSection, Count, Fact, Maybe, NonNegative, Positive, Sizes

# Each variant lists all uploads before its own, and a coordinator holds the kept ones in memory and in checkpoints.
_MOST_KEPT = 100


@dataclass(frozen=True, kw_only=True)
class FederationSection(ConfigSection, title="Federation"):
    """The rounds of a run, whom they wait for, and how the server aggregates uploads."""

    rounds: Annotated[Count, Fact.BY_TRAIN] = 40
    """the number of rounds, the head's start included; with `train = auto` and R, the most that it chooses"""
    head_start: Annotated[bool, Fact.TEXTS] = True
    """the first round is one noised release of features, summed by class: the head starts from class means"""
    evaluate_every: Count = 1
    """the server tests the model every so many rounds, and after the last"""
    lora_rounds: Annotated[Annotated[int, Field(ge=0)] | None, Maybe, Fact.BY_TRAIN | Fact.TEXTS] = 4
    """how many of the last rounds train A and B with the head; empty: all after the start, with the same noise"""
    trained_rank: Annotated[Count | None, Maybe, Fact.BY_TRAIN | Fact.TEXTS | Fact.LATER] = None
    """of R between frozen factors: the rank of the leading block that is trained, at most `rank`; empty: all"""
    lora_share: Annotated[float, Field(gt=0, lt=0.8), Fact.BY_TRAIN | Fact.TEXTS] = 0.02
    """the share of the budget for the last `lora_rounds`, in units of 1 / z^2"""
    clients_per_round: Annotated[int, Field(ge=0)] = 0
    """the number of clients sampled per round; 0 means all"""
    min_clients: Count = 1
    """a round with fewer valid replies asks further clients, if there are any, or ends the run, which can be resumed;
    no sum is made of fewer uploads. With `secure_aggregation` this is t >= 3, and [each client is charged for t
    uploads](secure_aggregation.md)"""
    round_seconds: Positive = 3600.0
    """how long a round waits for replies; later ones are counted and discarded, and their clients remain charged"""
    registration_seconds: Annotated[Positive, Fact.RELOADS] = 300.0
    """how long a run waits for its nodes; it continues with those that registered"""
    node_keys: Annotated[str, Fact.LOCATION] = ""
    """a folder with the public key of each node's vault, `PARTITION-ID.pub`; nodes whose registration is not signed
    with it are left out"""
    aggregation: Annotated[str, Fact.RELEASE | Fact.RELOADS] = "dp-lora"
    """[how uploads become the next global model](aggregation.md): `fedavg`, `t-fedavg` and `cmfl` train full weight
    matrices, the others LoRA adapters; or [a rule of your own](aggregation.md#a-rule-of-your-own)"""
    client_ranks: Annotated[Sizes, Fact.RELOADS | Fact.TEXTS] = ()
    """with `flora`: one rank per client, such as `[4, 8, 16]`; otherwise all clients use `rank`"""
    client_weights: Literal["auto", "records", "root-records"] = "auto"
    """rho_k, the weight of a client's upload: in proportion to N_k (`records`, as in the paper) or to N_k^1.5
    (`root-records`). `auto` is `root-records`, but `records` with `secure_aggregation`"""
    server_optimizer: Literal["sgd", "momentum", "adam", "yogi"] = "momentum"
    """the server's [step](aggregation.md#server-optimizers) from the weighted sum of the uploads, at no cost in
    privacy; with rules that are no weighted sum, `sgd` only"""
    server_learning_rate: Positive = 1.0
    """the rate of the server's step; with rules that are no weighted sum, 1 only"""
    server_rate_decay: Literal["none", "linear"] = "none"
    """`linear`: the server's rates fall from round to round, to 1 / `rounds` of themselves in the last"""
    lora_server_optimizer: Annotated[Literal["same", "adam"], Fact.BY_TRAIN | Fact.TEXTS] = "same"
    """replaces `server_optimizer` for A and B, or R: `adam` where there are enough records for LoRA to pay"""
    lora_server_learning_rate: Annotated[Positive, Fact.BY_TRAIN | Fact.TEXTS] = 0.02
    """the rate of `lora_server_optimizer = adam`"""
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """the share of its last step that `server_optimizer = momentum` keeps"""
    upload_codec: Annotated[Literal["float32", "bfloat16", "int8", "ternary"], Fact.RELOADS] = "float32"
    """the encoding of uploads. Rounding comes after the noise, so it costs no privacy"""
    relevance_threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    """v_0 of `cmfl`: in round t a client uploads if the share of its parameters that move as the last global update did
    reaches v_0 / sqrt(t)"""
    max_update_norm: Annotated[Positive | None, Maybe] = None
    """the largest L2 distance of an upload from the broadcast; larger ones are refused. Empty: no limit. With a limit
    the server measures every upload, so the `aggregate` view does not hold"""

    @property
    def rule(self) -> Rule:
        """The aggregation rule.

        Raises:
            InputError: its name is unknown.
        """
        return RULES.named(self.aggregation)

    def _check_aggregation(self) -> None:
        if self.client_ranks and not self.rule.restarts:
            raise ValueError(
                f"client_ranks = {list(self.client_ranks)}: aggregation = {self.aggregation} averages tensors of one "
                f"shape; clients of different ranks need {RULES.names_of(lambda rule: rule.restarts)}"
            )
        if self.rule.ternary and self.upload_codec not in ("float32", "ternary"):
            raise ValueError(
                f"upload_codec = {self.upload_codec}: {self.aggregation} sends ternary codes; leave it out"
            )

    def _check_server_optimizer(self) -> None:
        plain = self.server_optimizer == "sgd" and self.server_learning_rate == 1
        plain = plain and self.lora_server_optimizer == "same" and self.server_rate_decay == "none"
        if not plain and not self.rule.linear:
            raise ValueError(
                f"server_optimizer = {self.server_optimizer}, server_learning_rate = {self.server_learning_rate}, "
                f"server_rate_decay = {self.server_rate_decay}, lora_server_optimizer = {self.lora_server_optimizer}: "
                f"aggregation = {self.aggregation} is no weighted sum of the uploads; use sgd, 1, none and same, or "
                f"one of {RULES.names_of(lambda rule: rule.linear)}"
            )


@dataclass(frozen=True, kw_only=True)
class VariantsSection(ConfigSection, title="Variants and deduplication"):
    """The variants that a run keeps, and how the server stores them."""

    variant_rounds: Sizes = ()
    """rounds whose global models are kept as variants, in addition to the final one, such as `[5, 10]`"""
    variant_clients: Annotated[bool | None, Maybe] = None
    """whether each client's last upload is kept as a variant; by default in a run of at most 100 clients"""
    dedup: Annotated[
        Literal["", "drd", "dred", "greedy", "mcts", "dedup", "mistique", "shared-basis", "lossless"], Fact.TEXTS
    ] = ""
    """how the server [stores variants](deduplication.md) after the last round; empty leaves this to `fedpriv dedup
    run`. All but `lossless` need a test set"""
    dedup_block_size: Annotated[Count, Fact.TEXTS] = 256
    """the values in a block; `fedpriv dedup run` chooses them by the size of the model unless given"""
    dedup_records: Annotated[int, Field(ge=0), Fact.TEXTS] = 0
    """the number of test records for validation, drawn with the seed; 0 uses all"""
    dedup_epsilon_bound: Annotated[NonNegative, Fact.TEXTS] = 0.5
    """the largest permitted rise of a variant's epsilon"""
    dedup_utility_bound: Annotated[float, Field(ge=0, le=1), Fact.TEXTS] = 0.01
    """by how much a variant's accuracy may fall, or the mean log perplexity of responses rise;
    [proven](deduplication.md#what-is-proven) with 95 % confidence"""
    integral_epsilon: Annotated[NonNegative | None, Maybe, Fact.TEXTS] = None
    """finds uploads of the last round that lie within this distance in every weight, and keeps their mean as [a
    variant](integral.md). This is not differential privacy; empty compares none"""

    def keeps_uploads_of(self, num_clients: int) -> bool:
        """Whether the last upload of each of so many clients is kept as a variant."""
        return num_clients <= _MOST_KEPT if self.variant_clients is None else self.variant_clients

    @property
    def validates_variants(self) -> bool:
        """Whether what is stored of the variants is validated on the server's test set."""
        return self.dedup not in ("", "lossless")


@dataclass(frozen=True, kw_only=True)
class AuditSection(ConfigSection, title="Variants and deduplication"):
    """The questions that a language model is asked before and after, and canaries that test the run's epsilon."""

    generated_answers: Annotated[int, Field(ge=0), Fact.TEXTS] = 50
    """how many test prompts a language model answers before and after training"""
    max_new_tokens: Annotated[Count, Fact.TEXTS] = 96
    """the most tokens of an answer"""
    audit: Annotated[Literal["", "tokens", "mislabelled"], Fact.RELOADS | Fact.TEXTS] = ""
    """inserts [canaries](audit.md) into every client's data, each with probability 1/2, to test the run's epsilon:
    `tokens` (random tokens) or `mislabelled` (the client's last records). In simulations only"""
    audit_canaries: Annotated[int, Field(ge=2), Fact.RELOADS | Fact.TEXTS] = 50
    """the number of canaries of each client; `fedpriv audit power` says how much they can find"""
    audit_repeats: Annotated[Count, Fact.RELOADS | Fact.LATER | Fact.TEXTS] = 1
    """the records of an included canary; they are one person's where persons are the unit, else the bound is divided"""


@dataclass(frozen=True, kw_only=True)
class ExperimentSection(ConfigSection, title="Execution"):
    """How a run is repeated, and what it is compared with."""

    seed: Annotated[int, Field(ge=0), Fact.RELEASE | Fact.RECORDS | Fact.RELOADS] = 0
    """of the initial adapter, the selection of clients, the partition and the test split; with `simulate`, of
    everything"""
    simulate: Annotated[bool, Fact.RELOADS] = False
    """noise and sampling use the seed, so that a run can be reproduced to the bit; it is marked *not private*"""
    comparison: Annotated[bool | None, Maybe] = None
    """a second run with z = 0 and the same clipping; by default where there is a test set, and data are synthetic or
    public or `simulate` is set"""
    baselines: Annotated[bool | None, Maybe, Fact.RELOADS | Fact.TEXTS] = None
    """plain classifiers [next to the run's accuracy](configuration.md#what-an-accuracy-is-compared-with); by default
    for classifiers that are tested on public data. Refused without a test set, and where it would train on private
    records"""

    @property
    def noise_source(self) -> str:
        """`seeded` in a run marked `simulate`, otherwise `secure`."""
        return "seeded" if self.simulate else "secure"


BaseFormat = Literal["auto", "float32", "bfloat16", "nf4"]
"""Formats of the frozen weights."""

Track = Literal["none", "mlflow", "tensorboard", "wandb"]
"""Trackers that show a run's figures while it goes on."""


@dataclass(frozen=True, kw_only=True)
class MachineSection(ConfigSection, title="Execution", facts=Fact.RELOADS):
    """The machine's part in a run: formats, memory, devices, processes and folders."""

    base_dtype: Annotated[BaseFormat, Fact.TEXTS] = "auto"
    """the format in which the frozen base computes: [`nf4`](base_models.md#the-frozen-base-in-4-bits) with the extra
    `quantized`; `auto` means [bfloat16](base_models.md#the-frozen-base-in-bfloat16) on a GPU, and on a CPU where that
    is faster. Each node decides its own `auto`, and a resumed run keeps it"""
    prefix_cache: Annotated[bool, Fact.TEXTS] = True
    """caches the states below the first trainable layer"""
    activation_checkpointing: Annotated[bool, Fact.TEXTS] = False
    """trained layers keep only their inputs and run again in the backward pass: less memory for long records, up to
    half more time, the same bits"""
    memory_limit_mb: Count = 1024
    """MiB for one pass, and the same again for the prefix cache"""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), Fact.TEXTS] = "auto"
    """where the model runs: `cpu`, `cuda` or `cuda:1`; `auto` uses a GPU if there is one. On a node `vault.toml`
    decides, and its `auto` is the CPU unless `device_couples_records = true`"""
    engine: Literal["stacked", "in-process", "ray", "flower"] = "stacked"
    """`stacked`: the clients of a round share passes of the frozen base. `in-process`: one client at a time. `ray`: one
    actor per core or GPU. `flwr run` sets `flower`. Results differ by rounding alone"""
    ray_address: Annotated[str, Fact.HIDDEN | Fact.TEXTS] = ""
    """an existing [Ray cluster](ray_cluster.md), such as `auto` or `head:6379`; empty takes `RAY_ADDRESS`, or starts
    one here"""
    ray_workers: Annotated[int, Field(ge=0), Fact.TEXTS] = 0
    """the most actors; 0 means one per GPU, or one per core without a GPU"""
    track: Annotated[Track, Fact.OUTSIDE] = "none"
    """a [tracker](trackers.md) that also shows the figures, with the extra of its name. A resumed run may change it"""
    ledger: Annotated[str, Fact.LOCATION | Fact.BY_SWEEP] = ""
    """an SQLite file in which spending accumulates over runs; simulated nodes keep theirs in `<ledger>.nodes/`. By
    default a new one in the run's folder, with nothing spent before"""
    out: Annotated[str, Fact.LOCATION | Fact.BY_SWEEP | Fact.ARGUMENT] = ""
    """the folder for the results; it must be new or empty"""
    resume: Annotated[str, Fact.LOCATION | Fact.ARGUMENT] = ""
    """the folder of an interrupted run, or one of its checkpoints; `fedpriv run --resume DIR` reads all other keys from
    there"""
