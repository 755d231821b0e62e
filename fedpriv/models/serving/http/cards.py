"""The variants of a server as clients see them: the names that it answers to, who may use which, and what they cost.

Costs come from each variant's `variant.json`, a store's manifests, and the summary of the run that they belong to.
Epsilons hold on the `local` view, where every upload counts in full, as the coordinator saw it; of a run of secure sums
on the view that its budget or target is on, `aggregate`.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpriv.errors import InputError, StoreError
from fedpriv.models.serving.http.refusals import unknown_model
from fedpriv.models.serving.http.tokens import Token
from fedpriv.models.serving.requests import BASE
from fedpriv.models.variants import Manifest, folders, is_store
from fedpriv.models.variants.blocks import accuracy_after, perplexity_after, unproven, utilities
from fedpriv.models.variants.composition import (
    Guarantee,
    History,
    events_on,
    publication_cost,
    smallest_deltas,
)
from fedpriv.models.variants.folders import Described
from fedpriv.models.variants.store import Store
from fedpriv.privacy.accounting.law import Unit
from fedpriv.privacy.accounting.risk import Risk, risk_of_person, risks_of
from fedpriv.privacy.ledger.statement import adjacency_of
from fedpriv.runs import files
from fedpriv.texts import risk_in_words

if TYPE_CHECKING:
    from fedpriv.models.serving.scheduler import Scheduler


_RUN_KEYS = (
    *("run_id", "noise_source", "ledger_head", "unit", "privacy_view", "aggregate_objections"),
    *("epsilon_local_max", "epsilon_aggregate_max", "delta_max", "mu", "mu_regret", "advantage", "tpr_at_fpr"),
)

PUBLIC_BASE: Mapping[str, Any] = {
    "is_base": True,
    "note": "the public base model: no holder's record went into it, and reading it costs nobody anything",
}
"""The card of the base; it has no epsilon, since there is nobody whom one would protect."""

_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """A variant as its store describes it.

    Attributes:
        stated: what it cost, with whatever was spent on validation; None if the store does not say.
        accuracy, perplexity: on the validation records; None of what is not measured, or if the records are private.
        unproven: how its loss was accepted without a proof, in words; empty for a proof.
        is_private: validation was itself a release, which no upload tells of.
        is_unknown: nothing says what it was computed from.
    """

    bases: tuple[str, ...]
    stated: Guarantee | None
    accuracy: float | None
    perplexity: float | None
    unproven: str
    is_private: bool
    is_unknown: bool


class Cards:
    """The cards of the variants in a run's folder, a folder of variants, or a store.

    Nothing is read before it is asked for: a description lists every upload behind a variant. An epsilon may take
    seconds, and is kept. May be used by one thread at a time.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._described = lru_cache(maxsize=None)(self._read_described)
        self._cost = lru_cache(maxsize=1024)(self._compute_cost)

    def card(self, name: str) -> dict[str, Any]:
        """The cost and the ancestors of one variant.

        `epsilon` is "inf" where it is infinite or nothing is known, and `note` says which. `bases` holds names of other
        variants, which not everyone may see.
        """
        described, stored = self._described(name), self._stored.get(name)
        accuracy = stored.accuracy if stored and stored.accuracy is not None else described and described.utility
        consulted = self._consulted([name])
        ancestors = _ancestors([each.history for each in map(self._described, consulted) if each])
        return {
            **self.together([name]),
            "accuracy": accuracy,
            "perplexity": _written(stored.perplexity) if stored else None,
            "unproven": stored.unproven if stored else "",
            "ancestors": {**ancestors, "bases": consulted[1:]},
            "run": {key: _written(value) for key, value in self._run.items()},
        }

    def together(self, names: Iterable[str]) -> dict[str, Any]:
        """The cost of reading all of these variants: each upload behind them counts once where all are known."""
        return dict(self._cost(tuple(sorted(set(names)))))

    def _compute_cost(self, names: tuple[str, ...]) -> Mapping[str, Any]:
        consulted = self._consulted(names)
        described = [each for each in map(self._described, consulted) if each]
        stated = [stored.stated if (stored := self._stored.get(name)) else None for name in names]
        by_store = _sum([each for each in stated if each]) if all(stated) else None
        # Neither what private validation released nor what a damaged manifest names is known from uploads.
        told = [self._stored[name] for name in consulted if name in self._stored]
        hidden = any(stored is None or stored.is_private for stored in told)
        is_unknown = any(d.history.is_unknown for d in described) or any(s.is_unknown for s in told if s)
        is_known = len(described) == len(consulted) and not hidden
        units = {event.unit for each in described for event in _events(each.history)}
        note, method, guarantee, risk = "", "basic", by_store, None
        if is_known and len(units) <= 1:
            cost, risk = publication_cost(*_united(described)), _risk(described)
            known = cost.guarantee
            if by_store is None or known.epsilon <= by_store.epsilon:
                guarantee = known
                method = "accountant" if cost.refused else "provenance"
        view = "local"
        if guarantee and is_known and self._is_of_sums(described):
            summed = Guarantee(epsilon=self._run["epsilon_aggregate_max"], delta=self._run["delta_max"])
            if summed.epsilon < guarantee.epsilon:  # of an early round the local figure may be less, and it says more
                guarantee, method, view = summed, "run", "aggregate"
        if len(units) > 1:
            note = "these variants protect different units, whose guarantees have no common epsilon"
        elif guarantee is None or is_unknown:
            note = "nothing says what went into it: take it as not private"
        elif not math.isfinite(guarantee.epsilon):
            note = "no noise, or too little: this protects nobody"
        elif self._run.get("noise_source") not in (None, "secure"):
            note = "the noise was seeded, so that the run can be repeated: this protects nobody"
        unit: Unit = next(iter(units), "record")
        # A sum of stated epsilons does not say what an attacker finds; without a guarantee it is everybody.
        risk = Risk.none(unit) if note else risk
        figures = risk.values if risk else dict.fromkeys(Risk.none().values)
        if view == "aggregate" and not note:
            figures = {key: self._run.get(key, value) for key, value in figures.items()}
        return {
            "epsilon": _written(guarantee.epsilon if guarantee else math.inf),
            "delta": guarantee.delta if guarantee else None,
            **{key: _written(value) for key, value in figures.items()},
            "unit": unit,
            "risk_in_words": " ".join(risk_in_words(figures, guarantee.delta if guarantee else 0.0)) if risk else None,
            "adjacency": adjacency_of(unit, _holders(described)),
            "view": view,
            "method": method,
            "is_guarantee": not note and all(e.is_guarantee for d in described for e in _events(d.history)),
            "note": note,
        }

    def _is_of_sums(self, described: list[Described]) -> bool:
        """Whether all that went into these variants is what sums of the run showed, so that its summary covers them."""
        run = self._run
        holds = run.get("privacy_view") == "aggregate" and run.get("aggregate_objections") == []
        known = [each.history.ancestors for each in described]
        if not holds or run.get("epsilon_aggregate_max") is None:
            return False
        return all(uploads is not None and {each.run for each in uploads} <= {run.get("run_id")} for uploads in known)

    def _consulted(self, names: Iterable[str]) -> list[str]:
        """The variants and all whose blocks they may hold, directly or indirectly, as the store says if it has them."""
        found: dict[str, None] = dict.fromkeys(names)
        waiting = list(found)
        while waiting:
            stored = self._stored.get(waiting.pop(0))
            further = [base for base in (stored.bases if stored else ()) if base not in found]
            found |= dict.fromkeys(further)
            waiting += further
        return list(found)

    def _read_described(self, name: str) -> Described | None:
        """The description next to the variant, or in the run that the store belongs to; None if it says nothing."""
        for folder in (self._source / files.VARIANTS, self._source, self._source.absolute().parent / files.VARIANTS):
            if (folder / name / folders.FILE).is_file():
                try:
                    return folders.read(folder / name)
                except InputError:
                    return None
        return None

    @cached_property
    def _stored(self) -> dict[str, _Stored | None]:
        """{name: what the store says}; None where its manifest cannot be read: nobody knows whose blocks it holds."""
        # The source, or within the run that it is.
        folder = self._source if is_store(self._source) else self._source / files.STORE
        if not is_store(folder):
            return {}
        found: dict[str, _Stored | None] = {}
        with Store(folder, read_only=True) as store:
            for name in store.names:
                try:
                    found[name] = _stored(store.manifest(name))
                except (StoreError, KeyError, TypeError):
                    found[name] = None  # The engine refuses it; the others have their cards.
        return found

    @cached_property
    def _run(self) -> dict[str, Any]:
        """The run's summary of all of its releases; empty without one."""
        for folder in (self._source, self._source.absolute().parent):
            if (folder / files.SUMMARY).is_file():
                summary = files.read_values(folder / files.SUMMARY)
                return {key: summary[key] for key in _RUN_KEYS if key in summary}
        return {}


