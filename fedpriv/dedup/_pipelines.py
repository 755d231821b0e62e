"""Variants stored by shared blocks or by a shared basis, as far as validation accepts.

Blocks are replaced in saliency order. A shared basis is fitted to the variants that it may hold. The cost of a variant
counts its bases and all attempts at private validation.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.dedup._base_selection import Assignment, Selection, fair_limits
from fedpriv.dedup.algorithms import algorithm
from fedpriv.dedup.algorithms.mistique import minhash_similarity
from fedpriv.dedup.distance import nearest
from fedpriv.dedup.planning import (
    DedupSettings,
    Group,
    Members,
    ValidationCharge,
    candidate,
    choose_members,
    cost_of,
    plan,
    read_charges,
)
from fedpriv.dedup.saliency import by_block
from fedpriv.dedup.validation import Tensors, Validation
from fedpriv.dedup.work import Outcome, Work
from fedpriv.errors import InputError
from fedpriv.variants.blocks import BlockLayout, check_has_blocks
from fedpriv.variants.composition import PublicationCost
from fedpriv.variants.shared_basis import (
    BasisOptions,
    Encoded,
    RestoreError,
    SharedBasis,
    affordable_rank,
    covered,
    fit,
    flattened,
    restore_error,
)

log = logging.getLogger(__name__)

MINHASH_STEP = 2.0
"""Mistique treats weights as equal that round to the same multiple of this many of their standard deviations."""

# In which what a search found is proven.
_STEPS = 8

REPEATED = "repeated validation would exceed its bound"


def store_by_blocks(work: Work) -> list[Outcome]:
    """Store all variants of a deduplication by the blocks that they share; see `fedpriv.dedup.pipeline.deduplicate`."""
    costs = Costs.of(work)
    assignments = costs.selection.assignments
    for name in sorted({each for target, a in assignments.items() for each in (target, *a.bases)}):
        check_has_blocks(name, work.layouts[name])
    names = [*(name for name in work.variants if name not in assignments), *assignments]
    watch = work.watch(assignments)
    for name in names:
        if name not in work.stored:
            watch.begin(name)
            work.stored[name] = _store(work, costs, name, watch.validated)
            watch.store(is_target=name in assignments)
    return [work.stored[name] for name in names]


def _store(work: Work, costs: Costs, name: str, validated: Callable[[], None]) -> Outcome:
    """Store one variant, its bases having been stored."""
    assignment = costs.affordable(name)
    untouched: str | None = None
    if assignment is None:
        untouched = costs.selection.untouched.get(name, REPEATED)
    elif untouched := work.untold(name, assignment.limits, searches=True):
        assignment = None
    blocks, extras = work.layouts[name].to_blocks(work.read_tensors(name))
    found = _Found(blocks)
    if assignment:
        found = _search(work, costs, assignment, (blocks, extras), validated)
    outcome = work.outcome(
        name,
        bases=assignment.bases if assignment else (),
        untouched=untouched,
        cost=costs.after(name, is_target=assignment is not None),
        num_replaced=found.num_replaced,
        num_validations=found.num_validations,
        bound=work.bound(name, assignment.limits) if assignment else None,
        proof=found.validation.proof if found.validation else None,
        needed=found.validation.needed if found.validation else None,
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
    costs: Costs,
    assignment: Assignment,
    model: tuple[NDArray[Any], Mapping[str, NDArray[Any]]],
    validated: Callable[[], None],
) -> _Found:
    """The search for the blocks of a target that its bases can stand in for; charges for it first."""
    name, settings, (blocks, extras) = assignment.target, work.settings, model
    layout, evaluator = work.layouts[name], work.evaluators[name]
    validation = work.validation(name, assignment.limits, costs.attempts[name], searches=True)
    measured = evaluator.saliency(layout.from_blocks(blocks, extras), work.chosen_on(name))
    saliency = by_block(measured, layout, settings.aggregation)
    base = _blocks_of(work, assignment)
    indices, _ = nearest(blocks, base, settings.metric)
    substitutes = base[indices]
    # Those that are a base's already are shared anyway, so no validation is spent on them.
    differs = np.array([own.tobytes() != other.tobytes() for own, other in zip(blocks, substitutes, strict=True)])
    order = np.argsort(saliency, kind="stable")
    trial = _Trial(layout, blocks, extras, substitutes, order[differs[order]], validation, validated)
    return trial.run(algorithm(settings.algorithm), trial.options(settings))


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

    def options(self, settings: DedupSettings) -> Mapping[str, Any]:
        """The options of the search, with the block similarities that Mistique needs."""
        if settings.algorithm != "mistique":
            return settings.options
        step = MINHASH_STEP * float(self.blocks.std()) or 1.0
        similarity = minhash_similarity(self.blocks[self.order], self.nearest[self.order], step=step)
        return {**settings.options, "similarity": similarity}

    def run(self, search: Callable[..., Any], options: Mapping[str, Any]) -> _Found:
        """Search where that is allowed, and prove of what was found, the least salient first, as much as can be proven.

        The steps are eighths of what was found, or of all blocks without a search.
        """
        chosen, num_validations = list(range(len(self.order))), 0
        if self.validation.searches:
            result = search(len(self.order), partial(self._ask, self.validation.accept), **options)
            chosen, num_validations = sorted(result.replaced), result.num_validations
        proven: list[int] = []
        for num in dict.fromkeys(math.ceil(len(chosen) * step / _STEPS) for step in range(1, _STEPS + 1) if chosen):
            num_validations += 1
            if not self._ask(self.validation.proves, chosen[:num]):
                break
            proven = chosen[:num]
        num_shared = len(self.blocks) - len(self.order) + len(proven)
        return _Found(self._replaced(proven), num_shared, num_validations, self.validation)

    def _ask(self, question: Callable[[Tensors], bool], positions: Collection[int]) -> bool:
        answer = question(self.layout.from_blocks(self._replaced(positions), self.extras))
        self.validated()
        return answer

    def _replaced(self, positions: Collection[int]) -> NDArray[Any]:
        rows = self.order[sorted(positions)]
        blocks = self.blocks.copy()
        blocks[rows] = self.nearest[rows]
        return blocks


def _blocks_of(work: Work, assignment: Assignment) -> NDArray[Any]:
    """All blocks of the bases, whatever tensors they come from, [n, block_size].

    They are the bases' own: under `cross` a base may have taken others by a proof on the records that prove the target.
    """
    return np.concatenate([work.layouts[name].to_blocks(work.read_tensors(name))[0] for name in assignment.bases])


@dataclass(frozen=True, eq=False)
class Costs:
    """The bases of every variant, and the costs.

    Attributes:
        work: the deduplication.
        selection: of the bases.
        attempts: {variant: what validating it once is charged}.
    """

    work: Work
    selection: Selection
    attempts: Mapping[str, tuple[ValidationCharge, ...]]

    @classmethod
    def of(cls, work: Work) -> Costs:
        """The costs of a deduplication, with bases selected."""
        attempts = work.attempts(with_saliency=True)
        return cls(work, plan(list(work.variants.values()), work.settings, attempts, work.known), attempts)

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
        variants = {
            each: candidate(variant, self.work.settings.accountant, self.work.known)
            for each, variant in self.work.variants.items()
        }
        limit = min(assignment.limits.epsilon, fair_limits(variants[name], list(variants.values())).epsilon)
        cost = self._cost((name, *originals), [*charged, *self.attempts[name]])
        return assignment if cost.guarantee.epsilon <= limit else None

    def after(self, name: str, *, is_target: bool) -> PublicationCost:
        """The cost of the variant once it is stored.

        Args:
            name: of the variant.
            is_target: whether its bases were used; one with no replaced block has still consulted them.
        """
        names = (name, *self.originals(name)) if is_target else (name,)
        return self._cost(names, self._charged(names) if is_target else [])

    def _charged(self, names: Collection[str]) -> list[ValidationCharge]:
        """All that was charged for those of the variants that are targets, by this call and by earlier ones."""
        targets = self._targets(names)
        return [charge for charge in read_charges(self.work.store.path) if charge.name in targets]

    def _targets(self, names: Collection[str]) -> set[str]:
        return set(names) & set(self.selection.assignments)

    def _cost(self, names: Sequence[str], charges: Sequence[ValidationCharge]) -> PublicationCost:
        return cost_of([self.work.variants[name] for name in names], self.work.settings.accountant, charges)


# Residuals that are tried in turn; even the larger one takes a quarter of what the variant itself takes in float32.
_RESIDUAL_BITS = (8, 4)

TOO_FEW_BYTES = "the bytes allowed do not hold a basis of its group"
INTERRUPTED = "its validation was interrupted, and a further one would exceed what it may cost"


def store_by_basis(work: Work) -> list[Outcome]:
    """Store all variants of a deduplication; those that may share a basis by it where validation accepts that.

    A member is restored as the last of these that is proven in turn: plainly, with a residual of its own in eight or
    four bits, from the basis alone. Its records chose nothing before, so all of them prove. Its epsilon is that of
    publishing every variant that its basis was computed from. Reads all variants of a group into memory at once. Where
    records are private, a variant that an interrupted attempt was asking about is stored plainly: what it was told then
    is not asked again.

    Returns:
        One for each variant: those left out first, then group after group. `bases` are the other members of the group.

    Raises:
        InputError: an option cannot be used, or a variant has another layout than the others of its group, or holds
            values that are not finite.
    """
    options = BasisOptions(**work.settings.options)
    attempts = work.attempts(with_saliency=False)
    members = choose_members(list(work.variants.values()), work.settings, attempts, work.known)
    interrupted = {charge.name for charge in read_charges(work.store.path)} - set(work.stored)
    watch = work.watch(members.costs)
    fitted, unaffordable = _fit_all(work, members, options) if watch.num_left[True] else ([], [])
    left_out = {**members.left_out, **dict.fromkeys(unaffordable, TOO_FEW_BYTES)}
    bases = {name: each for each in fitted for name in each.group}
    names = [*sorted(left_out), *(name for group in members.groups for name in group if name not in left_out)]
    for name in names:
        if name in work.stored:
            continue
        watch.begin(name)
        if name in left_out or name in interrupted:
            work.stored[name] = _store_plain(work, members, name, left_out.get(name, INTERRUPTED))
        elif reason := work.untold(name, members.limits[name], searches=False):
            work.stored[name] = _store_plain(work, members, name, reason)
        else:
            validation = work.validation(name, members.limits[name], attempts[name], searches=False)
            work.stored[name] = _store_member(work, members, bases[name], name, validation, watch.validated)
        watch.store(is_target=name in members.costs)
    return [work.stored[name] for name in names]


@dataclass(frozen=True, eq=False)
class _Fitted:
    """A group's basis, and its members' coefficients."""

    group: Group
    layout: BlockLayout
    basis: SharedBasis
    encoded: Mapping[str, Encoded]


def _store_plain(
    work: Work,
    members: Members,
    name: str,
    reason: str | None,
    group: Group = (),
    num_validations: int = 0,
    validation: Validation | None = None,
) -> Outcome:
    """Store a variant as it is; one that the group's validation refused has still consulted the group."""
    layout = work.layouts[name]
    outcome = work.outcome(
        name,
        bases=_others(group, name),
        untouched=reason,
        cost=members.costs[name] if group else cost_of([work.variants[name]], work.settings.accountant),
        num_validations=num_validations,
        bound=work.bound(name, members.limits[name]) if group else None,
        needed=validation.needed if validation else None,
    )
    records = outcome.as_records(**work.digests)
    blocks, extras = layout.to_blocks(work.read_tensors(name))
    work.store.add(name, layout, blocks, extras, described=work.variants[name], **records)
    return outcome


