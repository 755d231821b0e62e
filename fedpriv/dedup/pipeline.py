"""Deduplication of variants: choose bases, replace blocks in saliency order, store what validation accepts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.events import Event
from fedpriv.accounting.law import Accountant
from fedpriv.dedup.algorithms import Positions, algorithm
from fedpriv.dedup.algorithms.mistique import minhash_similarity
from fedpriv.dedup.base_selection import Assignment, Selection
from fedpriv.dedup.block_saliency import by_block
from fedpriv.dedup.blocks import Layout, layout_of
from fedpriv.dedup.distance import nearest
from fedpriv.dedup.planning import Settings, cost_of, plan
from fedpriv.dedup.saliency import Saliency
from fedpriv.dedup.store import Store
from fedpriv.dedup.validation import PrivateRecords, PrivateValidation, PublicValidator, allowed_drop
from fedpriv.dedup.variants import Described
from fedpriv.errors import InputError

log = logging.getLogger(__name__)

# Mistique treats weights as equal that round to the same multiple of this many of their standard deviations.
MINHASH_STEP = 2.0

Tensors = Mapping[str, NDArray[Any]]


class Evaluator(Protocol):
    """Measures how good a variant is on the validation records.

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


class Validator(Protocol):
    """Answers pass or fail; raises `BudgetSpent` when no further answer is allowed."""

    def accept(self, count_correct: int) -> bool:
        """Whether a variant with this many correct answers passes."""


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


def deduplicate(
    variants: Sequence[Described],
    read_tensors: Callable[[str], Tensors],
    evaluator: Evaluator,
    store: Store,
    settings: Settings,
    *,
    private: PrivateValidation | None = None,
) -> list[Outcome]:
    """Store all variants; a target stores as many blocks of its bases as validation accepts.

    Guarantee: a target is stored, bit for bit, as its validator accepted it, or else as the original; its epsilon,
    private validation included, stays within its limit. Every base is stored before the variants that use it. Private
    records are charged for a target before they are first used for it.

    Args:
        variants: to be stored; none of them is in the store yet.
        read_tensors: gives the tensors of a variant by name.
        evaluator: of the validation records.
        store: open for writing.
        settings: see `Settings`.
        private: how the evaluator's records are queried; required if, and only if, they are private.

    Raises:
        InputError: the algorithm or an option is unknown, a variant has another layout than its base, or a name is
            taken.
        StoreError: the store cannot be written.
        ValueError: `private` is given without private records, or missing for private records.
    """
    if (private is None) != (evaluator.private is None):
        raise ValueError("private: must be given where the evaluator's records are private, and only there")
    search = algorithm(settings.algorithm)
    if private is None:
        variants = [_measured(variant, read_tensors, evaluator) for variant in variants]
    costs = _Costs.of(variants, settings, evaluator, private)
    assignments = costs.selection.assignments
    _check(assignments, costs.known, read_tensors, store, settings)
    outcomes = []
    for name in [*(name for name in costs.known if name not in assignments), *assignments]:
        tensors = read_tensors(name)
        layout = layout_of(tensors, settings.block_size)
        blocks, extras = layout.to_blocks(tensors)
        correct = evaluator.count_correct(tensors)
        result = _Deduplicated(blocks, 0, 0, correct)
        if assignment := assignments.get(name):
            base = _blocks_of(store, assignment)
            utility = costs.known[name].utility or 0.0
            drop = allowed_drop(max(0.0, utility - assignment.limits.utility), evaluator.num_records)
            validator: Validator = PublicValidator(original_correct=correct, max_drop=drop)
            if private and evaluator.private:
                validator = private.validator(name, correct, drop)
                if evaluator.private.saliency:
                    private.charge(name, evaluator.private.saliency)
            saliency = by_block(evaluator.saliency(tensors), layout, settings.aggregation)
            indices, _ = nearest(blocks, base, settings.metric)
            trial = _Trial(layout, blocks, extras, base[indices], np.argsort(saliency, kind="stable"), evaluator)
            result = trial.run(search, validator, trial.options(settings), correct)
        outcome = costs.outcome(name, result, correct, evaluator)
        store.add(
            name,
            layout,
            result.blocks,
            extras,
            privacy={"epsilon": outcome.epsilon_after, "delta": outcome.delta, "epsilons": dict(outcome.epsilons)},
            provenance={"bases": list(outcome.bases), "outcome": _plain(asdict(outcome))},
        )
        outcomes.append(outcome)
        log.info("%s: %s of %s blocks replaced", name, outcome.num_replaced, outcome.num_blocks)
    return outcomes


def _check(
    assignments: Mapping[str, Assignment],
    known: Mapping[str, Described],
    read_tensors: Callable[[str], Tensors],
    store: Store,
    settings: Settings,
) -> None:
    """Refuse variants that cannot be stored, before any of them is."""
    if taken := sorted(set(known) & set(store.names)):
        raise InputError(f"name = {taken[0]!r}: the store has a model of that name; remove it, or use another store")
    layouts = {name: layout_of(read_tensors(name), settings.block_size) for name in known}
    for name, assignment in assignments.items():
        for base in assignment.bases:
            if difference := layouts[base].difference(layouts[name]):
                raise InputError(f"{name}: is of another architecture than its base {base}: {difference}")


