"""Check a bundle of evidence without fedpriv: `python verify_evidence.py BUNDLE.zip [--head DIGEST]`.

By the rules of docs/appendices/evidence.md; needs cryptography, dp-accounting, numpy and scipy. A line says `confirmed`
of what was computed again and agrees, `NOT CONFIRMED` of what does not, or is unknown here, and `left to you` of what
no file can prove. The exit code is 0 if nothing is NOT CONFIRMED, else 1.
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

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, pld, rdp
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from scipy import optimize, stats

TOLERANCES = {"pld": (1e-3, 1e-3, 1.0), "rdp": (1e-6, 1e-6, 1.0), "risk": (1e-3, 1e-2, 1e-6)}
RATES = ("0.001", "0.01", "0.05")  # shares of outsiders who are wrongly accused
GRID, RDP_ABOVE, MANY_CLIENTS = 1e-4, 100.0, 32  # of losses; above it rdp stands for pld; risks of more are bounds
LEAST_NOISE, MOST_NOISE, FOR_RELEASES = 1e-6, 1e6, 1 - 1e-9  # less is none, more counts as this; part of delta
VIEWS, KEY = ("local", "rho", "aggregate"), ("run", "client", "round", "request")
CHARGE = ("data_set", "run", "round", "event", "aggregate_scale", "noise_source", "other_holders", "is_first")
Object = Mapping[str, Any]


class Findings(list[str]):
    """The lines of the output."""

    def check(self, holds: bool | None, claim: str, found: object = "it is not so") -> None:
        """Say whether a claim was confirmed, and what was found instead; None leaves it to the reader."""
        says = {True: "confirmed", False: "NOT CONFIRMED", None: "left to you"}[holds]
        self.append(f"{says:<15}{claim}" + f": {found}" * (holds is False))

    def compare(self, claim: str, printed: float | None, found: float, kind: str, *, is_bound: bool = False) -> None:
        """Say whether a printed figure, in which null stands for infinity, is the one found here, or bounds it."""
        value, (below, above, least) = math.inf if printed is None else printed, TOLERANCES[kind]
        scale, most = max(found, least), math.inf if is_bound else above
        agrees = value == found or found - below * scale <= value <= found + most * scale
        self.check(agrees, f"{claim} is {'at most ' * is_bound}{value:.6g}", f"it is {found:.6g} here")


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
    about, shown, registrations = (json.loads(files[f"{part}/{n}.json"]) for n in ("about", "figures", "registrations"))
    entries, receipts = ([*map(json.loads, files[f"{part}/{n}.jsonl"].splitlines())] for n in ("entries", "receipts"))
    for name, digest in about["policy"].items():
        findings.check(hashlib.sha256(files[f"{part}/{name}"]).hexdigest() == digest, f"{name} has the digest {digest}")
    check_chain(entries, about["head"], kept, findings)
    spent, rows = spent_of(entries), shown["data_sets"]
    registered = {entry["data_set"] for entry in entries if entry["phase"] == "registered"}
    firsts = [{"data_set": data_set, "is_first": True} for data_set in registered]  # which charge nothing
    check_receipts([*itertools.chain(*spent.values()), *firsts], receipts, findings)
    for client, each in registrations.items():
        known = [(row["client"], row["num_records"]) for row in rows if row["data_set"] == each["data_set"]]
        claim = f"client {client} registered data set {each['data_set']} of {each['num_records']} records"
        findings.check(known == [(client, each["num_records"])], claim, known)
        text = {name: value for name, value in each.items() if name != "receipt" or value} | {"signature": ""}
        signed = not each["identity"] or is_signed(each["identity"], text, each["signature"])
        findings.check(signed, f"its registration is signed by {each['identity'] or 'nobody, as in a simulation'}")
    findings.check({row["data_set"] for row in rows} == registered, f"the figures are of all {len(rows)} data sets")
    for row in rows:
        check_data_set(row, entries, spent[row["data_set"]], findings)
    if shown["printed"]:
        check_printed(shown["printed"], {c: spent[each["data_set"]] for c, each in registrations.items()}, findings)
    if any(entry["noise_source"] == "seeded" for entry in entries):
        findings.check(None, "some noise came from a seeded generator: who knows the seed can remove it")


def check_chain(entries: Sequence[Object], head: Object, kept: str | None, findings: Findings) -> None:
    """Compute the digest of every entry from that of the one before, up to the head."""
    digests = ["0" * 64]
    for number, entry in enumerate(entries, start=1):
        content = {name: value for name, value in entry.items() if name != "digest"}
        digests.append(hashlib.sha256(json.dumps([digests[-1], content], sort_keys=True).encode()).hexdigest())
        if (entry["number"], entry["digest"]) != (number, digests[-1]):
            return findings.check(False, f"entry {number} follows the one before", "one was changed, moved or lost")
    last = {"number": len(entries), "digest": digests[-1]}
    findings.check(head == last, f"the chain of {len(entries)} entries ends at its head {digests[-1]}", head)
    claim = "a holder can write another ledger: compare the head with one that you kept (--head)"
    return findings.check(kept in digests[1:] if kept else None, f"the chain holds the entry {kept}" if kept else claim)


def spent_of(entries: Sequence[Object]) -> Mapping[str, list[Object]]:
    """The releases that each data set has spent, with their notes and what the entry of their end says of a round."""
    ends = {tuple(entry[key] for key in KEY): entry for entry in entries if entry["phase"] == "released"}
    found: defaultdict[str, list[Object]] = defaultdict(list)
    for entry in (entry for entry in entries if entry["phase"] in ("charged", "recovered")):
        end, (note, event) = ends.get(tuple(entry[key] for key in KEY), entry), (entry["note"], entry["event"])
        said = {"num_readers": 0, **json.loads(note or "{}"), **entry, "event": json.loads(event or "{}"), "local": 1.0}
        said |= {"rho": end["rho_bar"] or entry["rho_bar"], "aggregate": end["aggregate_scale"]}
        found[entry["data_set"]].append(said)
    return found


def check_receipts(releases: Sequence[Object], receipts: Iterable[dict[str, Any]], findings: Findings) -> None:
    """Check the signature of every receipt, and that the ledger has its charge, by what its coordinator names too."""
    known = {str([release.get(name) or None for name in CHARGE]) for release in releases}
    replaced, signed = {release.get("replaces") for release in releases}, Counter[tuple[str, str]]()
    for receipt in receipts:
        signer, signature, data_set = receipt.pop("signer"), receipt.pop("signature"), receipt["data_set"]
        name, link = f"receipt {receipt['counter']} of data set {data_set}", {"purpose": "fedpriv charge 1", **receipt}
        charge = {**receipt, "event": json.loads(receipt["event"] or "{}"), "is_first": receipt["counter"] == 0}
        is_known = str([charge.get(name) or None for name in CHARGE]) in known
        if not is_signed(signer, link, signature):
            findings.check(False, f"{name} is signed", "the signature is not of this text and key")
        elif not is_known and hashlib.sha256(json.dumps(link, sort_keys=True).encode()).hexdigest() not in replaced:
            findings.check(False, f"{name} is of a charge of this ledger", "the ledger has no such charge")
        else:
            signed[data_set, signer] += 1
    for (data_set, signer), number in signed.items():
        findings.check(True, f"{number} receipts of data set {data_set} are signed, and their charges are here")
        findings.check(None, f"whether this is the key of its node: {signer}")


def is_signed(signer: str, content: Object, signature: str) -> bool:
    """Whether the key of a public line has signed this JSON: Ed25519, or ECDSA with SHA-256."""
    try:
        key: Any = serialization.load_ssh_public_key(signer.encode())
        more = () if isinstance(key, ed25519.Ed25519PublicKey) else (ec.ECDSA(hashes.SHA256()),)
        key.verify(base64.b64decode(signature, validate=True), json.dumps(content, sort_keys=True).encode(), *more)
    except (ValueError, InvalidSignature):
        return False
    return True


class Seen(NamedTuple):
    """Noise on a sum, to which a record or a person adds at each of its holders, if it is drawn there."""

    unit: str
    q: float  # the probability that it is drawn anywhere
    z: float  # the noise over all that it can move the sum by
    moves: tuple[float, ...]  # the shares of each holder in that
    drawn: tuple[float, ...]  # the probability that it is drawn at each holder


Events = tuple[tuple[Seen, int], ...]  # each different release, and how many of it there were


def seen_by(view: str, releases: Iterable[Object]) -> Events:
    """The events of releases on a view, which scales their noise; where `aggregate` does not hold, none is scaled."""
    counts: Counter[Seen] = Counter()
    for release in releases:
        event, scale = release["event"], release.get(view)
        if (event["version"], event["kind"]) != (1, "subsampled_gaussian"):
            raise ValueError(f"an event of kind {event['kind']!r} and version {event['version']} is unknown here")
        others = release.get("other_holders", []) if view == "aggregate" and scale is not None else []
        moves, drawn = zip((1.0, event["sampling_probability"]), *others, strict=True)
        noise, total = min(event["noise_multiplier"] * (1.0 if scale is None else scale), MOST_NOISE), math.fsum(moves)
        q, z = 1 - math.prod(1 - p for p in drawn), noise / total if noise / total >= LEAST_NOISE else 0.0
        counts[Seen(event["unit"], q, z, tuple(move / total for move in moves), drawn)] += event["count"]
    return tuple(sorted((event, count) for event, count in counts.items() if event.q > 0))


def composed(events: Events, interval: float = 0.0, orders: Sequence[int] | None = None) -> Any:
    """All events in an accountant of dp-accounting: by pld on a grid of losses, or by rdp at some orders."""
    total: Any = rdp.RdpAccountant(orders)
    if interval:  # a coarser grid does for mixtures, which take long
        interval *= 10 if any(len(event.moves) > 1 for event, _ in events) else 1
        total = pld.PLDAccountant(value_discretization_interval=interval)
    for event, count in events:
        one: Any = GaussianDpEvent(event.z)
        if interval and len(event.moves) > 1:
            coins = np.array(list(itertools.product((0, 1), repeat=len(event.moves))))
            shares = np.where(coins, event.drawn, 1 - np.array(event.drawn)).prod(axis=1)
            one = MixtureOfGaussiansDpEvent(event.z, (coins @ event.moves).tolist(), shares.tolist())
        elif event.q < 1:
            one = PoissonSampledDpEvent(event.q, one)
        total.compose(one, count)
    return total


@functools.lru_cache(maxsize=4096)
def epsilon_of(events: Events, delta: float, accountant: str) -> float:
    """Epsilon at delta: all events are composed first, and converted once."""
    by_rdp = float(composed(events).get_epsilon(delta))
    return by_rdp if accountant == "rdp" or by_rdp > RDP_ABOVE else float(composed(events, GRID).get_epsilon(delta))


def cost_of(events: Events, order: int) -> float:
    """The sum that a budget's rule keeps: of divergences at a Renyi order; without one, of 1 / z^2, which is mu^2."""
    if order:
        return float(composed(events, orders=[order]).get_epsilon(1e-12)) + divergence_at(order, 0.0, 1e-12)
    return math.fsum(count / event.z**2 if event.z else math.inf for event, count in events)


