"""What storing variants needs, whatever they are stored by: descriptions, layouts, validation records and the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from numpy.typing import NDArray

from fedpriv.dedup.base_selection import Limits
from fedpriv.dedup.blocks import Layout
from fedpriv.dedup.charges import Charge, add_charges
from fedpriv.dedup.composition import PublicationCost
from fedpriv.dedup.outcomes import Outcome
from fedpriv.dedup.planning import Settings, cost_of
from fedpriv.dedup.progress import Observer, Watch
from fedpriv.dedup.saliency import Saliency
from fedpriv.dedup.store import Store
from fedpriv.dedup.validation import PrivateRecords, PrivateValidation, PublicValidator, allowed_drop
from fedpriv.dedup.variants import Described

Tensors = Mapping[str, NDArray[Any]]


class Evaluator(Protocol):
    """Measures how good a variant is on its validation records.

    Attributes:
        num_records: the registered number of validation records.
        private: whose records they are; None if they are public, so that counts may be shown.
    """

    num_records: int
    private: PrivateRecords | None

    def count_correct(self, tensors: Tensors) -> int:
        """How many records the variant with these tensors answers correctly."""

    def saliency(self, tensors: Tensors) -> Saliency:
        """How much each weight matters, for every tensor that is cut into blocks.

        On private records it is noised, and its cost is stated by `private`.
        """


Evaluators = Mapping[str, Evaluator]
"""{variant: its evaluator}; variants of one architecture and task may have the same one."""


class Validator(Protocol):
    """Answers pass or fail; raises `BudgetSpent` when no further answer is allowed."""

    def accept(self, count_correct: int) -> bool:
        """Whether a variant with this many correct answers passes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    """One deduplication.

    Attributes:
        variants: by name; the utility of those whose records are public is known.
        layouts: of each.
        read_tensors: gives the tensors of a variant by name.
        evaluators: of each.
        store: open for writing.
        settings: see `Settings`.
        private: how private records are queried; None if all records are public.
        digests: of plan and validation, kept in every manifest.
        stored: outcomes of the variants that are in the store, earlier attempts' included.
        observer: is told how far it is.
    """

    variants: Mapping[str, Described]
    layouts: Mapping[str, Layout]
    read_tensors: Callable[[str], Tensors]
    evaluators: Evaluators
    store: Store
    settings: Settings
    private: PrivateValidation | None
    digests: Mapping[str, str]
    stored: dict[str, Outcome]
    observer: Observer | None
    _correct: dict[str, int] = field(default_factory=dict)

    def with_measured_utilities(self) -> Work:
        """The same, with the utility of each variant on public records as it is counted here, if not known already."""
        measured = {
            name: replace(variant, utility=self.num_correct(name) / self.evaluators[name].num_records)
            for name, variant in self.variants.items()
            if variant.utility is None and self.is_public(name)
        }
        return replace(self, variants={**self.variants, **measured})

    def is_public(self, name: str) -> bool:
        """Whether the variant's validation records are public."""
        return self.evaluators[name].private is None

    def num_correct(self, name: str) -> int:
        """How many of its validation records the variant answers correctly as it was given."""
        if name not in self._correct:
            earlier = self.stored[name].correct_before if name in self.stored else None
            counted = self.evaluators[name].count_correct(self.read_tensors(name)) if earlier is None else earlier
            self._correct[name] = counted
        return self._correct[name]

    def attempts(self, *, with_saliency: bool) -> dict[str, tuple[Charge, ...]]:
        """{variant: what validating it once is charged}; nothing where its records are public."""
        return {name: self._attempt(name, with_saliency) for name in self.variants}

    def watch(self, targets: Mapping[str, object]) -> Watch:
        """The watch of the variants that are not stored yet."""
        left = [name in targets for name in self.variants if name not in self.stored]
        num_left = {kind: left.count(kind) for kind in (True, False)}
        return Watch(observer=self.observer, num_variants=len(self.variants), num_left=num_left)

    def validator(self, name: str, limits: Limits, attempt: tuple[Charge, ...]) -> Validator:
        """The validator of a target; charges for all of its attempt.

        The store keeps the charges, durably, before the ledger has them: an interruption in between makes the variant
        dearer than it is, never cheaper.
        """
        drop = allowed_drop(
            max(0.0, (self.variants[name].utility or 0.0) - limits.utility), self.evaluators[name].num_records
        )
        if self.private is None or not attempt:
            return PublicValidator(original_correct=self.num_correct(name), max_drop=drop)
        add_charges(self.store.path, attempt)
        validator = self.private.validator(name, lambda: self.num_correct(name), drop)
        for charge in attempt[1:]:  # the first one was for the answers
            self.private.charge(name, charge.event)
        return validator

    def outcome(
        self,
        name: str,
        *,
        bases: tuple[str, ...] = (),
        untouched: str | None,
        cost: PublicationCost,
        num_replaced: int = 0,
        num_validations: int = 0,
        correct: int | None = None,
    ) -> Outcome:
        """What became of a variant; without a count it is as it was given."""
        before = self.num_correct(name) if self.is_public(name) else None
        methods = sorted({method for each in cost.by_data_set for method in each.epsilons})
        return Outcome(
            name=name,
            bases=bases,
            untouched=untouched,
            num_blocks=self.layouts[name].num_blocks,
            num_replaced=num_replaced,
            num_validations=num_validations,
            correct_before=before,
            correct_after=before if before is None or correct is None else correct,
            num_records=self.evaluators[name].num_records,
            epsilon_before=cost_of([self.variants[name]], self.settings.accountant).guarantee.epsilon,
            epsilon_after=cost.guarantee.epsilon,
            delta=cost.guarantee.delta,
            epsilons={m: max(each.epsilons[m] for each in cost.by_data_set if m in each.epsilons) for m in methods},
        )

    def _attempt(self, name: str, with_saliency: bool) -> tuple[Charge, ...]:
        records = self.evaluators[name].private
        if self.private is None or records is None:
            return ()
        events = self.private.events(records if with_saliency else replace(records, saliency=None))
        return tuple(Charge(name=name, data_set=records.data_set, delta=records.delta, event=event) for event in events)
