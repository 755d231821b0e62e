"""The section of a configuration on rounds, clients, and how uploads become the next global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedpriv.config._section import ConfigSection, Count, Fact, Maybe, Positive, Sizes

LINEAR_RULES = ("dp-lora", "fedavg", "ffa-lora", "rolora", "fedsvd", "fed-sb")
"""Aggregation rules whose global model is the weighted sum of the uploads, from which a server optimizer may step."""

# The rules with rounds that train some of the tensors.
PARTIAL_RULES = ("rolora", "fedsvd")
# The rules that neither train, decompose nor add to the frozen weights, which may then be in 4 bits.
RULES_ON_QUANTISED = ("dp-lora", "ffa-lora", "rolora", "fedsvd")
# The rules whose uploads hold one factor of the map alone; the others are frozen in every model.
ONE_FACTOR_RULES = ("ffa-lora", "fed-sb")

Aggregation = Literal[
    "dp-lora", "fedavg", "t-fedavg", "cmfl", "ffa-lora", "rolora", "fedsvd", "fed-sb", "fedex-lora", "flora"
]
"""The aggregation rules of fedpriv/aggregation/rules.py."""


@dataclass(frozen=True, kw_only=True)
class FederationSection(ConfigSection, title="Federation"):
    """The rounds of a run, whom they wait for, and how the server aggregates uploads."""

    rounds: Count = 40
    """the number of rounds, the head's start included"""
    head_start: bool = True
    """the first round is one release of every record's features, summed by class: the head starts from class means"""
    evaluate_every: Count = 1
    """the server tests the model after every so many rounds, and after the last; in rounds that train A and B a test
    costs a pass of the whole test set"""
    lora_rounds: Annotated[Annotated[int, Field(ge=0)] | None, Maybe, Fact.BY_TRAIN] = 4
    """in how many of the last rounds A and B are trained with the head; empty means in all rounds after the start, with
    the same noise"""
    lora_share: Annotated[float, Field(gt=0, lt=0.8), Fact.BY_TRAIN] = 0.02
    """the share of the budget that the last `lora_rounds` have, in units of 1 / z^2"""
    clients_per_round: Annotated[int, Field(ge=0)] = 0
    """number of clients sampled per round; 0 means all"""
    min_clients: Count = 1
    """a round with fewer valid replies asks further clients, if `clients_per_round` leaves any, or else ends the run,
    which can be resumed; of fewer uploads no sum is made. With `secure_aggregation` this is t, the number of uploads
    for which each client is charged, however many are in the sum: equal accuracy takes sqrt((K - 1) / (t - max(c, 1)))
    times the noise of t = K, c = 0; at least 3"""
    round_seconds: Positive = 3600.0
    """seconds that a round waits for replies; later ones are counted and discarded, and their clients remain charged"""
    registration_seconds: Annotated[Positive, Fact.RELOADS] = 300.0
    """seconds that a run waits for its nodes; after that it continues with those that registered"""
    node_keys: Annotated[str, Fact.LOCATION] = ""
    """folder with the public key of each node's vault as `PARTITION-ID.pub`; a node whose registration is not signed
    with its key does not take part"""
    aggregation: Annotated[Aggregation, Fact.RELEASE | Fact.RELOADS] = "dp-lora"
    """how uploads become the next global model, and with it what is trained: `dp-lora`, `ffa-lora`, `rolora`, `fedsvd`,
    `fed-sb`, `fedex-lora`, `flora` on LoRA adapters; `fedavg`, `t-fedavg`, `cmfl` on full weight matrices.
    [docs/aggregation.md](aggregation.md) explains what each rule averages, what it costs and which to use"""
    client_ranks: Annotated[Sizes, Fact.RELOADS] = ()
    """with `flora`: one rank per client, such as `[4, 8, 16]`; otherwise all clients use `rank`"""
    client_weights: Literal["auto", "records", "root-records"] = "auto"
    """rho_k, the weight of a client's upload, in proportion to N_k (`records`, the paper's) or to N_k^1.5
    (`root-records`: a large client's records count more, since its noise is no larger); `auto` is `root-records`, and
    `records` with `secure_aggregation`"""
    server_optimizer: Literal["sgd", "momentum", "adam", "yogi"] = "momentum"
    """the server's step from the weighted sum of the uploads: `sgd`, `momentum`, `adam` or `yogi`
    ([formulas](aggregation.md#server-optimizers)); with rules other than `dp-lora`, `ffa-lora`, `rolora`, `fedsvd`,
    `fed-sb` and `fedavg`, `sgd` only. It costs no privacy on any view"""
    server_learning_rate: Positive = 1.0
    """the rate of the server's step; with rules that are no weighted sum, 1 only"""
    server_rate_decay: Literal["none", "linear"] = "none"
    """`linear` lets the server's rates fall from round to round, to 1 / `rounds` of themselves in the last one: against
    a model that sways about what it has learned, where steps stay long"""
    lora_server_optimizer: Annotated[Literal["same", "adam"], Fact.BY_TRAIN] = "same"
    """what takes the place of `server_optimizer` for A and B, or R: `adam`, where there are so many records that LoRA
    pays; or `same`"""
    lora_server_learning_rate: Annotated[Positive, Fact.BY_TRAIN] = 0.02
    """the rate of `lora_server_optimizer = adam`"""
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """what `server_optimizer = momentum` keeps of its last step, in [0, 1)"""
    upload_codec: Annotated[Literal["float32", "bfloat16", "int8", "ternary"], Fact.RELOADS] = "float32"
    """how uploads are encoded: `float32`, `bfloat16`, `int8` or `ternary`. Rounding comes after the noise, so it costs
    no privacy"""
    relevance_threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    """with `cmfl`: v_0; in round t a client uploads if the share of its parameters that move in the direction of the
    last global update reaches v_0 / sqrt(t)"""
    max_update_norm: Annotated[Positive | None, Maybe] = None
    """maximum L2 distance of an upload from the broadcast, over all trained tensors; larger ones are refused. Empty
    sets no limit. With a limit the server measures every upload, so the `aggregate` view does not hold"""

    def _check_aggregation(self) -> None:
        if self.client_ranks and self.aggregation != "flora":
            raise ValueError(
                f"client_ranks = {list(self.client_ranks)}: aggregation = {self.aggregation} averages tensors of one "
                "shape; clients of different ranks need flora"
            )
        if self.aggregation == "t-fedavg" and self.upload_codec not in ("float32", "ternary"):
            raise ValueError(f"upload_codec = {self.upload_codec}: t-fedavg sends ternary codes; leave the key out")

    def _check_server_optimizer(self) -> None:
        plain = self.server_optimizer == "sgd" and self.server_learning_rate == 1
        plain = plain and self.lora_server_optimizer == "same" and self.server_rate_decay == "none"
        if not plain and self.aggregation not in LINEAR_RULES:
            raise ValueError(
                f"server_optimizer = {self.server_optimizer}, server_learning_rate = {self.server_learning_rate}, "
                f"server_rate_decay = {self.server_rate_decay}, lora_server_optimizer = {self.lora_server_optimizer}: "
                f"aggregation = {self.aggregation} is no weighted sum of the uploads; use sgd, 1, none and same, or "
                f"one of {', '.join(LINEAR_RULES)}"
            )