def divergence_at(order: int, epsilon: float, delta: float) -> float:
    """The Renyi divergence that has this epsilon at delta; without an order mu^2."""
    if order:
        return epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)
    of = pld.privacy_loss_mechanism.GaussianPrivacyLoss
    return float(optimize.brentq(lambda x: of(x**-0.5).get_delta_for_epsilon(epsilon) - delta, 1e-16, 1e6, xtol=1e-13))


@functools.lru_cache(maxsize=4096)
def risk_of(events: Events, delta: float, order: int = 0) -> dict[str, float]:
    """Mu, advantage, and shares found: of releases fixed in advance, or of all that cost as much at a Renyi order."""
    if any(event.z == 0 for event, _ in events):
        return {"mu": math.inf} | dict.fromkeys(("advantage", *RATES), 1.0)
    cost, exact = cost_of(events, order), not order and all(min(event.drawn) == 1 for event, _ in events)
    found = by_cost(cost, order) if order or exact else by_losses(events)
    mu, z = math.sqrt(cost) if exact else 0.0, np.linspace(-37.0, 4.0, 1000)
    for _ in range(0 if exact else 2):  # the second time about the largest, which is sharp at a Renyi order
        beyond = np.nan_to_num(stats.norm.ppf(np.clip(found(stats.norm.cdf(z)) - delta, 0, 1)) - z, posinf=0, neginf=0)
        mu, worst = float(beyond.max(initial=mu)), int(beyond[1:-1].argmax()) + 1
        z = np.linspace(z[worst - 1], z[worst + 1], len(z))
    balanced = optimize.brentq(lambda x: float(found(np.array([max(x, 1e-300)]))[0]) + x - 1, -1.0, 0.5)
    return {"mu": mu, "advantage": 1 - 2 * balanced} | {at: float(found(np.array([float(at)]))[0]) for at in RATES}


