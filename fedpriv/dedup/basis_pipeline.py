"""Variants stored by a shared basis: choose whom it may hold, fit it, and store what validation accepts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from fedpriv.accounting.events import Event, PureEpsilon
from fedpriv.dedup.algorithms import SHARED_BASIS, BudgetSpent
from fedpriv.dedup.basis_members import Group, Members, choose_members
from fedpriv.dedup.blocks import Layout
from fedpriv.dedup.charges import Charge, add_charges, read_charges
from fedpriv.dedup.outcomes import Outcome
from fedpriv.dedup.pipeline import Evaluator, Tensors, Validator, deduplicate
from fedpriv.dedup.planning import Settings, cost_of
from fedpriv.dedup.progress import Observer, Watch
from fedpriv.dedup.resumption import PLAN, VALIDATION, layouts_and_plan, stored_outcomes, validation_digest
from fedpriv.dedup.shared_basis import (
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
from fedpriv.dedup.store import Store
from fedpriv.dedup.validation import PrivateValidation, PublicValidator, allowed_drop
from fedpriv.dedup.variants import Described
from fedpriv.errors import InputError

log = logging.getLogger(__name__)

# Residuals that are tried in turn; even the larger one takes a quarter of what the variant itself takes in float32.
_RESIDUAL_BITS = (4, 8)

TOO_FEW_BYTES = "the bytes allowed do not hold a basis of its group"
REPEATED = "its validation was interrupted, and a further one would exceed what it may cost"


def deduplicator(settings: Settings) -> Callable[..., list[Outcome]]:
    """The function that stores variants as the settings' algorithm does: `deduplicate`, or `deduplicate_by_basis`."""
    return deduplicate_by_basis if settings.algorithm == SHARED_BASIS else deduplicate


