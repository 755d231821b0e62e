"""A coordinator who forges the evidence of a run: every digest and figure follows from its lies, no signature does.

It holds its own ledger, the receipts that nodes have signed, and the verifier's own functions, by which it states what
its lies come to. It has a key of its own, and none of a node.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedpriv.privacy.ledger import keys, verify_evidence
from fedpriv.privacy.ledger.head_file import EMPTY_CHAIN
from fedpriv.privacy.ledger.verify_evidence import RATES, VIEWS, Findings, epsilon_of, risk_of, seen_by, spent_of

Object = dict[str, Any]

# What stands in a number's place, and a careless reader may take for one.
_ODD = (-19, -1, 0, True, False, 1.5, -0.5, "1", "0.5", [], None, math.nan, math.inf)
_PHASES = ("changed", "withdrawn", "permitted", "Charged", "charged ", "released", "")


@dataclass
class Forgery:
    """The files of a run's evidence, taken apart.

    Attributes:
        files: {name: content} of the honest bundle.
        key: the coordinator's own private key.
        twice: {number of an entry: what its line says first of a field that it has twice}.
        hopes: {id of an entry: what the coordinator hopes that a reader takes it for}, by which it states its figures.
    """

    files: dict[str, bytes]
    key: Path
    twice: dict[int, str] = field(default_factory=dict)
    hopes: dict[int, Object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.entries = [json.loads(line) for line in self.files["run/entries.jsonl"].splitlines()]
        self.receipts = [json.loads(line) for line in self.files["run/receipts.jsonl"].splitlines()]
        self.registrations = json.loads(self.files["run/registrations.json"])
        self.figures = json.loads(self.files["run/figures.json"])

    @property
    def rows(self) -> list[Object]:
        """The figures of each data set, and those of each client in the summary."""
        return [*self.figures["data_sets"], *self.figures["printed"]["clients"]]

    def of(self, phase: str) -> list[Object]:
        """The entries of a phase."""
        return [entry for entry in self.entries if entry["phase"] == phase]

    def omit(self, charges: list[Object]) -> None:
        """Leave out charges, with how they ended."""
        keys_ = [_key(charge) for charge in charges]
        self.entries = [e for e in self.entries if e["phase"] not in ("charged", "released") or _key(e) not in keys_]

    def end_of(self, charge: Object) -> Object:
        """How a charge ended; the charge itself if nothing tells."""
        return next((entry for entry in self.of("released") if _key(entry) == _key(charge)), charge)

    def packed(self) -> dict[str, bytes]:
        """The files, with all digests and figures as the lies have them."""
        digest = EMPTY_CHAIN
        lines = []
        for number, entry in enumerate(self.entries, start=1):
            content = {**{name: value for name, value in entry.items() if name != "digest"}, "number": number}
            digest = hashlib.sha256(json.dumps([digest, content], sort_keys=True).encode()).hexdigest()
            line = json.dumps({**content, "digest": digest}, sort_keys=True)
            lines.append(f"{{{self.twice[number]}, {line[1:]}" if number in self.twice else line)
        about = json.loads(self.files["run/about.json"])
        about["head"] = {"number": len(lines), "digest": digest}
        return self.files | {
            "run/entries.jsonl": "".join(f"{line}\n" for line in lines).encode(),
            "run/receipts.jsonl": "".join(f"{json.dumps(each, sort_keys=True)}\n" for each in self.receipts).encode(),
            "run/registrations.json": json.dumps(self.registrations).encode(),
            "run/figures.json": json.dumps(self.figures).encode(),
            "run/about.json": json.dumps(about).encode(),
        }

    def restate(self) -> None:
        """State the figures that follow from the lies, as far as the verifier can compute them."""
        with suppress(Exception):  # what it refuses to read stays as it was
            hoped = [entry | self.hopes.get(id(entry), {}) for entry in self.entries]
            spent = spent_of(hoped, Findings())
            registered = {entry["data_set"]: entry for entry in self.of("registered")}
            for row in self.figures["data_sets"]:
                if row["data_set"] in registered:
                    self._restate_row(row, registered[row["data_set"]], list(spent.get(row["data_set"], ())))
            printed = self.figures["printed"]
            for client in printed["clients"]:
                registration = self.registrations[str(client["client"])]
                releases = list(spent.get(registration["data_set"], ()))
                client["delta"] = registered[registration["data_set"]]["delta"]
                _restate(client, releases, client["delta"], printed["privacy_view"])
                own = [release for release in releases if release["run"] == printed["run_id"]]
                client["epsilon_local_this_run"] = _epsilon("local", own, client["delta"])
            self.restate_worst()

    def _restate_row(self, row: Object, registered: Object, releases: list[Object]) -> None:
        row |= {key: registered[key] for key in ("client", "num_records", "delta")}
        charges = [entry for entry in self.of("charged") if entry["data_set"] == row["data_set"] and entry["run"]]
        row |= {"rounds": len(charges), "runs": len({charge["run"] for charge in charges})}
        row["noise_source"] = ",".join(sorted({release["noise_source"] for release in releases}))
        counted = [release["num_readers"] for release in releases if (release["aggregate"] or 1) > 1]
        row["num_readers"] = min(counted, default=None)
        row["unit"] = ",".join(sorted({release["event"]["unit"] for release in releases})) or "record"
        _restate(row, releases, row["delta"], "local")
        row["rdp"] = {view: _epsilon(view, releases, row["delta"], "rdp") for view in VIEWS}

    def restate_worst(self) -> None:
        """State the largest figures of all clients in the summary."""
        printed, clients = self.figures["printed"], self.figures["printed"]["clients"]
        for key in ("delta", *(f"epsilon_{view}" for view in VIEWS)):
            printed[f"{key}_max"] = _largest(client[key] for client in clients)
        for key in ("mu", "advantage"):
            printed[key] = _largest(client[key] for client in clients)
        printed["tpr_at_fpr"] = {rate: _largest(client["tpr_at_fpr"][rate] for client in clients) for rate in RATES}

    def sign(self, content: Object) -> Object:
        """A receipt or registration, under the coordinator's own key."""
        text = json.dumps(content, sort_keys=True).encode()
        return {"signer": keys.public_line(self.key), "signature": keys.sign(self.key, text)}


