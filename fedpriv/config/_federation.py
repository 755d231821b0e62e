"""The sections of a configuration on rounds and clients, on the variants that a run keeps, and on its machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedpriv.config._section import ConfigSection, Count, Fact, Maybe, NonNegative, Positive, Sizes
from fedpriv.config.rules import RULE_FACTS, RuleFacts

# Each variant lists all uploads before its own, and a coordinator holds the kept ones in memory and in checkpoints.
_MOST_KEPT = 100


@dataclass(frozen=True, kw_only=True)
class FederationSection(ConfigSection, title="Federation"):
    """The rounds of a run, whom they wait for, and how the server aggregates uploads."""

    rounds: Annotated[Count, Fact.BY_TRAIN] = 40
    """includes the head's start; with `train = auto` and R, an upper limit"""
    head_start: Annotated[bool, Fact.TEXTS] = True
    """the first round is one noised release of features, summed by class, from which the head starts"""
    evaluate_every: Count = 1
    """rounds between the server's tests; the last is always tested"""
    lora_rounds: Annotated[Annotated[int, Field(ge=0)] | None, Maybe, Fact.BY_TRAIN | Fact.TEXTS] = 4
    """the last rounds, which train A and B with the head; empty: all after the start, with the same noise"""
    trained_rank: Annotated[Count | None, Maybe, Fact.BY_TRAIN | Fact.TEXTS] = None
    """the rank of R's leading block that is trained, at most `rank`; empty: all"""
    lora_share: Annotated[float, Field(gt=0, lt=0.8), Fact.BY_TRAIN | Fact.TEXTS] = 0.02
    """share of the budget for the last `lora_rounds`, in 1 / z^2"""
    clients_per_round: Annotated[int, Field(ge=0)] = 0
    """clients sampled per round; 0: all"""
    min_clients: Count = 1
    """with fewer valid replies a round asks further clients or ends the run, which can be resumed. With
    `secure_aggregation` this is [the threshold t](secure_aggregation.md#the-threshold)"""
    round_seconds: Positive = 3600.0
    """how long a round waits; later replies are discarded, and their clients remain charged"""
    registration_seconds: Annotated[Positive, Fact.RELOADS] = 300.0
    """how long a run waits for nodes; it goes on with those that registered"""
    node_keys: Annotated[str, Fact.LOCATION] = ""
    """a folder with each vault's public key, `PARTITION-ID.pub`; other nodes are left out"""
    aggregation: Annotated[str, Fact.RELEASE | Fact.RELOADS] = "dp-lora"
    """[how uploads become the next model](aggregation.md); or [a rule of your
    own](aggregation.md#a-rule-of-your-own)"""
    client_ranks: Annotated[Sizes, Fact.RELOADS | Fact.TEXTS] = ()
    """with `flora`: a rank for each client, such as `[4, 8, 16]`; empty: `rank`"""
    client_weights: Literal["auto", "records", "root-records"] = "auto"
    """rho_k, an upload's weight, in proportion to N_k (`records`) or N_k^1.5 (`root-records`). `auto`: `root-records`,
    but `records` with `secure_aggregation`"""
    server_optimizer: Literal["sgd", "momentum", "adam", "yogi"] = "momentum"
    """the server's [step](aggregation.md#server-optimizers) from the sum of uploads, at no cost in privacy"""
    server_learning_rate: Positive = 1.0
    """of the server's step"""
    server_rate_decay: Literal["none", "linear"] = "none"
    """`linear`: the server's rates fall to 1 / `rounds` of themselves"""
    lora_server_optimizer: Annotated[Literal["same", "adam"], Fact.BY_TRAIN | Fact.TEXTS] = "same"
    """`server_optimizer` for A and B, or R; `adam` where records are enough for LoRA to pay"""
    lora_server_learning_rate: Annotated[Positive, Fact.BY_TRAIN | Fact.TEXTS] = 0.02
    """of `lora_server_optimizer = adam`"""
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """the share of its last step that `momentum` keeps"""
    upload_codec: Annotated[Literal["float32", "bfloat16", "int8", "ternary"], Fact.RELOADS] = "float32"
    """of uploads; rounding comes after the noise, so it costs no privacy"""
    relevance_threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    """of [`cmfl`](aggregation.md#what-each-rule-does): how far an update must agree with the last global one to be
    sent"""
    max_update_norm: Annotated[Positive | None, Maybe] = None
    """the largest L2 distance of an accepted upload from the broadcast; empty: no limit. With a limit the `aggregate`
    view does not hold"""

    @property
    def rule(self) -> RuleFacts:
        """The facts of the aggregation rule.

        Raises:
            InputError: its name is unknown.
        """
        return RULE_FACTS.named(self.aggregation)

    def _check_aggregation(self) -> None:
        if self.client_ranks and not self.rule.restarts:
            raise ValueError(
                f"client_ranks = {list(self.client_ranks)}: aggregation = {self.aggregation} averages tensors of one "
                f"shape; clients of different ranks need {RULE_FACTS.names_of(lambda rule: rule.restarts)}"
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
                f"one of {RULE_FACTS.names_of(lambda rule: rule.linear)}"
            )


