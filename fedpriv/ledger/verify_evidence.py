"""Check a bundle of evidence without fedpriv: `python verify_evidence.py BUNDLE.zip [--head DIGEST]`.

The rules are those of docs/privacy.md, section "Evidence". Needs cryptography, dp-accounting, numpy and scipy. A line
says `confirmed` of what was computed again and agrees, `NOT CONFIRMED` of what does not agree or is unknown here, and
`left to you` of what no file can prove. The exit code is 0 if nothing is NOT CONFIRMED, else 1.
"""

from __future__ import annotations

import argparse
import base64
import functools
import hashlib
import itertools
import json
import logging
import math
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from dp_accounting import pld, rdp
from scipy import optimize, stats

PLD_TOLERANCE, RDP_TOLERANCE, RISK_BELOW, RISK_ABOVE = 1e-3, 1e-6, 1 - 1e-3, 1 + 1e-2
RATES = ("0.001", "0.01", "0.05")  # shares of outsiders who are wrongly accused
GRID, RDP_ABOVE = 1e-4, 100.0  # of privacy losses; an epsilon by rdp above that stands for the one by pld
LEAST_NOISE, MOST_NOISE, FOR_RELEASES = 1e-6, 1e6, 1 - 1e-9  # less is none, more counts as this; part of delta
MANY_CLIENTS = 32  # risks of more are upper bounds
VIEWS = ("local", "rho", "aggregate")
PARTS = ("about.json", "figures.json", "registrations.json", "entries.jsonl", "receipts.jsonl")
KEY = ("run", "client", "round", "request")
SIGNED = {"purpose": "fedpriv charge 1"}
Object = Mapping[str, Any]


class Findings:
    """The lines of the output, and the number of those that say NOT CONFIRMED."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failures = 0

    def check(self, holds: bool, claim: str, found: object = "it is not so") -> None:
        """Note whether a claim was confirmed, and what was found instead."""
        self.failures += not holds
        self.lines.append(f"confirmed      {claim}" if holds else f"NOT CONFIRMED  {claim}: {found}")

    def leave(self, text: str) -> None:
        """Note what only the reader can find out."""
        self.lines.append(f"left to you    {text}")


def files_of(path: str, findings: Findings) -> dict[str, bytes]:
    """The files of a bundle, each compared with the SHA-256 that the manifest lists."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {name: archive.read(name) for name in archive.namelist()}
            findings.check(len(found) == len(archive.namelist()), "no file is in the bundle twice")
        listed = dict(json.loads(found.pop("manifest.json"))["files"])
    except Exception as error:
        findings.check(False, "the bundle has a manifest", repr(error))
        return {}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}
    wrong = {n: digests.get(n, "missing") for n in sorted(listed | digests) if digests.get(n) != listed.get(n)}
    findings.check(not wrong, f"the {len(listed)} files have the digests of the manifest", wrong)
    return found


def check_part(part: str, files: Mapping[str, bytes], kept: str | None, findings: Findings) -> None:
    """Check one ledger of the bundle, with what was printed of it."""
    about, figures, registrations = (json.loads(files[f"{part}/{name}"]) for name in PARTS[:3])
    entries, receipts = ([json.loads(line) for line in files[f"{part}/{name}"].splitlines()] for name in PARTS[3:])
    for name, digest in about["policy"].items():
        findings.check(hashlib.sha256(files[f"{part}/{name}"]).hexdigest() == digest, f"{name} has the digest {digest}")
    check_chain(entries, about["head"], kept, findings)
    check_receipts(entries, receipts, findings)
    rows, printed = figures["data_sets"], figures["printed"]
    for client, each in registrations.items():
        known = [(row["client"], row["num_records"]) for row in rows if row["data_set"] == each["data_set"]]
        claim = f"client {client} registered data set {each['data_set']} of {each['num_records']} records"
        findings.check(known == [(client, each["num_records"])], claim, known)
        text = {name: value for name, value in each.items() if name != "receipt" or value} | {"signature": ""}
        signed = not each["identity"] or is_signed(each["identity"], text, each["signature"])
        findings.check(signed, f"its registration is signed by {each['identity'] or 'nobody, as in a simulation'}")
    registered = {entry["data_set"] for entry in entries if entry["phase"] == "registered"}
    findings.check({row["data_set"] for row in rows} == registered, f"the figures are of all {len(rows)} data sets")
    for row in rows:
        check_data_set(row, entries, findings)
    if printed:
        check_printed(printed, registrations, entries, findings)
    if any(entry["noise_source"] == "seeded" for entry in entries):
        findings.leave("some noise came from a seeded generator: who knows the seed can remove it")