def _restate(row: Object, releases: list[Object], delta: float, view: str) -> None:
    """The epsilons and the risk in a row, on each view and on the given one."""
    row |= {f"epsilon_{on}": _epsilon(on, releases, delta) for on in VIEWS}
    risk = risk_of(seen_by(view, releases), delta)
    row |= {key: None if risk[key] == math.inf else risk[key] for key in ("mu", "advantage")}
    row["tpr_at_fpr"] = {rate: risk[rate] for rate in RATES}


def _epsilon(view: str, releases: list[Object], delta: float, kind: str = "pld") -> float | None:
    epsilon = epsilon_of(seen_by(view, releases), delta, kind)
    return None if epsilon == math.inf else epsilon


def _largest(figures: Iterator[float | None]) -> float | None:
    known = list(figures)
    return None if None in known else max(known)


def _key(entry: Object) -> tuple[object, ...]:
    return tuple(entry[name] for name in ("run", "client", "round", "request"))


def _some(items: list[Any], rng: random.Random, most: int = 9) -> list[Any]:
    return rng.sample(items, rng.randint(1, min(most, len(items))))


def _changed_event(charge: Object, **values: object) -> None:
    charge["event"] = json.dumps(json.loads(charge["event"]) | values, sort_keys=True)


# --- lies ---

Lie = Callable[[Forgery, random.Random], None]


def omits_charges(forgery: Forgery, rng: random.Random) -> None:
    """Some charges, or one of those whose round was asked twice, are not in the ledger."""
    forgery.omit(_some(forgery.of("charged"), rng))


def omits_charges_with_receipts(forgery: Forgery, rng: random.Random) -> None:
    charges = _some(forgery.of("charged"), rng)
    forgery.omit(charges)
    gone = {(charge["data_set"], charge["round"], charge["event"]) for charge in charges}
    forgery.receipts = [r for r in forgery.receipts if (r["data_set"], r["round"], r["event"]) not in gone]


