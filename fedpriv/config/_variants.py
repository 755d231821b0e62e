"""The sections of a configuration on the variants that a run keeps, its tests, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedpriv.config._section import ConfigSection, Count, Fact, Maybe, NonNegative, Sizes


@dataclass(frozen=True, kw_only=True)
class VariantsSection(ConfigSection, title="Variants and deduplication"):
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
class AuditSection(ConfigSection, title="Variants and deduplication"):
    """The questions that a language model is asked before and after, and canaries that test the run's epsilon."""

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


@dataclass(frozen=True, kw_only=True)
class ExperimentSection(ConfigSection, title="Execution"):
    """How a run is repeated, and what it is compared with."""

    seed: Annotated[int, Field(ge=0), Fact.RELEASE | Fact.RECORDS | Fact.RELOADS] = 0
    """seed of the initial adapter, the selection of clients, the partition and the test split; with `simulate`, of
    everything"""
    simulate: Annotated[bool, Fact.RELOADS] = False
    """noise and sampling use the seed, so that a run can be reproduced to the bit; the run is marked *not private*"""
    comparison: Annotated[bool | None, Maybe] = None
    """a second run with z = 0 and the same clipping; on by default wherever it is allowed: with synthetic or public
    data, or `simulate`"""
    baselines: Annotated[bool | None, Maybe, Fact.RELOADS] = None
    """plain classifiers [next to the run's accuracy](configuration.md#what-an-accuracy-is-compared-with); on by default
    for classifiers wherever public data are tested on: the embedded corpus, or `public_data`. With `data = "on-nodes"`,
    true if the server's own `test_data` are public: a cross-validation on these. Refused without a test set, and where
    it would train on private records"""

    @property
    def noise_source(self) -> str:
        """`seeded` in a run marked `simulate`, otherwise `secure`."""
        return "seeded" if self.simulate else "secure"
