"""Variants stored by a shared basis: choose whom it may hold, fit it, and store what validation accepts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fedpriv.dedup.algorithms import BudgetSpent
from fedpriv.dedup.planning import Group, Members, choose_members, cost_of, read_charges
from fedpriv.dedup.work import Outcome, Tensors, Validator, Work
from fedpriv.errors import InputError
from fedpriv.variants.blocks import BlockLayout
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
from fedpriv.variants.store import Share

log = logging.getLogger(__name__)

# Residuals that are tried in turn; even the larger one takes a quarter of what the variant itself takes in float32.
_RESIDUAL_BITS = (4, 8)

TOO_FEW_BYTES = "the bytes allowed do not hold a basis of its group"
REPEATED = "its validation was interrupted, and a further one would exceed what it may cost"


def store_by_basis(work: Work) -> list[Outcome]:
    """Store all variants of a deduplication; those that may share a basis by it where validation accepts that.

    A member is restored as the first of these that is accepted: from the basis alone, with a residual of its own in few
    bits, plainly. Its epsilon is that of publishing every variant that its basis was computed from. Reads all variants
    of a group into memory at once. Where records are private, a variant that an interrupted attempt was asking about is
    stored plainly: what it was told then is not asked again.

    Returns:
        One for each variant: those left out first, then group after group. `bases` are the other members of the group.

    Raises:
        InputError: an option cannot be used, or a variant has another layout than the others of its group, or holds
            values that are not finite.
    """
    options = BasisOptions(**work.settings.options)
    attempts = work.attempts(with_saliency=False)
    members = choose_members(list(work.variants.values()), work.settings, attempts)
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
            work.stored[name] = _store_plain(work, members, name, left_out.get(name, REPEATED))
        else:
            validator = work.validator(name, members.limits[name], attempts[name])
            work.stored[name] = _store_member(work, members, bases[name], name, validator, watch.validated)
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
    work: Work, members: Members, name: str, reason: str | None, group: Group = (), num_validations: int = 0
) -> Outcome:
    """Store a variant as it is; one that the group's validation refused has still consulted the group."""
    layout = work.layouts[name]
    outcome = work.outcome(
        name,
        bases=_others(group, name),
        untouched=reason,
        cost=members.costs[name] if group else cost_of([work.variants[name]], work.settings.accountant),
        num_validations=num_validations,
    )
    records = outcome.as_records(**work.digests)
    blocks, extras = layout.to_blocks(work.read_tensors(name))
    work.store.add(name, layout, blocks, extras, described=work.variants[name], **records)
    return outcome


def _store_member(
    work: Work, members: Members, fitted: _Fitted, name: str, validator: Validator, validated: Callable[[], None]
) -> Outcome:
    """Store a variant as the first of its restored forms that validation accepts."""
    tensors = work.read_tensors(name)
    vector, extras = flattened(name, tensors, fitted.layout), _extras(tensors, fitted.layout)
    num_validations = 0
    for encoded in _forms(fitted, name, vector):
        restored = fitted.basis.restore(encoded)
        correct = work.evaluators[name].count_correct({**restored, **extras})
        num_validations += 1
        validated()
        if not _accepts(validator, correct):
            continue
        error = restore_error(vector, flattened(name, restored, fitted.layout))
        outcome = work.outcome(
            name,
            bases=_others(fitted.group, name),
            untouched=None,
            cost=members.costs[name],
            num_replaced=fitted.layout.num_blocks,
            num_validations=num_validations,
            correct=correct,
        )
        records = outcome.as_records(basis=_described(fitted.basis, encoded, error), **work.digests)
        share = Share(basis=fitted.basis, encoded=encoded)
        work.store.add(name, fitted.layout, share, extras, described=work.variants[name], **records)
        log.info("%s: restored within %.3g by rank %s", name, error.relative, fitted.basis.rank)
        return outcome
    return _store_plain(work, members, name, None, fitted.group, num_validations)


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
    """The forms from which a variant may be restored, smallest first."""
    encoded = fitted.encoded[name]
    yield encoded
    for bits in _RESIDUAL_BITS:
        yield fitted.basis.with_residual(encoded, vector, bits)


def _accepts(validator: Validator, correct: int) -> bool:
    try:
        return validator.accept(correct)
    except BudgetSpent:
        return False


def _extras(tensors: Tensors, layout: BlockLayout) -> dict[str, Any]:
    held = {spec.name for spec in covered(layout)}
    return {name: array for name, array in tensors.items() if name not in held}


def _described(basis: SharedBasis, encoded: Encoded, error: RestoreError) -> dict[str, Any]:
    """The form in which a variant is stored, and its difference from the original."""
    return {"rank": basis.rank, "residual": encoded.residual is not None, "error": asdict(error)}
