"""Replies leave at public times: what these allow for, and that nothing leaves before."""

import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
from scipy.stats import binom

from fedpriv.errors import InputError
from fedpriv.holder.vault import _reply_times, _service
from fedpriv.holder.vault import answer as answer_module
from fedpriv.holder.vault._reply_times import log_odds, most_drawn
from fedpriv.holder.vault._service import Closing
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder
from fedpriv.holder.wire.frame import REGISTER, Request, Response
from fedpriv.learning.training import workbench
from fedpriv.learning.training.model import TrainingModel
from fedpriv.privacy.ledger.entries import DataSet
from fedpriv.privacy.ledger.ledger import Ledger
from tests.adversary.nodes import make_node, num_charges, run_config, training, write_rows
from tests.holder.vault.running import ROOT
from tests.marks import slow
from tests.tiny import LABELS, WORDS

pytestmark = pytest.mark.usefixtures("quick_nodes", "fresh_benches")

N_K = 24
# The longest, one for each length, and the shortest.
TABLES = {
    "long": [(" ".join(WORDS * 4), LABELS[i % 3]) for i in range(N_K)],
    "all lengths": [(" ".join(WORDS[:1] * (1 + i % 30)), LABELS[i % 3]) for i in range(N_K)],
    "none": [],
}


@pytest.mark.parametrize("log_odds", [3.0, 10.0, 30.0])
@pytest.mark.parametrize(("number", "probability"), [(1, 0.5), (5, 0.9), (80, 0.05), (6000, 0.01), (10**6, 1e-4)])
def test_no_more_is_drawn_but_with_the_stated_probability(number, probability, log_odds):
    most = most_drawn(number, probability, log_odds)
    assert binom.sf(most, number, probability) <= math.exp(-log_odds)
    # Of deviations, Chernoff's bound costs a third at most here.
    exact, mean = binom.isf(math.exp(-log_odds), number, probability), number * probability
    assert most - mean <= 4 / 3 * (exact - mean) + 3
    assert most_drawn(number, 1.0, log_odds) == number


def test_all_bounds_together_are_paid_for_whatever_their_number_and_taken_off_delta():
    data_set = DataSet(id="d", client="0", num_records=9, delta=1e-5)
    assert data_set.delta_for_releases + data_set.delta_of_clocks == pytest.approx(1e-5, rel=1e-12)
    each = [math.exp(-log_odds(number, data_set)) for number in range(1, 20_000)]
    assert 0.999 < 2 * sum(each) / data_set.delta_of_clocks < 1, "of charges, and the same of fractions"


def test_a_ledger_that_has_grown_is_given_time(node, start, monkeypatch):
    own = node()
    _, before = (work(own, everyone(start, round_))[0] for round_ in (1, 2))
    honest = Ledger.__init__
    later = max(0.1, before / 8)  # by more than a step of the grid of times
    monkeypatch.setattr(Ledger, "__init__", lambda *a, **k: (time.sleep(later), honest(*a, **k))[1])
    timed_again = WeakKeyDictionary()  # as if there were twice as many charges
    monkeypatch.setattr(_reply_times, "_opening", timed_again, raising=False)
    seconds, taken = work(own, everyone(start, 3))
    assert before < seconds
    assert taken < seconds


@pytest.fixture
def node(tiny_bert, tmp_path, monkeypatch):
    """Builds a node with a table, for whose reply times a charge more or less makes no difference."""
    monkeypatch.setattr(_reply_times, "_CHARGES_OF_AN_OPENING", 10**12)

    def build(table: str = "long", **settings: object):
        own = {"num_registered": N_K, "models": {"tiny": tiny_bert}, "budget_epsilon": 1e6, "settings": settings}
        return make_node(tmp_path / table, TABLES[table], **own)

    return build


def everyone(start, round_: int = 1, **changes: object) -> Request:
    values = {"rounds": 1000, "local_steps": 2} | changes
    return training(run_config(**values), start, round_=round_, fields={"sampling_probability": 1.0}).request