def _stored(manifest: Manifest) -> _Stored:
    privacy, outcome = manifest.privacy, manifest.outcome
    stated = None
    if "epsilon" in privacy and "delta" in privacy:
        stated = Guarantee(epsilon=float(privacy["epsilon"]), delta=float(privacy["delta"]))
    return _Stored(
        bases=manifest.bases,
        stated=stated,
        accuracy=accuracy_after(outcome),
        perplexity=perplexity_after(outcome),
        unproven=unproven(outcome.get("acceptance")),
        is_private=bool(manifest.bases and outcome) and utilities(outcome) is None,
        is_unknown=outcome.get("origin_known") is False,
    )


def _united(described: list[Described]) -> tuple[list[History], dict[str, float]]:
    """The histories to be composed, and {data set: the smallest delta of any}."""
    deltas = smallest_deltas(stated for each in described for stated in each.deltas.items())
    histories = [each.history for each in described]
    if all(history.ancestors is not None for history in histories):
        uploads = frozenset().union(*(history.ancestors or () for history in histories))
        histories = [History(name="together", ancestors=uploads, holders=_holders(described))]
    return histories, deltas


def _risk(described: list[Described]) -> Risk | None:
    """The largest risk of anyone protected in a data set behind them; None if there is none."""
    histories, deltas = _united(described)
    ids = frozenset().union(*(history.data_sets for history in histories))
    events = {id_: events_on(id_, histories) for id_ in ids}
    if (holders := _holders(described)) > 1 and ids:
        return risk_of_person(events, holders, min(deltas[id_] for id_ in ids))
    risks = risks_of({id_: (events[id_], deltas[id_]) for id_ in sorted(ids)})
    return Risk.worst(risks.values()) if risks else None