def _measured(variant: Described, read_tensors: Callable[[str], Tensors], evaluator: Evaluator) -> Described:
    """The variant with its utility, measured here if it is not known yet."""
    if variant.utility is not None:
        return variant
    return replace(variant, utility=evaluator.count_correct(read_tensors(variant.name)) / evaluator.num_records)


@dataclass(frozen=True, eq=False)
class _Deduplicated:
    """The blocks of a variant as they are to be stored, and the figures of the search that chose them."""

    blocks: NDArray[Any]
    num_replaced: int
    num_validations: int
    correct: int


@dataclass(frozen=True, eq=False)
class _Trial:
    """A target whose blocks can be replaced by their nearest base blocks; `order`: positions by rising saliency."""

    layout: Layout
    blocks: NDArray[Any]
    extras: Tensors
    nearest: NDArray[Any]
    order: NDArray[np.int64]
    evaluator: Evaluator

    def options(self, settings: Settings) -> Mapping[str, Any]:
        """The options of the search, with the block similarities that Mistique needs."""
        if settings.algorithm != "mistique" or "similarity" in settings.options:
            return settings.options
        step = MINHASH_STEP * float(self.blocks.std()) or 1.0
        similarity = minhash_similarity(self.blocks[self.order], self.nearest[self.order], step=step)
        return {**settings.options, "similarity": similarity}

    def run(
        self, search: Callable[..., Any], validator: Validator, options: Mapping[str, Any], correct: int
    ) -> _Deduplicated:
        counts: dict[Positions, int] = {frozenset(): correct}

        def accept(positions: Positions) -> bool:
            count = self.evaluator.count_correct(self.layout.from_blocks(self.replaced(positions), self.extras))
            counts[positions] = count
            return validator.accept(count)

        result = search(len(self.order), accept, **options)
        chosen = frozenset(result.replaced)
        return _Deduplicated(self.replaced(chosen), len(chosen), result.num_validations, counts[chosen])

    def replaced(self, positions: Positions) -> NDArray[Any]:
        rows = self.order[sorted(positions)]
        blocks = self.blocks.copy()
        blocks[rows] = self.nearest[rows]
        return blocks


def _blocks_of(store: Store, assignment: Assignment) -> NDArray[Any]:
    """All blocks of the bases, [n, block_size]."""
    manifests = [store.manifest(name) for name in assignment.bases]
    return np.concatenate([np.asarray(store.blocks[store.rows(manifest.blocks)]) for manifest in manifests])


@dataclass(frozen=True, eq=False)
class _Costs:
    """Which variant takes blocks of which, and the costs; `validation`: what one target costs private records."""

    known: Mapping[str, Described]
    selection: Selection
    accountant: Accountant
    validation: Mapping[str, Sequence[Event]]
    deltas: Mapping[str, float]

    @classmethod
    def of(
        cls,
        variants: Sequence[Described],
        settings: Settings,
        evaluator: Evaluator,
        private: PrivateValidation | None,
    ) -> _Costs:
        validation: dict[str, Sequence[Event]] = {}
        deltas: dict[str, float] = {}
        if private and (records := evaluator.private):
            validation[records.data_set] = private.events(records)
            deltas[records.data_set] = records.delta
        return cls(
            {variant.name: variant for variant in variants},
            plan(variants, settings, validation, deltas),
            settings.accountant,
            validation,
            deltas,
        )

    def originals(self, name: str) -> list[str]:
        """The variants whose blocks this one may hold, directly or indirectly."""
        assignment = self.selection.assignments.get(name)
        bases = assignment.bases if assignment else ()
        return sorted({each for base in bases for each in (base, *self.originals(base))})

    def outcome(self, name: str, result: _Deduplicated, correct: int, evaluator: Evaluator) -> Outcome:
        # A target with no replaced block has still consulted its bases and the validation records.
        names = (name, *self.originals(name))
        runs = sum(each in self.selection.assignments for each in names)
        extra = {id_: tuple(events) * runs for id_, events in self.validation.items() if runs}
        cost = cost_of([self.known[each] for each in names], self.accountant, extra, self.deltas)
        methods = sorted({method for each in cost.by_data_set for method in each.epsilons})
        assignment = self.selection.assignments.get(name)
        is_public = evaluator.private is None
        return Outcome(
            name=name,
            bases=assignment.bases if assignment else (),
            untouched=self.selection.untouched.get(name),
            num_blocks=len(result.blocks),
            num_replaced=result.num_replaced,
            num_validations=result.num_validations,
            correct_before=correct if is_public else None,
            correct_after=result.correct if is_public else None,
            num_records=evaluator.num_records,
            epsilon_before=cost_of([self.known[name]], self.accountant).guarantee.epsilon,
            epsilon_after=cost.guarantee.epsilon,
            delta=cost.guarantee.delta,
            epsilons={m: max(each.epsilons[m] for each in cost.by_data_set if m in each.epsilons) for m in methods},
        )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