def head(start, round_: int, **changes: object) -> Request:
    fields = {"sampling_probability": 1.0, "trains": "head", "optimizer": "sgd"}
    return training(run_config(rounds=1000, local_steps=20, **changes), start, round_=round_, fields=fields).request


@pytest.fixture
def passes(monkeypatch) -> list[object]:
    """What the features that a head reads were computed for, since it was last emptied."""
    calls, honest = [], TrainingModel._head_inputs
    monkeypatch.setattr(TrainingModel, "_head_inputs", lambda *a: calls.append(a[1:]) or honest(*a))
    return calls


def work(node, request: Request) -> tuple[float, float]:
    """T, and the seconds of work after the charge."""
    begun: list[tuple[float, float]] = []
    holder = replace(Holder.of(node.settings), before_records=lambda t: begun.append((t, time.monotonic())))
    assert not answer(request, holder).code
    ((seconds, begin),) = begun
    return seconds, time.monotonic() - begin


@pytest.mark.parametrize("case", [("long", 1), ("all lengths", 2), *slow(("none", 1), ("all lengths", 1), ("long", 2))])
def test_a_reply_has_time_for_the_largest_draw_of_any_records(node, start, monkeypatch, case):
    """Whether one process takes them, or workers that are forked share them."""
    table, cores = case
    monkeypatch.setattr(workbench, "num_cores", lambda: cores)
    own = node(table)
    first, again, later = (work(own, everyone(start, round_)) for round_ in (1, 2, 3))
    for seconds, taken in (first, again, later):
        assert taken < seconds
    assert first[0] > again[0] == later[0], "the first one reads the records and fills caches; it is measured once"


def test_a_request_that_reads_no_records_leaves_the_next_one_its_time(node, start, monkeypatch):
    """Or it would take several T, and which multiple would tell how long the records are."""
    own = node()
    first, again = (work(own, everyone(start, round_))[0] for round_ in (1, 2))

    def failing(*_, **__):
        raise InputError("memory_limit_mb = 1: too small")

    with monkeypatch.context() as patch:
        patch.setattr(_reply_times, "rehearse", failing)
        assert answer(everyone(start, 3), Holder.of(own.settings)).code
    assert work(own, everyone(start, 3))[0] == again < first, "the caches are as they were"
    workbench.forget()
    holder = Holder.of(own.settings)
    assert not answer(everyone(start, 3), holder).code, "the stored reply"
    assert answer(everyone(start, 4, noise_multiplier=1e-3), holder).code, "refused"
    first, again = (work(own, everyone(start, round_))[0] for round_ in (4, 5))  # of one measurement
    assert first > again


@pytest.mark.parametrize("fault", ["an update fails", "no file"])
def test_what_becomes_of_records_neither_changes_the_next_time_nor_its_work(node, start, monkeypatch, fault):
    own = node()
    with monkeypatch.context() as patch:
        if fault == "no file":
            own.records.rename(own.folder / "away.csv")
        else:
            results = iter([[RuntimeError("of a record")]])
            honest = answer_module.execute_one_by_one
            patch.setattr(answer_module, "execute_one_by_one", lambda *a: next(results, None) or honest(*a))
        first = work(own, everyone(start))[0]
    if fault == "no file":
        (own.folder / "away.csv").rename(own.records)
    read = []
    monkeypatch.setattr(workbench.federated, "load_own", lambda *_: read.append(1))
    assert work(own, everyone(start, 2))[0] < first
    assert not read, "this time does not allow for it"


@pytest.mark.parametrize("num_records", [N_K + 1, *slow(N_K)])
def test_a_neighbour_with_one_record_more_has_its_features_kept_too(node, start, passes, num_records):
    own = node()
    write_rows(own.records, [("a cough", LABELS[i % 3]) for i in range(num_records)])
    work(own, head(start, 1))
    passes.clear()
    work(own, head(start, 2))
    assert not passes