def check_chain(entries: Sequence[Object], head: Object, kept: str | None, findings: Findings) -> None:
    """Compute the digest of every entry from that of the one before, up to the head."""
    previous = "0" * 64
    for number, entry in enumerate(entries, start=1):
        content = {name: value for name, value in entry.items() if name != "digest"}
        previous = hashlib.sha256(json.dumps([previous, content], sort_keys=True).encode()).hexdigest()
        if (entry["number"], entry["digest"]) != (number, previous):
            findings.check(False, f"entry {number} follows the one before", "it was changed or moved, or one is lost")
            return
    last = {"number": len(entries), "digest": previous}
    findings.check(head == last, f"the chain of {len(entries)} entries ends at its head {previous}", head)
    if kept:
        findings.check(kept in {entry["digest"] for entry in entries}, f"the chain holds the entry {kept}")
    else:
        findings.leave("who holds a ledger can write another one: compare its head with one that you kept (--head)")


def charges_of(entries: Iterable[Object], data_set: str) -> list[Object]:
    """The entries that count as spent on a data set."""
    return [e for e in entries if e["phase"] in ("charged", "recovered") and e["data_set"] == data_set]


def links_of(entries: Iterable[Object], data_set: str) -> list[Object]:
    """The statements that a node signs of a data set's charges, each with the digest of the one before."""
    names = ("run", "client", "request", "event", "noise_source")
    first = {**SIGNED, **dict.fromkeys(names, ""), "data_set": data_set, "round": 0, "aggregate_scale": None}
    links = [{**first, "counter": 0, "previous": "0" * 64}]
    for entry in charges_of(entries, data_set):
        note = json.loads(entry["note"] or "{}")
        said = {name: entry[name] or "" for name in names} | {"request": entry["request"] or note.get("request", "")}
        said |= {"round": entry["round"] or 0, "aggregate_scale": entry["aggregate_scale"]}
        said |= {"counter": len(links), "previous": digest_of(links[-1])} | ({} if entry["run"] else {"client": ""})
        links.append({**first, **said, **{name: v for name, v in note.items() if name == "other_holders"}})
    return list[Object](links)


def digest_of(link: Object, *without: str) -> str:
    """SHA-256 of a link, or of what it says without some of its fields."""
    content = {name: value for name, value in link.items() if name not in without}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_receipts(entries: Sequence[Object], receipts: Iterable[dict[str, Any]], findings: Findings) -> None:
    """Check the signature of every receipt, and that the ledger has the charge that was signed."""
    links = [link for id_ in {entry["data_set"] for entry in entries} for link in links_of(entries, id_)]
    known = {digest_of(link) for link in links}
    known |= {json.loads(e["note"] or "{}").get("replaces", "") for e in entries if e["phase"] == "recovered"}
    # A coordinator's ledger lacks releases to others, and names requests in its own way.
    charged = {digest_of(link, "counter", "previous", "request") for link in links}
    signed: Counter[tuple[str, str]] = Counter()
    for receipt in receipts:
        signer, signature = receipt.pop("signer"), receipt.pop("signature")
        link, name = {**SIGNED, **receipt}, f"receipt {receipt['counter']} of data set {receipt['data_set']}"
        if not is_signed(signer, link, signature):
            findings.check(False, f"{name} is signed", "the signature is not of this text and key")
        elif digest_of(link) not in known and digest_of(link, "counter", "previous", "request") not in charged:
            findings.check(False, f"{name} is of a charge of this ledger", "the ledger has no such charge")
        else:
            signed[link["data_set"], signer] += 1
    for (data_set, signer), number in signed.items():
        findings.check(True, f"{number} receipts of data set {data_set} are signed, and their charges are here")
        findings.leave(f"whether this is the key of its node: {signer}")