def by_losses(events: Events) -> Callable[[Any], Any]:
    """The most that an attacker finds, by the share wrongly accused, from the privacy profile of both directions."""
    typical = min(p * move / max(e.z, 1.0) for e, _ in events for move, p in zip(e.moves, e.drawn, strict=True))
    loss = composed(events, float(np.clip(typical / 50, GRID / 10, 50 * GRID)))
    epsilons = np.append(0.0, np.geomspace(1e-4, min(loss.get_epsilon(1e-12), 600.0) + 1e-3, 1500))
    deltas, ratio = np.asarray(loss.get_delta(epsilons)), np.exp(epsilons)
    return lambda x: np.minimum(deltas + np.outer(x, ratio), 1 - (1 - deltas - x[:, None]) / ratio).min(axis=1)


def by_cost(cost: float, order: int) -> Callable[[Any], Any]:
    """The same from mu^2: N(0, 1) is told from N(mu, 1); or from a divergence: accusations are coins that keep it."""
    if not order:
        return lambda x: stats.norm.cdf(stats.norm.ppf(x) + math.sqrt(cost))

    def found(x: Any) -> Any:
        low, high = x, np.ones_like(x)
        for _ in range(45):
            y = (low + high) / 2
            coins = np.log([x, 1 - x]), np.log([y, 1 - y])
            moments = [np.logaddexp.reduce(order * p + (1 - order) * q) for p, q in (coins, coins[::-1])]
            fits = np.maximum(*moments) <= (order - 1) * cost
            low, high = np.where(fits, y, low), np.where(fits, high, y)
        return high

    return found


