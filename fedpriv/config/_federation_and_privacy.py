"""The sections of a configuration on rounds and clients, and on clients' steps, their clipping, noise and cost.

The facts of the aggregation rules stand here, so that a configuration is checked without torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Literal

from pydantic import Field

from fedpriv.config._section import (
    Budgets,
    Clipping,
    ConfigSection,
    Count,
    Fact,
    Maybe,
    NonNegative,
    Positive,
    Probability,
    Schedule,
    Sizes,
)
from fedpriv.exports import Registry
from fedpriv.privacy.mechanisms.registry import MECHANISMS

Trains = Literal["lora", "lora-b", "lora-r", "head", "weights", "biases"]
"""The tensors that a rule trains, of which `RuleFacts` says more."""


@dataclass(frozen=True, kw_only=True)
class RuleFacts:
    """The facts of an aggregation rule that a configuration has to know.

    Attributes:
        trains: `lora`: A, B and a head; `lora-b`: B and a head; `lora-r`: a matrix R between frozen B and A, and a
            head; `weights`: full weight matrices and a head; `biases`: those of linear layers, and a head.
        turns: the tensors that each round trains, in turn, where it trains more than the head; the others are
            broadcast and uploaded as they are.
        orthonormal: whether the rows of A are orthonormal at the start.
        rebases: whether the model gets another basis after the step of the server's optimizer.
        linear: whether the new model is the weighted sum of the uploads, as the `aggregate` view requires.
        merges: whether the frozen weights are added to, so that the global model is more than one adapter.
        restarts: whether clients start each round with a fresh adapter; their ranks may then differ.
        ternary: whether tensors are ternary differences to the start, in training and on the wire in both directions.
        selective: whether a client may withhold its upload.
    """

    trains: Trains = "lora"
    turns: tuple[str, ...] = ("all",)
    orthonormal: bool = False
    rebases: bool = False
    linear: bool = False
    merges: bool = False
    restarts: bool = False
    ternary: bool = False
    selective: bool = False

    @property
    def is_partial(self) -> bool:
        """Whether some of its rounds leave tensors as they are."""
        return self.turns != ("all",)

    @property
    def is_plain(self) -> bool:
        """Whether it makes the next model of whatever tensors are trained, and asks nothing of them or of clients."""
        asks = self.is_partial or self.has_one_factor or self.orthonormal or self.rebases
        return not (asks or self.merges or self.restarts or self.ternary or self.selective)

    @property
    def has_one_factor(self) -> bool:
        """Whether its uploads hold one factor of the map alone; the others are frozen in every model."""
        return self.trains in ("lora-b", "lora-r")

    @property
    def keeps_frozen_weights(self) -> bool:
        """Whether it neither trains, decomposes nor adds to the frozen weights, which may then be in 4 bits."""
        return self.trains in ("lora", "lora-b") and not self.merges

    @property
    def combines_lora(self) -> bool:
        """Whether the new model is made of LoRA's factors, by a weighted sum or as a rule of one's own makes it."""
        return (self.linear or self.is_plain) and self.trains not in ("weights", "biases")


class _RuleFacts(Registry[RuleFacts]):
    def names_of(self, fact: Callable[[RuleFacts], bool]) -> str:
        """The names of the rules of which the fact holds, for messages."""
        return ", ".join(name for name, rule in self.items() if fact(rule))


RULE_FACTS = _RuleFacts(
    "aggregation",
    {
        "dp-lora": RuleFacts(linear=True),
        "fedavg": RuleFacts(trains="weights", linear=True),
        "t-fedavg": RuleFacts(trains="weights", ternary=True),
        "cmfl": RuleFacts(trains="weights", selective=True),
        "bitfit": RuleFacts(trains="biases", linear=True),
        "ffa-lora": RuleFacts(trains="lora-b", linear=True),
        "rolora": RuleFacts(turns=("lora-b", "lora-a"), linear=True),
        "fedsvd": RuleFacts(turns=("lora-b",), orthonormal=True, rebases=True, linear=True),
        "fed-sb": RuleFacts(trains="lora-r", linear=True),
        "fedex-lora": RuleFacts(merges=True),
        "flora": RuleFacts(merges=True, restarts=True),
    },
)
"""{`aggregation` of a configuration: the facts of that rule}."""


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
    purpose: Annotated[str, Field(max_length=200), Fact.OUTSIDE] = ""
    """what the run is for, as invitations and the logs of nodes say it"""
    until: Annotated[str, Field(pattern=r"^(\d{4}-\d\d-\d\d)?$"), Fact.OUTSIDE] = ""
    """the last day, such as `2027-06-30` (UTC), on which a node takes part; empty: no end"""
    node_keys: Annotated[str, Fact.LOCATION] = ""
    """a folder with each vault's public key, `PARTITION-ID.pub`; other nodes are left out"""
    aggregation: Annotated[str, Fact.RELEASE | Fact.RELOADS] = "dp-lora"
    """[how uploads become the next model](aggregation.md); or [a rule of your
    own](aggregation.md#a-rule-of-your-own)"""
    client_ranks: Annotated[Sizes, Fact.RELOADS | Fact.TEXTS] = ()
    """with `flora`: a rank for each client, such as `[4, 8, 16]`; empty: `rank`"""
    client_weights: Literal["auto", "uniform", "records", "root-records"] = "auto"
    """rho_k, an upload's weight: equal (`uniform`), or in proportion to N_k (`records`) or N_k^1.5 (`root-records`).
    `auto`: `root-records`, but `records` with `secure_aggregation`"""
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
        """The facts of the aggregation rule; InputError if its name is unknown."""
        return RULE_FACTS.named(self.aggregation)

    def _check_purpose(self) -> None:
        if not self.purpose.isprintable():
            raise ValueError(f"purpose = {self.purpose!r}: must be one line without control characters")
        if self.until:
            try:
                date.fromisoformat(self.until)
            except ValueError:
                raise ValueError(f"until = {self.until}: is no day of the calendar") from None

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
class Phase:
    """Rounds of a run with the same noise, sampling and rates, whichever keys these come from.

    Attributes:
        name: `start`, which sums features by class; `head`, which trains the head alone; or `all`.
        num_rounds: >= 0.
        noise_multiplier: z >= 0; None where it is still to be derived.
        sampling_probability: q in (0, 1]; None for B / N_k.
        learning_rate: of the head, or of everything; `auto` where it is still to be derived.
        lora_learning_rate: of A and B; None for the same.
    """

    name: Literal["start", "head", "all"]
    num_rounds: int
    noise_multiplier: float | None
    sampling_probability: float | None
    learning_rate: float | Literal["auto"]
    lora_learning_rate: float | Literal["auto"] | None = None

    @property
    def known_noise(self) -> float:
        """z; ValueError as long as it is still to be derived."""
        if self.noise_multiplier is None:
            raise ValueError(f"{self.name}_noise_multiplier: has not been derived yet")
        return self.noise_multiplier


