"""A coordinator takes a sum of vaults' updates, and learns and pays what the terms say, whatever else it tries."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedpriv.config import parse
from fedpriv.holder.sums import _messages
from fedpriv.holder.vault import _records, _summed
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import CONFIRM, EVALUATE, FAILED, REFUSED, RETIRED, REVEAL, SHARE, Request, Response
from fedpriv.learning.training.private_evaluation import EvaluationSpec
from fedpriv.privacy.accounting import events
from fedpriv.privacy.accounting.filters import filtered_epsilon
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.receipts import Receipt, ReceiptLog
from tests.holder.sums.attempts import with_participant
from tests.holder.vault.sums import VALUES, Coordinator, make_vaults, vector
from tests.marks import slow
from tests.wire import arrays_of

pytestmark = pytest.mark.usefixtures("quick_nodes")

SLOW = pytest.mark.slow
SIZES = {0: 30, 1: 42, 2: 54, 3: 66}
DELTA = 1e-5


@pytest.fixture(scope="module")
def make(tiny_bert, table, tmp_path_factory) -> Callable[..., Coordinator]:
    """Makes four vaults that have approved each other; settings are those of the vault of client 1."""

    def make(*, of_persons: bool = False, **settings: object) -> Coordinator:
        folder, own = tmp_path_factory.mktemp("vaults"), lambda client: settings if client == 1 else {}
        vaults = make_vaults(folder, tiny_bert, SIZES, of_persons=of_persons, own=own)
        unit = {"unit": "person", "max_records_per_person": 2} if of_persons else {}
        return Coordinator(parse({**VALUES, **unit, "model": str(tiny_bert), "test_data": str(table)}), vaults)

    return make


@pytest.fixture(scope="module")
def site(make) -> Coordinator:
    """Four vaults, which each test asks in a run of its own."""
    return make()


@pytest.mark.parametrize("unit", ["record", "person"])
def test_the_server_learns_the_survivors_sum_and_each_vault_pays_for_the_threshold(make, site, monkeypatch, unit):
    site, sent = make(of_persons=True) if unit == "person" else site, []
    monkeypatch.setattr(_summed, "integers", lambda *a, whole=_summed.integers: sent.append(whole(*a)) or sent[-1])
    terms = site.terms("honest")
    dealt = site.open(terms)
    answers = {client: site.train(client, terms, dealt.message(client)) for client in (1, 2, 3)}  # 0 drops out
    for answer, values in zip(answers.values(), sent, strict=True):
        assert list(answer.arrays[kinds.ADAPTER]) == [kinds.SUM]
        assert np.mean(vector(answer).astype(np.int64) == values.numpy()) < 0.01, "masked"
    assert np.array_equal(site.close(dealt, answers).values, sum(values.numpy() for values in sent))
    # v_k = rho_k / B is in proportion to N_k: in the worst case the two smallest others survive, and the larger reads.
    for client in (1, 2, 3):
        (charge,) = site.charges(client, "honest")
        assert charge.aggregate_scale == pytest.approx(math.hypot(SIZES[0], SIZES[client]) / SIZES[client], rel=1e-9)
        assert (charge.num_records, events.from_json(charge.event).unit) == (None, unit)
    assert site.charges(0, "honest") == []


def test_the_same_request_gets_the_same_bytes_for_one_charge_and_with_new_keys_it_is_another_release(site, monkeypatch):
    seen, read = [], _records.of_release
    watched = lambda *args, **options: seen.append(len(site.charges(1, "twice"))) or read(*args, **options)  # noqa: E731
    monkeypatch.setattr(_records, "of_release", watched)
    terms = site.terms("twice")
    dealt = site.open(terms)
    first, again = (site.train(1, terms, dealt.message(1)) for _ in range(2))
    assert vector(first).tobytes() == vector(again).tobytes()
    assert len(site.charges(1, "twice")) == 1
    assert vector(site.upload(terms)).tobytes() != vector(first).tobytes()
    assert len(site.charges(1, "twice")) == 2
    assert seen == [1, 2], "each charge is written before any record is read"


def refused(site: Coordinator, answer, reason: str, *, run: str, client: int = 1) -> None:
    """The answer is a refusal for this reason, and nothing was charged."""
    assert answer.code == REFUSED, answer.reason
    assert reason in answer.reason
    assert not answer.arrays
    assert site.charges(client, run) == []


def test_what_does_not_belong_to_the_attempt_is_refused_before_the_charge_and_spends_no_session(site, monkeypatch):
    early = site.terms("attempt")
    assert not site.advertise(1, early).code
    refused(site, site.train(1, early, "{}"), "expects share", run="attempt")
    terms = site.terms("attempt")
    dealt = site.open(terms)
    own = dealt.message(1)
    for asked, sealed, changes, reason in (
        (site.terms("attempt"), own, {}, "takes no part in it"),
        (terms, own, {"secure_masks": False}, "secure_masks = false"),
        (terms, "", {}, "shares"),
        (terms, "{}", {}, "shares: are of 1 clients, must be of at least 3"),
        (terms, dealt.message(0), {}, "shares"),
        (terms, own.replace("A", "B"), {}, "shares"),
        (replace(terms, colluding=1), own, {}, "are not those that this node has signed"),
    ):
        refused(site, site.train(1, asked, sealed, **changes), reason, run="attempt")
    with monkeypatch.context() as restarted:
        restarted.setattr(_summed, "_sessions", type(_summed._sessions)(_summed.Sessions))
        refused(site, site.train(1, terms, own), "takes no part in it", run="attempt")
    assert not site.train(1, terms, own).code


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda terms: with_participant(terms, 1, num_records=43, sampling_probability=6 / 43), "num_records = 43"),
        (lambda terms: with_participant(terms, 1, sampling_probability=0.5), "sampling_probability = 0.5"),
        pytest.param(lambda terms: replace(terms, clip_norm=0.5), "clip_norm = 0.5: the request has 1.0", marks=SLOW),
        (lambda terms: replace(terms, noise_multiplier=8.0), "noise_multiplier = 8.0: the request has 4.0"),
        (lambda terms: replace(terms, dimension=terms.dimension + 1), "dimension"),
        (lambda terms: replace(terms, request="0" * 64), f"request = {'0' * 64}"),
        (lambda terms: replace(terms, round=2), "run, round = lies, 2"),
        (lambda terms: replace(terms, grid_exponent=terms.grid_exponent - 17), "must be 1024 to"),
        (lambda terms: replace(terms, grid_exponent=terms.grid_exponent + 6), "modulus_bits = 32 does not hold"),
        pytest.param(lambda terms: replace(terms, grid_exponent=100), "must be 1024 to", marks=SLOW),
    ],
)
def test_terms_that_are_not_those_of_the_request_are_refused(site, lie, reason):
    lied = lie(site.terms("lies"))  # a node signs what it cannot check yet
    refused(site, site.upload(lied, round_=1), reason, run="lies")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"local_steps": 2}, "local_steps = 2: needs 1"),
        pytest.param({"optimizer": "adamw"}, "optimizer = adamw: needs sgd", marks=SLOW),
        ({"mechanism": "gaussian"}, "mechanism = gaussian: needs one whose sum"),
    ],
)
def test_an_update_whose_sum_hides_less_than_the_terms_say_is_refused(site, changes, reason):
    """The run's configuration is honest; the instruction is not."""
    spec = replace(site.spec, **changes)
    terms = site.terms("instruction", spec=spec)
    refused(site, site.upload(terms, spec=spec), reason, run="instruction")