def _holders(described: Iterable[Described]) -> int:
    """In how many data sets one person may have records."""
    return max((each.history.holders for each in described), default=1)


def _sum(stated: list[Guarantee]) -> Guarantee:
    """Basic composition of models whose data may overlap."""
    delta = min(1.0, math.fsum(each.delta for each in stated))
    return Guarantee(epsilon=math.fsum(each.epsilon for each in stated), delta=delta)


def _events(history: History) -> list[Any]:
    return history.events_on(history.data_sets)


def _ancestors(histories: list[History]) -> dict[str, Any]:
    """The number of uploads, by data sets and runs, that went into it; null where they are not known."""
    known = [history.ancestors for history in histories]
    if not known or any(each is None for each in known):
        return {"num_uploads": None, "uploads_of_data_sets": None, "runs": None}
    uploads = frozenset().union(*(each or () for each in known))
    return {
        "num_uploads": len(uploads),
        "uploads_of_data_sets": dict(sorted(Counter(upload.data_set for upload in uploads).items())),
        "runs": sorted({upload.run for upload in uploads}),
    }


def _written(value: Any) -> Any:
    """The value as JSON has it: an infinity as a word, since null is below every number."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf"
    return value


def check_aliases(aliases: Mapping[str, str], names: Collection[str]) -> None:
    """Refuse an alias that is malformed, is a variant's name, or stands for none of them, with an InputError."""
    for alias, variant in aliases.items():
        if not _ALIAS.fullmatch(alias):
            raise InputError(f"alias = {alias!r}: must be letters, digits, '.', '_' and '-', at most 64")
        if alias in names:
            raise InputError(f"alias = {alias!r}: is the name of a variant; give another")
        if variant not in names:
            raise InputError(f"alias = {f'{alias}={variant}'!r}: there is no variant {variant!r}")


class Catalogue:
    """The names of one server.

    A token may use an alias if it may use the variant that the alias stands for: another name opens nothing.

    Args:
        aliases: {alias: the variant that it stands for}.

    Raises:
        InputError: an alias is malformed or a variant's name, or stands for none of the variants.
    """

    def __init__(self, serving: Scheduler, aliases: Mapping[str, str]) -> None:
        self._serving, self._aliases = serving, dict(aliases)
        self._created = int(time.time())
        check_aliases(aliases, serving.names)

    def resolve(self, token: Token, name: str) -> str:
        """The variant that a name stands for; one RefusalError if there is none, and if the token may not use it."""
        variant = self._aliases.get(name, name)
        if not self.may(token, variant):
            raise unknown_model(name)
        return variant

    def may(self, token: Token, variant: str) -> bool:
        """Whether a variant is loaded and the token may use it."""
        return token.allows(variant) and variant in self._serving.names

    def allowed(self, token: Token) -> list[str]:
        """The variants that the token may use, in order."""
        return [name for name in self._serving.names if token.allows(name)]

    def entries(self, token: Token) -> list[dict[str, Any]]:
        """These variants and their aliases, as OpenAI's API lists models."""
        aliases = [alias for alias, variant in self._aliases.items() if self.may(token, variant)]
        return [self.entry(name) for name in (*self.allowed(token), *aliases)]

    def entry(self, name: str) -> dict[str, Any]:
        """A variant or an alias, as OpenAI's API lists models."""
        found = {"id": name, "object": "model", "created": self._created, "owned_by": "fedpriv"}
        if self.is_base(name):
            found["is_base"] = True
        if name in self._aliases:
            found["alias_of"] = self._aliases[name]
        return found

    def is_base(self, name: str) -> bool:
        """Whether this is the base itself."""
        return name == BASE and self._serving.has_base