def _store_member(
    work: Work, members: Members, fitted: _Fitted, name: str, validation: Validation, validated: Callable[[], None]
) -> Outcome:
    """Store a variant as the smallest of its restored forms that is proven, after all larger ones."""
    tensors = work.read_tensors(name)
    vector, extras = flattened(name, tensors, fitted.layout), _extras(tensors, fitted.layout)
    num_validations, proven = 0, None
    for encoded in _forms(fitted, name, vector):
        restored = fitted.basis.restore(encoded)
        num_validations += 1
        is_proven = validation.proves({**restored, **extras})
        validated()
        if not is_proven:
            break
        proven = encoded
    if proven is None:
        return _store_plain(work, members, name, None, fitted.group, num_validations, validation)
    error = restore_error(vector, flattened(name, fitted.basis.restore(proven), fitted.layout))
    outcome = work.outcome(
        name,
        bases=_others(fitted.group, name),
        untouched=None,
        cost=members.costs[name],
        num_replaced=fitted.layout.num_blocks,
        num_validations=num_validations,
        bound=work.bound(name, members.limits[name]),
        proof=validation.proof,
        needed=validation.needed,
    )
    records = outcome.as_records(basis=_described(fitted.basis, proven, error), **work.digests)
    held = {**extras, **proven.to_tensors()}
    work.store.add(name, fitted.layout, fitted.basis, held, described=work.variants[name], **records)
    log.info("%s: restored within %.3g by rank %s", name, error.relative, fitted.basis.rank)
    return outcome