def is_signed(signer: str, content: Object, signature: str) -> bool:
    """Whether the key of a public line has signed this JSON: Ed25519, or ECDSA with SHA-256."""
    try:
        key: Any = serialization.load_ssh_public_key(signer.encode())
        more = () if isinstance(key, ed25519.Ed25519PublicKey) else (ec.ECDSA(hashes.SHA256()),)
        key.verify(base64.b64decode(signature, validate=True), json.dumps(content, sort_keys=True).encode(), *more)
    except (ValueError, InvalidSignature):
        return False
    return True


class SeenUpload(NamedTuple):
    """One release: noise on a sum, to which a record or a person adds at each of its holders, if it is drawn there."""

    unit: str
    q: float  # the probability that it is drawn anywhere
    z: float  # the noise over all that it can move the sum by
    noise: float
    moves: tuple[float, ...]
    drawn: tuple[float, ...]


Curve = Callable[[Any], Any]  # [shares] the most found of each share of outsiders who are wrongly accused
Events = tuple[tuple[SeenUpload, int], ...]  # each different release, and how many of it there were


def releases_of(entries: Sequence[Object], data_set: str) -> list[Object]:
    """The charges of a data set, each with what the entry of its end says of its round."""
    ends = {tuple(entry[key] for key in KEY): entry for entry in entries if entry["phase"] == "released"}
    found: list[Object] = []
    for entry in charges_of(entries, data_set):
        end = ends.get(tuple(entry[key] for key in KEY), entry)
        event, note = (json.loads(entry[name] or "{}") for name in ("event", "note"))
        scales = {"local": 1.0, "rho": end["rho_bar"] or entry["rho_bar"], "aggregate": end["aggregate_scale"]}
        found.append({"num_readers": 0, **note, "run": entry["run"], "event": event, **scales})
    return found


def seen_by(view: str, releases: Iterable[Object]) -> Events:
    """The events of releases on a view, which scales their noise; where `aggregate` does not hold, none is scaled."""
    counts: Counter[SeenUpload] = Counter()
    for release in releases:
        event, scale = release["event"], release.get(view, 1.0)
        if (event["version"], event["kind"]) != (1, "subsampled_gaussian"):
            raise ValueError(f"an event of kind {event['kind']!r} and version {event['version']} is unknown here")
        others = release.get("other_holders", []) if view == "aggregate" and scale is not None else []
        moves, drawn = zip((1.0, event["sampling_probability"]), *others, strict=True)
        noise = min(event["noise_multiplier"] * (1.0 if scale is None else scale), MOST_NOISE)
        q = 1 - math.prod(1 - p for p in drawn) if others else drawn[0]
        counts[SeenUpload(event["unit"], q, noise / math.fsum(moves), noise, moves, drawn)] += event["count"]
    return tuple(sorted(counts.items()))


@functools.lru_cache(maxsize=4096)
def epsilon_of(events: Events, delta: float, accountant: str) -> float:
    """Epsilon at delta: all events are composed first, and converted once."""
    live = tuple((event, count) for event, count in events if event.q > 0)
    if not live or any(event.z < LEAST_NOISE for event, _ in live):
        return math.inf if live else 0.0
    composed = rdp.RdpAccountant()
    for event, count in live:
        composed.compose(dp_accounting.PoissonSampledDpEvent(event.q, dp_accounting.GaussianDpEvent(event.z)), count)
    by_rdp = float(composed.get_epsilon(delta))
    return by_rdp if accountant == "rdp" or by_rdp > RDP_ABOVE else float(loss_of(live).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=256)
