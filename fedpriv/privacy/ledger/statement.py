"""A ledger for human readers: what every data set has spent, and one page that a privacy officer can sign.

For notebooks and scripts, the same as data frames and text. Nothing is stated unless the chain is found intact.
"""

from __future__ import annotations

import json
import math
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpriv.errors import InputError
from fedpriv.files import software
from fedpriv.privacy.accounting import filters
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.calibration import rounds_within
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.filters import CommittedPlans, Rule
from fedpriv.privacy.accounting.risk import Risk, risk_of
from fedpriv.privacy.accounting.views import PlannedView, least_readers, readers_label
from fedpriv.privacy.ledger import reader
from fedpriv.privacy.ledger.entries import COLUMNS, LATER, DataSet, Entry, LedgerConnection
from fedpriv.texts import counted, holder_label, printable, risk_in_figures, risk_in_words, what_is_counted

if TYPE_CHECKING:
    import pandas as pd

_TEXTS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ADJACENCY: dict[str, str] = _TEXTS["adjacency"]
ODOMETER: str = _TEXTS["odometer"]
_ASSUMED_OF_OTHERS: str = _TEXTS["assumed_of_others"]
_NEVER_COVERED: list[str] = _TEXTS["never_covered"]

# Of the page, and of its left column.
_COLUMNS, _LEFT = 80, 20

# More of them are not counted.
_MOST_ROUNDS = 100_000


def gaps(db: LedgerConnection) -> dict[str, list[dict[str, Any]]]:
    """The events after which a ledger may not tell all: `adopted` and `recovered`, each a list.

    At an adoption the operator alone vouches that no entry is missing: up to which entry, when and why. At a recovery
    charges were taken over since the ledger had been restored: when, how many and why.
    """

    def recovery(entry: Entry) -> tuple[str, str, str]:
        return entry.time, entry.data_set, json.loads(entry.note or "{}").get("reason", "")

    recovered = []
    for (time, data_set, reason), entries in groupby(db.recoveries(), recovery):
        known = [entry.event is not None for entry in entries]
        counts = {"releases": sum(known), "known_in_full": all(known)}
        recovered.append({"time": time, "data_set": data_set, "reason": reason, **counts})
    adopted = [{"up_to_entry": entry.number - 1, "time": entry.time, "reason": entry.note} for entry in db.adoptions()]
    return {"adopted": adopted, "recovered": recovered}


def gap_lines(*, adopted: Sequence[dict[str, Any]] = (), recovered: Sequence[dict[str, Any]] = ()) -> list[str]:
    """The gaps for a reader, one or two lines each."""
    lines = [
        f"NOT KNOWN TO BE COMPLETE up to entry {each['up_to_entry']}: the head was missing on {each['time'][:19]} UTC, "
        f"and only the operator's word says that no entry is lost: {each['reason']}"
        for each in adopted
    ]
    for each in recovered:
        when = f"{each['time'][:19]} UTC: data set {each['data_set'][:12]}"
        if each["releases"]:
            lines.append(
                f"RECOVERED on {when}: {each['releases']} releases that a restored copy of this ledger lacked were "
                f"charged again: {each['reason']}"
            )
        if not each["known_in_full"]:
            lines.append(
                f"NOT KNOWN IN FULL since {when}: there were more releases, of which nobody knows the cost; it is at "
                f"most the budget that the node kept, and nothing more is released: {each['reason']}"
            )
    return lines


def enforced(db: LedgerConnection, data_set: DataSet, epsilon: float, view: PlannedView) -> tuple[Rule, float]:
    """The rule that enforces the budget of a data set, and the share of it that is used, >= 0.

    Raises:
        ValueError: the ledger names a rule that this fedpriv does not know.
    """
    delta, history = data_set.delta_for_releases, db.releases(data_set.id)
    rule = filters.rule_in_force(db.bounds(data_set.id), epsilon, delta)
    return rule, rule.used([release.charged_on(view) for release in history], epsilon=epsilon, delta=delta)


