"""The work of storing variants, in whatever way: its inputs, its outcomes and its progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.models.dedup._base_selection import VariantLimits
from fedpriv.models.dedup.planning import DedupSettings, KnownUtility, ValidationCharge, add_charges, cost_of
from fedpriv.models.dedup.validation import (
    Evaluator,
    PrivateQueries,
    PrivateValidation,
    PublicValidation,
    Tensors,
    Utilities,
    Utility,
    Validation,
    least_records,
    search_records,
)
from fedpriv.models.variants.blocks import BlockLayout
from fedpriv.models.variants.composition import PublicationCost
from fedpriv.models.variants.folders import Described
from fedpriv.models.variants.store import Store

Evaluators = Mapping[str, Evaluator]
"""{variant: its evaluator}; variants of one architecture and task may have the same one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    """One deduplication.

    Attributes:
        variants: by name; the utility of those whose records are public is known.
        evaluators: of each; of some or none where nothing is validated.
        store: open for writing.
        private: how private records are queried; None if all records are public.
        digests: of plan and validation, kept in every manifest.
        stored: outcomes of the variants that are in the store, earlier attempts' included.
        others: {variant that an earlier call stored: whether it has no blocks but its own, and may be a base}.
    """

    variants: Mapping[str, Described]
    layouts: Mapping[str, BlockLayout]
    read_tensors: Callable[[str], Tensors]
    evaluators: Evaluators
    store: Store
    settings: DedupSettings
    private: PrivateQueries | None
    digests: Mapping[str, str]
    stored: dict[str, Outcome]
    others: Mapping[str, bool] = field(default_factory=dict)
    observer: Observer | None
    _utilities: dict[str, Utilities] = field(default_factory=dict)

    def with_measured_utilities(self) -> Work:
        """This work, in which the accuracy of every variant on public records is known or has been measured."""
        measured = {
            name: replace(variant, utility=self.utility(name))
            for name, variant in self.variants.items()
            if variant.utility is None
            and name in self.evaluators
            and self.is_public(name)
            and self.evaluators[name].utility == "accuracy"
        }
        return replace(self, variants={**self.variants, **measured})

    @cached_property
    def known(self) -> dict[str, KnownUtility]:
        """{variant: its utility and the standard error of that}, by which it is decided who may share."""
        return {name: self._known(name) for name in self.variants}

    def _known(self, name: str) -> KnownUtility:
        evaluator, (utility, deviation) = self.evaluators.get(name), (self.variants[name].utility, 0.5)
        if evaluator is None:
            return utility, 0.0
        if evaluator.utility != "accuracy" and self.is_public(name):
            utility, deviation = self.utility(name), self._deviation(name)
        if utility is not None and not math.isfinite(utility):  # nothing is held against it, and nothing of it replaced
            utility, deviation = None, 0.0
        return utility, deviation / math.sqrt(max(1, evaluator.num_records))

    def is_public(self, name: str) -> bool:
        """Whether the variant's validation records are public."""
        return self.evaluators[name].private is None

    def utility(self, name: str) -> float:
        """The mean utility of the variant as it was given, over all of its validation records."""
        earlier = self.stored[name].utility_given if name in self.stored else None
        return float(self.utilities(name).mean()) if earlier is None else earlier

    def _deviation(self, name: str) -> float:
        earlier = self.stored[name].deviation_given if name in self.stored else None
        return float(self.utilities(name).std()) if earlier is None else earlier

    def utilities(self, name: str) -> Utilities:
        """The utility of the variant as it was given, on each of its validation records."""
        if name not in self._utilities:
            evaluator = self.evaluators[name]
            self._utilities[name] = evaluator.utilities(self.read_tensors(name), np.arange(evaluator.num_records))
        return self._utilities[name]

    def chosen_on(self, name: str) -> NDArray[np.int64]:
        """The validation records by which its blocks are ordered and searched: all if private, or nothing is proven."""
        number, proves = self.evaluators[name].num_records, self.settings.acceptance == "proof"
        return search_records(number) if self.is_public(name) and proves else np.arange(number)

    def attempts(self) -> dict[str, tuple[ValidationCharge, ...]]:
        """{variant: what validating it once is charged}; nothing where its records are public."""
        private = {name: each.private for name, each in self.evaluators.items() if each.private and self.private}
        return dict.fromkeys(self.variants, ()) | {
            name: tuple(
                ValidationCharge(name=name, data_set=records.data_set, delta=records.delta, event=event)
                for event in (self.private.events(records) if self.private else ())
            )
            for name, records in private.items()
        }

    def watch(self) -> ProgressWatch:
        """The watch of the variants that are not stored yet."""
        own = self.variants.keys() - self.others.keys()
        progress = Progress(num_variants=len(own), num_stored=len(own & self.stored.keys()))
        return ProgressWatch(observer=self.observer, progress=progress)

    def validation(self, name: str, limits: VariantLimits, attempt: tuple[ValidationCharge, ...]) -> Validation:
        """The validation of a target; charges for all of its attempt.

        The store keeps the charges, durably, before the ledger has them: an interruption in between makes the variant
        dearer than it is, never cheaper.
        """
        evaluator, bound = self.evaluators[name], self.bound(name, limits)
        if self.private is None or not attempt:
            return PublicValidation(evaluator, self.utilities(name), bound, acceptance=self.settings.acceptance)
        add_charges(self.store.path, attempt)
        validation = PrivateValidation(
            evaluator,
            lambda: self.utilities(name),
            bound,
            epsilon=self.private.epsilon,
            charge=partial(self.private.charge, name),
            source=self.private.source,
            cutoff=self.settings.cutoff,
        )
        for charge in attempt[1:]:  # the first one was for the answers
            self.private.charge(name, charge.event)
        return validation

    def untold(self, name: str, limits: VariantLimits) -> str | None:
        """Why no validation of the target could prove anything, before it is charged; None if one could."""
        evaluator, bound = self.evaluators[name], self.bound(name, limits)
        if self.is_public(name) and not np.isfinite(self.utilities(name)).all():
            return "its utility is no number on some validation records"
        if self.settings.cutoff or self.settings.acceptance != "proof":
            return None
        if self.private is None or evaluator.private is None:
            least = least_records(bound)
        else:
            least = self.private.least_records(bound)
        if least is None:
            return "nothing may be lost, which no number of records tells from a little"
        if evaluator.num_records >= least:
            return None
        return f"{evaluator.num_records} validation records cannot tell a loss of {bound:.2g} from none, {least} could"

    def bound(self, name: str, limits: VariantLimits) -> float:
        """The most that the variant may lose in the mean, >= 0."""
        return max(0.0, (self.known[name][0] or 0.0) - limits.utility)

    def outcome(
        self,
        name: str,
        *,
        bases: tuple[str, ...] = (),
        untouched: str | None,
        cost: PublicationCost,
        num_replaced: int = 0,
        num_validations: int = 0,
        bound: float | None = None,
        validation: Validation | None = None,
    ) -> Outcome:
        """The outcome for a variant; without a proof it is as it was given, or its records are private."""
        evaluator, proof = self.evaluators.get(name), validation.proof if validation else None
        given, deviation = self.variants[name].utility if evaluator is None else None, None
        if evaluator is not None and evaluator.private is None:
            given = self.utility(name)
            # That of accuracy is not needed.
            deviation = self._deviation(name) if evaluator.utility != "accuracy" else None
        num_records = evaluator.num_records if evaluator else 0
        methods = sorted({method for each in cost.by_data_set for method in each.epsilons})
        return Outcome(
            name=name,
            bases=bases,
            untouched=untouched,
            num_blocks=self.layouts[name].num_blocks,
            num_replaced=num_replaced,
            num_validations=num_validations,
            utility=evaluator.utility if evaluator else "accuracy",
            utility_given=given,
            deviation_given=deviation,
            utility_before=proof.before if proof else given,
            utility_after=proof.after if proof else given,
            bound=bound,
            loss_limit=proof.limit if proof else None,
            num_records=proof.num_records if proof else num_records,
            records_needed=validation.needed if validation else None,
            acceptance=validation.acceptance if validation and num_replaced else "proof",
            origin_known=not cost.is_unknown,
            epsilon_before=cost_of([self.variants[name]]).guarantee.epsilon,
            epsilon_after=cost.guarantee.epsilon,
            delta=cost.guarantee.delta,
            epsilons={m: max(each.epsilons[m] for each in cost.by_data_set if m in each.epsilons) for m in methods},
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result for one variant.

    Attributes:
        bases: whose blocks it may hold; empty if it stays as it was.
        untouched: why it stays as it was; None if it has bases.
        utility_given: the mean over all validation records of the variant as it was given; None if they are private.
        deviation_given: the standard deviation of likelihoods over these; None if they are private, and for accuracy.
        utility_before, utility_after: the mean over `num_records` records, of the variant as it was given and as it is
            stored. If anything was replaced by a proof, they are those by which nothing was chosen. None if private.
        bound: of what it was allowed to lose in the mean; None if nothing was tried.
        loss_limit: of what it loses, see `fedpriv.models.dedup.validation.loss_limit`; None if nothing was replaced or
            proven, or if the records are private.
        num_records: validation records; see above.
        records_needed: how many would tell that the next larger part can be replaced within the bound; None if that
            is not what failed.
        acceptance: `proof`; `empirical` or `sparse vector` if what was replaced was accepted unproven.
        origin_known: whether something says what it, and every variant that it may hold values of, was computed from;
            else its epsilons are infinite.
        epsilon_before, epsilon_after, delta: against a reader of this variant alone; `epsilon_after` includes the
            cost of private validation.
        epsilons: {method: epsilon} after deduplication, the largest over data sets.
    """

    name: str
    bases: tuple[str, ...]
    untouched: str | None
    num_blocks: int
    num_replaced: int
    num_validations: int
    utility: Utility
    utility_given: float | None
    deviation_given: float | None
    utility_before: float | None
    utility_after: float | None
    bound: float | None
    loss_limit: float | None
    num_records: int
    records_needed: int | None
    acceptance: str
    origin_known: bool
    epsilon_before: float
    epsilon_after: float
    delta: float
    epsilons: Mapping[str, float]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Outcome:
        """The outcome that a manifest keeps."""
        return cls(**{**fields, "bases": tuple(fields["bases"])})

    def as_records(self, **provenance: Any) -> dict[str, Any]:
        """The records for a manifest: the arguments `privacy` and `provenance` of `Store.add`."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {
            "privacy": {"epsilon": self.epsilon_after, "delta": self.delta, "epsilons": dict(self.epsilons)},
            "provenance": {"bases": list(self.bases), "outcome": plain, **provenance},
        }


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a deduplication.

    Attributes:
        name: of the variant that is under way, or was just stored.
        num_stored: variants in the store, those of an earlier attempt included.
        num_validations: in this attempt so far, over all variants.
        seconds_left: an estimate; None as long as there is nothing to estimate from.
    """

    name: str = ""
    num_stored: int
    num_variants: int
    num_validations: int = 0
    seconds_left: float | None = None
    stored: bool = False


Observer = Callable[[Progress], None]


@dataclass(kw_only=True)
class ProgressWatch:
    """Tells an observer of every validation and stored variant; the time left is what those so far took in the mean."""

    observer: Observer | None
    progress: Progress
    _num_stored: int = 0
    _began: float = field(default_factory=time.monotonic)

    def begin(self, name: str) -> None:
        """Note that a variant is under way."""
        self._tell(name=name)

    def validated(self) -> None:
        """Note that the variant was validated once."""
        self._tell(num_validations=self.progress.num_validations + 1)

    def store(self) -> None:
        """Note that the variant was stored."""
        self._num_stored += 1
        self._tell(num_stored=self.progress.num_stored + 1, stored=True)

    def _tell(self, *, stored: bool = False, **changes: Any) -> None:
        self.progress = replace(self.progress, stored=stored, **changes)
        if num := self._num_stored:
            seconds = (time.monotonic() - self._began) / num * (self.progress.num_variants - self.progress.num_stored)
            self.progress = replace(self.progress, seconds_left=seconds)
        if self.observer:
            self.observer(self.progress)
