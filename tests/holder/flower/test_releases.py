"""Mods that pay for what leaves: what a coordinator may try, and what it gets."""

import math
from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from opacus.accountants import RDPAccountant
from scipy.stats import norm

from fedpriv.errors import InputError
from fedpriv.holder.flower import Account, LedgerMod, UpdateMod, local_dp_event
from fedpriv.holder.flower._messages import read_array
from fedpriv.holder.vault import RefusedError
from fedpriv.holder.wire.frame import FAILED, REFUSED, RETIRED
from fedpriv.privacy.accounting import SubsampledGaussian, epsilon_of
from fedpriv.privacy.ledger import reading
from tests.holder.flower.nodes import START, Node, arrays_of, difference

STEP = SubsampledGaussian(noise_multiplier=2.0, sampling_probability=0.1, count=5)


def moved(received):
    return {name: array + 1 for name, array in received.items()}


def update_node(folder, train=moved, *, budget=None, clip_norm=1.0, noise_multiplier=4.0, **options):
    def mods(account_of):
        return [UpdateMod(account_of, clip_norm=clip_norm, noise_multiplier=noise_multiplier, **options)]

    return Node(folder, mods, train, budget)


def ledger_node(folder, train=moved, *, budget=None, **options):
    return Node(folder, lambda account_of: [LedgerMod(account_of, lambda context: STEP, **options)], train, budget)


BOTH = pytest.mark.parametrize("make", [update_node, ledger_node])


@BOTH
def test_a_message_sent_ten_times_has_one_reply_and_one_charge_and_any_other_is_another_release(make, tmp_path):
    node = make(tmp_path)
    replies = [node.ask().content for _ in range(10)]
    assert all(reply == replies[0] for reply in replies)
    assert (node.num_charges, node.calls) == (1, 1)
    changes = [{"server-round": 2}, *({"lr": value} for value in (0.1, 1, 1.0, "1", b"1"))]
    for change in changes:
        node.ask(**change)
    node.ask({**START, "bias": START["bias"].astype(np.float64)})
    assert node.num_charges == node.calls == len(changes) + 2


@pytest.mark.parametrize(("make", "budget"), [(update_node, 5.0), (ledger_node, 1.0)])
def test_beyond_the_budget_the_app_is_not_asked(make, budget, tmp_path):
    node = make(tmp_path, budget=budget)
    replies = [node.ask(**{"server-round": number}) for number in range(6)]
    codes = [reply.error.code if reply.has_error() else 0 for reply in replies]
    allowed = codes.index(RETIRED)
    assert allowed > 1
    assert codes == [0] * allowed + [RETIRED] * (6 - allowed)
    assert node.num_charges == node.calls == allowed
    assert node.account.spent().epsilon <= budget


@BOTH
def test_nothing_but_paid_arrays_the_registered_number_and_what_the_operator_lets_out_leaves(make, tmp_path):
    for options, metrics in (({}, {}), ({"metrics": ["loss"]}, {"loss": 0.25})):
        content = make(tmp_path / f"{len(options)}", **options).ask(metrics="all", debug=True).content
        assert list(content) == ["arrays", "metrics"]
        assert dict(content.metric_records["metrics"]) == {**metrics, "num-examples": 120}
        assert list(content.array_records["arrays"]) == list(START)
    assert make(tmp_path / "closed").ask(kind="evaluate").error.code == REFUSED
    allowed = make(tmp_path / "open", uncovered=["evaluate"]).ask(kind="evaluate")
    assert dict(allowed.content.metric_records["metrics"]) == {"accuracy": 0.5}


