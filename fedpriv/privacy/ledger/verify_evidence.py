"""Check a bundle that `fedpriv evidence` wrote, without fedpriv; needs cryptography, dp-accounting, numpy and scipy."""

import argparse
import base64
import functools
import itertools
import json
import logging
import math
import re
import zipfile
from collections import Counter, defaultdict, namedtuple
from hashlib import sha256
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, dp_event, pld, rdp
from scipy import optimize, stats

TOLERANCES, LEAST = {"pld": (1e-3, 1e-3), "rdp": (1e-6, 1e-6), "risk": (1e-3, 1e-2)}, 1e-6  # of a figure
GRID, MOST_LOSSES, LARGE, MANY_CLIENTS, TINY = 1e-4, 3e6, 100.0, 32, 1e-9  # of losses; beyond, a risk is a bound
LEAST_NOISE, MOST_NOISE, FOR_RELEASES = 1e-6, 1e6, 1 - 1e-9  # less is none, more counts as this; part of delta
VIEWS, KEY, RATES = ("local", "rho", "aggregate"), ("run", "client", "round", "request"), ("0.001", "0.01", "0.05")
CHARGE = ("data_set", "run", "round", "event", "aggregate_scale", "noise_source", "other_holders")
WEIGHTS = {"uniform": (0.0,), "records": (1.0,), "root-records": (1.5,), "auto": (0.0, 1.0, 1.5)}
Object = dict[str, Any]
# Noise on a sum: probability that one is drawn, noise over all that it can move, each holder's share, and probability
Seen = namedtuple("Seen", "unit q z moves drawn")
Events = tuple[tuple[Seen, int], ...]  # each different release, and how many of it there were
as_text = json.JSONEncoder(sort_keys=True).encode  # whose bytes are signed and hashed
NUMBER, INSIDE = r"\d+(\.\d+)?(e[+-]\d+)?", r"0\.\d*[1-9]\d*|[1-9](\.\d+)?e-\d+"  # from 0 on; between 0 and 1
WRITTEN = rf"""(?x)(data_set|client|run|request|event|note|noise_source|reply|reason|signer|signature)=(".*"|null)
    |(digest|previous|replaces)="[0-9a-f]{{64}}"|time="\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00"|events=\[.*\]
    |phase="(registered|changed|charged|released|adopted|recovered|bounded|permitted|withdrawn)"|version=1|rho_bar=1\.0
    |kind="subsampled_gaussian"|(number|num_records|count|order)=([1-9]\d{{0,14}}|null)|(delta|rho_bar)=({INSIDE}|null)
    |(counter|round|num_readers)=(\d{{1,15}}|null)|aggregate_scale=([1-9]\d*(\.\d+)?(e\+\d+)?|null)
    |sampling_probability=({INSIDE}|[01](\.0)?)|(noise_multiplier|epsilon)={NUMBER}|budget=\[{NUMBER},\s"(local|aggregate)"\]
    |unit="(record|person|client)"|rule="(renyi|gaussian|plan)"|other_holders=\[(\[{NUMBER},\s({INSIDE}|[01]\.0)\](,\s)?)*]"""


class Findings(list[str]):  # the lines of the output
    def check(self, holds: bool | None, claim: str, found: object = "it is not so") -> None:
        """Say whether a claim was confirmed, and what was found instead; None leaves it to the reader."""
        says = {True: "confirmed", False: "NOT CONFIRMED", None: "left to you"}[holds]
        self.append(f"{says:<15}{claim}" + f": {found}" * (holds is False))

    def compare(self, claim: str, printed: float | None, found: float, kind: str, is_bound: bool = False) -> None:
        """Say whether a printed figure, which bounds nothing if it is null, is the one found here, or bounds it."""
        value, scale, (below, above) = math.inf if printed is None else printed, max(found, LEAST), TOLERANCES[kind]
        agrees = value == found or found - below * scale <= value <= found + (math.inf if is_bound else above) * scale
        self.check(agrees, f"{claim} is {'at most ' * is_bound}{value:.6g}", f"it is {found:.6g} here")

    def once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """An object of JSON without whatever in it fedpriv never writes, on which there is a line."""
        wrong = [key for key, value in pairs if not re.fullmatch(WRITTEN, f"{key}={json.dumps(value)}")]
        if wrong or len(dict(pairs)) < len(pairs):
            self.check(False, f"fedpriv can have written {pairs!s:.999}", wrong or "a name is there twice")
        return {key: value for key, value in pairs if key not in wrong}

    def parsed(self, text: str | bytes) -> Any:
        """The content of a JSON text of a ledger."""
        return json.loads(text, object_pairs_hook=self.once)


