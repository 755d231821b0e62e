"""The plan of a deduplication: its settings, which variant may share with which, and what that costs.

Blocks: a variant takes them of its bases, which `fedpriv.models.dedup._base_selection` chooses by public metadata only.

Charges: a validation on private records that was interrupted has been paid for, and the one who starts another may
have seen how the first went. So the store keeps them, whatever became of each attempt, and a variant's epsilon counts
all attempts at it, also those of before it was removed from the store.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fedpriv.errors import InputError, StoreError
from fedpriv.files import replace_file, sync_folder
from fedpriv.models.dedup import _base_selection
from fedpriv.models.dedup._in_order import check_whole
from fedpriv.models.dedup.algorithms import ALGORITHMS, LOSSLESS, METHODS
from fedpriv.models.dedup.distance import METRICS, TILE
from fedpriv.models.dedup.saliency import AGGREGATIONS
from fedpriv.models.variants.composition import Guarantee, PublicationCost, publication_cost, smallest_deltas
from fedpriv.models.variants.folders import Described
from fedpriv.models.variants.store import CHARGES_FILE
from fedpriv.privacy.accounting import events
from fedpriv.privacy.accounting.events import Event

Acceptance = Literal["proof", "empirical"]
"""Ways to accept a variant on public records: a proof, or the paper's rule, which proves nothing."""

_CHARGES_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class DedupSettings:
    """The settings of a deduplication.

    Attributes:
        block_size: values in a block, >= 1.
        metric: used to find the nearest base block of each block.
        max_distance: of metadata within a cluster of variants, whose bases are chosen among themselves first; 2 makes
            one cluster of all, whatever their data, tags and architectures.
        acceptance: of public validation.
        cutoff: of private validation: the failures after which a search by Algorithm 5 ends; None for a proof.

    Raises:
        InputError: a name or an option is unknown, or the algorithm does not take an option's value.
    """

    block_size: int = 1024
    algorithm: str = "drd"
    options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "l2"
    metric: str = "l2"
    strategy: _base_selection.Strategy = "single"
    fairness: _base_selection.Fairness = "bounds"
    max_distance: float = _base_selection.MAX_DISTANCE
    acceptance: Acceptance = "proof"
    cutoff: int | None = None

    def __post_init__(self) -> None:
        if self.cutoff is not None:
            check_whole("cutoff", self.cutoff, 1)
        known = {"acceptance": get_args(Acceptance), "aggregation": AGGREGATIONS, "metric": METRICS}
        for name, values in ({"algorithm": METHODS} | known).items():
            if (given := getattr(self, name)) not in values:
                raise InputError(f"{name} = {given!r}: known are {', '.join(values)}")
        if self.algorithm == LOSSLESS:
            if self.options:
                raise InputError(f"option = {min(self.options)!r}: {LOSSLESS} has none")
            return
        search = ALGORITHMS[self.algorithm]
        parameters = inspect.signature(search).parameters
        options = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
        if odd := sorted(set(self.options) - set(options)):
            raise InputError(f"option = {odd[0]!r}: {self.algorithm} knows {', '.join(options)}")
        search(0, lambda positions: False, **self.options)  # a search of no blocks checks its options


KnownUtility = tuple[float | None, float]
"""The utility of a variant on its records, None counting as 0; and its standard error, within which all are alike."""


def candidate(variant: Described, utilities: Mapping[str, KnownUtility] | None = None) -> _base_selection.Candidate:
    """The variant as base selection needs it; without known utilities, with that which it states."""
    guarantee = variant.guarantee()
    utility, error = (utilities or {}).get(variant.name, (variant.utility, 0.0))
    return _base_selection.Candidate(
        name=variant.name,
        architecture=variant.architecture,
        data_sets=variant.history.data_sets,
        epsilon=guarantee.epsilon,
        delta=guarantee.delta,
        utility=utility or 0.0,
        utility_error=error,
        epsilon_bound=variant.epsilon_bound,
        utility_bound=variant.utility_bound,
        tags=variant.tags,
    )


