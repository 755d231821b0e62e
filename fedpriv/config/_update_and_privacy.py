"""The sections of a configuration on the steps of a client, their phases, and on clipping, noise and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
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
)
from fedpriv.privacy.mechanisms.registry import MECHANISMS


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
        """z.

        Raises:
            ValueError: it is still to be derived.
        """
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
    def mechanism_parameters_are_a_file(self) -> bool:
        """Whether the mechanism's parameters are still to be read from a file."""
        takes_parameters = bool(MECHANISMS[self.mechanism].parameters_hint)
        return takes_parameters and not self.mechanism_parameters.lstrip().startswith("{")

    @property
    def caveat(self) -> str:
        """Why the run's epsilon, as it is accounted for, is no privacy guarantee; empty if it is one."""
        return MECHANISMS[self.mechanism].caveat(self.mechanism_parameters)

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
