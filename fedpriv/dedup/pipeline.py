"""Deduplicating variants: choose bases, try blocks by saliency, keep what validation accepts, store it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.curves import Accountant
from fedpriv.dedup.algorithms import Positions, algorithm
from fedpriv.dedup.base_selection import Assignment, Fairness, Selection, Strategy, Variant, select_bases
from fedpriv.dedup.blocks import Layout, layout_of
from fedpriv.dedup.composition import Guarantee, PublicationCost, publication_cost
from fedpriv.dedup.distance import nearest
from fedpriv.dedup.saliency import Saliency, by_block
from fedpriv.dedup.store import Store
from fedpriv.dedup.validation import PublicValidator, allowed_drop
from fedpriv.dedup.variants import Described

log = logging.getLogger(__name__)

Tensors = Mapping[str, NDArray[Any]]


class Evaluator(Protocol):
    """Tells how good a variant is, on records that the validation may see.

    Attributes:
        num_records: how many there are, as registered.
        is_public: whether numbers may be shown; on private records only a validator's pass or fail is.
    """

    num_records: int
    is_public: bool

    def count_correct(self, tensors: Tensors) -> int:
        """How many records the variant with these tensors answers correctly."""

    def saliency(self, tensors: Tensors) -> Saliency:
        """How much each weight matters; of every tensor that is cut into blocks."""


class Validator(Protocol):
    """Says pass or fail; `BudgetSpent` where it may not say more."""

    def accept(self, count_correct: int) -> bool:
        """Whether a variant with so many correct answers passes."""


Validate = Callable[[str, int, int], Validator]
"""The validator of a target by its name, its original count of correct answers and by how many it may drop."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How variants are deduplicated.

    Attributes:
        block_size: values in a block, >= 1.
        algorithm: name of the search, with its options.
        options: of the search.
        aggregation: of saliency over a block.
        metric: by which a block's nearest base block is found.
        strategy, fairness: of base selection.
        accountant: that bounds are held against.
    """

    block_size: int = 1024
    algorithm: str = "drd"
    options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "l2"
    metric: str = "l2"
    strategy: Strategy = "single"
    fairness: Fairness = "bounds"
    accountant: Accountant = "pld"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one variant.

    Attributes:
        name: of the variant.
        bases: whose blocks it may hold; none where it stays as it was.
        num_blocks: that it is cut into.
        num_replaced: that were replaced.
        num_validations: counted by the search.
        correct_before, correct_after: of `num_records` validation records; None where these are private.
        epsilon_before, epsilon_after, delta: against a reader of this variant alone, private validation left out.
        epsilons: {method: epsilon} of what it costs now, the largest over data sets.
    """

    name: str
    bases: tuple[str, ...]
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


def plan(variants: Sequence[Described], settings: Settings) -> Selection:
    """Which variant may take blocks of which, by what they cost together; no weights are looked at.

    A base costs a target what `publication_cost` says of both, by the tightest composition that holds.

    Raises:
        ValueError: two variants of one name, or of one upload with two events.
    """
    known = {variant.name: variant for variant in variants}

    def cost(target: Variant, bases: Sequence[Variant]) -> Guarantee:
        return cost_of([known[each.name] for each in (target, *bases)], settings.accountant).guarantee

    return select_bases(
        [variant.as_variant(settings.accountant) for variant in variants],
        strategy=settings.strategy,
        fairness=settings.fairness,
        cost=cost,
    )


def cost_of(consulted: Sequence[Described], accountant: Accountant = "pld") -> PublicationCost:
    """What it costs to publish anything made of these variants."""
    deltas: dict[str, float] = {}
    for variant in consulted:
        for id_, delta in variant.deltas.items():
            deltas[id_] = min(delta, deltas.get(id_, delta))
    return publication_cost([variant.history for variant in consulted], deltas, accountant=accountant)


def publicly(name: str, original_correct: int, max_drop: int) -> Validator:
    """Validation on public records, whatever the target."""
    return PublicValidator(original_correct=original_correct, max_drop=max_drop)


