"""Deduplication of variants: choose who may share with whom, and store what validation accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedpriv.dedup.algorithms import SHARED_BASIS
from fedpriv.dedup.basis_pipeline import store_by_basis
from fedpriv.dedup.block_pipeline import store_by_blocks
from fedpriv.dedup.outcomes import Outcome
from fedpriv.dedup.planning import Settings, check_options
from fedpriv.dedup.progress import Observer
from fedpriv.dedup.resumption import (
    PLAN,
    VALIDATION,
    check_has_blocks,
    layouts_and_plan,
    stored_outcomes,
    validation_digest,
)
from fedpriv.dedup.store import Store
from fedpriv.dedup.validation import PrivateValidation
from fedpriv.dedup.variants import Described
from fedpriv.dedup.work import Evaluators, Tensors, Work
from fedpriv.errors import InputError


def deduplicate(
    variants: Sequence[Described],
    read_tensors: Callable[[str], Tensors],
    evaluators: Evaluators,
    store: Store,
    settings: Settings,
    *,
    private: PrivateValidation | None = None,
    evaluation: str = "",
    observer: Observer | None = None,
) -> list[Outcome]:
    """Store all variants; each takes as much from others as validation accepts, by blocks or by a shared basis.

    Blocks are runs of values, whatever tensor they come from, so variants of different architectures may share them.

    Guarantee: a variant is restored, bit for bit, as its validator accepted it, or else as the original; its epsilon,
    private validation included, stays within its limit. Every base is stored before the variants that use it. Private
    records are charged for a variant before they are first used for it.

    An interrupted call can be repeated with the same arguments: what is stored stays, and the rest follows as if
    nothing had happened, except that private records are charged once more for the target that was under way. Its
    epsilon then counts both charges; if its limit has no room for them, or with a shared basis, it stays as it is.

    Args:
        variants: to be stored; those that are in the store already were stored by a call with the same arguments.
        read_tensors: gives the tensors of a variant by name.
        evaluators: one for each variant; see `Evaluator`. With a shared basis no saliency is measured.
        store: open for writing.
        settings: see `Settings`.
        private: how private validation records are queried; required if, and only if, an evaluator's are private.
        evaluation: what else decides a validation, such as the evaluator's name and seed; compared with that of
            variants that are stored already.
        observer: is told how far it is.

    Returns:
        One for each variant: first those that stay as they are, then the others, each after its bases or by groups.

    Raises:
        InputError: the algorithm or an option is unknown, a variant has no evaluator or cannot share with its bases or
            group, or a name is taken by a variant that was stored in another way.
        StoreError: the store cannot be written.
        ValueError: `private` is given without private records, or missing for private records.
    """
    check_options(settings)
    names = [variant.name for variant in variants]
    if missing := [name for name in names if name not in evaluators]:
        raise InputError(f"evaluators: none for variant {missing[0]!r}; each variant needs one")
    own = {name: evaluators[name] for name in names}
    if (private is None) != all(each.private is None for each in own.values()):
        raise ValueError("private: must be given where an evaluator's records are private, and only there")
    layouts, plan = layouts_and_plan(variants, read_tensors, settings)
    digests = {PLAN: plan, VALIDATION: validation_digest(own, private, evaluation)}
    work = Work(
        variants={variant.name: variant for variant in variants},
        layouts=layouts,
        read_tensors=read_tensors,
        evaluators=own,
        store=store,
        settings=settings,
        private=private,
        digests=digests,
        stored={name: Outcome.of(fields) for name, fields in stored_outcomes(store, layouts, digests).items()},
        observer=observer,
    ).with_measured_utilities()
    return store_by_basis(work) if settings.algorithm == SHARED_BASIS else store_by_blocks(work)


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
        InputError: the algorithm or an option is unknown, the variants share no blocks of this size, or the store holds
            some from another plan or validation.
        StoreError: another process is writing to the store, or it is damaged.
    """
    check_options(settings)
    layouts, digest = layouts_and_plan(variants, read_tensors, settings)
    for name, layout in layouts.items():
        check_has_blocks(name, layout)
    if store.exists() and (not store.is_dir() or any(store.iterdir())):
        digests: Mapping[str, str] = {PLAN: digest} | ({VALIDATION: validation} if validation else {})
        with Store(store) as opened:
            stored_outcomes(opened, layouts, digests)