def loss_of(events: Events, interval: float = GRID) -> Any:
    """The privacy loss distribution of all events, rounded up to a grid."""
    build, grid = pld.privacy_loss_distribution, interval * (10 if any(len(e.moves) > 1 for e, _ in events) else 1)
    total = build.identity(grid)  # that of mixtures, which take long, is coarser
    for event, count in events:
        if len(event.moves) > 1 and event.q < 1:
            sums: defaultdict[float, float] = defaultdict(float)
            for who in itertools.product((0, 1), repeat=len(event.moves)):
                moved = math.fsum(m * d for m, d in zip(event.moves, who, strict=True))
                sums[moved] += math.prod(p if d else 1 - p for p, d in zip(event.drawn, who, strict=True))
            moves, shares = zip(*sorted(sums.items()), strict=True)
            one = build.from_mixture_gaussian_mechanism(event.noise, moves, shares, value_discretization_interval=grid)
        else:  # releases without sampling are one with less noise
            noise = event.z / math.sqrt(count) if event.q == 1 else event.z
            one = build.from_gaussian_mechanism(noise, value_discretization_interval=grid, sampling_prob=event.q)
        total = total.compose(one.self_compose(1 if event.q == 1 else count))
    return total


@functools.lru_cache(maxsize=4096)
def risk_of(events: Events, delta: float, rule: str = "", order: int = 0) -> dict[str, float]:
    """Mu, advantage, and shares found: of releases fixed in advance, or of all that a filter lets pass for as much."""
    live = tuple((event, count) for event, count in events if event.q > 0)
    if any(event.z < LEAST_NOISE for event, _ in live):
        return {"mu": math.inf} | dict.fromkeys(("advantage", *RATES), 1.0)
    found, exact = coin(order, math.fsum(count * divergence(event, order) for event, count in live)), {}
    if rule != "renyi":
        exact = {"mu": mu_of(live)} if not rule and all(event.q == 1 for event, _ in live) else {}
        found = gaussian(mu_of(live)) if exact or rule else by_losses(live)
    z = np.linspace(-37.0, 4.0, 1000)
    beyond = stats.norm.ppf(np.clip(found(stats.norm.cdf(z)) - delta, 0, 1)) - z
    mu = float(beyond[np.isfinite(beyond)].max(initial=0.0))
    balanced = optimize.brentq(lambda x: float(found(np.array([max(x, 1e-300)]))[0]) + x - 1, -1.0, 0.5)
    shares = dict(zip(RATES, found(np.array(RATES, float)).tolist(), strict=True))
    return {"mu": mu, "advantage": 1 - 2 * balanced} | shares | exact


def by_losses(events: Events) -> Curve:
    """The most that an attacker finds by the privacy profile of both directions."""
    finest = min(p * move / max(e.noise, 1.0) for e, _ in events for move, p in zip(e.moves, e.drawn, strict=True)) / 20
    loss = loss_of(events, 50 * GRID if is_large(events) else min(GRID, max(finest, GRID / 10)))
    epsilons = np.append(0.0, np.geomspace(1e-4, min(loss.get_epsilon_for_delta(1e-12), 600.0) + 1e-3, 1500))
    deltas, ratio = np.asarray(loss.get_delta_for_epsilon(epsilons)), np.exp(epsilons)
    return lambda x: np.minimum(deltas + np.outer(x, ratio), 1 - (1 - deltas - x[:, None]) / ratio).min(axis=1)


def is_large(events: Events) -> bool:
    """Whether losses are so large that a risk is printed by Renyi divergences, which bound it from above."""
    return any(event.q < 1 for event, _ in events) and epsilon_of(events, 1e-5, "rdp") > RDP_ABOVE


def gaussian(mu: float) -> Curve:
    """The most that an attacker finds who tells N(0, 1) from N(mu, 1)."""
    return lambda x: stats.norm.cdf(stats.norm.ppf(x) + mu)


