"""Going on with an interrupted deduplication: what the store holds counts only if it was made in the same way.

Every manifest keeps two digests: one of the plan, which is known before any model is loaded, and one of how its
variants were validated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fedpriv.accounting import events
from fedpriv.dedup.blocks import Layout, layout_of
from fedpriv.dedup.planning import Settings
from fedpriv.dedup.store import Store
from fedpriv.dedup.validation import PrivateValidation
from fedpriv.dedup.variants import Described, to_json
from fedpriv.dedup.work import Evaluator, Evaluators, Tensors
from fedpriv.errors import InputError

PLAN, VALIDATION = "plan", "validation"
"""Where a manifest's provenance has the two digests."""


def layouts_and_plan(
    variants: Sequence[Described], read_tensors: Callable[[str], Tensors], settings: Settings
) -> tuple[dict[str, Layout], str]:
    """The layout of each variant, and the digest of the plan: settings, descriptions and values. Reads all tensors."""
    layouts, values = {}, {}
    for variant in variants:
        tensors = read_tensors(variant.name)
        layouts[variant.name] = layout_of(tensors, settings.block_size)
        values[variant.name] = _digest_of_values(tensors)
    described = sorted((to_json(variant) for variant in variants), key=lambda fields: fields["name"])
    return layouts, _digest({"settings": asdict(settings), "variants": described, "values": values})


def check_has_blocks(name: str, layout: Layout) -> None:
    """Refuse a variant whose tensors are all smaller than a block, so that it can share nothing.

    Raises:
        InputError: with the largest size that would do.
    """
    if not layout.num_blocks:
        largest = max((each.size for each in layout.tensors if each.dtype == layout.dtype), default=0)
        raise InputError(
            f"block_size = {layout.block_size}: no {layout.dtype} tensor of {name} has so many values; "
            f"its largest one has {largest}"
        )


def validation_digest(evaluators: Evaluators, private: PrivateValidation | None, evaluation: str) -> str:
    """The digest of how variants are validated.

    Args:
        evaluators: {variant: its evaluator}.
        private: how private records are queried.
        evaluation: what else decides a validation, such as the name of the evaluator.
    """
    fields = {name: _of_evaluator(each, private) for name, each in evaluators.items()}
    return _digest({"evaluators": fields, "evaluation": evaluation})


def _of_evaluator(evaluator: Evaluator, private: PrivateValidation | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"num_records": evaluator.num_records}
    if private and (records := evaluator.private):
        saliency = events.to_json(records.saliency) if records.saliency else None
        fields |= {"data_set": records.data_set, "delta": records.delta, "saliency": saliency}
        fields |= {"epsilon": private.epsilon, "cutoff": private.cutoff, "noise": private.source.name}
    return fields


def stored_outcomes(
    store: Store, layouts: Mapping[str, Layout], digests: Mapping[str, str]
) -> dict[str, Mapping[str, Any]]:
    """{variant that an earlier attempt stored: its outcome}.

    Args:
        store: of that attempt, or a new one.
        layouts: of all variants of this one.
        digests: of this attempt, as far as they are known, under their names in a provenance.

    Raises:
        InputError: one of the variants was stored in another way, or the store has other blocks.
    """
    for name, layout in layouts.items():
        store.check_blocks(name, layout)
    found = {name: store.manifest(name).provenance for name in store.names if name in layouts}
    for name, provenance in found.items():
        if not digests.items() <= provenance.items():
            raise InputError(
                f"store = {store.path}: holds {name!r} from other settings, variants or validation; "
                f"repeat these to go on, `fedpriv dedup remove` it, or use another store"
            )
    return {name: provenance["outcome"] for name, provenance in found.items()}


def _digest_of_values(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(json.dumps([name, str(tensors[name].dtype), tensors[name].shape]).encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else repr(value)