@BOTH
def test_what_cannot_be_noised_stored_or_understood_is_refused_before_the_charge(make, tmp_path, monkeypatch):
    node = make(tmp_path)
    for arrays, named in (
        ({"weight": np.float32([1, np.nan])}, "not finite"),
        ({"weight": np.float32([1, np.inf])}, "not finite"),
        ({"weight": np.int64([1, 2])}, "no value"),
        ({"weight": np.array([True])}, "no value"),
        ({"weight": np.complex64([1, 2])}, "weight: is complex64"),
        ({"weight": np.zeros(0, np.float32)}, "no value"),
        ({}, "no value"),
    ):
        error = node.ask(arrays).error
        assert (error.code, named in error.reason) == (REFUSED, True), error.reason
    record = ArrayRecord({"weight": Array(START["weight"])})
    lying = ArrayRecord({"weight": Array("float32", (9, 9), "numpy.ndarray", Array(START["weight"]).data[:-4])})
    no_rounds = {"config": ConfigRecord({"server-round": 1})}
    for content in ({"one": record, "two": record}, no_rounds, {"arrays": lying}):
        assert node.ask_for(RecordDict(content)).error.code == REFUSED
    for number in (-1, 0.5, "1", True):
        assert node.ask(**{"server-round": number}).error.code == REFUSED
    monkeypatch.setattr("fedpriv.holder.flower._messages.MAX_ARRAYS_BYTES", 20)
    assert "at most 10 can be stored" in node.ask().error.reason
    assert (node.num_charges, node.calls) == (0, 0)


def test_with_huge_parameters_the_update_is_clipped_all_the_same(tmp_path):
    node = update_node(tmp_path, lambda received: {name: array * 0.5 for name, array in received.items()})
    for scale in (1e30, 3e38):
        start = {"weight": np.float32([scale, 0.0]), "bias": np.float32(1.0)}
        reply = arrays_of(node.ask(start))
        assert reply["weight"][0] == start["weight"][0], "the clipped update is below the rounding of such a number"
        assert abs(reply["weight"][1]) < 40
        assert reply["bias"].shape == ()
    assert node.num_charges == 2


def raising(error):
    def train(received):
        raise error("record 17 is empty")

    return train


FAILING = {
    "broken": raising(ValueError),
    "refusing": raising(RefusedError),
    "nan": lambda received: {name: array * np.nan for name, array in received.items()},
    "half": lambda received: {"weight": received["weight"]},
    "turned": lambda received: {name: array.T for name, array in received.items()},
    "integers": lambda received: {name: array.astype(np.int64) for name, array in received.items()},
    "nothing": lambda received: {},
}


@pytest.mark.parametrize("fault", FAILING)
def test_an_app_that_fails_uploads_noise_like_any_other_or_nothing_and_no_word_of_its_records(fault, tmp_path):
    node = update_node(tmp_path / "update", FAILING[fault], clip_norm=1000.0, noise_multiplier=1e-3)
    reply = node.ask()
    found = {name: (array.shape, array.dtype) for name, array in arrays_of(reply).items()}
    assert found == {name: (array.shape, array.dtype) for name, array in START.items()}
    assert 0 < np.abs(difference(reply)).max() < 10
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 120}
    assert node.num_charges == 1
    if fault in ("broken", "refusing", "nan"):
        error = ledger_node(tmp_path / "ledger", FAILING[fault]).ask().error
        assert (error.code, error.reason) == (FAILED, "failed; this node's log says why")


@BOTH
def test_the_number_of_batches_that_batch_norm_saw_never_leaves(make, tmp_path):
    """After a round of FedAvg the counter is a float, so its name says what it is; other integers stay as they came."""
    start = {name: value.numpy() for name, value in torch.nn.BatchNorm1d(2).state_dict(prefix="norm.").items()}
    start["order"] = np.array([True, False])
    counter = "norm.num_batches_tracked"

    def train(received):
        return {**moved(received), "order": received["order"] ^ True, counter: received[counter] + 1000}

    node = make(tmp_path, train)
    for number in (1, 2):
        reply = node.ask(start, **{"server-round": number})
        found = arrays_of(reply)
        assert list(found) == list(start)
        assert (found[counter], found[counter].dtype) == (start[counter], start[counter].dtype)
        np.testing.assert_array_equal(found["order"], [True, False])
        start = {name: array.numpy() for name, array in aggregate_arrayrecords([reply.content], "num-examples").items()}
        start["order"] = np.array([True, False])
    assert node.num_charges == 2