def plan(
    variants: Sequence[Described],
    settings: DedupSettings,
    attempts: Mapping[str, Sequence[ValidationCharge]] | None = None,
    utilities: Mapping[str, KnownUtility] | None = None,
    stored: Mapping[str, bool] | None = None,
) -> _base_selection.Selection:
    """Plan who may take blocks of whom, by their joint cost; no weights are read.

    The cost of a target with a base is the `publication_cost` of both, by the tightest composition that holds. Where
    variants share releases, `multi` takes no more bases than are worthwhile.

    Args:
        attempts: {variant: what validating it once is charged}, for those whose validation records are private.
        utilities: {variant: what is known of its utility}; None for what each states.
        stored: {variant that a store holds already: whether it is whole, and may be a base}.

    Raises:
        ValueError: two variants have one name, or one upload has two different events.
    """
    known = {variant.name: variant for variant in variants}

    def cost(target: _base_selection.Candidate, bases: Sequence[_base_selection.Candidate]) -> Guarantee:
        # Under `cross` a base may itself be a target, and then its own validation influenced its blocks.
        validated = () if not bases else (target, *bases) if settings.strategy == "cross" else (target,)
        charges = [charge for each in validated for charge in (attempts or {}).get(each.name, ())]
        return cost_of([known[each.name] for each in (target, *bases)], charges).guarantee

    return _base_selection.select_bases(
        [candidate(variant, utilities) for variant in variants],
        cost,
        strategy=settings.strategy,
        fairness=settings.fairness,
        max_distance=settings.max_distance,
        most_bases=_base_selection.worthwhile_bases if _share_releases(variants) else None,
        stored=stored or {},
    )


def search_memory(target: int, bases: int, block_size: int) -> dict[str, int]:
    """The peak memory of one target's search, without the evaluator's model and records; and as it was published.

    With T bytes of the target and B of its bases it is the largest of 3 T (own blocks, substitutes and a form to be
    validated; or own blocks, saliency and its absolute values), T + 2 B (bases as read and in blocks) and T + B + a
    tile of distances. Padding is not counted.

    Args:
        target: bytes of its float32 tensors.
        bases: the same of all its bases.

    Source: Guan et al. 2025, section 6: a base and one block, since blocks are replaced one by one.
    """
    pairs = math.prod(min(TILE, -(-size // (4 * block_size))) for size in (target, bases))
    most = max(3 * target, target + 2 * bases, target + bases + 48 * pairs)
    return {"memory_bytes": most, "memory_bytes_published": bases + 4 * block_size}


def _share_releases(variants: Sequence[Described]) -> bool:
    """Whether two variants descend from one upload: then bases cost hardly any epsilon, and bounds end no list."""
    ancestors = [variant.history.ancestors or frozenset() for variant in variants]
    return len(frozenset().union(*ancestors)) < sum(map(len, ancestors))


def cost_of(consulted: Sequence[Described], charges: Iterable[ValidationCharge] = ()) -> PublicationCost:
    """The cost of publishing anything computed from these variants and from answers that were charged."""
    stated = [(id_, delta) for variant in consulted for id_, delta in variant.deltas.items()]
    extra: dict[str, list[Event]] = {}
    for charge in charges:
        extra.setdefault(charge.data_set, []).append(charge.event)
        stated.append((charge.data_set, charge.delta))
    histories = [variant.history for variant in consulted]
    return publication_cost(histories, smallest_deltas(stated), extra=extra)


@dataclass(frozen=True, kw_only=True)
class ValidationCharge:
    """One event that private records were charged for one variant, and the delta of their data set's epsilon."""

    name: str
    data_set: str
    delta: float
    event: Event


def read_charges(store: Path) -> list[ValidationCharge]:
    """All charges for variants of the store, in the order of their making; StoreError if their file is damaged."""
    path = store / CHARGES_FILE
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != _CHARGES_VERSION:
            raise ValueError(f"version {content['version']}: this fedpriv reads version {_CHARGES_VERSION}")
        return [
            ValidationCharge(**{**values, "event": events.from_json(values["event"])}) for values in content["charges"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: not a list of charges ({error}); use another store") from None


def add_charges(store: Path, charges: Iterable[ValidationCharge]) -> None:
    """Add charges to those of a store that is open for writing, durably; StoreError if their file is damaged."""
    known = [*read_charges(store), *charges]
    rows = [{**asdict(charge), "event": events.to_json(charge.event)} for charge in known]
    replace_file(store / CHARGES_FILE, json.dumps({"version": _CHARGES_VERSION, "charges": rows}).encode())
    sync_folder(store / CHARGES_FILE)