def spending(
    db: LedgerConnection,
    *,
    names: Mapping[str, str] | None = None,
    budget_epsilon: float | None = None,
    view: PlannedView = "local",
) -> list[dict[str, Any]]:
    """The spending of each data set, in order of registration.

    `epsilon_aggregate` is what a budget on that view counts: there, an upload that the server saw costs what it does
    on the `local` one.

    Args:
        names: {id of a data set: its holder's name}, where it is known.
        budget_epsilon: if given, `remaining_rounds` is added: the rounds like the last one that this budget still
            allows on the view.
        view: of the budget and of the risk. With a filter, the risk is that of all that the largest budget lets pass
            which the ledger says was in force. An older ledger says of none: then this budget counts, or without it
            what was spent, by the filter's own measure.
    """
    known = names or {}
    return [_spending(db, each, known.get(each.id), budget_epsilon, view) for each in db.data_sets()]


def _spending(
    db: LedgerConnection, data_set: DataSet, name: str | None, budget_epsilon: float | None, view: PlannedView
) -> dict[str, Any]:
    releases, runs = db.releases(data_set.id), db.runs(data_set.id)
    units = {release.event.unit for release in releases}
    if len(units) > 1:
        raise InputError(f"data set {data_set.id}: has releases of different units, which have no common epsilon")
    local = [release.event for release in releases]
    # A node's own ledger knows no other client, so it has the `local` view only.
    has_rho_view = any(release.rho_bar < 1 for release in releases)
    costs = {"local": epsilon_of(local, data_set.delta)}
    if has_rho_view:
        costs["rho"] = epsilon_of([release.seen_by("rho") for release in releases], data_set.delta)
    is_summed = any(release.aggregate_scale is not None for release in releases)
    charged: dict[PlannedView, list[Event]] = {
        "local": local,
        "aggregate": [release.charged_on("aggregate") for release in releases],
    }
    costs["aggregate"] = epsilon_of(charged["aggregate"], data_set.delta) if is_summed else costs["local"]
    # More was released than anyone can list, so no sum of what is listed may be stated.
    is_known = db.is_known_in_full(data_set.id)
    epsilons = {name: cost.epsilon if is_known else math.inf for name, cost in costs.items()}
    result: dict[str, Any] = {
        "client": data_set.client,
        "name": name,
        "data_set": data_set.id,
        "num_records": data_set.num_records,
        "delta": data_set.delta,
        "runs": len(runs),
        "rounds": sum(run.rounds for run in runs),
        "epsilon_local": epsilons["local"],
        "epsilon_rho": epsilons.get("rho"),
        "epsilon_aggregate": epsilons["aggregate"],
        "num_readers": least_readers(releases),
        "upper_bound_only": any(cost.upper_bound_only for cost in costs.values()),
        "unit": next(iter(units), "record"),
        "is_guarantee": all(cost.is_guarantee for cost in costs.values()),
        "caveats": sorted({event.caveat for event in local if event.caveat and event.sampling_probability > 0}),
        "noise_source": ",".join(sorted({source for run in runs for source in run.noise_source.split(",")})),
    }
    notes = db.bounds(data_set.id)
    rule, in_force = filters.rule_of(notes), filters.largest_budget(notes, view) or (budget_epsilon if runs else None)
    upto = "" if in_force is None else f" for epsilon {in_force:g}, the largest budget in force so far"
    result["enforced_by"] = None if rule is None else f"{rule}{upto}"
    if not is_known:
        risk = Risk.none(result["unit"])
    elif rule is None:
        risk = risk_of(charged[view], data_set.delta)
    else:
        risk = rule.risk(charged[view], epsilon=in_force, delta=data_set.delta_for_releases)
    result |= {"view": view, **risk.values}
    if budget_epsilon is not None and (rounds := remaining_rounds(db, data_set, budget_epsilon, view)) is not None:
        result["remaining_rounds"] = rounds
    return result


def epsilon_spent(db: LedgerConnection, data_set: DataSet, view: PlannedView) -> float:
    """The epsilon of all releases of a data set on a view, as `spending` has it; infinite if not all are known."""
    if not db.is_known_in_full(data_set.id):
        return math.inf
    releases = db.releases(data_set.id)
    return epsilon_of([release.charged_on(view) for release in releases], data_set.delta).epsilon