def check_risk(name: str, row: Object, events: Events, delta: float, order: int, is_bound: bool, to: Findings) -> None:
    """Compare a printed risk, which may not be too small; where it is a bound, as of large losses, it may be larger."""
    is_bound |= not order and any(min(e.drawn) < 1 for e, _ in events) and epsilon_of(events, 1e-5, "rdp") > RDP_ABOVE
    printed = {key: row[key] for key in ("mu", "advantage")} | row["tpr_at_fpr"]
    for key, found in risk_of(events, delta, order).items():
        to.compare(f"{name}: {'found at ' * (key in RATES)}{key}", printed[key], found, "risk", is_bound=is_bound)


def check_data_set(row: Object, entries: Sequence[Object], releases: Sequence[Object], findings: Findings) -> None:
    """Check what is printed of a data set."""
    name, delta = f"data set {row['data_set']}", row["delta"]
    (registered,) = [e for e in entries if (e["phase"], e["data_set"]) == ("registered", row["data_set"])]
    facts = {key: registered[key] for key in ("client", "num_records", "delta")}
    in_runs = [release for release in releases if release["run"]]
    facts |= {"rounds": len(in_runs), "runs": len({release["run"] for release in in_runs})}
    facts["noise_source"] = ",".join(sorted({r["noise_source"] for r in in_runs} - {"", None}))
    facts["num_readers"] = min((r["num_readers"] for r in releases if (r["aggregate"] or 1) > 1), default=None)
    facts["unit"] = ",".join(sorted({r["event"]["unit"] for r in releases if r["event"]})) or "record"
    found = {key: value for key, value in facts.items() if row[key] != value}
    findings.check(not found, f"{name}: {', '.join(f'{key} {row[key]}' for key in facts)}", found)
    for view in VIEWS if any(release["rho"] < 1 for release in releases) else ("local", "aggregate"):
        for kind, printed in (("pld", row[f"epsilon_{view}"]), ("rdp", row["rdp"][view])):
            epsilon = epsilon_of(seen_by(view, releases), delta, kind)
            findings.compare(f"{name}: epsilon_{view} at delta {delta:g} by {kind}", printed, epsilon, kind)
    rules = [json.loads(e["note"]) for e in entries if (e["phase"], e["data_set"]) == ("bounded", row["data_set"])]
    last: Object = rules[-1] if rules else {"rule": "none"}
    order, delta = last.get("order", 0), delta * (FOR_RELEASES if rules else 1.0)
    if row["budget"]:
        check_budget(row, releases, rules, order, findings)
    slots = [{"event": event} for rule in rules for event in rule.get("events", ())]
    events = seen_by("local", slots if last["rule"] == "plan" else releases)
    if last["rule"] == "gaussian":  # which counts no sampling
        events = tuple((event._replace(q=1.0, drawn=(1.0,)), count) for event, count in events)
    for epsilon in (e for e, view in (rule.get("budget", (0, "")) for rule in rules) if view == "local"):
        if (left := divergence_at(order, epsilon, delta) - cost_of(events, order)) > 0:  # which could be released too
            events += ((Seen(facts["unit"], 1.0, math.sqrt((order or 2) / (2 * left)), (1.0,), (1.0,)), 1),)
    check_risk(name, row, events, delta, order, False, findings)