def shows_receipts_twice(forgery: Forgery, rng: random.Random) -> None:
    """In place of some receipts, whose charges are left out, others are shown again."""
    signed = [at for at, receipt in enumerate(forgery.receipts) if receipt["counter"]]
    for at in _some(signed, rng):
        receipt = forgery.receipts[at]
        same = [
            c for c in forgery.of("charged") if (c["data_set"], c["round"]) == (receipt["data_set"], receipt["round"])
        ]
        forgery.omit(same[:1])
        forgery.receipts[at] = dict(forgery.receipts[rng.choice(signed)])


def numbers_receipts_again(forgery: Forgery, rng: random.Random) -> None:
    """Receipts are left out, and the others get the missing numbers and digests, which nobody signed."""
    omits_charges_with_receipts(forgery, rng)
    for counter, receipt in enumerate(sorted(forgery.receipts, key=lambda each: each["counter"])):
        receipt["counter"] = counter


def signs_by_itself(forgery: Forgery, rng: random.Random) -> None:
    """From some number on the receipts are the coordinator's own, of cheaper charges, after genuine ones."""
    data_set = rng.choice(forgery.of("registered"))["data_set"]
    chain = sorted((r for r in forgery.receipts if r["data_set"] == data_set), key=lambda each: each["counter"])
    start, previous = rng.randrange(len(chain)), EMPTY_CHAIN
    charges = [charge for charge in forgery.of("charged") if charge["data_set"] == data_set]
    for receipt in chain:
        link = {"purpose": "fedpriv charge 1", **{k: v for k, v in receipt.items() if k not in ("signer", "signature")}}
        if receipt["counter"] >= start:
            link["previous"] = receipt["previous"] = previous
            if receipt["event"]:
                charge = next(c for c in charges if (c["round"], c["event"]) == (receipt["round"], receipt["event"]))
                charges.remove(charge)
                _changed_event(charge, noise_multiplier=rng.choice([50.0, 1e6]))
                link["event"] = receipt["event"] = charge["event"]
            receipt |= forgery.sign(link)
        previous = hashlib.sha256(json.dumps(link, sort_keys=True).encode()).hexdigest()


def adds_an_odd_entry(forgery: Forgery, rng: random.Random) -> None:
    """A charge of its own, with a number that no release has."""
    charge = dict(rng.choice(forgery.of("charged"))) | {"request": f"{rng.random()}"}
    name = rng.choice(["count", "count", "noise_multiplier", "sampling_probability"])
    _changed_event(charge, **{name: rng.choice(_ODD)})
    for each in (charge, *_some(forgery.of("charged"), rng)):  # which a negative number would take away
        forgery.hopes[id(each)] = {"phase": "changed"}
    forgery.entries.append(charge)


def takes_odd_numbers(forgery: Forgery, rng: random.Random) -> None:
    for entry in _some(forgery.of("charged"), rng, 2):
        name = rng.choice(["rho_bar", "aggregate_scale", "round", "noise_source", "event", "note", "event"])
        if name == "event":
            _changed_event(
                entry, **{rng.choice(["count", "noise_multiplier", "sampling_probability"]): rng.choice(_ODD)}
            )
        else:
            entry[name] = rng.choice(_ODD)
        forgery.hopes[id(entry)] = {"phase": "changed"}


def makes_noise_larger(forgery: Forgery, rng: random.Random) -> None:
    for charge in _some(forgery.of("charged"), rng):
        event = json.loads(charge["event"])
        factor = rng.choice([1.01, 1.1, 3.0, 1e6])
        _changed_event(charge, noise_multiplier=event["noise_multiplier"] * factor)


def samples_less(forgery: Forgery, rng: random.Random) -> None:
    for charge in _some(forgery.of("charged"), rng):
        _changed_event(charge, sampling_probability=rng.choice([0.0, 0.0, 0.0, 0.5]))