def test_terms_with_fewer_survivors_or_colluders_than_the_operators_are_refused_and_those_of_the_terms_charged(make):
    site = make(colluding_clients=1, min_survivors=4)
    refused(site, site.advertise(1, site.terms("few", colluding=1)), "needs at least 4 survivors", run="few")
    trusting = site.advertise(1, site.terms("trusting", threshold=4))
    refused(site, trusting, "counts on 1 that may collude", run="trusting")
    assert not site.upload(site.terms("wary", colluding=2, threshold=4)).code
    (charge,) = site.charges(1, "wary")
    # Of the three others, those with the least noise but two.
    assert charge.aggregate_scale == pytest.approx(math.hypot(SIZES[0], SIZES[1]) / SIZES[1], rel=1e-9)
    assert json.loads(charge.note) == {"num_readers": 2}


def test_a_stranger_is_refused_and_an_approval_holds_from_the_next_attempt_on(make):
    site = make()
    peer = site.vaults[1].peers / "2.pub"
    line = peer.read_text()
    peer.unlink()
    refused(site, site.advertise(1, site.terms("strangers")), "client 2: this node's operator has not approved", run="")
    peer.write_text(keys.public_line(site.vaults[0].key))
    refused(site, site.advertise(1, site.terms("strangers")), "client 2: its identity is not the one", run="")
    peer.write_text(line)
    assert not site.advertise(1, site.terms("strangers")).code
    (peer.parent / "two.pub").write_text(line)
    assert site.advertise(1, site.terms("strangers")).code == FAILED