def check_part(part: str, files: dict[str, bytes], kept: str | None, to: Findings) -> None:
    """Check one ledger of the bundle, with what was printed of it."""
    texts = (files[f"{part}/{n}.json"].replace(b'"inf"', b"Infinity") for n in ("about", "figures", "registrations"))
    about, shown, registrations = map(json.loads, texts)
    entries, receipts = ([*map(to.parsed, files[f"{part}/{n}.jsonl"].splitlines())] for n in ("entries", "receipts"))
    for name, digest in about["policy"].items():
        to.check(sha256(files[f"{part}/{name}"]).hexdigest() == digest, f"{name} has the digest {digest}")
    digests = ["0" * 64]  # of every entry with that of the one before
    for e in entries:
        digests.append(sha256(as_text([digests[-1], {k: e[k] for k in e if k != "digest"}]).encode()).hexdigest())
    for number in [n for n, e in enumerate(entries, 1) if (e["number"], e["digest"]) != (n, digests[n])][:1]:
        to.check(False, f"entry {number} follows the one before", "one was changed, moved or lost")
    head, last = about["head"], {"number": len(entries), "digest": digests[-1]}
    to.check(head == last, f"the chain of {len(entries)} entries ends at its head {digests[-1]}", head)
    to.check(kept in digests[1:] if kept else None, f"the chain holds the entry {kept or 'you kept (--head)'}")
    check_sums([*map(json.loads, files[f"{part}/inclusions.jsonl"].splitlines())], about, entries, to)
    spent, rows, printed = spent_of(entries, to), {row["data_set"]: row for row in shown["data_sets"]}, shown["printed"]
    receipts += [to.parsed(each["receipt"]) for each in registrations.values() if each.get("receipt")]
    ids = {each["data_set"] for each in (*entries, *receipts)} - {""}  # of an adoption
    to.check(rows.keys() == ids and len(rows) == len(shown["data_sets"]), f"figures are of all {len(ids)} data sets")
    check_receipts(spent, receipts, {each["data_set"]: each["identity"] for each in registrations.values()}, to)
    deltas = {str(client["client"]): client["delta"] for client in printed["clients"]} if printed else {}
    for client, each in registrations.items():
        row, identity = rows[each["data_set"]], each["identity"]
        claim = f"client {client} registered data set {each['data_set']} of {each['num_records']} records"
        is_own = f"{row['client']} of ".startswith((f"{client} of ", f"{each['name']} of "))
        told = (str(each["client"]), is_own, row["num_records"], deltas[client])
        to.check(told == (client, True, each["num_records"], row["delta"]), claim, told)
        text = {name: value for name, value in each.items() if name != "receipt" or value} | {"signature": ""}
        signed = is_signed(identity, text, each["signature"]) if identity else None
        to.check(signed, f"its registration is signed by {identity or 'nobody, as in a simulation'}")
    for row in rows.values():
        check_data_set(row, entries, spent[row["data_set"]], to)
    if printed:
        check_printed(printed, {c: spent[each["data_set"]] for c, each in registrations.items()}, to)
    if any(entry["noise_source"] == "seeded" for entry in entries):
        to.check(None, "some noise came from a seeded generator: who knows the seed can remove it")


def spent_of(entries: list[Object], to: Findings) -> dict[str, list[Object]]:
    """The releases that each data set has spent, with their notes and what the entry of their end says of a round."""
    ends = {tuple(e[key] for key in KEY): e for e in entries if e["phase"] == "released"}
    found: defaultdict[str, list[Object]] = defaultdict(list)
    for e in (e for e in entries if e["phase"] in ("charged", "recovered")):
        end, note, event = ends.get(tuple(map(e.get, KEY)), e), *(to.parsed(e[k] or "{}") for k in ("note", "event"))
        scales = e["aggregate_scale"], end["aggregate_scale"]  # a node signs the first alone
        views = {"local": 1.0, "rho": end["rho_bar"], "aggregate": None if None in scales else min(scales)}
        found[e["data_set"]].append({"num_readers": 0, **note, **e, **views, "event": event})
    return found


