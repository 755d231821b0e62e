"""The section of a configuration on a client's steps, and the phases of rounds that they come in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fedpriv.config._section import Count, Fact, Maybe, NonNegative, Positive, Probability, Section


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
class UpdateSection(Section, title="Local update and privacy"):
    """The steps of a client in a round: how many, on which records, at which rates."""

    local_steps: Count = 1
    """the noisy steps of a client in each round after the head's start"""
    batch_size: Annotated[Count, Fact.RELOADS] = 64
    """B, the *expected* batch size, where `sampling_probability` is empty: q is then B / N_k"""
    sampling_probability: Annotated[Probability | None, Maybe, Fact.RELOADS] = 1.0
    """q, the probability with which a client samples each of its records in a step; the same at every client, and 1
    means full batches"""
    lora_sampling_probability: Annotated[Probability | None, Maybe, Fact.BY_TRAIN] = 0.125
    """q in the last `lora_rounds`"""
    optimizer: Annotated[Literal["sgd", "adamw"], Fact.RELOADS] = "sgd"
    """of the clients: `sgd` or `adamw`, neither with state from earlier rounds"""
    learning_rate: Positive | Literal["auto"] = "auto"
    """of the clients; `auto` derives it from noise, number of records and rounds, and prints it with its terms"""
    lora_learning_rate: Positive | Literal["auto"] = "auto"
    """the rate of A and B in the last `lora_rounds`; `auto` derives it from noise, number of records and of values"""
    lora_head_learning_rate: Positive | Literal["auto"] = "auto"
    """the rate of the head in the last `lora_rounds`; `auto` derives it likewise"""
    weight_decay: Annotated[NonNegative, Fact.RELOADS] = 0.0
    """of `adamw`"""

    def _check_weight_decay(self) -> None:
        if self.weight_decay > 0 and self.optimizer == "sgd":
            raise ValueError(f"weight_decay = {self.weight_decay}: only adamw applies it; use 0 with sgd")