def coin(order: int, limit: float) -> Curve:
    """The most that an attacker finds whose accusations, as coins, have a divergence of at most so much both ways."""

    def moment(p: Any, q: Any) -> Any:
        sides = [order * np.log(a) + (1 - order) * np.log(b) for a, b in ((p, q), (1 - p, 1 - q))]
        return np.logaddexp(*sides)

    def found(x: Any) -> Any:
        low, high = x, np.ones_like(x)
        for _ in range(45):
            y = (low + high) / 2
            fits = np.maximum(moment(x, y), moment(y, x)) <= (order - 1) * limit
            low, high = np.where(fits, y, low), np.where(fits, high, y)
        return high

    return found


def check_epsilon(claim: str, printed: float | None, found: float, kind: str, is_bound: bool, to: Findings) -> None:
    """Compare a printed epsilon, in which null stands for infinity; one that is marked as a bound may be larger."""
    value = math.inf if printed is None else printed
    tolerance = (RDP_TOLERANCE if kind == "rdp" or found > RDP_ABOVE else PLD_TOLERANCE) * max(1.0, found)
    agrees = value == found or abs(value - found) <= tolerance or (is_bound and value > found)
    to.check(agrees, f"{claim} by {kind} is {'at most ' * is_bound}{value:.6g}", f"it is {found:.6g} here")


def check_data_set(row: Object, entries: Sequence[Object], findings: Findings) -> None:
    """Check what is printed of a data set."""
    id_, name, delta = row["data_set"], f"data set {row['data_set']}", row["delta"]
    releases, charges = releases_of(entries, id_), [e for e in charges_of(entries, id_) if e["run"]]
    (registered,) = [e for e in entries if e["phase"] == "registered" and e["data_set"] == id_]
    facts = {key: registered[key] for key in ("client", "num_records", "delta")}
    facts |= {"rounds": len(charges), "runs": len({e["run"] for e in charges})}
    facts["noise_source"] = ",".join(sorted({e["noise_source"] for e in charges if e["noise_source"]}))
    facts["num_readers"] = min((r["num_readers"] for r in releases if (r["aggregate"] or 1) > 1), default=None)
    facts["unit"] = ",".join(sorted({r["event"]["unit"] for r in releases if r["event"]})) or "record"
    found = {key: value for key, value in facts.items() if row[key] != value}
    findings.check(not found, f"{name}: {', '.join(f'{key} {row[key]}' for key in facts)}", found)
    for view in VIEWS if any(release["rho"] < 1 for release in releases) else ("local", "aggregate"):
        for kind, printed in (("pld", row[f"epsilon_{view}"]), ("rdp", row["rdp"][view])):
            epsilon = epsilon_of(seen_by(view, releases), delta, kind)
            check_epsilon(f"{name}: epsilon_{view} at delta {delta:g}", printed, epsilon, kind, False, findings)
    rules = [json.loads(e["note"]) for e in entries if (e["phase"], e["data_set"]) == ("bounded", id_)]
    if row["budget"]:
        check_budget(row, releases, rules, findings)
    events, last = seen_by("local", releases), rules[-1] if rules else {"rule": ""}
    if last["rule"] == "plan":  # all slots count
        events = seen_by("local", [{"event": e} for rule in rules for e in rule.get("events", ())])
    how = (last["rule"], last.get("order", 0)) if last["rule"] != "plan" else ()
    risk = risk_of(events, delta * (FOR_RELEASES if rules else 1.0), *how)
    check_risk(name, row, risk, not any(how) and is_large(events), findings)