def writes_an_event_twice(forgery: Forgery, rng: random.Random) -> None:
    """One reader takes the first number of two with one name, another one the last."""
    for charge in _some(forgery.of("charged"), rng):
        number = rng.choice(["1e6", "77.5"])
        charge["event"] = f'{charge["event"][:-1]}, "noise_multiplier": {number}}}'


def writes_a_field_twice(forgery: Forgery, rng: random.Random) -> None:
    at = rng.choice([at for at, entry in enumerate(forgery.entries, start=1) if entry["phase"] == "charged"])
    entry = forgery.entries[at - 1]
    forgery.twice[at] = f'"event": {json.dumps(entry["event"])}'
    _changed_event(entry, noise_multiplier=1e6)


def raises_the_scale_of_a_round(forgery: Forgery, rng: random.Random) -> None:
    for charge in _some(forgery.of("charged"), rng):
        factor = rng.choice([1.05, 2.0, 100.0, 1e9])
        scale = factor * charge["aggregate_scale"]
        forgery.end_of(charge)["aggregate_scale"] = scale
        forgery.hopes[id(charge)] = {"aggregate_scale": scale}


def raises_the_scale_of_a_charge(forgery: Forgery, rng: random.Random) -> None:
    for charge in _some(forgery.of("charged"), rng):
        scale = charge["aggregate_scale"] * rng.choice([1.05, 2.0, 1e9])
        charge["aggregate_scale"] = forgery.end_of(charge)["aggregate_scale"] = scale


def ends_a_round_twice(forgery: Forgery, rng: random.Random) -> None:
    for charge in _some(forgery.of("charged"), rng):
        forgery.entries.append({**forgery.end_of(charge), "phase": "released", "aggregate_scale": 1e6})
        forgery.hopes[id(charge)] = {"aggregate_scale": 1e6}


def changes_rho_bar(forgery: Forgery, rng: random.Random) -> None:
    for charge in _some(forgery.of("charged"), rng):
        forgery.end_of(charge)["rho_bar"] = charge["rho_bar"] = rng.choice([1.0, 2.0, 1e6, -1.0])


def swaps_data_sets(forgery: Forgery, rng: random.Random) -> None:
    """Charges of one data set go to another, which may not exist; or two holders change places."""
    ids = [entry["data_set"] for entry in forgery.of("registered")]
    if rng.random() < 0.3:
        swapped = dict(zip(ids, reversed(ids), strict=True))
        for each in (*forgery.entries, *forgery.figures["data_sets"], *forgery.registrations.values()):
            if rng.random() < 0.9:
                each["data_set"] = swapped.get(each["data_set"], each["data_set"])
    for charge in _some(forgery.of("charged"), rng):
        other = rng.choice([*ids, "0" * 32])
        forgery.end_of(charge)["data_set"] = charge["data_set"] = other


def changes_a_delta(forgery: Forgery, rng: random.Random) -> None:
    delta = rng.choice([0, 0.0, 1.0, 1, 2.0, -1e-5, True, "1e-5", math.nan, None])
    for entry in _some(forgery.of("registered"), rng):
        entry["delta"] = delta
        for row in forgery.rows:
            if str(row["client"]) == entry["client"]:
                row["delta"] = delta


def hides_charges_in_another_phase(forgery: Forgery, rng: random.Random) -> None:
    for charge in _some(forgery.of("charged"), rng):
        charge["phase"] = rng.choice(_PHASES)


def moves_charges_to_another_run(forgery: Forgery, rng: random.Random) -> None:
    """What the run cost is told of a run that is not in question; and rounds get other numbers."""
    for charge in _some(forgery.of("charged"), rng):
        end = forgery.end_of(charge)
        end["run"] = charge["run"] = rng.choice(["", "f" * 32, None])
        end["round"] = charge["round"] = rng.choice([charge["round"], 0, 99, -1])


def turns_clocks(forgery: Forgery, rng: random.Random) -> None:
    """Times say nothing of costs; with them charges are left out, or their order changes."""
    for entry in forgery.entries:
        entry["time"] = rng.choice([entry["time"], "2001-01-01T00:00:00.000+00:00", "yesterday"])
    rng.shuffle(forgery.entries)
    omits_charges(forgery, rng)