@dataclass(frozen=True, kw_only=True)
class UpdateSection(ConfigSection, title="Local update and privacy"):
    """The steps of a client in a round: how many, on which records, at which rates."""

    local_steps: Count = 1
    """noisy steps of a client in each round after the head's start"""
    batch_size: Annotated[Count, Fact.RELOADS] = 64
    """B, the *expected* batch size, if `sampling_probability` is empty: q = B / N_k"""
    sampling_probability: Annotated[Probability | None, Maybe, Fact.RELOADS] = 1.0
    """q, with which a client draws each record in a step; 1: full batches"""
    lora_sampling_probability: Annotated[Probability | None, Maybe, Fact.BY_TRAIN | Fact.TEXTS] = 0.125
    """q in the last `lora_rounds`"""
    optimizer: Annotated[Literal["sgd", "adamw"], Fact.RELOADS] = "sgd"
    """of the clients; keeps no state between rounds"""
    learning_rate: Positive | Literal["auto"] = "auto"
    """of the clients; `auto` derives it from noise, records and rounds"""
    lora_learning_rate: Annotated[Positive | Literal["auto"], Fact.TEXTS] = "auto"
    """of A and B in the last `lora_rounds`; `auto` derives it"""
    lora_head_learning_rate: Annotated[Positive | Literal["auto"], Fact.TEXTS] = "auto"
    """of the head in the last `lora_rounds`; `auto` derives it"""
    weight_decay: Annotated[NonNegative, Fact.RELOADS] = 0.0
    """of `adamw`"""

    def _check_weight_decay(self) -> None:
        if self.weight_decay > 0 and self.optimizer == "sgd":
            raise ValueError(f"weight_decay = {self.weight_decay}: only adamw applies it; use 0 with sgd")