def check_printed(printed: Object, registrations: Object, entries: Sequence[Object], findings: Findings) -> None:
    """Check what a run printed at its end of every client, and of the worst."""
    names, clients = (*(f"epsilon_{view}" for view in VIEWS), "delta"), printed["clients"]
    risky, view = [client for client in clients if client["tpr_at_fpr"]], printed["privacy_view"]
    of = {c["client"]: releases_of(entries, registrations[str(c["client"])]["data_set"]) for c in clients}
    seen = {c["client"]: (seen_by(view, of[c["client"]]), c["delta"]) for c in risky}
    for client in clients:
        releases, name = of[client["client"]], f"client {client['client']} in the run's summary"
        own = [release for release in releases if release["run"] == printed["run_id"]]
        for key in (*names[:-1], "epsilon_local_this_run"):
            on, counted = key.split("_")[1], own if key.endswith("run") else releases
            if client[key] is not None or not any(release[on] is None for release in counted):
                epsilon = epsilon_of(seen_by(on, counted), client["delta"], "pld")
                claim = f"{name}: {key} at delta {client['delta']:g}"
                check_epsilon(claim, client[key], epsilon, "pld", printed["upper_bound_only"], findings)
        units = {release["event"]["unit"] for release in releases} | {printed["unit"]}
        findings.check(units == {client["unit"]}, f"{name}: what is protected is a {client['unit']}", units)
        if client in risky:
            is_bound = len(set(seen.values())) > MANY_CLIENTS or is_large(seen[client["client"]][0])
            check_risk(name, client, risk_of(*seen[client["client"]]), is_bound, findings)
        else:
            holds = all(release[view] is not None for release in releases)
            findings.check(not holds, f"{name}: it has no risk, since the {view} view does not hold")
    figures = {f"{key}_max": [client[key] for client in clients] for key in names}
    figures |= {key: [(c | c["tpr_at_fpr"])[key] for c in risky] for key in ("mu", "advantage", *RATES) if risky}
    for key, values in figures.items():
        worst, stated = None if None in values else max(values), {**printed, **(printed["tpr_at_fpr"] or {})}.get(key)
        findings.check(stated == worst, f"{key} {stated} is that of the worst client", worst)
    budgets, spent = printed["budget_epsilon"], figures[f"epsilon_{view}_max"]
    for budget, epsilon in zip(budgets * (len(spent) if len(budgets) == 1 else 1), spent, strict=False):
        kept = epsilon is not None and epsilon <= budget * (1 + 1e-9)
        findings.check(kept, f"the budget of epsilon {budget:g} on the {view} view is kept", epsilon)


def check_risk(name: str, row: Object, found: Mapping[str, float], is_bound: bool, findings: Findings) -> None:
    """Compare a printed risk, which may not be too small; where it is stated as a bound, it may be larger."""
    printed = {key: math.inf if row[key] is None else row[key] for key in ("mu", "advantage")} | row["tpr_at_fpr"]
    findings.check(printed.keys() == found.keys(), f"{name}: a risk has {', '.join(found)}", [*printed])
    for key in sorted(printed.keys() & found.keys()):
        value, claim = found[key], f"{name}: {f'found at {key}' if key in RATES else key} is {printed[key]:.6g}"
        is_close = printed[key] <= value * RISK_ABOVE + 1e-9 or is_bound
        findings.check(is_close and printed[key] >= value * RISK_BELOW - 1e-9, claim, f"it is {value:.6g} here")


