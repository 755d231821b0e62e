"""A coordinator may recompute every digest and figure of its evidence, and sign for nobody: no lie of it is confirmed.

A lie is told apart by what the nodes know: a figure is false if it is below the cost, by fedpriv's own accountants, of
all that a node has signed up to the newest receipt of its that the bundle shows. What a node signed after that, or for
which the bundle shows nothing, no file can prove; of that the verifier has to say so.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from fedpriv.holder.vault._charging import charge
from fedpriv.holder.wire import frame, kinds
from fedpriv.holder.wire.kinds import Registration
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.risk import risk_of
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.entries import Charge, DataSet, Key
from fedpriv.privacy.ledger.evidence import Exhibit, write_evidence
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.ledger.statement import spending
from tests.adversary import forgeries
from tests.adversary.forgeries import Forgery, forged
from tests.marks import slow
from tests.privacy.ledger.test_evidence import failures, packed, unpacked, verified
from tests.privacy.ledger.test_recovery import DELTA, Node

Files = dict[str, bytes]

RUN, ROUNDS, ASKED_TWICE = "run", 6, (2, 3, 5)
VIEW = "aggregate"
# So much noise that loss distributions are short, and epsilons below 1; a sample costs a second to account for.
EVENTS = (
    SubsampledGaussian(noise_multiplier=300.0, sampling_probability=1.0),
    SubsampledGaussian(noise_multiplier=120.0, sampling_probability=1.0),
)


@dataclass(frozen=True)
class World:
    """A run whose nodes were asked twice in some rounds, its honest evidence, and what its nodes know.

    Attributes:
        files: of the bundle.
        signed: of each client {text of a receipt that its node signed: its number}.
        releases: of each client, in order.
        key: of the coordinator.
    """

    files: Files
    signed: tuple[dict[str, int], ...]
    releases: tuple[tuple[Release, ...], ...]
    key: Path

    def shown(self, files: Files, client: int) -> int:
        """The number of the newest receipt of a client's node that a bundle shows; 0 without any."""
        texts = [line.decode() for line in files["run/receipts.jsonl"].splitlines()]
        texts += [each.get("receipt", "") for each in json.loads(files["run/registrations.json"]).values()]
        return max((self.signed[client].get(text, 0) for text in texts), default=0)

    def is_false(self, files: Files) -> bool:
        """Whether a figure is below what it is the figure of, or is none."""
        figures = json.loads(files["run/figures.json"])
        printed, false = figures["printed"], False
        worst: Counter[str] = Counter()
        for row in (*figures["data_sets"], *printed["clients"]):
            is_row, client = "data_set" in row, int(row["client"])
            if not (type(row["delta"]) is float and 0 < row["delta"] < 1):
                return True
            view = row["view"] if is_row else VIEW
            truth = _truth(self.releases[client][: self.shown(files, client)], row["delta"], view)
            false |= any(_is_below(row[key], true) for key, true in truth.items() if key in row)
            if is_row:
                true = _by_rdp(self.releases[client][: self.shown(files, client)], row["delta"])
                false |= _is_below(row["rdp"]["local"], true)
            else:
                false |= _is_below(row["epsilon_local_this_run"], truth["epsilon_local"])
        for client in range(len(EVENTS)):  # of the summary's worst, whoever it lists
            truth = _truth(self.releases[client][: self.shown(files, client)], DELTA, VIEW)
            worst |= Counter({f"{key}_max" if "epsilon" in key else key: true for key, true in truth.items()})
        return false or any(_is_below(printed[key], true) for key, true in worst.items())


def _is_below(figure: float | None, true: float) -> bool:
    """Whether a figure is below the true one by more than the verifier's tolerance, which is a thousandth."""
    return figure is not None and not (isinstance(figure, (int, float)) and figure >= true * 0.998)


@lru_cache
def _truth(releases: tuple[Release, ...], delta: float, view: Any) -> dict[str, float]:
    """The epsilons of releases, and the risk on a view."""
    known: dict[str, float] = {}
    for on in ("local", "aggregate"):
        known[f"epsilon_{on}"] = epsilon_of([each.charged_on(on) for each in releases], delta).epsilon
    risk = risk_of([each.charged_on(view) for each in releases], delta).values
    return known | {key: risk[key] for key in ("mu", "advantage")}


