"""Deduplication of variants: choose bases, replace blocks in saliency order, store what validation accepts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedpriv.dedup.algorithms import Positions, algorithm
from fedpriv.dedup.algorithms.mistique import minhash_similarity
from fedpriv.dedup.base_selection import Assignment
from fedpriv.dedup.block_saliency import by_block
from fedpriv.dedup.blocks import Layout
from fedpriv.dedup.distance import nearest
from fedpriv.dedup.outcomes import Costs, Deduplicated, Outcome
from fedpriv.dedup.planning import Settings
from fedpriv.dedup.progress import Observer, Watch
from fedpriv.dedup.resumption import (
    PLAN,
    VALIDATION,
    check_has_blocks,
    layouts_and_plan,
    stored_outcomes,
    validation_digest,
)
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


def deduplicate(
    variants: Sequence[Described],
    read_tensors: Callable[[str], Tensors],
    evaluator: Evaluator,
    store: Store,
    settings: Settings,
    *,
    private: PrivateValidation | None = None,
    evaluation: str = "",
    observer: Observer | None = None,
) -> list[Outcome]:
    """Store all variants; a target stores as many blocks of its bases as validation accepts.

    Guarantee: a target is stored, bit for bit, as its validator accepted it, or else as the original; its epsilon,
    private validation included, stays within its limit. Every base is stored before the variants that use it. Private
    records are charged for a target before they are first used for it.

    An interrupted call can be repeated with the same arguments: what is stored stays, and the rest follows as if
    nothing had happened, except that private records are charged once more for the target that was under way. Its
    epsilon then counts both charges; if its limit has no room for them, it stays as it is.

    Args:
        variants: to be stored; those that are in the store already were stored by a call with the same arguments.
        read_tensors: gives the tensors of a variant by name.
        evaluator: of the validation records.
        store: open for writing.
        settings: see `Settings`.
        private: how the evaluator's records are queried; required if, and only if, they are private.
        evaluation: what else decides a validation, such as the evaluator's name and seed; compared with that of
            variants that are stored already.
        observer: is told how far it is.

    Raises:
        InputError: the algorithm or an option is unknown, a variant has another layout than its base, or a name is
            taken by a variant that was stored in another way.
        StoreError: the store cannot be written.
        ValueError: `private` is given without private records, or missing for private records.
    """
    if (private is None) != (evaluator.private is None):
        raise ValueError("private: must be given where the evaluator's records are private, and only there")
    search = algorithm(settings.algorithm)
    layouts, plan_digest = layouts_and_plan(variants, read_tensors, settings)
    validation = validation_digest(evaluator.num_records, evaluator.private, private, evaluation)
    digests = {PLAN: plan_digest, VALIDATION: validation}
    outcomes = {name: Outcome.of(fields) for name, fields in stored_outcomes(store, layouts, digests).items()}
    correct = {} if private else _counts(variants, read_tensors, evaluator, outcomes)
    costs = Costs.of(
        [_measured(each, correct, evaluator.num_records) for each in variants],
        settings,
        evaluator.private,
        evaluator.num_records,
        private,
        store,
    )
    assignments = costs.selection.assignments
    _check(assignments, layouts)
    names = [*(name for name in costs.known if name not in assignments), *assignments]
    left = [name for name in names if name not in outcomes]
    targets = sum(name in assignments for name in left)
    watch = Watch(observer=observer, num_variants=len(names), num_left={True: targets, False: len(left) - targets})
    for name in left:
        watch.begin(name)
        tensors, layout = read_tensors(name), layouts[name]
        blocks, extras = layout.to_blocks(tensors)
        assignment = costs.affordable(name)
        if name not in correct and (assignment or not private):
            correct[name] = evaluator.count_correct(tensors)
        result = Deduplicated(blocks, 0, 0, correct.get(name, 0))
        if assignment:
            validator = _validator(assignment, correct[name], costs, private)
            saliency = by_block(evaluator.saliency(tensors), layout, settings.aggregation)
            base = _blocks_of(store, assignment)
            indices, _ = nearest(blocks, base, settings.metric)
            order = np.argsort(saliency, kind="stable")
            trial = _Trial(layout, blocks, extras, base[indices], order, evaluator, watch.validated)
            result = trial.run(search, validator, trial.options(settings), correct[name])
        outcome = outcomes[name] = costs.outcome(name, assignment, result, correct.get(name))
        store.add(
            name,
            layout,
            result.blocks,
            extras,
            privacy={"epsilon": outcome.epsilon_after, "delta": outcome.delta, "epsilons": dict(outcome.epsilons)},
            provenance={"bases": list(outcome.bases), "outcome": _plain(asdict(outcome)), **digests},
        )
        log.info("%s: %s of %s blocks replaced", name, outcome.num_replaced, outcome.num_blocks)
        watch.store(is_target=name in assignments)
    return [outcomes[name] for name in names]


def check(
    variants: Sequence[Described],
    read_tensors: Callable[[str], Tensors],
    store: Path,
    settings: Settings,
    *,
    validation: str | None = None,
) -> None:
    """Refuse what `deduplicate` would refuse, as far as it can be known before any model is loaded.

    Args:
        variants: see `deduplicate`.
        read_tensors: see `deduplicate`.
        store: its folder, which may be missing.
        settings: see `Settings`.
        validation: the digest of how they are validated, if that is known; see `validation_digest`.

    Raises:
        InputError: the variants share no blocks of this size, or the store holds some from another plan or validation.
        StoreError: another process is writing to the store, or it is damaged.
    """
    layouts, digest = layouts_and_plan(variants, read_tensors, settings)
    for name, layout in layouts.items():
        check_has_blocks(name, layout)
    if store.exists() and (not store.is_dir() or any(store.iterdir())):
        with Store(store) as opened:
            stored_outcomes(opened, layouts, {PLAN: digest} | ({VALIDATION: validation} if validation else {}))


def _check(assignments: Mapping[str, Assignment], layouts: Mapping[str, Layout]) -> None:
    """Refuse variants that cannot share blocks, before any of them is stored."""
    for name, assignment in assignments.items():
        check_has_blocks(name, layouts[name])
        for base in assignment.bases:
            if difference := layouts[base].difference(layouts[name]):
                raise InputError(f"{name}: is of another architecture than its base {base}: {difference}")


def _counts(
    variants: Sequence[Described],
    read_tensors: Callable[[str], Tensors],
    evaluator: Evaluator,
    stored: Mapping[str, Outcome],
) -> dict[str, int]:
    """{variant of unknown utility, or stored: how many records it answers correctly}."""
    known = {name: outcome.correct_before for name, outcome in stored.items() if outcome.correct_before is not None}
    unknown = [variant.name for variant in variants if variant.utility is None and variant.name not in known]
    return known | {name: evaluator.count_correct(read_tensors(name)) for name in unknown}


def _measured(variant: Described, correct: Mapping[str, int], num_records: int) -> Described:
    """The variant with its utility as it was counted here, if it is not known otherwise."""
    if variant.utility is not None or variant.name not in correct:
        return variant
    return replace(variant, utility=correct[variant.name] / num_records)


def _validator(assignment: Assignment, correct: int, costs: Costs, private: PrivateValidation | None) -> Validator:
    """The validator of a target; charges for it, and for its saliency."""
    name = assignment.target
    drop = allowed_drop(max(0.0, (costs.known[name].utility or 0.0) - assignment.limits.utility), costs.num_records)
    if private is None or costs.records is None:
        return PublicValidator(original_correct=correct, max_drop=drop)
    costs.charge(name)
    validator = private.validator(name, correct, drop)
    if costs.records.saliency:
        private.charge(name, costs.records.saliency)
    return validator


@dataclass(frozen=True, eq=False)
class _Trial:
    """A target whose blocks can be replaced by their nearest base blocks; `order`: positions by rising saliency."""

    layout: Layout
    blocks: NDArray[Any]
    extras: Tensors
    nearest: NDArray[Any]
    order: NDArray[np.int64]
    evaluator: Evaluator
    validated: Callable[[], None]

    def options(self, settings: Settings) -> Mapping[str, Any]:
        """The options of the search, with the block similarities that Mistique needs."""
        if settings.algorithm != "mistique" or "similarity" in settings.options:
            return settings.options
        step = MINHASH_STEP * float(self.blocks.std()) or 1.0
        similarity = minhash_similarity(self.blocks[self.order], self.nearest[self.order], step=step)
        return {**settings.options, "similarity": similarity}

    def run(
        self, search: Callable[..., Any], validator: Validator, options: Mapping[str, Any], correct: int
    ) -> Deduplicated:
        counts: dict[Positions, int] = {frozenset(): correct}

        def accept(positions: Positions) -> bool:
            count = self.evaluator.count_correct(self.layout.from_blocks(self.replaced(positions), self.extras))
            counts[positions] = count
            self.validated()
            return validator.accept(count)

        result = search(len(self.order), accept, **options)
        chosen = frozenset(result.replaced)
        return Deduplicated(self.replaced(chosen), len(chosen), result.num_validations, counts[chosen])

    def replaced(self, positions: Positions) -> NDArray[Any]:
        rows = self.order[sorted(positions)]
        blocks = self.blocks.copy()
        blocks[rows] = self.nearest[rows]
        return blocks


def _blocks_of(store: Store, assignment: Assignment) -> NDArray[Any]:
    """All blocks of the bases, [n, block_size]."""
    manifests = [store.manifest(name) for name in assignment.bases]
    return np.concatenate([np.asarray(store.blocks[store.rows(manifest.blocks)]) for manifest in manifests])


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