def check_printed(printed: Object, spent: Mapping[str, Sequence[Object]], findings: Findings) -> None:
    """Check what a run printed at its end of every client, and of the worst."""
    clients, view, keys = printed["clients"], printed["privacy_view"], [f"epsilon_{view}" for view in VIEWS]
    if (holders := printed.get("holders_per_person") or 1) > 1:  # a person pays what the costliest so many released
        name, delta = f"(any {holders}, for a person at so many)", min(client["delta"] for client in clients)
        sums = [list(itertools.chain(*several)) for several in itertools.combinations(spent.values(), holders)]
        spent = {**spent, name: max(sums, key=lambda each: epsilon_of(seen_by(view, each), delta, "rdp"))}
        clients = [*clients, {**printed, **{k: printed[f"{k}_max"] for k in keys}, "client": name, "delta": delta}]
    worst_of: Sequence[Object] = clients if holders == 1 else clients[-1:]
    risky = [client | client["tpr_at_fpr"] for client in worst_of if client["tpr_at_fpr"]]
    are_many = len({(seen_by(view, spent[str(client["client"])]), client["delta"]) for client in risky}) > MANY_CLIENTS
    for client in clients:
        releases, delta = spent[str(client["client"])], client["delta"]
        name = f"client {client['client']} in the run's summary"
        for key in (*keys, "epsilon_local_this_run"):
            on, is_run = key.split("_")[1], key.endswith("run")
            counted = [release for release in releases if not is_run or release["run"] == printed["run_id"]]
            if key in client and (client[key] is not None or all(release[on] is not None for release in counted)):
                found, is_bound = epsilon_of(seen_by(on, counted), delta, "pld"), printed["upper_bound_only"]
                findings.compare(f"{name}: {key} at delta {delta:g}", client[key], found, "pld", is_bound=is_bound)
        units = {release["event"]["unit"] for release in releases} | {printed["unit"]}
        findings.check(units == {client["unit"]}, f"{name}: what is protected is a {client['unit']}", units)
        if not client["tpr_at_fpr"]:
            holds = all(release[view] is not None for release in releases)
            findings.check(not holds, f"{name}: it has no risk, since the {view} view does not hold")
        else:
            check_risk(name, client, seen_by(view, releases), delta, 0, are_many, findings)
    figures = {"delta_max": [c["delta"] for c in clients]} | {f"{key}_max": [c[key] for c in worst_of] for key in keys}
    figures |= {key: [client[key] for client in risky] for key in ("mu", "advantage", *RATES) if risky}
    for key, values in figures.items():
        worst, stated = None if None in values else max(values), {**printed, **(printed["tpr_at_fpr"] or {})}.get(key)
        findings.check(stated == worst, f"{key} {stated} is that of the worst client", worst)
    for epsilon, budget in zip(figures.get(f"epsilon_{view}_max", []), itertools.cycle(printed["budget_epsilon"])):
        kept = epsilon is not None and epsilon <= budget * (1 + 1e-9)
        findings.check(kept, f"the budget of epsilon {budget:g} on the {view} view is kept", epsilon)