def check_receipts(spent: Object, receipts: list[Object], identities: Object, to: Findings) -> None:
    """Check that each data set's receipts are one chain under its node's key, with a charge for each."""
    links, keys = defaultdict[str, dict[tuple[int, str], Object]](dict), defaultdict[str, set[str]](set)
    for receipt in receipts:
        link = {key: receipt[key] for key in receipt.keys() - {"signer", "signature"}} | {"purpose": "fedpriv charge 1"}
        digest, signer = sha256(as_text(link).encode()).hexdigest(), receipt["signer"]
        links[link["data_set"]][link["counter"], digest] = link | {"event": to.parsed(link["event"] or "{}")}
        keys[digest].add(signer if is_signed(signer, link, receipt["signature"]) else "")
    for data_set in sorted({*spent, *links}):
        chain, number, last, name = sorted(links[data_set].items()), -1, "0" * 64, f"data set {data_set}"
        for (counter, digest), each in chain:
            if (counter - 1, each["previous"]) != (number, last) or "" in keys[digest]:  # "": signed wrongly
                to.check(False, f"receipt {counter} of {name} is signed, and here once, after number {number}")
            number, last = counter, digest
        both = spent.get(data_set, ()), [link for _, link in chain[1:]]
        charged, signed = (Counter(str([each.get(key) or None for key in CHARGE]) for each in some) for some in both)
        signers, claim = sorted(keys[last]), f"{len(chain)} receipts of {name} have a charge each, and its node's key"
        is_own = not (chain and identities.get(data_set)) or identities[data_set] in signers
        to.check(is_own and signed <= charged, claim, f"{(signed - charged).total()} have none; the last has {signers}")
        to.check(None, f"{name}: {(charged - signed).total()} charges lack a receipt; its key {signers} signed no more")


def top_of(tree: Any, leaves: list[Object]) -> list[Any]:
    """Hash, number of replies and weight of a tree: of a leaf, which is listed, of two trees, or of one not shown."""
    if isinstance(tree, dict):
        leaves.append(tree)
        return [sha256(b"\0" + as_text(tree).encode()).hexdigest(), int(tree["reply"] != ""), tree["weight"]]
    if isinstance(tree[0], str):
        return [*tree]
    one, other = both = [top_of(each, leaves) for each in tree]
    return [sha256(b"\1" + as_text(both).encode()).hexdigest(), one[1] + other[1], one[2] + other[2]]


def check_sums(sums: list[Object], about: Object, entries: list[Object], to: Findings) -> None:
    """Check that each round's sum, which the coordinator signed, is of the ledger's replies at the agreed weights."""
    known: defaultdict[Any, set[Any]] = defaultdict(set)  # the replies of a client's round, and its registered sizes
    for e in entries:
        known[e["run"], e["round"], e["client"]] |= {e["reply"] or e["num_records"]} - {None}
    by, powers = about["coordinator"], WEIGHTS[about["schedule"].get("client_weights", "auto")]
    for s in sums:
        said, leaves = {**s["record"], "purpose": "fedpriv round 1"}, list[Object]()
        top, run, seal = top_of(s["tree"], leaves), f"round {said['round']} of run {said['run']}", said.pop("signature")
        own = top == [said[key] for key in ("root", "included", "weight")] and len(leaves) in (1, said["positions"])
        to.check(own and is_signed(by, said, seal), f"{run}: its sum of {said['included']} is signed by {by}", top)
        for at, leaf in enumerate(leaves, leaves[0]["position"] if len(leaves) == 1 else 0):
            replies, sizes = known[said["run"], said["round"], str(at)], known[None, None, str(at)]
            may_lack = not (replies and said["included"]) or len(leaves) == 1  # a node's reply may have come late
            fits = str(leaf["position"]) == str(at) and (leaf["reply"] in replies or (leaf["reason"] and may_lack))
            weights = [size**power for size in sizes for power in powers] if leaf["reply"] else [0.0]
            if not (fits and any(math.isclose(leaf["weight"], weight) for weight in weights)):
                to.check(False, f"{run}: position {at} has its reply in the sum, as agreed, or a reason why not", leaf)
            elif leaf["reason"] not in ("", "not asked"):
                to.check(None, f"{run}: position {at} is not in the sum: {leaf['reason']}")