def _others(group: Group, name: str) -> tuple[str, ...]:
    return tuple(each for each in group if each != name)


def _fit_all(work: Work, members: Members, options: BasisOptions) -> tuple[list[_Fitted], list[str]]:
    """The basis of every group, before anything is stored; and the members of groups for which it has no room."""
    names = [name for group in members.groups for name in group]
    layouts = {name: work.layouts[name] for name in names}
    for group in members.groups:
        for name in group[1:]:
            if difference := layouts[group[0]].difference(layouts[name]):
                raise InputError(f"{name}: is of another architecture than {group[0]}: {difference}")
    if options.max_bytes is not None:
        plain = sum(spec.num_bytes for layout in layouts.values() for spec in covered(layout))
        options = replace(options, max_bytes=None, ratio=options.max_bytes / max(plain, 1))
    fitted: list[_Fitted] = []
    unaffordable: list[str] = []
    for group in members.groups:
        layout = layouts[group[0]]
        if affordable_rank(len(group), covered(layout), options) < 0:
            unaffordable += group
            continue
        vectors = np.array([flattened(name, work.read_tensors(name), layout) for name in group])
        basis, coefficients = fit(vectors, layout, options)
        encoded = {name: Encoded(own) for name, own in zip(group, coefficients, strict=True)}
        fitted.append(_Fitted(group, layout, basis, encoded))
    return fitted, unaffordable


def _forms(fitted: _Fitted, name: str, vector: Any) -> Iterator[Encoded]:
    """The forms from which a variant may be restored, largest and likeliest to be proven first."""
    encoded = fitted.encoded[name]
    for bits in _RESIDUAL_BITS:
        yield fitted.basis.with_residual(encoded, vector, bits)
    yield encoded


def _extras(tensors: Tensors, layout: BlockLayout) -> dict[str, Any]:
    held = {spec.name for spec in covered(layout)}
    return {name: array for name, array in tensors.items() if name not in held}


def _described(basis: SharedBasis, encoded: Encoded, error: RestoreError) -> dict[str, Any]:
    """The form in which a variant is stored, and its difference from the original."""
    return {"rank": basis.rank, "residual": encoded.residual is not None, "error": asdict(error)}