@dataclass(frozen=True, kw_only=True)
class VariantsSection(ConfigSection, title="Variants and deduplication"):
    """The variants that a run keeps, and how the server stores them."""

    variant_rounds: Sizes = ()
    """rounds whose global models are kept as variants, in addition to the final one, such as `[5, 10]`"""
    variant_clients: Annotated[bool | None, Maybe] = None
    """keeps each client's last upload as a variant; empty: with at most 100 clients"""
    dedup: Annotated[Literal["", "drd", "dred", "greedy", "mcts", "dedup", "mistique", "lossless"], Fact.TEXTS] = ""
    """how the server [stores variants](deduplication.md) after the last round; empty: left to `fedpriv dedup run`"""
    dedup_block_size: Annotated[Count, Fact.TEXTS] = 256
    """values in a block"""
    dedup_records: Annotated[int, Field(ge=0), Fact.TEXTS] = 0
    """test records for validation, drawn with the seed; 0: all"""
    dedup_epsilon_bound: Annotated[NonNegative, Fact.TEXTS] = 0.5
    """the most by which a variant's epsilon may rise"""
    dedup_utility_bound: Annotated[float, Field(ge=0, le=1), Fact.TEXTS] = 0.01
    """the most by which a variant's accuracy may fall, or responses' mean log perplexity rise,
    [proven](deduplication.md#what-is-proven) with 95 % confidence"""
    integral_epsilon: Annotated[NonNegative | None, Maybe, Fact.TEXTS] = None
    """keeps as [a variant](integral.md) the mean of uploads of the last round within this distance in every weight.
    This is not differential privacy"""

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
    """test prompts that a language model answers before and after training"""
    max_new_tokens: Annotated[Count, Fact.TEXTS] = 96
    """the most tokens of an answer"""
    audit: Annotated[Literal["", "tokens", "mislabelled"], Fact.RELOADS | Fact.TEXTS] = ""
    """inserts [canaries](audit.md) into every client's data: random tokens, or records mislabelled; in simulations
    only"""
    audit_canaries: Annotated[int, Field(ge=2), Fact.RELOADS | Fact.TEXTS] = 50
    """canaries of each client; `fedpriv audit power` says how much they can find"""
    audit_repeats: Annotated[Count, Fact.RELOADS | Fact.TEXTS] = 1
    """records of an included canary: one person's where persons are the unit, else the bound is divided"""


@dataclass(frozen=True, kw_only=True)
class ExperimentSection(ConfigSection, title="Execution"):
    """How a run is repeated, and what it is compared with."""

    seed: Annotated[int, Field(ge=0), Fact.RELEASE | Fact.RECORDS | Fact.RELOADS] = 0
    """of the initial adapter, the selection of clients, the partition and the test split; with `simulate`, of
    everything"""
    simulate: Annotated[bool, Fact.RELOADS] = False
    """noise and sampling use the seed: the run can be reproduced to the bit, and is marked *not private*"""
    comparison: Annotated[bool | None, Maybe] = None
    """a second run with z = 0 and the same clipping; empty: with a test set, if data are synthetic or public or
    `simulate` is set"""
    baselines: Annotated[bool | None, Maybe, Fact.RELOADS | Fact.TEXTS] = None
    """plain classifiers [to compare with](configuration.md#what-an-accuracy-is-compared-with); empty: for classifiers
    tested on public data"""

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
    """of the frozen base: [`nf4`](base_models.md#the-frozen-base-in-4-bits) needs the extra `quantized`; `auto` is
    bfloat16 on a GPU, and on a CPU where that is faster. Each node decides its own `auto`"""
    prefix_cache: Annotated[bool, Fact.TEXTS] = True
    """caches records' states below the first trainable layer, beyond `memory_limit_mb` in a nameless temporary file"""
    activation_checkpointing: Annotated[bool, Fact.TEXTS] = False
    """recomputes trained layers in the backward pass: less memory for long records, up to half more time"""
    memory_limit_mb: Count = 1024
    """MiB for passes, and again for the prefix cache"""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), Fact.TEXTS] = "auto"
    """`cpu`, `cuda` or `cuda:1`; `auto`: a GPU if there is one. On a node `vault.toml` decides"""
    engine: Literal["stacked", "in-process", "ray", "flower"] = "stacked"
    """`stacked`: clients share passes of the frozen base. `in-process`: one client at a time. `ray`: an actor per core
    or GPU. `flower`: set by `flwr run`. Results differ by rounding alone"""
    ray_address: Annotated[str, Fact.HIDDEN | Fact.TEXTS] = ""
    """a [Ray cluster](ray_cluster.md), such as `auto` or `head:6379`; empty: `RAY_ADDRESS`, or a new one here"""
    ray_workers: Annotated[int, Field(ge=0), Fact.TEXTS] = 0
    """the most actors; 0: one per GPU, or per core without a GPU"""
    track: Annotated[Track, Fact.OUTSIDE] = "none"
    """a [tracker](trackers.md) for the figures, with the extra of its name"""
    ledger: Annotated[str, Fact.LOCATION | Fact.BY_SWEEP] = ""
    """an SQLite file in which spending accumulates over runs, [by holder](ledger.md#whose-account-it-is); simulated
    nodes keep theirs in `<ledger>.nodes/`. Empty: a new one in the run's folder, with nothing spent before"""
    out: Annotated[str, Fact.LOCATION | Fact.BY_SWEEP | Fact.ARGUMENT] = ""
    """a new or empty folder for the results"""
    resume: Annotated[str, Fact.LOCATION | Fact.ARGUMENT] = ""
    """an interrupted run's folder or one of its checkpoints; `fedpriv run --resume DIR` reads all other keys from
    there"""