def is_signed(signer: str, content: Object, signature: str) -> bool:
    """Whether the key of a public line has signed this JSON: Ed25519, or ECDSA with SHA-256."""
    try:
        key: Any = serialization.load_ssh_public_key(signer.encode())
        more = () if isinstance(key, ed25519.Ed25519PublicKey) else (ec.ECDSA(hashes.SHA256()),)
        return key.verify(base64.b64decode(signature, validate=True), as_text(content).encode(), *more) is None
    except (ValueError, InvalidSignature):
        return False


def seen_by(view: str, releases: list[Object]) -> Events:
    """The events of releases on a view, which scales their noise; where `aggregate` does not hold, none is scaled."""
    counts: Counter[Seen] = Counter()
    for release in releases:
        event, scale = release["event"], release.get(view)
        others = release.get("other_holders", []) if view == "aggregate" and scale is not None else []
        moves, drawn = zip((1.0, event["sampling_probability"]), *others, strict=True)
        noise, total = min(event["noise_multiplier"] * (1.0 if scale is None else scale), MOST_NOISE), math.fsum(moves)
        q, z = 1 - math.prod(1 - p for p in drawn), noise / total if noise / total >= LEAST_NOISE else 0.0
        counts[Seen(event["unit"], q, z, tuple(move / total for move in moves), drawn)] += event["count"]
    return tuple(sorted((event, count) for event, count in counts.items() if event.q > 0))


def composed(events: Events, interval: float = 0.0, orders: list[int] | None = None) -> Any:
    """All events in an accountant of dp-accounting: by pld on a grid of losses, or by rdp at some orders."""
    interval *= 10 if any(len(event.moves) > 1 for event, _ in events) else 1  # does for mixtures, which take long
    total: Any = pld.PLDAccountant(value_discretization_interval=interval) if interval else rdp.RdpAccountant(orders)
    for event, count in events:
        one: Any = GaussianDpEvent(event.z)
        if interval and len(event.moves) > 1:
            coins = np.array(list(itertools.product((0, 1), repeat=len(event.moves))))
            shares = np.where(coins, event.drawn, 1 - np.array(event.drawn)).prod(axis=1)
            one = dp_event.MixtureOfGaussiansDpEvent(event.z, (coins @ event.moves).tolist(), shares.tolist())
        elif event.q < 1:
            one = PoissonSampledDpEvent(event.q, one)
        total.compose(one, count)
    return total


@functools.lru_cache(maxsize=4096)
def epsilon_of(events: Events, delta: float, kind: str = "rdp", printed: float | None = None) -> float:
    """Epsilon at delta: all are composed first, and converted once; by pld the lesser of both, or the printed one."""
    by_rdp, reach = (float(composed(events).get_epsilon(at)) for at in (delta, 1e-15))
    interval, said = max(GRID, 2 * reach / MOST_LOSSES), printed or math.inf
    if kind == "rdp" or interval > 1 or math.isclose(said, by_rdp, rel_tol=TOLERANCES["rdp"][0]):
        return by_rdp
    loss, off = composed(events, interval), 3e-14 + 1e-16 * sum(count for _, count in events)  # by Fourier transforms
    low, high = (float(loss.get_epsilon(at)) if at > 0 else math.inf for at in (delta + off, delta - 2 * off))
    return min(by_rdp, high, max(low, said))