def remaining_rounds(db: LedgerConnection, data_set: DataSet, epsilon: float, view: PlannedView) -> int | None:
    """The rounds like the last one that a budget of a data set still allows; None before the first."""
    in_order = [release.charged_on(view) for release in db.releases_in_order(data_set.id)]
    if not in_order:
        return None
    if not db.is_known_in_full(data_set.id):
        return 0
    event, before = in_order[-1], [release.charged_on(view) for release in db.releases(data_set.id)]
    rule = filters.rule_of(db.bounds(data_set.id))
    if rule is None:
        return rounds_within(epsilon, data_set.delta, each_round=event, spent_before=before, at_most=_MOST_ROUNDS)
    if isinstance(rule, CommittedPlans):
        before = in_order
    rounds = rule.remaining(before, event, epsilon=epsilon, delta=data_set.delta_for_releases)
    return int(min(rounds, _MOST_ROUNDS))


def statement(
    db: LedgerConnection,
    path: Path,
    client: str | None,
    *,
    names: Mapping[str, str] | None = None,
    view: PlannedView | None = None,
    since: str = "",
    year: str = "",
    changes: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """A privacy statement for each data set of a client: what `render` formats and `--json` prints.

    Args:
        client, names: as for `of_client`; None stands for all clients.
        view: `aggregate` also states what that view costs, and what it rests on; None is that of `reader.limit_of`.
        since: a date; the runs and requests from then on are listed, and what they cost alone. All else is of the whole
            history.
        year: the same, to its end, with a first section of what is asked once a year.
        changes: lines on who changed which limit then; None where nobody keeps a history of that.

    Raises:
        InputError: the ledger does not know the client, or several have the name.
        LedgerError: the chain is broken, so nothing can be stated.
    """
    last = reader.verify_with_head(db, path)
    names = names or {}
    data_sets = db.data_sets() if client is None else of_client(db, path, client, names)
    since, until = (f"{year}-01-01", f"{year}-12-31~") if year else (since, LATER)
    if last is None:
        raise InputError(f"{path}: has no entry of which anything could be stated")
    its_view, budget = reader.limit_of(db, path)
    view = view or its_view
    studies, pages = reader.studies_in(path.parent), []
    limit = budget if its_view in ("local", view) else None
    for data_set in data_sets:
        cost, found = _spending(db, data_set, names.get(data_set.id), limit, view), gaps(db)
        runs = [{**asdict(run), "study": studies.get(run.run, "")} for run in db.runs(data_set.id, since, until)]
        seeded = "seeded" in cost["noise_source"]
        parts = [db.releases(data_set.id, since=begin, until=until) for begin in (since, "")]
        recent, so_far = ([release.charged_on(view) for release in part] for part in parts)
        used = None if budget is None else enforced(db, data_set, budget, its_view)[1]
        pages.append(
            cost
            | {
                "private": not seeded and cost["is_guarantee"] and math.isfinite(cost["epsilon_local"]),
                "adjacency": ADJACENCY[cost["unit"]],
                "covers": _TEXTS["covers"],
                "budget": None if budget is None else {"epsilon": budget, "view": its_view, "used": used},
                "since": since,
                "year": year,
                "epsilon_since": epsilon_of(recent, data_set.delta).epsilon,
                "epsilon_until": epsilon_of(so_far, data_set.delta).epsilon,
                "refused": reader.refusals_in(path.parent, since, until),
                "changes": changes,
                "software": software(),
                "does_not_cover": [
                    *not_covered(cost["unit"]),
                    *([_TEXTS["rests_on_others"]] if view == "aggregate" else []),
                ],
                "statements": _notes(db, data_set),
                "run_list": runs,
                "ledger": str(path),
                "entries": last.number,
                "head": last.digest,
                "as_of": last.time,
                "adopted": found["adopted"],
                "recovered": [each for each in found["recovered"] if each["data_set"] == data_set.id],
            }
        )
    return pages


def adjacency_of(unit: str, holders: int = 1) -> str:
    """The difference between neighbouring worlds, where a person may have records at so many clients."""
    if holders > 1:
        return f"one person, with all of their records at up to {holders} clients, added or removed"
    return ADJACENCY.get(unit, "unknown")


def not_covered(unit: str, holders: int = 1) -> list[str]:
    """The sentences that say what no epsilon of this unit covers; of an unknown unit, as of records."""
    if holders > 1:
        return [f"what further clients release of a person with records at more than {holders}", *_NEVER_COVERED]
    return [_TEXTS["several"].get(unit, _TEXTS["several"]["record"]), *_NEVER_COVERED]


def of_client(db: LedgerConnection, path: Path, client: str, names: Mapping[str, str] | None = None) -> list[DataSet]:
    """The data sets of a client: as it is registered, or else of this name, or else of this number in any run.

    A name that a holder chose never stands for another client, and neither does a number that several had.

    Args:
        client: what it is registered as, its name, or its number in runs.
        names: {id of a data set: its holder's name}, where it is known.

    Raises:
        InputError: the ledger does not know the client, or several have the name or number.
    """
    registered, names = db.data_sets(), names or {}
    ways = {
        "client": [each for each in registered if each.client == client],
        # As a terminal shows both.
        "name": [each for each in registered if client and printable(names.get(each.id, "")) == printable(client)],
        "number": db.charged_as(client),
    }
    way = next((way for way, found in ways.items() if found), "")
    shown = ways.get(way, registered)
    whose = {each.client for each in shown}
    if way and len(whose) == 1:
        return [each for each in registered if each.client in whose]
    known = ", ".join(dict.fromkeys(label(each.client, names.get(each.id)) for each in shown)) or "nobody"
    several = f"{len(whose)} of this {way}, " if way else ""
    asked = "number" if all(each.isdigit() for each in whose) else "name"
    raise InputError(f"--client {printable(client)}: {path} knows {several}{known}; give the {asked}")


def render(page: Mapping[str, Any]) -> str:
    """The statement as one page of plain text: a table of 80 columns, with an answer to each question."""
    lines = ["PRIVACY STATEMENT", ""]
    for heading, rows in _table(page).items():
        if heading and not rows:
            continue
        lines += [heading.upper(), "-" * _COLUMNS] if heading else []
        for question, answer in rows:
            cells = textwrap.wrap(answer, _COLUMNS - _LEFT, break_long_words=False, break_on_hyphens=False)
            lines += [f"{left:<{_LEFT}}{right}" for left, right in zip_longest([question], cells, fillvalue="")]
        lines.append("")
    lines += [f"Head of the chain of {page['entries']} entries, which was verified:", f"  {page['head']}"]
    lines += ["Keep it, and check later that the ledger still holds it:"]
    return "\n".join([*lines, f"  fedpriv ledger verify {page['ledger']} \\", f"    --head {page['head']}"])


def _table(page: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """{heading: questions with their answers}."""
    name = _TEXTS["name_note"] if page["name"] and not _is_of(page["client"], page["name"]) else ""
    since = f" in {page['year']}" if page["year"] else f" since {page['since']}" if page["since"] else ""
    size = f"{page['num_records']} {what_is_counted(page['unit'])}"
    return {
        "": [
            ("Client", f"{label(page['client'], page['name'])}{name}"),
            ("Data set", f"{page['data_set']}, {size} when it was registered"),
            ("As of", f"{page['as_of']}, computed by fedpriv {page['software']}"),
            *(("Take note", warning) for warning in _warnings(page)),
        ],
        f"The year {page['year']}": list(_year(page, size)) if page["year"] else [],
        "What is guaranteed": [
            ("Unit", f"a {page['unit']}"),
            ("Neighbouring data", page["adjacency"]),
            *_epsilons(page),
            ("Risk", " ".join(risk_in_words(page, page["delta"]))),
            ("Found at most", risk_in_figures(page)),
            ("Delta", f"{page['delta']:g}, registered with the data; {_TEXTS['delta']}"),
            ("Composition", _composition(page)),
            ("Covered", page["covers"]),
        ],
        "Against whom, and what that rests on": [
            ("Adversary", _TEXTS["adversary"]),
            ("Assumed of others", _assumptions(page)),
            ("Noise source", page["noise_source"] or "nothing was released"),
            *(("Holder's statement", each) for each in page["statements"]),
        ],
        "What regulators ask": list(_TEXTS["asked"].items()),
        "Not covered": [(f"{number}.", each) for number, each in enumerate(page["does_not_cover"], start=1)],
        f"Runs{since}": [
            (
                run["run"][: _LEFT - 2],
                f"{printable(run['study'])}{': ' * bool(run['study'])}{counted(run['rounds'], 'round')} charged, noise "
                f"{run['noise_source']}, {run['first'][:19]} to {run['last'][:19]} UTC",
            )
            for run in page["run_list"]
        ]
        or [("None", "nothing was charged")],
        f"Refused requests{since}": [(f"{number} times", printable(why)) for why, number in page["refused"].items()],
    }


def _year(page: Mapping[str, Any], size: str) -> Iterator[tuple[str, str]]:
    """The questions of a yearly review in their order, with answers."""
    runs, asked, delta = page["run_list"], _TEXTS["year"], f"at delta {page['delta']:g} on the {page['view']} view"
    yield asked["who"], f"{label(page['client'], page['name'])}, {size}; a {page['unit']} is protected"
    studies = "; ".join(dict.fromkeys(printable(run["study"] or run["run"][:12]) for run in runs))
    rounds = f"noised updates of {counted(sum(run['rounds'] for run in runs), 'round')}"
    yield asked["what"], f"{rounds} in {counted(len(runs), 'run')}: {studies}" if runs else "nothing was released"
    if runs:
        first, last = min(run["first"] for run in runs), max(run["last"] for run in runs)
        yield asked["when"], f"from {first[:10]} to {last[:10]} UTC; each run is listed below"
    alone, total = (_rounded_up(page[f"epsilon_{part}"]) for part in ("since", "until"))
    yield asked["much"], f"epsilon {alone} by the year alone, {total} by all up to its end, {delta}"
    left = "no budget is set here"
    if (budget := page["budget"]) is not None:
        left = f"{max(0.0, 1 - budget['used']):.1%} of epsilon {budget['epsilon']:g} on the {budget['view']} view"
    yield asked["left"], f"{left}, as of {page['as_of'][:10]}"
    known = ["nobody, as the node's history has it"] if page["changes"] is not None else [_TEXTS["no_history"]]
    yield from ((asked["limits"] * (not place), each) for place, each in enumerate(page["changes"] or known))


def _warnings(page: Mapping[str, Any]) -> Iterator[str]:
    """The warnings that come before the figures."""
    for caveat in page["caveats"]:
        yield f"NOT A PRIVACY GUARANTEE: {caveat}."
    if "seeded" in page["noise_source"]:
        yield "NOT PRIVATE: some noise came from a seeded generator. Anyone who knows the seed can remove it."
    yield from gap_lines(adopted=page["adopted"], recovered=page["recovered"])


def _epsilons(page: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The epsilon on each view, who is meant by it, and the budget."""
    bound = ", an upper bound" if page["upper_bound_only"] else ""
    delta = f"at delta {page['delta']:g}{bound}"
    yield (
        "Local view",
        f"epsilon {_rounded_up(page['epsilon_local'])} {delta}: against the server, which sees each upload",
    )
    if page["epsilon_rho"] is not None:
        yield "Rho view", f"epsilon {_rounded_up(page['epsilon_rho'])} {delta}: {_TEXTS['rho_view']}"
    if page["view"] == "aggregate":
        against = f"against {readers_label(page['num_readers'])}, where the server saw sums alone"
        yield "Aggregate view", f"epsilon {_rounded_up(page['epsilon_aggregate'])} {delta}: {against}"
        if page["num_readers"] == 0:
            yield "", _TEXTS["old_sums"]
    if (budget := page["budget"]) is not None:
        of_all = f"epsilon {budget['epsilon']:g} for all runs together, on the {budget['view']} view"
        yield "Budget", f"{of_all}: {budget['used']:.1%} of it is used, by the rule that enforces it"


def _composition(page: Mapping[str, Any]) -> str:
    """How releases were added up over rounds and runs."""
    summed = f"{counted(page['rounds'], 'round')} in {counted(page['runs'], 'run')}, composed first and converted once"
    if page["since"]:
        told = f"epsilon {_rounded_up(page['epsilon_since'])} at delta {page['delta']:g} on the {page['view']} view"
        when = f"in {page['year']}" if page["year"] else f"since {page['since']}"
        summed += f"; what was charged {when} would alone be {told}"
    return f"{summed}. Enforced by {page['enforced_by']}. Each {ODOMETER}." if page["enforced_by"] else f"{summed}."


def _assumptions(page: Mapping[str, Any]) -> str:
    """The assumptions of the figures on the holder and on others."""
    if page["view"] != "aggregate":
        return _ASSUMED_OF_OTHERS
    return f"{_ASSUMED_OF_OTHERS} On the aggregate view also that no more participants read together than it says."


def label(client: str, name: str | None) -> str:
    """A client as the ledger knows it, with its name where that is known and says more."""
    return client if not name or _is_of(client, name) else holder_label(client, name)


def _is_of(client: str, name: str) -> bool:
    """Whether the ledger knows a client by its name."""
    return client == name or client.startswith(f"{name} of ")


def _notes(db: LedgerConnection, data_set: DataSet) -> list[str]:
    rows = db.execute(
        "SELECT note FROM entries WHERE phase = 'registered' AND data_set = ? AND note IS NOT NULL", (data_set.id,)
    )
    return [row[0] for row in rows]


def _rounded_up(epsilon: float) -> str:
    """To four decimal places, rounded up: a statement must not understate what was spent."""
    return f"{epsilon:.4f}" if float(f"{epsilon:.4f}") >= epsilon else f"{epsilon + 5e-5:.4f}"


def entries_frame(path: str | Path) -> pd.DataFrame:
    """Every entry of a ledger in order, a row each, under the names of `fedpriv.privacy.ledger.entries.Entry`.

    Raises:
        LedgerError: the chain of hashes is broken, or the ledger lost entries or its head.
    """
    import pandas as pd  # deferred: only notebooks need it

    path = Path(path)
    with reader.reading(path) as db:
        reader.verify_with_head(db, path)
        rows = [asdict(entry) for entry in db.entries()]
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).set_index("number")
    whole, real = ("round", "num_records"), ("rho_bar", "aggregate_scale", "delta")
    return frame.astype(dict.fromkeys(whole, "Int64") | dict.fromkeys(real, float))


def spending_frame(
    path: str | Path,
    *,
    budget_epsilon: float | None = None,
    view: PlannedView | None = None,
    run: str | Path | None = None,
) -> pd.DataFrame:
    """The spending of each data set of a ledger, a row each, as `fedpriv ledger show` has it.

    Args:
        budget_epsilon: > 0; adds `remaining_rounds`, the rounds like the last one that it still allows on the view.
        view: of the budget and of the risk; by default that of the settings in the ledger's folder.
        run: a run's folder that knows the holders' names; by default the ledger's own folder.

    Raises:
        InputError: the run's folder knows no names.
        LedgerError: as for `entries_frame`.
    """
    import pandas as pd  # deferred: only notebooks need it

    path = Path(path)
    with reader.reading(path) as db:
        reader.verify_with_head(db, path)
        known = reader.holder_names(db, path, Path(run) if run is not None else None)
        view = view or reader.limit_of(db, path)[0]
        rows = spending(db, names=known, budget_epsilon=budget_epsilon, view=view)
    return pd.DataFrame(rows)


def statement_text(
    path: str | Path, client: str, *, view: PlannedView | None = None, run: str | Path | None = None
) -> str:
    """The privacy statement of a client, one page of plain text for each of its data sets.

    Args:
        client: its number, or the name of a holder that has it alone.
        view: `aggregate` also states what the releases cost where the server saw sums alone; by default that of the
            settings in the ledger's folder.
        run: a run's folder that knows the holders' names; by default the ledger's own folder.

    Raises:
        InputError: the ledger does not know the client, several have the name, or the run's folder knows no names.
        LedgerError: as for `entries_frame`.
    """
    path = Path(path)
    with reader.reading(path) as db:
        known = reader.holder_names(db, path, Path(run) if run is not None else None)
        pages = statement(db, path, client, names=known, view=view)
    return "\n\n".join(map(render, pages))
