"""Variants stored by shared blocks, which are replaced in saliency order as far as validation accepts.

The cost of a variant counts its bases and all attempts at private validation.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.models.dedup import planning
from fedpriv.models.dedup._base_selection import Assignment, Selection, fair_limits
from fedpriv.models.dedup.algorithms import ALGORITHMS, minhash_similarity
from fedpriv.models.dedup.distance import nearest
from fedpriv.models.dedup.saliency import by_block
from fedpriv.models.dedup.validation import Tensors, Validation
from fedpriv.models.dedup.work import Outcome, Work
from fedpriv.models.variants.blocks import BlockLayout, check_has_blocks
from fedpriv.models.variants.composition import PublicationCost

log = logging.getLogger(__name__)

MINHASH_STEP = 2.0
"""Mistique treats weights as equal that round to the same multiple of this many of their standard deviations."""

# In which what a search found is proven.
_STEPS = 8

REPEATED = "repeated validation would exceed its bound"


def store_by_blocks(work: Work, searchers: Executor | None) -> list[Outcome]:
    """Store all variants of a deduplication by the blocks that they share; see `dedup.pipeline.deduplicate`."""
    costs = Costs.of(work)
    assignments = costs.selection.assignments
    for name in sorted({each for target, a in assignments.items() for each in (target, *a.bases)}):
        check_has_blocks(name, work.layouts[name])
    names = [*(name for name in work.variants if name not in assignments and name not in work.others), *assignments]
    watch, nothing, free = work.watch(), cast(Any, None), dict[str, Assignment]()
    for name in (name for name in names if searchers and name not in work.stored):
        if (each := costs.affordable(name)) and not work.untold(name, each.limits):
            free[name] = each
    # Copies of what changes while they are sent.
    alone = replace(work, stored={**work.stored}, _utilities={**work._utilities}, observer=None)
    alone = replace(alone, read_tensors=nothing, evaluators={}, store=nothing)
    found = {name: searchers.submit(_search_apart, alone, each) for name, each in free.items() if searchers}
    try:
        for name in (name for name in names if name not in work.stored):
            watch.begin(name)
            work.stored[name] = _store(work, costs, name, watch.validated, found.get(name))
            watch.store()
    except BrokenProcessPool:
        raise InputError("workers: a process ended in its search; fewer of them need less memory") from None
    finally:
        for search in found.values():
            search.cancel()
    return [work.stored[name] for name in names]


def searchers(number: int, again: Callable[[], Any]) -> AbstractContextManager[Executor | None]:
    """Processes that search for targets, whose reader and evaluators `again` gives once more; None for this one."""
    given = again, torch.get_num_threads()  # rounding depends on it
    return nullcontext() if number == 1 else ProcessPoolExecutor(number, get_context("spawn"), _begin, given)


_here: list[Any] = []  # the reader and the evaluators of such a process


def _begin(again: Callable[[], Any], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    _here[:] = again()


def _search_apart(work: Work, assignment: Assignment) -> _Found:
    """No search looks at what another one found: substitutes are blocks of the bases as they were given."""
    work = replace(work, read_tensors=_here[0], evaluators=_here[1])
    model = work.layouts[assignment.target].to_blocks(work.read_tensors(assignment.target))
    return _search(work, assignment, (), model, lambda: None)


def _store(
    work: Work, costs: Costs, name: str, validated: Callable[[], None], search: Future[_Found] | None
) -> Outcome:
    """Store one variant, its bases having been stored."""
    assignment = costs.affordable(name)
    untouched: str | None = None
    if assignment is None:
        untouched = costs.selection.untouched.get(name, REPEATED)
    elif untouched := work.untold(name, assignment.limits):
        assignment = None
    blocks, extras = work.layouts[name].to_blocks(work.read_tensors(name))
    found = _Found(blocks)
    if assignment and search:
        found = search.result()
        for _ in range(found.num_validations):
            validated()
    elif assignment:
        found = _search(work, assignment, costs.attempts[name], (blocks, extras), validated)
    outcome = work.outcome(
        name,
        bases=assignment.bases if assignment else (),
        untouched=untouched,
        cost=costs.after(name, is_target=assignment is not None),
        num_replaced=found.num_replaced,
        num_validations=found.num_validations,
        bound=work.bound(name, assignment.limits) if assignment else None,
        validation=found.validation,
    )
    records = outcome.as_records(**work.digests)
    work.store.add(name, work.layouts[name], found.blocks, extras, described=work.variants[name], **records)
    log.info("%s: %s of %s blocks replaced", name, outcome.num_replaced, outcome.num_blocks)
    return outcome


@dataclass(frozen=True, eq=False)
class _Found:
    """The blocks of a variant as they are to be stored, and the figures of the search that chose them."""

    blocks: NDArray[Any]
    num_replaced: int = 0
    num_validations: int = 0
    validation: Validation | None = None


def _search(
    work: Work,
    assignment: Assignment,
    attempt: tuple[planning.ValidationCharge, ...],
    model: tuple[NDArray[Any], Mapping[str, NDArray[Any]]],
    validated: Callable[[], None],
) -> _Found:
    """The search for the blocks of a target that its bases can stand in for; charges for it first."""
    name, settings, (blocks, extras) = assignment.target, work.settings, model
    layout, evaluator = work.layouts[name], work.evaluators[name]
    validation = work.validation(name, assignment.limits, attempt)
    # Neither what was measured nor the bases outlive their lines, as `planning.search_memory` counts.
    saliency = by_block(
        evaluator.saliency(layout.from_blocks(blocks, extras), work.chosen_on(name)), layout, settings.aggregation
    )
    substitutes = _substitutes(work, assignment, blocks)
    # Those that are a base's already are shared anyway, so no validation is spent on them.
    differs = np.array([own.tobytes() != other.tobytes() for own, other in zip(blocks, substitutes, strict=True)])
    order = np.argsort(saliency, kind="stable")
    trial = _Trial(layout, blocks, extras, substitutes, order[differs[order]], validation, validated)
    return trial.run(ALGORITHMS[settings.algorithm], trial.options(settings))


@dataclass(frozen=True, eq=False)
class _Trial:
    """A target whose blocks can be replaced by their nearest base blocks.

    `order`: positions by rising saliency, without those whose blocks equal their substitutes.
    """

    layout: BlockLayout
    blocks: NDArray[Any]
    extras: Tensors
    nearest: NDArray[Any]
    order: NDArray[np.int64]
    validation: Validation
    validated: Callable[[], None]

    def options(self, settings: planning.DedupSettings) -> Mapping[str, Any]:
        """The options of the search, with the block similarities that Mistique needs."""
        if settings.algorithm != "mistique":
            return settings.options
        step = MINHASH_STEP * float(self.blocks.std()) or 1.0
        similarity = minhash_similarity(self.blocks[self.order], self.nearest[self.order], step=step)
        return {**settings.options, "similarity": similarity}

    def run(self, search: Callable[..., Any], options: Mapping[str, Any]) -> _Found:
        """Search where that is allowed, and prove of what was found, the least salient first, as much as can be proven.

        The steps are eighths of what was found, or of all blocks without a search. Where a search alone accepts, what
        it found is only measured, which is no validation.
        """
        chosen, num_validations = list(range(len(self.order))), 0
        if self.validation.searches:
            result = search(len(self.order), partial(self._ask, self.validation.accept), **options)
            chosen, num_validations = sorted(result.replaced), result.num_validations
        proven: list[int] = []
        if self.validation.acceptance != "proof":
            proven, chosen = (chosen if self.validation.proves(self._form(chosen)) else []), []
        for num in dict.fromkeys(math.ceil(len(chosen) * step / _STEPS) for step in range(1, _STEPS + 1) if chosen):
            num_validations += 1
            if not self._ask(self.validation.proves, chosen[:num]):
                break
            proven = chosen[:num]
        num_shared = len(self.blocks) - len(self.order) + len(proven)
        return _Found(self._replaced(proven), num_shared, num_validations, self.validation)

    def _ask(self, question: Callable[[Tensors], bool], positions: Collection[int]) -> bool:
        answer = question(self._form(positions))
        self.validated()
        return answer

    def _form(self, positions: Collection[int]) -> Tensors:
        return self.layout.from_blocks(self._replaced(positions), self.extras)

    def _replaced(self, positions: Collection[int]) -> NDArray[Any]:
        replaced = np.zeros((len(self.blocks), 1), bool)
        replaced[self.order[list(positions)]] = True
        return np.where(replaced, self.nearest, self.blocks)


def _substitutes(work: Work, assignment: Assignment, blocks: NDArray[Any]) -> NDArray[Any]:
    """The nearest block of the bases for each of a target's, whatever tensors they come from, [n, block_size].

    They are the bases' own: under `cross` a base may have taken others by a proof on the records that prove the target.
    """
    base = np.concatenate([work.layouts[name].to_blocks(work.read_tensors(name))[0] for name in assignment.bases])
    return base[nearest(blocks, base, work.settings.metric)[0]]


@dataclass(frozen=True, eq=False)
class Costs:
    """The bases of every variant, and the costs: `attempts` has {variant: what validating it once is charged}."""

    work: Work
    selection: Selection
    attempts: Mapping[str, tuple[planning.ValidationCharge, ...]]

    @classmethod
    def of(cls, work: Work) -> Costs:
        """The costs of a deduplication, with bases selected."""
        attempts = work.attempts()
        selection = planning.plan(list(work.variants.values()), work.settings, attempts, work.known, work.others)
        return cls(work, selection, attempts)

    def originals(self, name: str) -> list[str]:
        """The variants whose blocks this one may hold, directly or indirectly."""
        assignment = self.selection.assignments.get(name)
        bases = assignment.bases if assignment else ()
        return sorted({each for base in bases for each in (base, *self.originals(base))})

    def affordable(self, name: str) -> Assignment | None:
        """The target's bases; None if it has none, or if repeated attempts left no room for another one.

        The selection knows nothing of repetitions, nor of attempts that cost more than one does now. After one, no
        epsilon may pass the next higher one as it was before deduplication, which keeps their order whatever becomes of
        the others.
        """
        assignment, originals = self.selection.assignments.get(name), self.originals(name)
        charged = self._charged((name, *originals))
        expected = [charge for each in self._targets(originals) for charge in self.attempts[each]]
        if assignment is None or Counter(charged) <= Counter(expected):
            return assignment
        variants = {each: planning.candidate(variant, self.work.known) for each, variant in self.work.variants.items()}
        limit = min(assignment.limits.epsilon, fair_limits(variants[name], list(variants.values())).epsilon)
        cost = self._cost((name, *originals), [*charged, *self.attempts[name]])
        return assignment if cost.guarantee.epsilon <= limit else None

    def after(self, name: str, *, is_target: bool) -> PublicationCost:
        """The cost of the variant once it is stored; a target with no replaced block has still consulted its bases."""
        names = (name, *self.originals(name)) if is_target else (name,)
        return self._cost(names, self._charged(names) if is_target else [])

    def _charged(self, names: Collection[str]) -> list[planning.ValidationCharge]:
        """All that was charged for those of the variants that are targets, by this call and by earlier ones."""
        targets = self._targets(names)
        return [charge for charge in planning.read_charges(self.work.store.path) if charge.name in targets]

    def _targets(self, names: Collection[str]) -> set[str]:
        return set(names) & set(self.selection.assignments)

    def _cost(self, names: Sequence[str], charges: Sequence[planning.ValidationCharge]) -> PublicationCost:
        return planning.cost_of([self.work.variants[name] for name in names], charges)