def promises_a_plan(forgery: Forgery, rng: random.Random) -> None:
    """A rule of a budget, of which a coordinator's ledger has none, and by which less can be found."""
    charge = rng.choice(forgery.of("charged"))
    event = json.loads(charge["event"]) | {"noise_multiplier": 1000.0}
    note = {"rule": "plan", "epsilon": 0.1, "delta": 1e-5, "events": [event]}
    if rng.random() < 0.3:
        note = {"rule": "renyi", "order": rng.choice([1, 0, -3, 2.5, "2"])}
    empty = {**charge, **dict.fromkeys(("run", "round", "request", "event", "rho_bar", "aggregate_scale"), None)}
    forgery.entries.append(empty | {"phase": "bounded", "noise_source": None, "note": json.dumps(note)})
    low = {"mu": 1e-4, "advantage": 1e-4, "tpr_at_fpr": {rate: float(rate) * 1.0001 for rate in RATES}}
    for row in forgery.figures["data_sets"]:
        if row["data_set"] == charge["data_set"]:
            with suppress(Exception):
                risk = risk_of(seen_by("local", [{"event": event}]), row["delta"] * verify_evidence.FOR_RELEASES)
                low = {key: risk[key] for key in ("mu", "advantage")} | {"tpr_at_fpr": {r: risk[r] for r in RATES}}
            row |= low


def leaves_a_client_out(forgery: Forgery, rng: random.Random) -> None:
    """The summary tells of the others alone."""
    clients = forgery.figures["printed"]["clients"]
    clients.remove(max(clients, key=lambda each: each["epsilon_local"] or math.inf))
    forgery.restate_worst()


def lowers_a_figure(forgery: Forgery, rng: random.Random) -> None:
    """By little, or much, where it is printed, and in the largest."""
    row, factor = rng.choice(forgery.rows), rng.choice([0.99, 0.9, 0.5, 0.0])
    for key in _some(["epsilon_local", "epsilon_aggregate", "mu", "advantage"], rng):
        row[key] = (row[key] or 1.0) * factor
    forgery.restate_worst()


LIES: tuple[Lie, ...] = (
    *(omits_charges, omits_charges_with_receipts, shows_receipts_twice, numbers_receipts_again, signs_by_itself),
    *(adds_an_odd_entry, takes_odd_numbers, makes_noise_larger, samples_less, writes_an_event_twice),
    *(writes_a_field_twice, raises_the_scale_of_a_round, raises_the_scale_of_a_charge, ends_a_round_twice),
    *(changes_rho_bar, swaps_data_sets, changes_a_delta, hides_charges_in_another_phase),
    *(moves_charges_to_another_run, turns_clocks, promises_a_plan, leaves_a_client_out, lowers_a_figure),
)

# Of printed figures alone; what follows from the ledger must not be stated again after them.
_OF_FIGURES = (promises_a_plan, leaves_a_client_out, lowers_a_figure, changes_a_delta)


def forged(files: dict[str, bytes], key: Path, seed: int) -> tuple[Forgery, list[str]]:
    """One to three lies that fit each other, and their names; each kind is the first of every so many seeds.

    Args:
        files: of the honest bundle.
        key: the coordinator's private key.
        seed: of its choices.
    """
    rng, forgery = random.Random(seed), Forgery(files, key)
    lies = [LIES[seed % len(LIES)], *rng.sample(LIES, rng.randint(0, 2))]
    lies.sort(key=lambda lie: lie in _OF_FIGURES)
    restated = False
    for lie in lies:
        if lie in _OF_FIGURES and not restated:
            forgery.restate()
            restated = True
        with suppress(IndexError, ValueError, StopIteration, TypeError, KeyError):  # an earlier lie left it nothing
            lie(forgery, rng)
    if not restated or (changes_a_delta in lies and rng.random() < 0.5):
        forgery.restate()
    return forgery, [lie.__name__ for lie in lies]
