"""Deduplication of variants: choose who may share with whom, and store what validation accepts.

An interrupted deduplication goes on if the store was filled in the same way: every manifest keeps two digests, one of
the plan, which is known before any model is loaded, and one of how its variants were validated.
"""

import hashlib
import itertools
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedpriv.errors import InputError
from fedpriv.files import is_free
from fedpriv.models.dedup._blocks import searchers as searchers
from fedpriv.models.dedup._blocks import store_by_blocks
from fedpriv.models.dedup.algorithms import LOSSLESS
from fedpriv.models.dedup.planning import DedupSettings, cost_of
from fedpriv.models.dedup.validation import CONFIDENCE, Evaluator, PrivateQueries, Tensors
from fedpriv.models.dedup.work import Evaluators, Observer, Outcome, Work
from fedpriv.models.variants.blocks import BlockLayout, check_has_blocks, layout_of
from fedpriv.models.variants.folders import Described, to_json
from fedpriv.models.variants.lossless import Reference, best_reference, sample
from fedpriv.models.variants.store import Store
from fedpriv.privacy.accounting import events
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.entries import Charge, DataSet, Key
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.mechanisms.sources import SecureSource

# The way in which bounds are proven: its confidence, and a number that grows whenever the way is another.
_PROOF = (CONFIDENCE, 1)

PLAN, VALIDATION = "plan", "validation"
"""The keys of the two digests in a manifest's provenance."""

log = logging.getLogger(__name__)

STORED = "it is stored without loss"
"""Why no block of a variant was replaced"""

# Among which a reference is chosen, and by which: the choice takes a compression for each pair.
_CANDIDATES = 16


def deduplicate(
    variants: Sequence[Described],
    read_tensors: Callable[[str], Tensors],
    evaluators: Evaluators,
    store: Store,
    settings: DedupSettings,
    *,
    private: PrivateQueries | None = None,
    evaluation: str = "",
    observer: Observer | None = None,
    adding: bool = False,
    apart: Executor | None = None,
) -> list[Outcome]:
    """Store all variants; each takes as many blocks of others as validation accepts.

    Or all of them without loss, and then nothing is validated.

    Blocks are runs of values, whatever tensor they come from, so variants of different architectures may share them.

    Guarantee: a variant is restored, bit for bit, as its validator accepted it, or else as the original; its epsilon,
    private validation included, stays within its limit. Every base is stored before the variants that use it. Private
    records are charged for a variant before they are first used for it.

    An interrupted call can be repeated with the same arguments: what is stored stays, and the rest follows as if
    nothing had happened, except that private records are charged once more for the target that was under way. Its
    epsilon then counts both charges; if its limit has no room for them, it stays as it is.

    Args:
        variants: to be stored; those that are in the store already were stored by a call with the same arguments.
        evaluators: one for each variant; see `Evaluator`. Without loss they measure utilities that are not known, and
            may be missing.
        store: open for writing.
        private: how private validation records are queried; required if, and only if, an evaluator's are private.
        evaluation: what else decides a validation, such as the evaluator's name and seed; compared with that of
            variants that are stored already.
        adding: the store holds others, which stay as they are; those of them that took no blocks may be bases.
        apart: `searchers` that search for targets on public records side by side, with the same result, bit for bit.

    Returns:
        One for each variant: first those that stay as they are, then the others, each after its bases.

    Raises:
        InputError: a variant has no evaluator or cannot share with its bases, or a name is taken by a variant that was
            stored in another way.
        StoreError: the store cannot be written.
        ValueError: `private` is given without private records, or missing for private records.
    """
    names = [variant.name for variant in variants]
    missing = [name for name in names if name not in evaluators]
    if missing and settings.algorithm != LOSSLESS:
        raise InputError(f"evaluators: none for variant {missing[0]!r}; each variant needs one")
    own = {name: evaluators[name] for name in names if name in evaluators}
    if (private is None) != all(each.private is None for each in own.values()):
        raise ValueError("private: must be given where an evaluator's records are private, and only there")
    if hidden := [name for name, each in own.items() if each.private is not None and each.utility != "accuracy"]:
        raise InputError(f"evaluators: that of {hidden[0]!r} has likelihoods of private records; give accuracy")
    if private and settings.acceptance != "proof":
        raise InputError(
            f"acceptance = {settings.acceptance!r}: would answer on private records without noise; leave it out for a "
            "proof, or give -o cutoff=3 for the Sparse Vector Technique in a search"
        )
    if apart and (private or adding):
        raise InputError("workers: private records answer one process, and targets that are added are searched by one")
    if settings.cutoff and not private:
        raise InputError("cutoff: ends a search on private records; the evaluator's are public")
    layouts, plan = _layouts_and_plan(variants, read_tensors, settings)
    digests = {PLAN: plan, VALIDATION: validation_digest(own, private, evaluation)}
    others = _others(store, names) if adding else {}
    work = Work(
        variants={variant.name: variant for variant in variants} | others,
        layouts=layouts | {name: store.manifest(name).layout for name in others},
        read_tensors=lambda name: store.tensors(name) if name in others else read_tensors(name),
        evaluators=own,
        store=store,
        settings=settings,
        private=private,
        digests=digests,
        stored=_stored(store, layouts, digests),
        others={name: not store.manifest(name).bases and store.manifest(name).basis is None for name in others},
        observer=observer,
    ).with_measured_utilities()
    return store_without_loss(work) if settings.algorithm == LOSSLESS else store_by_blocks(work, apart)