def check_budget(row: Object, releases: Sequence[Object], rules: Sequence[Object], findings: Findings) -> None:
    """Compute the share of a budget that is used, by the rule that the ledger names."""
    name, budget, delta = f"data set {row['data_set']}", row["budget"], row["delta"] * FOR_RELEASES
    view, epsilon, events = budget["view"], budget["epsilon"], seen_by(budget["view"], releases)
    kind = rules[-1]["rule"] if rules else "none"
    used, limit = 0.0, 0.0
    if kind == "plan":
        plans = [rule for rule in rules if rule["rule"] == "plan"]
        slots = [seen_by("local", [{"event": event} for event in plan["events"]]) for plan in plans]
        for plan, events in zip(plans, slots, strict=True):
            cost = epsilon_of(events, plan["delta"], "pld")
            check_epsilon(f"{name}: epsilon of a plan", plan["epsilon"], cost, "pld", False, findings)
        total = [math.fsum(plan[key] for plan in plans) for key in ("epsilon", "delta")]
        findings.check(total[0] <= epsilon * (1 + 1e-9) and total[1] <= delta, f"{name}: its plans fit", total)
        limit = sum(count for events in slots for _, count in events)
        used = limit - slots_left(slots, [seen_by(view, [release])[0] for release in releases])
    elif kind == "renyi":
        order = rules[-1]["order"]
        used = math.fsum(count * divergence(event, order) for event, count in events)
        limit = epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)
    elif kind == "gaussian":
        used = mu_of(events) ** 2
        limit = optimize.brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, 1e-8, 1e3, xtol=1e-13) ** 2
    share = used / limit if limit > 0 else math.inf if releases else 0.0
    stated = math.inf if budget["used"] is None else budget["used"]
    close = share == stated or abs(share - stated) <= RDP_TOLERANCE * max(1.0, share)
    claim = f"{name}: {stated:.2%} of epsilon {epsilon:g} on the {view} view is used, by the rule {kind}"
    findings.check(close and budget["left"] == max(0.0, 1 - stated), claim, f"{share:.6%} here")
    findings.check(share <= 1 + 1e-9, f"{name}: its budget is kept", f"{share:.6%} of it is used")


def divergence(event: SeenUpload, order: int) -> float:
    """The Renyi divergence of one release at a whole order."""
    plain, k = order / (2 * event.z**2), np.arange(order + 1)
    log_moment = np.logaddexp.reduce(stats.binom.logpmf(k, order, event.q) + (k * k - k) / (2 * event.z**2))
    return float(max(log_moment / (order - 1), min(plain, 1e-12)))


def mu_of(events: Events) -> float:
    """The mu of releases without sampling."""
    return math.sqrt(math.fsum(count / event.z**2 for event, count in events if event.q > 0))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The delta that mu-Gaussian DP has at an epsilon."""
    below = epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)
    return float(stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(min(below, 0.0)))


def slots_left(plans: Sequence[Events], history: Iterable[tuple[SeenUpload, int]]) -> int:
    """How many slots are free after each release took the first that dominates it, of those that protect most."""
    slots = [slot for plan in plans for slot in sorted(plan, key=lambda slot: (slot[0].q, -slot[0].z))]
    for event, missing in history:
        for i, (slot, free) in enumerate(slots):
            is_closer = event.unit == slot.unit and event.z >= slot.z and event.q <= slot.q
            if event == slot or (is_closer and event.moves == slot.moves == (1.0,)):
                slots[i], missing = (slot, free - min(free, missing)), missing - min(free, missing)
        if missing:
            raise ValueError("a release has no slot in the plans")
    return sum(free for _, free in slots)


def main() -> int:
    """Print the findings, and return the exit code."""
    parser = argparse.ArgumentParser(description="Check a bundle that `fedpriv evidence` wrote.")
    parser.add_argument("bundle")
    parser.add_argument("--head", help="digest of an entry, which a report or statement printed")
    given, findings = parser.parse_args(), Findings()
    logging.disable(logging.WARNING)  # of dp-accounting, that it leaves out an order: fewer only raise epsilon
    files = files_of(given.bundle, findings)
    for part in sorted({name.partition("/")[0] for name in files if "/" in name}):
        findings.lines.append(f"-- {part}")
        try:
            check_part(part, files, given.head, findings)
        except Exception as error:  # whatever it is, it was not confirmed
            findings.check(False, f"{part} can be read and computed to its end", repr(error))
    findings.leave("that the noise was drawn, and that these are all ledgers: docs/privacy.md says what that rests on")
    print("\n".join([*findings.lines, f"{findings.failures} NOT CONFIRMED"]))
    return 1 if findings.failures else 0


if __name__ == "__main__":
    sys.exit(main())