def deduplicate_by_basis(
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
    """Store all variants; those that may share a basis are stored by it where validation accepts what it restores.

    Guarantee: a variant is restored, bit for bit, as its validator accepted it, or else as the original: first by the
    basis alone, then with a residual of its own, then plainly. Its epsilon, private validation included, is that of
    publishing every variant that its basis was computed from, and stays within its limit. Private records are charged
    for a variant before they are first used for it. Reads all variants of a group into memory at once.

    An interrupted call can be repeated with the same arguments: what is stored stays, and the rest follows. Where
    records are private, the variant that was under way is stored plainly: what it was told then is not asked again.

    Args:
        variants: to be stored; those that are in the store already were stored by a call with the same arguments.
        read_tensors: gives the tensors of a variant by name.
        evaluator: of the validation records; its saliency is not measured.
        store: open for writing.
        settings: `options` are those of `BasisOptions`; strategy, aggregation and metric do not matter.
        private: how the evaluator's records are queried; required if, and only if, they are private.

    Returns:
        One for each variant: those left out first, then group after group. `bases` are the other members of the group.

    Raises:
        InputError: an option cannot be used, a variant has another layout than the others of its group, holds values
            that are not finite, or a name is taken by a variant that was stored in another way.
        StoreError: the store cannot be written.
        ValueError: `private` is given without private records, or missing for private records.
    """
    if (private is None) != (evaluator.private is None):
        raise ValueError("private: must be given where the evaluator's records are private, and only there")
    options = BasisOptions(**settings.options)
    layouts, plan = layouts_and_plan(variants, read_tensors, settings)
    digests = {PLAN: plan, VALIDATION: validation_digest(evaluator.num_records, evaluator.private, private, evaluation)}
    stored = {name: Outcome.of(fields) for name, fields in stored_outcomes(store, layouts, digests).items()}

    @cache
    def count(name: str) -> int:
        earlier = stored[name].correct_before if name in stored else None
        return evaluator.count_correct(read_tensors(name)) if earlier is None else earlier

    if private is None:
        variants = [
            v if v.utility is not None else replace(v, utility=count(v.name) / evaluator.num_records) for v in variants
        ]
    validation, deltas = _validation(evaluator, private)
    members = choose_members(variants, settings, validation, deltas)
    known = {variant.name: variant for variant in variants}
    interrupted = {charge.name for charge in read_charges(store.path)} - set(stored)
    by_kind = {
        kind: sum((name in members.costs) == kind for name in known if name not in stored) for kind in (True, False)
    }
    watch = Watch(observer=observer, num_variants=len(known), num_left=by_kind)
    job = _Job(known, layouts, members, read_tensors, evaluator, count, store, settings, private, digests, watch)
    fitted, unaffordable = _fit_all(job, options) if by_kind[True] else ([], [])
    left_out = {**members.left_out, **dict.fromkeys(unaffordable, TOO_FEW_BYTES)}
    bases = {name: each for each in fitted for name in each.group}
    names = [*sorted(left_out), *(name for group in members.groups for name in group if name not in left_out)]
    for name in names:
        if name in stored:
            continue
        watch.begin(name)
        if name in left_out or name in interrupted:
            stored[name] = job.store_plain(name, left_out.get(name, REPEATED))
        else:
            stored[name] = job.store_member(name, bases[name])
        watch.store(is_target=name in members.costs)
    return [stored[name] for name in names]


@dataclass(frozen=True, eq=False)
class _Fitted:
    """A group's basis, and its members' coefficients."""

    group: Group
    layout: Layout
    basis: SharedBasis
    encoded: Mapping[str, Encoded]


@dataclass(frozen=True, eq=False)
class _Job:
    """What storing a variant needs."""

    known: Mapping[str, Described]
    layouts: Mapping[str, Layout]
    members: Members
    read_tensors: Callable[[str], Tensors]
    evaluator: Evaluator
    count: Callable[[str], int]
    store: Store
    settings: Settings
    private: PrivateValidation | None
    digests: Mapping[str, str]
    watch: Watch

    def store_plain(self, name: str, reason: str | None, group: Group = (), num_validations: int = 0) -> Outcome:
        """Store a variant as it is; one that the group's validation refused has still consulted the group."""
        layout = self.layouts[name]
        outcome = self._outcome(name, group, layout, reason, 0, num_validations)
        self.store.add(name, layout, *layout.to_blocks(self.read_tensors(name)), **_records(outcome, **self.digests))
        return outcome

    def store_member(self, name: str, fitted: _Fitted) -> Outcome:
        """Store a variant as the first of its restored forms that validation accepts."""
        tensors = self.read_tensors(name)
        vector, extras = flattened(name, tensors, fitted.layout), _extras(tensors, fitted.layout)
        validator = self._validator(name)
        num_validations = 0
        for encoded in _forms(fitted, name, vector):
            restored = fitted.basis.restore(encoded)
            correct = self.evaluator.count_correct({**restored, **extras})
            num_validations += 1
            self.watch.validated()
            if not _accepts(validator, correct):
                continue
            error = restore_error(vector, flattened(name, restored, fitted.layout))
            outcome = self._outcome(
                name, fitted.group, fitted.layout, None, fitted.layout.num_blocks, num_validations, correct
            )
            records = _records(outcome, basis=_described(fitted.basis, encoded, error), **self.digests)
            self.store.add_from_basis(name, fitted.layout, fitted.basis, encoded, extras, **records)
            log.info("%s: restored within %.3g by rank %s", name, error.relative, fitted.basis.rank)
            return outcome
        return self.store_plain(name, None, fitted.group, num_validations)

    def _validator(self, name: str) -> Validator:
        utility = self.known[name].utility or 0.0
        drop = allowed_drop(max(0.0, utility - self.members.limits[name].utility), self.evaluator.num_records)
        if self.private and (records := self.evaluator.private):
            # Kept before the ledger is charged: an interruption in between makes the variant dearer, never cheaper.
            event = PureEpsilon(epsilon=self.private.epsilon)
            add_charges(
                self.store.path, [Charge(name=name, data_set=records.data_set, delta=records.delta, event=event)]
            )
            return self.private.validator(name, self.count(name), drop)
        return PublicValidator(original_correct=self.count(name), max_drop=drop)

    def _outcome(
        self,
        name: str,
        group: Group,
        layout: Layout,
        reason: str | None,
        num_replaced: int,
        num_validations: int,
        correct: int | None = None,
    ) -> Outcome:
        """What became of a variant; without a count, it is as it was."""
        own = cost_of([self.known[name]], self.settings.accountant)
        cost = self.members.costs[name] if group else own
        methods = sorted({method for each in cost.by_data_set for method in each.epsilons})
        is_public = self.evaluator.private is None
        return Outcome(
            name=name,
            bases=tuple(each for each in group if each != name),
            untouched=reason,
            num_blocks=layout.num_blocks,
            num_replaced=num_replaced,
            num_validations=num_validations,
            correct_before=self.count(name) if is_public else None,
            correct_after=(self.count(name) if correct is None else correct) if is_public else None,
            num_records=self.evaluator.num_records,
            epsilon_before=own.guarantee.epsilon,
            epsilon_after=cost.guarantee.epsilon,
            delta=cost.guarantee.delta,
            epsilons={m: max(each.epsilons[m] for each in cost.by_data_set if m in each.epsilons) for m in methods},
        )


def _validation(
    evaluator: Evaluator, private: PrivateValidation | None
) -> tuple[dict[str, Sequence[Event]], dict[str, float]]:
    """What validating one variant costs private records, and at which delta; no saliency is measured."""
    if private is None or (records := evaluator.private) is None:
        return {}, {}
    return {records.data_set: (PureEpsilon(epsilon=private.epsilon),)}, {records.data_set: records.delta}


def _fit_all(job: _Job, options: BasisOptions) -> tuple[list[_Fitted], list[str]]:
    """The basis of every group, before anything is stored; and the members of groups for which it has no room."""
    names = [name for group in job.members.groups for name in group]
    layouts = {name: job.layouts[name] for name in names}
    for group in job.members.groups:
        for name in group[1:]:
            if difference := layouts[group[0]].difference(layouts[name]):
                raise InputError(f"{name}: is of another architecture than {group[0]}: {difference}")
    if options.max_bytes is not None:
        plain = sum(spec.num_bytes for layout in layouts.values() for spec in covered(layout))
        options = replace(options, max_bytes=None, ratio=options.max_bytes / max(plain, 1))
    fitted: list[_Fitted] = []
    unaffordable: list[str] = []
    for group in job.members.groups:
        layout = layouts[group[0]]
        if affordable_rank(len(group), covered(layout), options) < 0:
            unaffordable += group
            continue
        vectors = np.array([flattened(name, job.read_tensors(name), layout) for name in group])
        basis, coefficients = fit(vectors, layout, options)
        encoded = {name: Encoded(own) for name, own in zip(group, coefficients, strict=True)}
        fitted.append(_Fitted(group, layout, basis, encoded))
    return fitted, unaffordable


def _forms(fitted: _Fitted, name: str, vector: Any) -> Iterator[Encoded]:
    """What a variant may be restored from, smallest first."""
    encoded = fitted.encoded[name]
    yield encoded
    for bits in _RESIDUAL_BITS:
        yield fitted.basis.with_residual(encoded, vector, bits)


def _accepts(validator: Validator, correct: int) -> bool:
    try:
        return validator.accept(correct)
    except BudgetSpent:
        return False


def _extras(tensors: Tensors, layout: Layout) -> dict[str, Any]:
    held = {spec.name for spec in covered(layout)}
    return {name: array for name, array in tensors.items() if name not in held}


def _described(basis: SharedBasis, encoded: Encoded, error: RestoreError) -> dict[str, Any]:
    """How a variant is stored, and by how much it then differs from the original."""
    return {"rank": basis.rank, "residual": encoded.residual is not None, "error": asdict(error)}


def _records(outcome: Outcome, **more: Any) -> dict[str, Any]:
    """What a manifest keeps of an outcome, as for other algorithms."""
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(outcome).items()}
    return {
        "privacy": {"epsilon": outcome.epsilon_after, "delta": outcome.delta, "epsilons": dict(outcome.epsilons)},
        "provenance": {"bases": list(outcome.bases), "outcome": plain, **more},
    }