@pytest.mark.parametrize("kept", [{}, {"a.counter": np.int64(3)}, {"a.index": np.float64([3.0, 4.0])}])
def test_arrays_that_are_kept_have_no_noise_and_no_part_in_the_norm_or_the_event(kept, tmp_path):
    node = update_node(tmp_path, moved, clip_norm=0.5, noise_multiplier=1e-4, untrained=["index"])
    reply = node.ask({**START, **kept})
    for name, array in kept.items():
        np.testing.assert_array_equal(arrays_of(reply)[name], array)
    released = np.concatenate([(arrays_of(reply)[name] - START[name]).ravel() for name in START])
    np.testing.assert_allclose(released, np.full(7, 0.5 / math.sqrt(7)), atol=5e-4)
    with reading(node.account.ledger) as db:
        (release,) = db.releases(node.account.data_set.id)
    mod = UpdateMod(lambda context: node.account, clip_norm=0.5, noise_multiplier=1e-4)
    assert release.event == mod.event(7)


def test_the_noise_has_the_standard_deviation_that_is_charged(tmp_path):
    start = {"weight": np.zeros(6000)}
    node = update_node(tmp_path, lambda received: received, clip_norm=2.0, noise_multiplier=3.0)
    stddev = difference(node.ask(start), start).std()
    # 6,000 values: the estimate's own deviation is 0.9 %, and 2/3 and 3/2 are far outside.
    assert abs(stddev / 6.0 - 1) < 0.05
    charged = SubsampledGaussian(noise_multiplier=1.5, sampling_probability=1, unit="client")
    assert node.account.spent().epsilon == pytest.approx(epsilon_of([charged], 1e-5).epsilon, rel=1e-3)


@BOTH
def test_the_charge_is_on_disk_when_the_app_starts_and_a_ledger_that_cannot_be_used_lets_nothing_out(make, tmp_path):
    phases = []

    def train(received):
        with reading(node.account.ledger) as db:
            phases.extend(entry.phase for entry in db.entries())
        return received

    node = make(tmp_path, train)
    node.ask()
    assert phases == ["registered", "charged"]
    node.account.ledger.write_text("no ledger")
    assert node.ask(**{"server-round": 2}).error.code == FAILED
    assert node.calls == 1


class Killed(BaseException):
    """The process ends: nothing catches it."""


def killed(received):
    raise Killed


def test_after_a_crash_there_is_noise_alone_or_nothing_to_send_and_the_app_is_not_asked_again(tmp_path):
    noising = update_node(tmp_path / "update", killed, clip_norm=100.0, noise_multiplier=1e-3)
    recording = ledger_node(tmp_path / "ledger", killed)
    for node in (noising, recording):
        with pytest.raises(Killed):
            node.ask()
    first, second = noising.ask(), noising.ask()
    assert first.content == second.content
    assert np.abs(difference(first)).max() < 1
    assert recording.ask().error.code == REFUSED
    assert [(node.num_charges, node.calls) for node in (noising, recording)] == [(1, 1)] * 2


def test_values_out_of_range_are_refused_at_once(tmp_path):
    wrong = ({"noise_multiplier": 0.0}, {"clip_norm": math.nan}, {"clip_norm": 1e-150}, {"metrics": "loss"})
    for options in wrong:
        with pytest.raises(InputError, match=next(iter(options))):
            update_node(tmp_path, **options)
    with pytest.raises(InputError, match="num_records = 0"):
        Account(ledger=tmp_path / "ledger", client="clinic", num_records=0)
    for numbers in ((2.0, 0.0, 1e-5), (2.0, 1.0, 0.0), (0.0, 1.0, 1e-5)):  # which give no finite noise
        with pytest.raises(InputError, match="LocalDpMod: sensitivity"):
            local_dp_event(LocalDpMod(1.0, *numbers))