def cost_of(events: Events, order: int) -> float:
    """The sum that a budget's rule keeps: of divergences at a Renyi order; without one, of 1 / z^2, which is mu^2."""
    return math.fsum(composed(events, 0, [order])._rdp if order else [n / e.z**2 if e.z else np.inf for e, n in events])


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
    profile: Any = None, None, np.linspace(-37.0, 0.0, 4000)  # with half of the tests: the others mirror them
    if not order and not exact:
        typical = min(p * move / max(e.z, 1.0) for e, _ in events for move, p in zip(e.moves, e.drawn, strict=True))
        finest = float(np.clip(typical / 50, GRID / 10, 50 * GRID))
        losses = [composed(events, grid) for grid in (finest, 8 * finest)]  # a bound each: floats blur tiny losses
        epsilons = np.append(0.0, np.geomspace(1e-4, min(losses[0].get_epsilon(1e-15), 600.0) + 1e-3, 2000))
        deltas, ratio = np.min([loss.get_delta(epsilons) for loss in losses], axis=0), np.exp(epsilons)
        profile = deltas, ratio, stats.norm.ppf(np.clip(-np.diff(deltas) / np.diff(ratio), 1e-300, 0.5))  # of corners
    found: Any = functools.partial(found_at, cost, order, *profile[:2])
    balanced = optimize.brentq(lambda x: float(found(np.array([max(x, 1e-300)]))[0]) + x - 1, -1.0, 0.5)
    z = np.append(profile[2], [stats.norm.ppf(max(balanced, 1e-300)), -37.0])  # a divergence has no other corner
    total = composed(events if delta < TINY and profile[0] is not None else ())  # which rounds to less
    also = [(its, n) for its, n in zip(total._rdp[::4], total._orders[::4], strict=True) if its]
    least = np.min([found(x := stats.norm.cdf(z)), *(found_at(*each, None, None, x) for each in also)], axis=0)
    needed = stats.norm.ppf(np.clip(least - delta, 0, 1)) - z
    mu = math.inf if not exact and least[-1] > delta else float(needed.max(initial=exact * math.sqrt(cost)))
    return {"mu": mu, "advantage": 1 - 2 * balanced} | dict(zip(RATES, found(np.array(RATES, float)), strict=True))


def found_at(cost: float, order: int, deltas: Any, ratio: Any, x: Any) -> Any:
    """The most found by who accuses a share x of outsiders: by delta at each e^epsilon, by mu^2, or by a divergence."""
    if ratio is not None:
        return np.minimum(deltas + np.outer(x, ratio), 1 - (1 - deltas - x[:, None]) / ratio).min(axis=1)
    if not order:
        return stats.norm.cdf(stats.norm.ppf(x) + math.sqrt(cost))
    low, high = x, np.ones_like(x)
    for _ in range(52):  # by geometric means, as a share may be smaller than any difference of floats near 1
        coins = np.log([x, 1 - x]), np.log([y := np.sqrt(low) * np.sqrt(high), 1 - y])
        fits = [np.logaddexp.reduce(order * p + (1 - order) * q) <= (order - 1) * cost for p, q in (coins, coins[::-1])]
        low, high = np.where(np.all(fits, axis=0), (y, high), (low, y))
    return high


def check_risk(name: str, row: Object, events: Events, delta: float, order: int, is_bound: bool, to: Findings) -> None:
    """Compare a printed risk, which may not be too small; where it is a bound, as of large losses, it may be larger."""
    is_sampled = not order and any(min(e.drawn) < 1 for e, _ in events)
    is_bound |= is_sampled and (delta < TINY or epsilon_of(events, 1e-5) > LARGE)
    printed = row["tpr_at_fpr"] | {key: row[key] for key in ("mu", "advantage")}
    for key, found in risk_of(events, delta, order).items():
        to.compare(f"{name}: {'found at ' * (key in RATES)}{key}", printed[key], found, "risk", is_bound)


def check_data_set(row: Object, entries: list[Object], releases: list[Object], to: Findings) -> None:
    """Check what is printed of a data set."""
    name, delta, view = f"data set {row['data_set']}", row["delta"], VIEWS[2 * (row["view"] == "aggregate")]
    (registered,) = [e for e in entries if (e["phase"], e["data_set"]) == ("registered", row["data_set"])]
    facts = {key: registered[key] for key in ("client", "num_records", "delta")} | {"view": view}
    in_runs = [release for release in releases if release["run"]]
    facts |= {"rounds": len(in_runs), "runs": len({release["run"] for release in in_runs})}
    facts["noise_source"] = ",".join(sorted({r["noise_source"] for r in in_runs} - {"", None}))
    facts["num_readers"] = min((r["num_readers"] for r in releases if (r["aggregate"] or 1) > 1), default=None)
    facts["unit"] = ",".join(sorted({r["event"]["unit"] for r in releases if r["event"]})) or "record"
    to.check(facts.items() <= row.items(), f"{name}: {', '.join(f'{key} {row[key]}' for key in facts)}", facts)
    for on in VIEWS if any(release["rho"] < 1 for release in releases) else ("local", "aggregate"):
        for kind, printed in (("pld", row[f"epsilon_{on}"]), ("rdp", row["rdp"][on])):
            epsilon = epsilon_of(seen_by(on, releases), delta, kind, printed)
            to.compare(f"{name}: epsilon_{on} at delta {delta:g} by {kind}", printed, epsilon, kind)
    check_rules(name, view, row, entries, releases, to)