def rebase(
    store: Store,
    names: Sequence[str],
    variants: Sequence[Described],
    read_tensors: Callable[[str], Tensors],
    evaluators: Evaluators,
    settings: DedupSettings,
    *,
    evaluation: str = "",
) -> list[Outcome]:
    """Remove variants; those with their blocks look for other bases, if that takes fewer bytes, and are returned.

    The second strategy is tried in a copy of the store. If it wins and is interrupted, `deduplicate` adds what lacks.

    Args:
        variants: as they were before deduplication; those that are not among them keep blocks of a base.

    Raises:
        InputError: a name is not stored, or an evaluator's records are private, and would be charged for a trial.

    Source: Guan et al. 2025, section 6, "Model Addition/Removal".
    """
    if any(each.private is not None for each in evaluators.values()):
        raise InputError("evaluator: its records are private; remove the variants themselves, and add them again")
    users = [v for v in variants if v.name not in names and {*names} & {*store.sources(v.name)}]
    with TemporaryDirectory(dir=store.path.parent, prefix=".rebased-") as scratch:
        shutil.copytree(store.path, made := Path(scratch) / "made")
        with Store(made) as making:
            making.remove(*names, *(user.name for user in users))
            deduplicate(users, read_tensors, evaluators, making, settings, evaluation=evaluation, adding=True)
            making.compact()
            store.remove(*names)
            store.compact()
            if not users or store.bytes_stored <= making.bytes_stored:
                return []
    store.remove(*(user.name for user in users))
    return deduplicate(users, read_tensors, evaluators, store, settings, evaluation=evaluation, adding=True)


def _others(store: Store, names: Sequence[str]) -> dict[str, Described]:
    """{variant that is stored and was not given now: its description}, if it has one, which tells its cost."""
    found = {name: (store.describe(name), store.manifest(name)) for name in store.names if name not in names}
    return {
        name: replace(described, utility=manifest.outcome.get("utility_given"))
        for name, (described, manifest) in found.items()
        if described
    }


def check(
    variants: Sequence[Described],
    read_tensors: Callable[[str], Tensors],
    store: Path,
    settings: DedupSettings,
    *,
    validation: str | None = None,
) -> None:
    """Refuse what `deduplicate` would refuse, as far as it can be known before any model is loaded.

    Args:
        store: its folder, which may be missing.
        validation: the digest of how they are validated, if that is known; see `validation_digest`.

    Raises:
        InputError: the variants share no blocks of this size, or the store holds some from another plan or validation.
        StoreError: another process is writing to the store, or it is damaged.
    """
    layouts, digest = _layouts_and_plan(variants, read_tensors, settings)
    for name, layout in layouts.items() if settings.algorithm != LOSSLESS else ():
        check_has_blocks(name, layout)
    if not is_free(store):
        digests: Mapping[str, str] = {PLAN: digest} | ({VALIDATION: validation} if validation else {})
        with Store(store) as opened:
            _stored(opened, layouts, digests)


def _layouts_and_plan(
    variants: Sequence[Described], read_tensors: Callable[[str], Tensors], settings: DedupSettings
) -> tuple[dict[str, BlockLayout], str]:
    """The layout of each variant, and the digest of the plan: settings, descriptions and values. Reads all tensors."""
    layouts, values = {}, {}
    for variant in variants:
        tensors = read_tensors(variant.name)
        layouts[variant.name] = layout_of(tensors, settings.block_size)
        values[variant.name] = _digest_of_values(tensors)
    described = sorted((to_json(variant) for variant in variants), key=lambda fields: fields["name"])
    return layouts, _digest({"settings": asdict(settings), "variants": described, "values": values})


def validation_digest(evaluators: Evaluators, private: PrivateQueries | None, evaluation: str) -> str:
    """The digest of how variants are validated; `evaluation` is what else decides it, as the evaluator's name."""
    fields = {name: _of_evaluator(each, private) for name, each in evaluators.items()}
    return _digest({"evaluators": fields, "evaluation": evaluation})


def _of_evaluator(evaluator: Evaluator, private: PrivateQueries | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"num_records": evaluator.num_records, "utility": evaluator.utility, "proof": _PROOF}
    if private and (records := evaluator.private):
        saliency = events.to_json(records.saliency) if records.saliency else None
        fields |= {"data_set": records.data_set, "delta": records.delta, "saliency": saliency}
        fields |= {"epsilon": private.epsilon, "noise": private.source.name}
    return fields