def test_one_ledger_is_one_holders_and_a_partition_s_number_is_its_name(tmp_path):
    """Flower gives every virtual client the same path, and the number of its partition as an integer."""
    path, facts = tmp_path / "ledger", {"num_records": 100, "delta": 1e-5}
    first = Account(ledger=path, client=0, **facts)
    assert first.data_set == Account(ledger=path, client="0", **facts).data_set
    for wrong in ({"client": 1}, {"num_records": 200}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} = .* which stays") as told:
            _ = Account(**{"ledger": path, "client": 0, **facts, **wrong}).data_set
        assert "\n" not in str(told.value)
    assert Account(ledger=tmp_path / "own", client=1, **facts).data_set.client == "1", "the cure"


def exact_delta(epsilon, multiplier):
    """The delta of one Gaussian mechanism (Balle and Wang 2018, Theorem 8)."""
    mu = 1 / multiplier
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("stated", "count"), [(0.5, 1), (8.0, 1), (1.0, 10)])
def test_a_local_dp_mod_costs_what_its_gaussian_costs(stated, count):
    event = local_dp_event(LocalDpMod(1.0, 2.0, stated, 1e-5), count)
    multiplier = math.sqrt(2 * math.log(1.25e5)) / stated / 1.001
    epsilon = epsilon_of([event], 1e-5).epsilon
    # Releases of one Gaussian compose to one with less noise.
    assert exact_delta(epsilon, multiplier / math.sqrt(count)) == pytest.approx(1e-5, rel=0.02)
    assert event.unit == "client"
    too_small = local_dp_event(LocalDpMod(1.0, 1.0, stated, 1e-5), count)  # a sensitivity
    assert epsilon_of([too_small], 1e-5).epsilon > epsilon, "which makes no mod cheaper"


def test_a_local_dp_mod_behind_the_ledger_adds_the_noise_that_is_charged(tmp_path):
    local_dp = LocalDpMod(clipping_norm=3.0, sensitivity=6.0, epsilon=4.0, delta=1e-5)
    start = {"weight": np.zeros(6000, np.float32)}
    event = local_dp_event(local_dp)

    def mods(account_of):
        return [LedgerMod(account_of, lambda context: event, noise_source="numpy"), local_dp]

    node = Node(tmp_path, mods, lambda received: {"weight": received["weight"] + 1})
    for number in range(3):
        stddev = difference(node.ask(start, **{"server-round": number}), start).std()
        assert abs(stddev / (event.noise_multiplier * 6.0) - 1) < 0.05
    assert node.account.spent().epsilon == epsilon_of([event.with_count(3)], 1e-5).epsilon


def test_the_event_of_an_opacus_loader_costs_what_opacus_says():
    accountant = RDPAccountant()
    for _ in range(60):
        accountant.step(noise_multiplier=1.1, sample_rate=1 / 20)
    event = SubsampledGaussian(noise_multiplier=1.1, sampling_probability=1 / 20, count=60)
    # Both convert the best of many orders; ours has fewer of them.
    assert epsilon_of([event], 1e-5, "rdp").epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=0.01)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"(3,), }" + b" " * 12, b"(1000000000000,), }", "claims 4000000000000 bytes, but holds 12"),
        (b"<f4", b"|O8", "holds objects"),
        (b"\x93NUMPY\x01", b"\x93NUMPY\x09", "unknown version"),
    ],
)
def test_an_array_with_a_wrong_header_is_refused_before_memory_is_allocated(old, new, message):
    stream = BytesIO()
    np.save(stream, np.zeros(3, dtype=np.float32))
    data = stream.getvalue()
    assert read_array("a", data).tolist() == [0.0, 0.0, 0.0]
    damaged = data.replace(old, new)
    assert damaged != data
    with pytest.raises(ValueError, match=f"a: .*{message}"):
        read_array("a", damaged)