def test_a_list_of_survivors_is_confirmed_and_revealed_once_and_after_the_vector(site):
    for kind in (CONFIRM, REVEAL):
        terms = site.terms("order")
        dealt = site.open(terms)
        message = '{"survivors":[0,1,2,3]}'
        refused(site, site.step(1, kind, terms, message), "out of order", run="order")
        refused(site, site.train(1, terms, dealt.message(1)), "is over", run="order")
    terms = site.terms("order")
    dealt = site.open(terms)
    assert not site.train(1, terms, dealt.message(1)).code
    assert not site.step(1, CONFIRM, terms, '{"survivors":[1,2,3]}').code
    assert "out of order" in site.step(1, CONFIRM, terms, '{"survivors":[0,1,2]}').reason
    assert "out of order" in site.step(1, REVEAL, terms, "{}").reason
    assert "takes no part" in site.step(1, SHARE, site.terms("order"), "{}").reason


@pytest.fixture
def exchanged(site, monkeypatch):
    """Ledgers may be exchanged under a vault, as these tests do: it would see that its folder knows of more charges."""
    monkeypatch.setattr(ReceiptWatch, "lost", lambda *_: None)
    yield
    for vault in site.vaults.values():
        vault.receipts.unlink(missing_ok=True)
        vault.receipts_of_peers.unlink(missing_ok=True)


def with_budget(site: Coordinator, folder: Path, **settings: object) -> Coordinator:
    """The same vaults, but that of client 1 has a ledger of its own."""
    vault = replace(site.vaults[1], ledger_file=folder / f"{len(list(folder.iterdir()))}.sqlite", **settings)
    with Ledger(vault.ledger) as ledger:
        ledger.register("1", SIZES[1], DELTA)
    return replace(site, vaults={**site.vaults, 1: vault})


def uploads(site: Coordinator, num_rounds: int) -> list[int]:
    """The codes of client 1's answers."""
    return [site.upload(site.terms("budget", round_)).code for round_ in range(1, num_rounds + 1)]


def test_a_budget_on_the_aggregate_view_ends_where_its_epsilon_does(site, tmp_path, exchanged):
    assert not site.upload(site.terms("probe")).code
    (charge,) = site.charges(1, "probe")
    event = events.from_json(charge.event)
    costs = [filtered_epsilon([event.with_noise(charge.aggregate_scale).with_count(n)], DELTA) for n in (2, 3)]
    budget = sum(costs) / 2
    assert filtered_epsilon([event.with_count(2)], DELTA) > budget, "so two rounds are too much on the local view"

    aggregate = with_budget(site, tmp_path, budget_epsilon=budget)
    assert uploads(aggregate, 3) == [0, 0, RETIRED]
    assert [charge.round for charge in aggregate.charges(1, "budget")] == [1, 2]
    assert uploads(with_budget(site, tmp_path, budget_epsilon=budget, budget_view="local"), 2) == [0, RETIRED]