def _stored(store: Store, layouts: Mapping[str, BlockLayout], digests: Mapping[str, str]) -> dict[str, Outcome]:
    """{variant that an earlier attempt stored: its outcome}; digests are those of this one that are known."""
    for name, layout in layouts.items():
        store.check_blocks(name, layout)
    found = {name: store.manifest(name).provenance for name in store.names if name in layouts}
    for name, provenance in found.items():
        if not digests.items() <= provenance.items():
            raise InputError(
                f"store = {store.path}: holds {name!r} from other settings, variants or validation; "
                f"repeat these to go on, `fedpriv dedup remove` it, or use another store"
            )
    return {name: Outcome.of(provenance["outcome"]) for name, provenance in found.items()}


def _digest_of_values(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(json.dumps([name, str(tensors[name].dtype), tensors[name].shape]).encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def _digest(values: Mapping[str, Any]) -> str:
    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else repr(value)

    return hashlib.sha256(json.dumps(values, sort_keys=True, default=plain).encode()).hexdigest()


def store_without_loss(work: Work) -> list[Outcome]:
    """Store all variants of a deduplication bit for bit, so that none is validated or costs more; by architecture."""
    groups: dict[BlockLayout, list[str]] = {}
    for name in sorted(work.variants):
        groups.setdefault(work.layouts[name], []).append(name)
    watch = work.watch()
    for layout, names in groups.items():
        if not (waiting := [name for name in names if name not in work.stored]):
            continue
        chosen = _chosen(work, layout, names)
        reference = Reference.of(work.read_tensors(chosen), layout) if chosen else Reference.zeros(layout)
        for name in waiting:
            watch.begin(name)
            work.stored[name] = _store(work, layout, name, reference, chosen)
            watch.store()
    return [work.stored[name] for names in groups.values() for name in names]


def _store(work: Work, layout: BlockLayout, name: str, reference: Reference, chosen: str | None) -> Outcome:
    held = reference.pack(work.read_tensors(name))
    outcome = work.outcome(name, untouched=STORED, cost=cost_of([work.variants[name]]))
    records = outcome.as_records(reference=chosen, **work.digests)
    work.store.add(name, layout, reference, held, described=work.variants[name], **records)
    log.info("%s: %.3g of its bytes", name, sum(part.nbytes for part in held.values()) / max(1, layout.num_bytes))
    return outcome


def _chosen(work: Work, layout: BlockLayout, names: Sequence[str]) -> str | None:
    """The variant from which all differ least; None where zeros take fewer bytes. The same at every attempt."""
    candidates = [names[len(names) * index // _CANDIDATES] for index in range(_CANDIDATES)]
    candidates = list(dict.fromkeys(candidates)) if len(names) > _CANDIDATES else list(names)
    best = best_reference([sample(work.read_tensors(name), layout) for name in candidates], len(names))
    return None if best is None else candidates[best]


@contextmanager
def private_queries(
    evaluators: Evaluators, epsilon: float | None, path: Path | None
) -> Iterator[PrivateQueries | None]:
    """How variants are validated on private records, each charged to the ledger; None if all records are public."""
    private_ones = {name: each for name, each in evaluators.items() if each.private is not None}
    if not private_ones:
        if epsilon is not None or path is not None:
            raise InputError("validation_epsilon, ledger: are for private records; the evaluator's are public")
        yield None
        return
    if epsilon is None or path is None or not path.exists():
        raise InputError(
            "evaluator: its records are private; give --validation-epsilon, and the --ledger that holds their data set"
        )
    source, run = SecureSource(), secrets.token_hex(16)
    with Ledger(path) as ledger:
        known = {name: _registered(ledger, each) for name, each in private_ones.items()}
        numbers = itertools.count(1)

        def charge(name: str, event: Event) -> None:
            request = hashlib.sha256(name.encode()).hexdigest()
            data_set = known[name]
            key = Key(run=run, client=data_set.client, round=next(numbers), request=request)
            release = Release(event=event, rho_bar=1.0)
            ledger.charge([Charge(key=key, data_set=data_set.id, release=release, noise_source=source.name)])

        try:
            private = PrivateQueries(epsilon=epsilon, charge=charge, source=source)
        except ValueError as error:
            raise InputError(str(error)) from None
        yield private


def _registered(ledger: Ledger, evaluator: Evaluator) -> DataSet:
    """The data set of an evaluator's private records, as the ledger has it."""
    id_ = evaluator.private.data_set if evaluator.private else None
    known = ledger.data_set(id_) if id_ else None
    if known is None or known.num_records != evaluator.num_records:
        raise InputError(f"data_set = {id_!r}: {ledger.path} has no such data set of {evaluator.num_records} records")
    return known