def check_budget(row: Object, releases: Sequence[Object], rules: Sequence[Object], order: int, to: Findings) -> None:
    """Compute the share of a budget that is used, by the rule that the ledger names."""
    name, budget, delta = f"data set {row['data_set']}", row["budget"], row["delta"] * FOR_RELEASES
    view, epsilon, kind = budget["view"], budget["epsilon"], rules[-1]["rule"] if rules else "none"
    used = cost_of(seen_by(view, releases), order)
    limit = divergence_at(order, epsilon, delta) if kind in ("renyi", "gaussian") else 0.0
    if kind == "plan":
        plans = [rule for rule in rules if rule["rule"] == "plan"]
        slots = [seen_by("local", [{"event": event} for event in plan["events"]]) for plan in plans]
        for plan, events in zip(plans, slots, strict=True):
            to.compare(f"{name}: epsilon of a plan", plan["epsilon"], epsilon_of(events, plan["delta"], "pld"), "pld")
        total = [math.fsum(plan[key] for plan in plans) for key in ("epsilon", "delta")]
        to.check(total[0] <= epsilon * (1 + 1e-9) and total[1] <= delta, f"{name}: its plans fit", total)
        to.check(have_slots(slots, releases, view), f"{name}: each release has a slot in its plans")
        used, limit = sum(r["event"]["count"] for r in releases), sum(n for events in slots for _, n in events)
    share = used / limit if limit > 0 else math.inf if releases else 0.0
    claim = f"{name}: the share of epsilon {epsilon:g} on the {view} view that is"
    to.compare(f"{claim} used, by the rule {kind},", budget["used"], share, "rdp")
    to.compare(f"{claim} left", budget["left"], max(0.0, 1 - share), "rdp")
    to.check(share <= 1 + 1e-9, f"{name}: its budget is kept", f"{share:.6%} of it is used")


def have_slots(plans: Sequence[Events], releases: Iterable[Object], view: str) -> bool:
    """Whether each release finds a slot if it takes the first that dominates it, of those that protect most."""
    slots = [slot for plan in plans for slot in sorted(plan, key=lambda slot: (slot[0].q, -slot[0].z))]
    for event, missing in (event for release in releases for event in seen_by(view, [release])):
        for i, (slot, free) in enumerate(slots):
            is_closer = event.unit == slot.unit and event.z >= slot.z and event.q <= slot.q
            if event == slot or (is_closer and event.moves == slot.moves == (1.0,)):
                slots[i], missing = (slot, free - min(free, missing)), missing - min(free, missing)
        if missing:
            return False
    return True


def main() -> int:
    """Print the findings, and return the exit code."""
    parser = argparse.ArgumentParser(description="Check a bundle that `fedpriv evidence` wrote.")
    parser.add_argument("bundle")
    parser.add_argument("--head", help="digest of an entry, which a report or statement printed")
    given, findings = parser.parse_args(), Findings()
    logging.disable(logging.WARNING)  # of dp-accounting, that it leaves out an order: fewer only raise epsilon
    files = files_of(given.bundle, findings)
    for part in sorted({name.partition("/")[0] for name in files if "/" in name}):
        findings.append(f"-- {part}")
        try:
            check_part(part, files, given.head, findings)
        except Exception as error:  # whatever it is, it was not confirmed
            findings.check(False, f"{part} can be read and computed to its end", repr(error))
    findings.check(None, "that the noise was drawn, and these are all ledgers: docs/privacy.md says what that rests on")
    failures = sum(line.startswith("NOT CONFIRMED") for line in findings)
    print("\n".join([*findings, f"{failures} NOT CONFIRMED"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