def test_an_upload_outside_the_protocol_counts_in_full_on_the_aggregate_view(site, tmp_path, exchanged):
    def plain(vaults: Coordinator) -> int:
        return vaults.train(1, vaults.terms("plain"), "", secure_aggregation=False, privacy_view="local").code

    assert plain(site) == 0
    assert not site.ask(1, site.request("bare", 1, site.spec)).code, "a request without terms, though the run has sums"
    assert [charge.aggregate_scale for charge in site.charges(1, "bare")] == [None]
    # The counts of an evaluation are seen one by one, so its cost is the same on every view.
    fields = kinds.pack_instruction("evaluation", 5, EvaluationSpec(noise_multiplier=4.0))
    request = Request.of(EVALUATE, fields=fields, arrays={kinds.ADAPTER: arrays_of(site.initial)})
    assert not site.ask(1, request, evaluation_noise_multiplier=4.0, test_data="").code
    assert [charge.aggregate_scale for charge in site.charges(1, "evaluation")] == [1.0]
    (charge,) = site.charges(1, "plain")
    assert charge.aggregate_scale is None
    local = filtered_epsilon([events.from_json(charge.event)], DELTA)
    codes = [plain(with_budget(site, tmp_path, budget_epsilon=local * share)) for share in (1.001, 0.999)]
    assert codes == [0, RETIRED]


def of_sum(site: Coordinator, run: str, *clients: int) -> list[Response]:
    """The answers of these vaults in a sum of this run, which all have begun."""
    terms = site.terms(run)
    dealt = site.open(terms)
    return [site.train(client, terms, dealt.message(client)) for client in clients]


def test_peers_tell_a_vault_that_was_restored_as_a_whole(make):
    """Nobody but its peers knows, and the coordinator shows nothing: it could not drop what they say."""
    site = make()
    vault = site.vaults[1]
    of_sum(site, "first", 1)
    backup = {path: path.read_bytes() for path in vault.folder.iterdir() if path.is_file()}
    assert {"ledger.sqlite", "ledger.sqlite.head", "receipts.jsonl"} <= {path.name for path in backup}
    of_sum(site, "second", 1)
    of_sum(site, "third")  # at its beginning the peers learn of the second charge
    for path in vault.folder.iterdir():
        if path.is_file() and path not in backup:
            path.unlink()
    for path, content in backup.items():
        path.write_bytes(content)
    peer, restored = of_sum(site, "fourth", 0, 1)
    refused(site, restored, "its operator must recover it", run="fourth")
    assert not peer.code
    assert (len(site.charges(1, "first")), site.charges(1, "second")) == (1, [])
    line = keys.public_line(vault.key)
    (known,) = (each for each in ReceiptLog(site.vaults[0].receipts_of_peers).read() if each.is_of(line))
    assert known.counter == 2


@pytest.mark.parametrize("lie", ["left out", *slow("made up", "another's")])
def test_what_a_peer_says_of_receipts_cannot_be_changed_on_its_way(site, lie):
    terms = site.terms("stripped")
    shown = {client: site.advertise(client, terms).fields["message"] for client in terms.by_client}
    texts = {client: _messages.advertisement_from_text(text) for client, text in shown.items()}
    assert all(each.receipts for each in texts.values())
    receipts = {"left out": (), "made up": ("x",), "another's": texts[0].receipts}[lie]
    texts[2] = replace(texts[2], receipts=receipts)
    answer = site.step(1, SHARE, terms, _messages.advertisements_text(texts))
    assert (answer.code, "did not sign these keys" in answer.reason) == (REFUSED, True)


def test_peers_keep_only_what_its_signer_signed_and_little_of_each(site, tmp_path):
    own, peer = site.vaults[1], site.vaults[0]
    watch = ReceiptWatch(own.key, tmp_path / "own", tmp_path / "of peers")
    link = Receipt(data_set="d" * 32, counter=5)
    signed, stranger = link.signed(peer.key), link.signed(site.vaults[2].key)
    forged = replace(signed, counter=7)
    newer, older = replace(link, counter=6).signed(peer.key), replace(link, counter=4).signed(peer.key)
    lines = {keys.public_line(peer.key)}
    watch.told(["x", "[" * 10**5, signed.text(), stranger.text(), forged.text(), newer.text(), older.text()], lines)
    assert list(ReceiptLog(watch.of_peers).read()) == [newer]
    assert not watch.kept.exists()
    many = [replace(link, data_set=f"{number:032x}").signed(peer.key) for number in range(20)]
    watch.told([each.text() for each in many], lines)
    assert list(ReceiptLog(watch.of_peers).read()) == many[-4:]
    mine = link.signed(own.key)
    watch.told([mine.text(), mine.text()], lines)
    assert list(ReceiptLog(watch.kept).read()) == [mine]