@lru_cache
def _by_rdp(releases: tuple[Release, ...], delta: float) -> float:
    return epsilon_of([each.event for each in releases], delta, "rdp").epsilon


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("world")
    nodes = [Node(folder / f"node-{client}") for client in range(len(EVENTS))]
    registrations = {str(client): _registered(node, client) for client, node in enumerate(nodes)}
    releases: list[list[Release]] = [[] for _ in nodes]
    with Ledger(folder / "ledger.sqlite") as ledger:
        known = [
            DataSet(id=node.data_set.id, client=str(c), num_records=100, delta=DELTA) for c, node in enumerate(nodes)
        ]
        ledger.register_all(known)
        for round_ in range(1, ROUNDS + 1):
            for request in ("first", "second")[: 1 + (round_ in ASKED_TWICE)]:
                asked = []
                for client, (node, event) in enumerate(zip(nodes, EVENTS, strict=True)):
                    release = Release(event=event, rho_bar=1.0, aggregate_scale=1.5, num_readers=1)
                    key = Key(run=RUN, client=str(client), round=round_, request=f"{request} {round_} of the node")
                    charge(node.policy, key, release, node.data_set, noise_source="secure")
                    releases[client].append(release)
                    told = replace(key, request=f"{request} {round_}")
                    asked.append(
                        Charge(
                            key=told,
                            data_set=node.data_set.id,
                            release=replace(release, rho_bar=0.8),
                            noise_source="secure",
                        )
                    )
                ledger.charge(asked)
                ledger.release([(each, "0" * 64) for each in asked])
    log = folder / "receipts.jsonl"
    other = Node(folder / "node-of-another-run").newest.text()
    log.write_text("".join(node.receipts.read_text() for node in nodes) + f"{other}\n")
    with reading(folder / "ledger.sqlite") as db:
        summary = _summary(spending(db, view=VIEW))
    source = Exhibit(ledger=folder / "ledger.sqlite", receipts=(log,), registrations=registrations, summary=summary)
    write_evidence(folder / "bundle.zip", {"run": source})
    keys.make_key_pair(folder / "coordinator.key")
    signed = [{line: json.loads(line)["counter"] for line in node.receipts.read_text().splitlines()} for node in nodes]
    assert [max(each.values()) for each in signed] == [ROUNDS + len(ASKED_TWICE)] * len(nodes)
    return World(
        unpacked(folder / "bundle.zip"), tuple(signed), tuple(map(tuple, releases)), folder / "coordinator.key"
    )


def _registered(node: Node, client: int) -> dict[str, Any]:
    """What a node registers, under its key, with the receipt that begins its chain."""
    statement = Registration(
        client=client,
        num_records=100,
        name=f"Clinic {client}",
        data_set=node.data_set.id,
        keeps_replies=True,
        software=kinds.SOFTWARE,
        identity=keys.public_line(node.folder / "vault.key"),
        receipt=node.newest.text(),
    )
    signature = keys.sign(node.folder / "vault.key", statement.signed)
    return {"version": frame.VERSION, **vars(replace(statement, signature=signature))}


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run's summary tells of its clients."""
    told = ("client", "delta", "unit", "epsilon_local", "epsilon_rho", "epsilon_aggregate", "mu", "advantage")
    clients = [{key: row[key] for key in (*told, "tpr_at_fpr")} for row in rows]
    for client in clients:
        client |= {"client": int(client["client"]), "epsilon_local_this_run": client["epsilon_local"]}
    worst = {f"{key}_max": max(each[key] for each in clients) for key in told if key.startswith(("epsilon", "delta"))}
    worst |= {key: max(each[key] for each in clients) for key in ("mu", "advantage")}
    rates = {rate: max(each["tpr_at_fpr"][rate] for each in clients) for rate in clients[0]["tpr_at_fpr"]}
    of_run = {"run_id": RUN, "privacy_view": VIEW, "budget_epsilon": [50.0], "holders_per_person": 1}
    return {**of_run, **worst, "tpr_at_fpr": rates, "unit": "record", "accountant": "pld", "clients": clients}


def check(world: World, files: Files, folder: Path) -> tuple[int, list[str]]:
    return verified(packed(files, folder / "forged.zip", forged=True))


def test_the_honest_evidence_is_confirmed_and_says_on_whose_word_it_rests(world, tmp_path):
    code, lines = check(world, world.files, tmp_path)
    assert (code, failures(lines)) == (0, [])
    assert not world.is_false(world.files)
    assert sum("10 receipts of data set" in line for line in lines) == len(EVENTS)
    left = [line for line in lines if line.startswith("left to you")]
    assert sum("0 charges lack a receipt" in line and "ssh-ed25519" in line for line in left) == len(EVENTS)
    # What the coordinator makes of what it was given, in the same words, is confirmed too.
    again = Forgery(world.files, world.key)
    again.restate()
    code, lines = check(world, again.packed(), tmp_path)
    assert (code, failures(lines)) == (0, [])


