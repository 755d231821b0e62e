"""The sections of a configuration on the variants that a run keeps, and on what its final model is tried with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedpriv.config._section import Count, Fact, Maybe, NonNegative, Section, Sizes


@dataclass(frozen=True, kw_only=True)
class VariantsSection(Section, title="Variants and deduplication"):
    """The variants that a run keeps, and how the server stores them."""

    variant_rounds: Sizes = ()
    """rounds whose global models are kept as variants, such as `[5, 10]`, in addition to the final one"""
    variant_clients: bool = True
    """whether each client's last upload is kept as a variant"""
    dedup: Literal["", "drd", "dred", "greedy", "mcts", "dedup", "mistique", "shared-basis"] = ""
    """the search algorithm with which the server deduplicates the variants into shared blocks after the last round:
    `drd`, `dred`, `greedy`, `mcts`, `dedup` or `mistique`; or `shared-basis`, by which they are stored as sums of
    common components; empty leaves this to `fedpriv dedup run`. See [docs/deduplication.md](deduplication.md)"""
    dedup_block_size: Count = 256
    """number of values in a block; `fedpriv dedup run` chooses one by the size of the model instead, unless it is
    given"""
    dedup_records: Annotated[int, Field(ge=0)] = 0
    """number of test records for validation, drawn with the seed; 0 uses all. Every validation is a pass over them.
    `fedpriv dedup run` has `--validation-records` and `--seed` for it"""
    dedup_epsilon_bound: NonNegative = 0.5
    """the largest permitted rise of a variant's epsilon"""
    dedup_utility_bound: Annotated[float, Field(ge=0, le=1)] = 0.01
    """the largest permitted fall of a variant's accuracy on the validation records"""
    integral_epsilon: Annotated[NonNegative | None, Maybe] = None
    """compares the clients' uploads of the last round by what they add to the model: finds those that agree within this
    distance in every weight, and keeps their mean as a variant ([docs/integral.md](integral.md)). This is not
    differential privacy; empty compares none"""


@dataclass(frozen=True, kw_only=True)
class AuditSection(Section, title="Variants and deduplication"):
    """What a language model is asked before and after, and canaries that test the run's epsilon."""

    generated_answers: Annotated[int, Field(ge=0)] = 50
    """how many test prompts a language model answers before and after"""
    max_new_tokens: Count = 96
    """the most tokens of an answer"""
    audit: Annotated[Literal["", "tokens", "mislabelled"], Fact.RELOADS] = ""
    """inserts canaries into every client's data, each with probability 1/2, and tests the run's epsilon by what its
    final model reveals about them: `tokens` (random tokens and labels) or `mislabelled` (the client's last records). In
    simulations only; see [docs/audit.md](audit.md)"""
    audit_canaries: Annotated[int, Field(ge=2), Fact.RELOADS] = 50
    """the number of canaries of each client"""