def check_printed(printed: Object, spent: dict[str, list[Object]], to: Findings) -> None:
    """Check what a run printed at its end of every client, and of the worst."""
    clients, view, keys = printed["clients"], printed["privacy_view"], [f"epsilon_{view}" for view in VIEWS]
    if (holders := printed.get("holders_per_person") or 1) > 1:  # a person pays what the costliest so many released
        name, delta = f"(any {holders}, for a person at so many)", min(client["delta"] for client in clients)
        sums = [list(itertools.chain(*several)) for several in itertools.combinations(spent.values(), holders)]
        spent = {**spent, name: max(sums, key=lambda each: epsilon_of(seen_by(view, each), delta, "rdp"))}
        clients = [*clients, {**printed, **{k: printed[f"{k}_max"] for k in keys}, "client": name, "delta": delta}]
    worst_of: list[Object] = clients if holders == 1 else clients[-1:]
    risky = [c | {rate: c["tpr_at_fpr"][rate] for rate in RATES} for c in worst_of if c["tpr_at_fpr"]]
    are_many = len({(seen_by(view, spent[str(client["client"])]), client["delta"]) for client in risky}) > MANY_CLIENTS
    for who, client in ((str(client["client"]), client) for client in clients):
        releases, delta, name = spent[who], client["delta"], f"client {who} in the run's summary"
        for key, on in zip((*keys, "epsilon_local_this_run"), (*VIEWS, "local"), strict=True):
            some = [r for r in releases if key in keys or r["run"] == printed["run_id"]]
            if key in client and (client[key] is not None or all(r[on] is not None for r in some)):
                found = epsilon_of(seen_by(on, some), delta, "pld", client[key])
                to.compare(f"{name}: {key} at delta {delta:g}", client[key], found, "pld", printed["upper_bound_only"])
        told = {r["event"]["unit"] for r in releases} | {printed["unit"]}, all(r[view] is not None for r in releases)
        claim = f"{name}: its unit is a {client['unit']}, with a risk if the {view} view holds"
        to.check(told == ({client["unit"]}, bool(client["tpr_at_fpr"])), claim, told)
        if client["tpr_at_fpr"]:
            check_risk(f"{name}: on the {view} view", client, seen_by(view, releases), delta, 0, are_many, to)
    figures = {"delta_max": [c["delta"] for c in clients]} | {f"{key}_max": [c[key] for c in worst_of] for key in keys}
    figures |= {key: [client[key] for client in risky] for key in ("mu", "advantage", *RATES) if risky}
    for key, values in figures.items():
        worst, place = None if None in values else max(values), printed["tpr_at_fpr"] if key in RATES else printed
        to.check(place[key] == worst, f"{key} {place[key]} is that of the worst client", worst)
    for most, budget in zip(figures[f"epsilon_{view}_max"], itertools.cycle(printed["budget_epsilon"])):
        to.check(most is not None and most <= budget * (1 + 1e-9), f"the {view} budget of {budget:g} is kept", most)


