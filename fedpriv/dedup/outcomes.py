"""What deduplication does to each variant, and what that costs: base selection, and attempts at private validation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from fedpriv.accounting.events import Event
from fedpriv.dedup.base_selection import Assignment, Selection, fair_limits
from fedpriv.dedup.charges import Charge, add_charges, read_charges
from fedpriv.dedup.composition import PublicationCost
from fedpriv.dedup.planning import Settings, cost_of, plan
from fedpriv.dedup.store import Store
from fedpriv.dedup.validation import PrivateRecords, PrivateValidation
from fedpriv.dedup.variants import Described


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result for one variant.

    Attributes:
        name: of the variant.
        bases: whose blocks it may hold; empty if it stays as it was.
        untouched: why it stays as it was; None if it has bases.
        num_blocks: in the variant.
        num_replaced: blocks that were replaced.
        num_validations: counted by the search.
        correct_before, correct_after: out of `num_records` validation records; None if these are private.
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
    correct_before: int | None
    correct_after: int | None
    num_records: int
    epsilon_before: float
    epsilon_after: float
    delta: float
    epsilons: Mapping[str, float]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Outcome:
        """The outcome that a manifest keeps."""
        return cls(**{**fields, "bases": tuple(fields["bases"])})


@dataclass(frozen=True, eq=False)
class Deduplicated:
    """The blocks of a variant as they are to be stored, and the figures of the search that chose them."""

    blocks: NDArray[Any]
    num_replaced: int
    num_validations: int
    correct: int


@dataclass(frozen=True, eq=False)
class Costs:
    """Which variant takes blocks of which, and the costs.

    Attributes:
        known: the variants by name.
        selection: of their bases.
        settings: of the deduplication.
        validation: what one attempt at a target costs private records.
        records: these; None if they are public.
        num_records: of the validation set.
        store: of the variants.
        charges: what was charged so far, by this call and by earlier ones.
    """

    known: Mapping[str, Described]
    selection: Selection
    settings: Settings
    validation: Sequence[Event]
    records: PrivateRecords | None
    num_records: int
    store: Store
    charges: list[Charge]

    @classmethod
    def of(
        cls,
        variants: Sequence[Described],
        settings: Settings,
        records: PrivateRecords | None,
        num_records: int,
        private: PrivateValidation | None,
        store: Store,
    ) -> Costs:
        """The costs of these variants, with bases selected and earlier charges read."""
        validation = private.events(records) if private and records else ()
        by_data_set = {records.data_set: validation} if records else {}
        selection = plan(variants, settings, by_data_set, {records.data_set: records.delta} if records else {})
        known = {variant.name: variant for variant in variants}
        return cls(known, selection, settings, validation, records, num_records, store, read_charges(store.path))

    def originals(self, name: str) -> list[str]:
        """The variants whose blocks this one may hold, directly or indirectly."""
        assignment = self.selection.assignments.get(name)
        bases = assignment.bases if assignment else ()
        return sorted({each for base in bases for each in (base, *self.originals(base))})

    def affordable(self, name: str) -> Assignment | None:
        """The target's bases; None if it has none, or if repeated attempts left no room for another one.

        The selection knows nothing of repetitions. After one, no epsilon may pass the next higher one as it was before
        deduplication, which keeps their order whatever becomes of the others.
        """
        assignment, originals = self.selection.assignments.get(name), self.originals(name)
        charged = self._charged((name, *originals))
        num_expected = len(self.validation) * sum(each in self.selection.assignments for each in originals)
        if assignment is None or len(charged) <= num_expected:
            return assignment
        variants = {each: known.as_variant(self.settings.accountant) for each, known in self.known.items()}
        limit = min(assignment.limits.epsilon, fair_limits(variants[name], list(variants.values())).epsilon)
        cost = self._cost((name, *originals), [*charged, *self._attempt(name)])
        return assignment if cost.guarantee.epsilon <= limit else None

    def charge(self, name: str) -> None:
        """Keep, durably, that a target is about to be validated; the ledger comes after.

        An interruption in between makes the variant dearer than it is, never cheaper.
        """
        attempt = self._attempt(name)
        add_charges(self.store.path, attempt)
        self.charges.extend(attempt)

    def outcome(
        self,
        name: str,
        assignment: Assignment | None,
        result: Deduplicated,
        correct: int | None,
    ) -> Outcome:
        """The result for one variant.

        Args:
            name: of the variant.
            assignment: its bases, as they were used.
            result: of the search.
            correct: as the original; None if it was not counted.
        """
        # A target with no replaced block has still consulted its bases and the validation records.
        names = (name, *self.originals(name)) if assignment else (name,)
        cost = self._cost(names, self._charged(names) if assignment else [])
        methods = sorted({method for each in cost.by_data_set for method in each.epsilons})
        untouched = self.selection.untouched.get(name)
        return Outcome(
            name=name,
            bases=assignment.bases if assignment else (),
            untouched=untouched if assignment or untouched else "repeated validation would exceed its bound",
            num_blocks=len(result.blocks),
            num_replaced=result.num_replaced,
            num_validations=result.num_validations,
            correct_before=correct if self.records is None else None,
            correct_after=result.correct if self.records is None else None,
            num_records=self.num_records,
            epsilon_before=cost_of([self.known[name]], self.settings.accountant).guarantee.epsilon,
            epsilon_after=cost.guarantee.epsilon,
            delta=cost.guarantee.delta,
            epsilons={m: max(each.epsilons[m] for each in cost.by_data_set if m in each.epsilons) for m in methods},
        )

    def _attempt(self, name: str) -> list[Charge]:
        """What validating the variant once is charged."""
        if self.records is None:
            return []
        data_set, delta = self.records.data_set, self.records.delta
        return [Charge(name=name, data_set=data_set, delta=delta, event=event) for event in self.validation]

    def _charged(self, names: Collection[str]) -> list[Charge]:
        """All that was charged for those of the variants that are targets."""
        targets = set(names) & set(self.selection.assignments)
        return [charge for charge in self.charges if charge.name in targets]

    def _cost(self, names: Sequence[str], charges: Sequence[Charge]) -> PublicationCost:
        """What it costs to publish anything computed from the variants and from answers that were charged."""
        deltas = {self.records.data_set: self.records.delta} if self.records else {}
        extra: dict[str, list[Event]] = {}
        for charge in charges:
            extra.setdefault(charge.data_set, []).append(charge.event)
            deltas[charge.data_set] = min(charge.delta, deltas.get(charge.data_set, charge.delta))
        return cost_of([self.known[name] for name in names], self.settings.accountant, extra, deltas)
