"""Variants stored without loss, each as what differs from one of those of its architecture."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fedpriv.models.dedup.planning import cost_of
from fedpriv.models.dedup.work import Outcome, Work
from fedpriv.models.variants.blocks import BlockLayout
from fedpriv.models.variants.lossless import Reference, Values, best_reference, sample

log = logging.getLogger(__name__)

STORED = "it is stored without loss"
"""Why no block of a variant was replaced"""

# Among which a reference is chosen, and by which: the choice takes a compression for each pair.
_CANDIDATES = 16


def store_without_loss(work: Work) -> list[Outcome]:
    """Store all variants of a deduplication bit for bit, so that none of them is validated or costs more than before.

    Returns:
        One for each variant, architecture after architecture.
    """
    groups: dict[BlockLayout, list[str]] = {}
    for name in sorted(work.variants):
        groups.setdefault(work.layouts[name], []).append(name)
    watch = work.watch({})
    for layout, names in groups.items():
        if not (waiting := [name for name in names if name not in work.stored]):
            continue
        chosen = _chosen(work, layout, names)
        reference = Reference.of(work.read_tensors(chosen), layout) if chosen else Reference.zeros(layout)
        for name in waiting:
            watch.begin(name)
            work.stored[name] = _store(work, layout, name, reference, chosen)
            watch.store(is_target=False)
    return [work.stored[name] for names in groups.values() for name in names]


def _store(work: Work, layout: BlockLayout, name: str, reference: Reference, chosen: str | None) -> Outcome:
    held = reference.pack(work.read_tensors(name))
    outcome = work.outcome(name, untouched=STORED, cost=cost_of([work.variants[name]], work.settings.accountant))
    records = outcome.as_records(reference=chosen, **work.digests)
    work.store.add(name, layout, reference, held, described=work.variants[name], **records)
    log.info("%s: %.3g of its bytes", name, sum(part.nbytes for part in held.values()) / max(1, layout.num_bytes))
    return outcome


def _chosen(work: Work, layout: BlockLayout, names: Sequence[str]) -> str | None:
    """The variant from which all differ least; None where zeros take fewer bytes. The same at every attempt."""
    candidates = [names[len(names) * index // _CANDIDATES] for index in range(_CANDIDATES)]
    candidates = list(dict.fromkeys(candidates)) if len(names) > _CANDIDATES else list(names)
    samples: list[Values] = [sample(work.read_tensors(name), layout) for name in candidates]
    best = best_reference(samples, len(names))
    return None if best is None else candidates[best]