@dataclass(frozen=True, kw_only=True)
class PrivacySection(ConfigSection, title="Local update and privacy"):
    """How releases are clipped and noised, who may see them, and how much epsilon they may cost."""

    clipping: Annotated[Clipping, Fact.RELOADS] = "joint"
    """the [clipping rule](privacy.md#mechanism); `flat` is `joint`, `per-layer` is `per-tensor`"""
    clip_norm: Positive = 0.8
    """C, the L2 norm to which the rule clips"""
    noise_multiplier: Annotated[NonNegative, Fact.PRIVACY] = 1.0
    """z, the standard deviation of a step's noise divided by C; give this or `target_epsilon`, which derives it"""
    noise_schedule: Annotated[Schedule, Fact.PRIVACY] = ()
    """[z of each round](python.md#a-network-a-rule-and-a-noise-schedule-of-your-own), or z and q, such as
    `[[2, 0.5], [1, 0.5]]`; z is in units of `noise_multiplier`, which is 1 then unless it is given, or derived for a
    target"""
    start_noise_multiplier: Annotated[NonNegative | None, Maybe, Fact.CALIBRATED | Fact.TEXTS] = None
    """z of the head's start; empty: for 15 % of the budget"""
    lora_noise_multiplier: Annotated[NonNegative | None, Maybe, Fact.CALIBRATED | Fact.TEXTS] = None
    """z of the last `lora_rounds`; empty: for `lora_share`"""
    target_epsilon: Annotated[Positive | None, Maybe, Fact.PRIVACY] = 2.3
    """derives the least noise that keeps every client within this epsilon on the `privacy_view`, even if it takes part
    in every round. Empty (by default with a `noise_multiplier`): no target"""
    target_risk: Annotated[str, Fact.PRIVACY] = ""
    """instead of `target_epsilon`: a [risk](accounting.md#risk) at every client. `tpr=0.1@fpr=0.01`: an attacker who
    wrongly accuses 1 % of outsiders finds at most 10 % of those who took part; `mu=0.9` bounds mu"""
    target_epsilon_published: Annotated[Positive | None, Maybe, Fact.PRIVACY] = None
    """instead of both, in simulations: the figure of `"accounting": "published"`, which **is no privacy guarantee**"""
    noise_on: Annotated[Literal["gradients", "upload"], Fact.RELOADS] = "gradients"
    """`gradients`: in every step. `upload`: steps are plain, the whole update is clipped to `clip_norm` and noised, and
    epsilon protects a [*client*](privacy.md#unit-and-adjacency)"""
    mechanism: str = "gaussian"
    """`discrete-gaussian` is [exact on a grid of integers](privacy.md#discrete-gaussian-noise), `lmo` is [Laplace noise
    of random scale](lmo.md)"""
    mechanism_parameters: Annotated[str, Fact.PATH] = ""
    """of `lmo`: JSON, or a JSON file as `fedpriv lmo search` writes; its noise is scaled by `noise_multiplier` and
    `clip_norm`. `"accounting": "published"` **is no privacy guarantee**: its epsilon is infinite"""
    privacy_view: Literal["local", "rho", "aggregate"] = "local"
    """the [view](privacy.md#who-observes-three-views-of-one-history) of target, risk and budget"""
    budget_epsilon: Annotated[Budgets, Fact.PRIVACY] = ()
    """what all runs on a client's data together may spend on the `privacy_view`: one number, or one per client by id. A
    client whose next round would exceed it retires"""
    secure_aggregation: bool = False
    """the server learns only [the sum of a round's uploads](secure_aggregation.md). Unless given, `mechanism` is then
    `discrete-gaussian`, `privacy_view` is `aggregate`, and `min_clients` is all of a round"""
    secure_masks: Annotated[bool | None, Maybe] = None
    """masks uploads; empty: with `data = on-nodes` only. In a simulation masks only take time, and `engine = flower`
    needs them off"""
    colluding_clients: Annotated[int, Field(ge=0)] = 0
    """c, how many other clients may reveal their noise and shares to the server; the noise of max(c, 1) [is not
    counted](secure_aggregation.md#what-each-party-learns)"""
    delta: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, Maybe] = None
    """of every epsilon; empty: 1 / (10 N_k) per client, at most 1e-5"""

    @property
    def has_target(self) -> bool:
        """Whether the noise is derived, for an epsilon, proven or not, or a risk."""
        return bool(self.target_epsilon or self.target_risk or self.target_epsilon_published)

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
    def scheduled(self) -> tuple[tuple[float, float | None], ...]:
        """z of every round, and q where that is given; empty without a `noise_schedule`."""
        pairs = [each if isinstance(each, tuple) else (each, None) for each in self.noise_schedule]
        return tuple((self.noise_multiplier * z, q) for z, q in pairs)

    @property
    def noise_in_words(self) -> str:
        """z of the rounds, for people."""
        values = [z for z, _ in self.scheduled] or [self.noise_multiplier]
        return f"z = {min(values):.4g}" + (f" to {max(values):.4g}, as scheduled" if self.scheduled else "")

    def budget_of(self, client: int) -> float | None:
        """A client's budget of epsilon, by partition id; None if it has none."""
        if not self.budget_epsilon:
            return None
        return self.budget_epsilon[client if len(self.budget_epsilon) > 1 else 0]

    def _check_mechanism(self) -> None:
        mechanism = MECHANISMS.named(self.mechanism)
        if mechanism.parameters_hint and not self.mechanism_parameters:
            raise ValueError(f"mechanism = {self.mechanism}: needs mechanism_parameters, {mechanism.parameters_hint}")
        if self.mechanism_parameters_are_a_file:
            return
        MECHANISMS.checked_parameters(self.mechanism, self.mechanism_parameters, self.noise_multiplier)
        if self.target_epsilon_published and not self.caveat:
            raise ValueError(
                f"target_epsilon_published = {self.target_epsilon_published:g}: is of mechanism = lmo with "
                '"accounting": "published" among its parameters; use target_epsilon'
            )
        if self.caveat and (self.target_epsilon or self.target_risk or self.budget_epsilon):
            raise ValueError(
                f"mechanism_parameters: their cost is no privacy guarantee ({self.caveat}), so no target or budget of "
                "epsilon can be kept"
            )

    def _check_targets(self) -> None:
        if not self.target_risk:
            return
        from fedpriv.privacy.accounting.risk import RiskTarget  # deferred: few runs need it

        RiskTarget.parse(self.target_risk)
        if self.target_epsilon is not None:
            raise ValueError(
                f"target_risk = {self.target_risk!r}: target_epsilon = {self.target_epsilon} is another target; give "
                "one of the two (-c target_epsilon= leaves out a file's)"
            )

    def _check_upload_noise(self) -> None:
        if self.noise_on == "upload" and self.clipping != "joint":
            raise ValueError(
                f"clipping = {self.clipping}: with noise_on = upload the whole update is clipped; use joint"
            )