def deduplicate(
    variants: Sequence[Described],
    read_tensors: Callable[[str], Tensors],
    evaluator: Evaluator,
    store: Store,
    settings: Settings,
    *,
    validate: Validate = publicly,
) -> list[Outcome]:
    """Store all variants, those that a base was found for with as many of its blocks as validation accepts.

    Epsilons here are those of training alone. On private validation records each validator's event, and the saliency,
    which is a release of its own and then has to be noised by the evaluator, are charged by who passes them in, and
    are in none of the outcomes.

    Guarantee: what is stored of a target is, bit for bit, what its validator accepted, or the original; its epsilon
    stays within its limit. Every base is stored before whoever uses it.

    Args:
        variants: to be stored; none of them in the store yet.
        read_tensors: the tensors of a variant by name.
        evaluator: on the validation records.
        store: open for writing.
        settings: see there.
        validate: makes the validator of each target.

    Raises:
        InputError: an unknown algorithm or option, a variant of another layout than its base, or a name that is taken.
        StoreError: the store cannot be written.
    """
    known = {variant.name: variant for variant in variants}
    search = algorithm(settings.algorithm)
    selection = plan(variants, settings)
    outcomes = []
    for name in [*(name for name in known if name not in selection.assignments), *selection.assignments]:
        tensors = read_tensors(name)
        layout = layout_of(tensors, settings.block_size)
        blocks, extras = layout.to_blocks(tensors)
        correct = evaluator.count_correct(tensors)
        found = _Found(blocks, 0, 0, correct)
        assignment = selection.assignments.get(name)
        if assignment is not None:
            drop = allowed_drop(max(0.0, known[name].utility - assignment.limits.utility), evaluator.num_records)
            validator = validate(name, correct, drop)
            saliency = by_block(evaluator.saliency(tensors), layout, settings.aggregation)
            base = _blocks_of(store, assignment, layout)
            indices, _ = nearest(blocks, base, settings.metric)
            trial = _Trial(layout, blocks, extras, base[indices], np.argsort(saliency, kind="stable"), evaluator)
            found = trial.searched(search, validator, settings.options, correct)
        consulted = [known[each] for each in (name, *_originals(name, selection))]
        outcome = _outcome(consulted, assignment, found, correct, evaluator, settings.accountant)
        store.add(
            name,
            layout,
            found.blocks,
            extras,
            privacy={"epsilon": outcome.epsilon_after, "delta": outcome.delta, "epsilons": dict(outcome.epsilons)},
            provenance={"bases": list(outcome.bases), "outcome": _plain(asdict(outcome))},
        )
        outcomes.append(outcome)
        log.info("%s: %s of %s blocks replaced", name, outcome.num_replaced, outcome.num_blocks)
    return outcomes


@dataclass(frozen=True, eq=False)
class _Found:
    """Blocks of a variant as they are to be stored, and how they were found."""

    blocks: NDArray[Any]
    num_replaced: int
    num_validations: int
    correct: int


@dataclass(frozen=True, eq=False)
class _Trial:
    """A target whose blocks can be replaced by their nearest ones; `order` holds positions by rising saliency."""

    layout: Layout
    blocks: NDArray[Any]
    extras: Tensors
    nearest: NDArray[Any]
    order: NDArray[np.int64]
    evaluator: Evaluator

    def searched(
        self, search: Callable[..., Any], validator: Validator, options: Mapping[str, Any], correct: int
    ) -> _Found:
        counts: dict[Positions, int] = {frozenset(): correct}

        def accept(positions: Positions) -> bool:
            count = self.evaluator.count_correct(self.layout.from_blocks(self.replaced(positions), self.extras))
            counts[positions] = count
            return validator.accept(count)

        result = search(len(self.order), accept, **options)
        chosen = frozenset(result.replaced)
        return _Found(self.replaced(chosen), len(chosen), result.num_validations, counts[chosen])

    def replaced(self, positions: Positions) -> NDArray[Any]:
        places = self.order[sorted(positions)]
        blocks = self.blocks.copy()
        blocks[places] = self.nearest[places]
        return blocks


def _blocks_of(store: Store, assignment: Assignment, layout: Layout) -> NDArray[Any]:
    """All blocks of the bases, [n, block_size]."""
    found = []
    for name in assignment.bases:
        manifest = store.manifest(name)
        if difference := manifest.layout.difference(layout):
            raise ValueError(f"base {name} of {assignment.target}: {difference}")
        found.append(np.asarray(store.blocks[store.rows(manifest.blocks)]))
    return np.concatenate(found)


def _originals(name: str, selection: Selection) -> list[str]:
    """The variants whose blocks may be in this one, over any number of steps."""
    bases = selection.assignments[name].bases if name in selection.assignments else ()
    return sorted({each for base in bases for each in (base, *_originals(base, selection))})


def _outcome(
    consulted: Sequence[Described],
    assignment: Assignment | None,
    found: _Found,
    correct: int,
    evaluator: Evaluator,
    accountant: Accountant,
) -> Outcome:
    # A target that replaced nothing consulted its bases all the same.
    cost = cost_of(consulted, accountant)
    methods = sorted({method for each in cost.by_data_set for method in each.epsilons})
    return Outcome(
        name=consulted[0].name,
        bases=assignment.bases if assignment else (),
        num_blocks=len(found.blocks),
        num_replaced=found.num_replaced,
        num_validations=found.num_validations,
        correct_before=correct if evaluator.is_public else None,
        correct_after=found.correct if evaluator.is_public else None,
        num_records=evaluator.num_records,
        epsilon_before=cost_of(consulted[:1], accountant).guarantee.epsilon,
        epsilon_after=cost.guarantee.epsilon,
        delta=cost.guarantee.delta,
        epsilons={m: max(each.epsilons[m] for each in cost.by_data_set if m in each.epsilons) for m in methods},
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