def test_a_receipt_that_is_missing_is_named_once(world, tmp_path):
    """The receipts after it are no worse for it: it may have been lost with a reply, and only its node has it."""
    lines = world.files["run/receipts.jsonl"].splitlines(keepends=True)
    lines.remove(next(line for line in lines if json.loads(line)["counter"] == 4))
    code, found = check(world, world.files | {"run/receipts.jsonl": b"".join(lines)}, tmp_path)
    (failure,) = failures(found)
    assert code == 1
    assert re.search("receipt 5 of data set .* after number 3", failure), failure


def hide_what_was_asked_twice(forgery: Forgery) -> None:
    """Rounds were asked twice, each node signed both, and the ledger has one: as many receipts have its charge."""
    forgery.omit([entry for entry in forgery.of("charged") if entry["request"].startswith("second")])


def subtract_charges(forgery: Forgery) -> None:
    entry = forgery.of("charged")[0]
    event = json.loads(entry["event"]) | {"count": 1 - ROUNDS}
    forgery.hopes = {id(each): {"phase": "changed"} for each in forgery.of("charged")[2 : 2 * ROUNDS : 2]}
    forgery.entries.append(entry | {"request": "third", "event": json.dumps(event, sort_keys=True)})
    forgery.hopes[id(forgery.entries[-1])] = {"phase": "changed"}


def raise_the_scale_at_the_end(forgery: Forgery) -> None:
    for entry in forgery.of("released"):
        entry["aggregate_scale"] = 100.0
    forgery.hopes = {id(entry): {"aggregate_scale": 100.0} for entry in forgery.of("charged")}


def round_off(forgery: Forgery) -> None:
    """By a fiftieth of an epsilon below 1."""
    forgery.figures["data_sets"][0]["epsilon_local"] *= 0.98


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        (hide_what_was_asked_twice, f"receipts of data set .* {len(ASKED_TWICE)} have none"),
        (subtract_charges, f"fedpriv can have written .*{1 - ROUNDS}"),
        (raise_the_scale_at_the_end, "epsilon_aggregate"),
        (round_off, "epsilon_local"),
    ],
)
def test_each_way_to_a_figure_that_is_too_small_is_named(world, lie, told, tmp_path):
    forgery = Forgery(world.files, world.key)
    lie(forgery)
    if lie is not round_off:
        forgery.restate()
    assert world.is_false(forgery.packed())
    code, lines = check(world, forgery.packed(), tmp_path)
    assert code == 1
    assert any(re.search(told, line) for line in failures(lines)), lines


def test_a_round_that_ends_with_more_noise_than_was_charged_costs_what_was_charged(tmp_path):
    """A node signs its charge, and nobody what a coordinator says of the round's end; null there counts in full."""
    release = Release(event=EVENTS[1], rho_bar=1.0, aggregate_scale=1.5, num_readers=1)
    costs = []
    for number, scale in enumerate((1.5, 100.0, 1.2, None)):
        with Ledger(tmp_path / f"{number}.sqlite") as ledger:
            data_set = ledger.register("0", 100, DELTA)
            key = Key(run=RUN, client="0", round=1, request="x")
            charged = Charge(key=key, data_set=data_set.id, release=release, noise_source="secure")
            ledger.charge([charged])
            ledger.release([(replace(charged, release=replace(release, aggregate_scale=scale)), None)])
        with reading(tmp_path / f"{number}.sqlite") as db:
            costs.append(spending(db)[0]["epsilon_aggregate"])
    assert costs[1] == costs[0] < costs[2] < costs[3]


@pytest.mark.parametrize("number", [10, *slow(1000)])
def test_no_consistent_forgery_that_is_a_lie_is_confirmed(world, number, tmp_path):
    lies, harmless, confirmed, told = 0, 0, [], Counter[str]()
    seed = 0
    while lies < number:
        forgery, names = forged(world.files, world.key, seed)
        seed += 1
        files = forgery.packed()
        if not world.is_false(files):
            harmless += 1
            continue
        lies += 1
        told.update(names)
        code, _ = check(world, files, tmp_path)
        if code == 0:
            confirmed.append((seed - 1, names))
    assert confirmed == []
    assert number < 1000 or all(told[lie.__name__] > 10 for lie in forgeries.LIES), told
    assert harmless < seed / 2, "most of what the generator makes is a lie"