def check_rules(name: str, view: str, row: Object, entries: list[Object], releases: list[Object], to: Findings) -> None:
    """Check how much of a budget and of its plans is used, by the rule that the ledger names, and the risk under it."""
    rules = [to.parsed(e["note"]) for e in entries if (e["phase"], e["data_set"]) == ("bounded", row["data_set"])]
    last: Object = rules[-1] if rules else {"rule": "none"}
    rules, order, kind = [rule for rule in rules if rule["rule"] == last["rule"]], last.get("order", 0), last["rule"]
    slots = [seen_by("local", [{"event": event} for event in rule.get("events", ())]) for rule in rules]
    delta, events = row["delta"] * (FOR_RELEASES if rules else 1.0), seen_by(view, releases)
    if kind == "plan":  # each release takes the first slots that dominate it, of those that protect most
        free = [slot for plan in slots for slot in sorted(plan, key=lambda slot: (slot[0].q, -slot[0].z))]
        lacking, events = 0, tuple(itertools.chain(*slots))
        for event, missing in (event for release in releases for event in seen_by(view, [release])):
            for i, (slot, num) in enumerate(free):
                if (event.unit, event.moves) == (slot.unit, slot.moves) and event.z >= slot.z and event.q <= slot.q:
                    free[i], missing = (slot, num - min(num, missing)), missing - min(num, missing)
            lacking += missing
        to.check(not lacking, f"{name}: each release has a slot in its plans", f"{lacking} have none")
    events = tuple((e._replace(q=1.0, drawn=(1.0,)) if kind == "gaussian" else e, n) for e, n in events)  # no sampling
    if budget := row["budget"]:
        used, on, epsilon = cost_of(seen_by(budget["view"], releases), order), budget["view"], budget["epsilon"]
        limit = divergence_at(order, epsilon, delta) if kind in ("renyi", "gaussian") else 0.0
        if kind == "plan":
            for p, s in zip(rules, slots, strict=True):
                to.compare(f"{name}: a plan's epsilon", e := p["epsilon"], epsilon_of(s, p["delta"], "pld", e), "pld")
            total = [math.fsum(plan[key] for plan in rules) for key in ("epsilon", "delta")]
            to.check(total[0] <= epsilon * (1 + 1e-9) and total[1] <= delta, f"{name}: its plans fit", total)
            used, limit = math.fsum(r["event"]["count"] for r in releases), math.fsum(n for _, n in events)
        share = used / limit if limit > 0 else math.inf if releases else 0.0
        to.compare(f"{name}: share of {on} epsilon {epsilon:g} used, by the rule {kind},", budget["used"], share, "rdp")
        kept = share <= 1 + 1e-9 and budget["left"] == max(0.0, 1 - budget["used"])
        to.check(kept, f"{name}: its budget is kept; {budget['left']:.6g} of it is left", f"{share:.6%} of it is used")
    noted = [e for e, on in (rule.get("budget", (0, "")) for rule in rules) if on in ("local", view)]
    for epsilon in noted or [budget["epsilon"] for _ in rules[:1] if budget and row["rounds"] and not slots[0]]:
        if (left := divergence_at(order, epsilon, delta) - cost_of(events, order)) > 0:  # which could be released too
            events += ((Seen(row["unit"], 1.0, math.sqrt((order or 2) / (2 * left)), (1.0,), (1.0,)), 1),)
    check_risk(f"{name}: on the {view} view, by the rule {last['rule']}", row, events, delta, order, False, to)


def main() -> int:
    """Print the findings, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--head", help="digest of an entry, which a report or statement printed")
    given, to, part = parser.parse_args(), Findings(), "the rest"
    logging.disable(logging.WARNING)  # of dp-accounting, that it leaves out an order: fewer only raise epsilon
    try:
        with zipfile.ZipFile(given.bundle) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
            to.check(len(files) == len(archive.namelist()), "no file is in the bundle twice")
        listed = dict(json.loads(files.pop("manifest.json"))["files"])
        digests = {name: sha256(content).hexdigest() for name, content in files.items()}
        wrong = {n: digests.get(n, "missing") for n in sorted(listed | digests) if digests.get(n) != listed.get(n)}
        to.check(not wrong, f"the {len(listed)} files have the digests of the manifest", wrong)
        for part in sorted({name.partition("/")[0] for name in files if "/" in name}) or ["a ledger"]:
            to.append(f"-- {part}")
            check_part(part, files, given.head, to)
    except Exception as error:  # whatever it is, it was not confirmed
        to.check(False, f"the bundle has a manifest, and {part} can be read and computed to its end", repr(error))
    to.check(None, "what no node signs, as rho_bar, num_readers, delta, times; that noise was drawn; other ledgers")
    print("\n".join([*to, f"{(failures := sum(line.startswith('NOT CONFIRMED') for line in to))} NOT CONFIRMED"]))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