@pytest.mark.parametrize("newcomer", [1000, *slow(0)])
def test_a_person_with_a_thousand_records_has_the_time_and_the_room_of_a_person(node, start, passes, newcomer):
    own = node(person_column="person", max_records_per_person=4)
    rows = [("a cough", LABELS[i % 3], f"person {i // 2}") for i in range(2 * N_K)]
    write_rows(own.records, [("a long rash", LABELS[i % 3], "newcomer") for i in range(newcomer)] + rows)
    of_persons = {"unit": "person", "max_records_per_person": 3}
    first, taken = work(own, head(start, 1, **of_persons))
    assert taken < first
    passes.clear()
    again, taken = work(own, head(start, 2, **of_persons))
    assert taken < again < first
    assert not passes, "the features of all that is kept of all persons have room"


def test_a_larger_table_has_more_time_and_the_operator_may_set_it_within_a_round(node, start):
    own = node()
    work(own, everyone(start))
    ordinary = work(own, everyone(start, 2))[0]
    settings = (own.folder / "vault.toml").read_text()
    (own.folder / "vault.toml").write_text(f"{settings}max_records = 600\n")
    assert work(own, everyone(start, 3))[0] > 2 * ordinary
    (own.folder / "vault.toml").write_text(f"{settings}reply_seconds = 0.7\n")
    assert work(own, everyone(start, 4))[0] == 0.7
    (own.folder / "vault.toml").write_text(f"{settings}reply_seconds = 5.0\n")
    reason = answer(everyone(start, 5, round_seconds=2.0), Holder.of(own.settings)).reason
    assert "round_seconds = 2: this node's reply would leave after 5 s, when the round is over" in reason
    assert "reply_seconds in vault.toml" in reason
    assert num_charges(own) == 4, "it is refused before it is charged"


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but when somebody sleeps."""
    now = [100.0]
    monkeypatch.setattr(_service.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(_service.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.mark.parametrize(("taken", "leaves"), [(0.0, 2.0), (0.3, 2.0), (2.0, 2.0), (2.001, 4.0), (9.0, 16.0)])
def test_an_answer_leaves_at_its_time_or_a_double_of_it(clock, taken, leaves):
    hold = _service._Hold()
    hold.begin(2.0)
    clock[0] += taken
    hold.wait()
    assert clock[0] == pytest.approx(100 + leaves)
    hold.begin(0.0)  # what was not charged leaves at once
    hold.wait()
    assert clock[0] == pytest.approx(100 + leaves)


@pytest.mark.slow
def test_no_broadcast_makes_the_processor_slow(node):
    """Products of subnormal numbers take 150 times longer, and the coordinator chooses what it broadcasts."""
    code = """
import sys
from pathlib import Path
from fedpriv.holder.vault._service import run_worker

class Closed:
    def recv_bytes(self):
        raise EOFError

run_worker(Closed(), Path(sys.argv[1]))
import torch
print(int((torch.full((2**20,), 1e-39) * 0.5).count_nonzero()))
"""
    variables = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", code, str(node().folder)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]


@pytest.mark.slow
def test_meanwhile_no_other_question_is_answered(node, start):
    """Its answer would tell when the work was done."""
    own = node(reply_seconds=1.5)
    worker = _service.Worker(own.folder, Closing.of(own.settings))
    config = everyone(start).run_config
    register = Request.of(kind=REGISTER, run_config=config).packed()
    try:
        worker.answer(register)  # loads the model
        worker.answer(everyone(start).packed())
        with ThreadPoolExecutor() as pool:
            begin = time.monotonic()
            training_ = pool.submit(worker.answer, everyone(start, 2).packed())
            time.sleep(0.2)
            assert not Response(worker.answer(register)).code
            assert training_.done()
            assert time.monotonic() - begin > 1.5
    finally:
        worker.stop()
