"""A node of persons: its operator decides the unit, it registers persons, and every release's event is a person's."""

import numpy as np
import pytest

from fedpriv.config import ON_NODES, parse, to_flower
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder, bench_of, run_of
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import EVALUATE, REFUSED, REGISTER, TRAIN, Request
from fedpriv.learning.training import workbench
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.private_evaluation import EvaluationSpec
from fedpriv.privacy.ledger.reader import reading
from tests.tiny import LABELS, WORDS
from tests.vaults import make_vault, write_records

pytestmark = pytest.mark.usefixtures("quick_nodes")

P_K = 12
OF_PERSONS = {"person_column": "patient", "max_records_per_person": 4}


@pytest.fixture
def data(tmp_path):
    rows = [(f"{WORDS[i % 13]} {i}", LABELS[i % 3], f"P{i * i % P_K}") for i in range(40)]
    return write_records(tmp_path / "own.csv", rows)


@pytest.fixture
def holder(tiny_bert, tmp_path, data):
    """Builds the holder of a node's folder."""
    workbench.forget()

    def build(**settings):
        return Holder.of(make_vault(tmp_path / "node", data, tiny_bert, num_records=P_K, **settings))

    yield build
    workbench.forget()


def run_config(tiny_bert, **changes):
    values = {"model": str(tiny_bert), "layers": "last-1", "rank": 2, "data": ON_NODES, "labels": list(LABELS)}
    values |= {"num_clients": 3, "recipe": "per-sample", "batch_size": 6, "local_steps": 1}
    return to_flower(parse(values | {"unit": "person", "max_records_per_person": 3} | changes))


def asked(holder, config, kind, **fields):
    """The answer to a request, whose specification is that of the configuration but for the fields."""
    request = Request.of(kind=kind, run_config=config, fields={}, arrays={})
    if kind != REGISTER:
        run = parse(dict(config))
        spec = EvaluationSpec.of(run) if kind == EVALUATE else UpdateSpec.of(run)
        initial = bench_of(run_of(config, holder), holder).initial
        arrays = {kinds.ADAPTER: {name: np.zeros(t.shape, np.float32) for name, t in initial.items()}}
        named = kinds.pack_instruction("run", 1 if kind == TRAIN else 11, spec) | fields
        request = Request.of(kind=kind, run_config=config, fields=named, arrays=arrays)
    return answer(request, holder)


def test_updates_and_evaluations_cost_a_persons_event_over_the_registered_persons(holder, tiny_bert):
    own = holder(**OF_PERSONS)
    config = run_config(tiny_bert, evaluation_noise_multiplier=4.0)
    assert kinds.unpack(kinds.Registration, asked(own, config, REGISTER).fields).num_records == P_K
    for kind in (TRAIN, EVALUATE):
        response = asked(own, config, kind)
        assert not response.code, response.reason
    with reading(own.policy.ledger) as db:
        (data_set,) = db.data_sets()
        events = [release.event for release in db.releases(data_set.id)]
    assert {event.unit for event in events} == {"person"}
    assert sorted(event.sampling_probability for event in events) == [6 / P_K, 1.0]


def test_neither_unit_gets_anything_from_a_node_of_the_other(holder, tiny_bert):
    config = run_config(tiny_bert, unit="record", evaluation_noise_multiplier=4.0)
    own = holder(**OF_PERSONS)
    for kind in (REGISTER, TRAIN, EVALUATE):
        response = answer(Request.of(kind=kind, run_config=config, fields={}, arrays={}), own)
        assert response.code == REFUSED
        assert response.reason == "refused: unit = record: this node's operator decided that the unit is the person"
    response = asked(holder(), run_config(tiny_bert), REGISTER)
    assert (response.code, "the unit is the record" in response.reason) == (REFUSED, True)


def test_an_instruction_that_protects_no_person_or_asks_for_more_of_one_is_refused(holder, tiny_bert):
    own, config = holder(**OF_PERSONS), run_config(tiny_bert, evaluation_noise_multiplier=4.0)
    responses = [(asked(own, run_config(tiny_bert, max_records_per_person=5), REGISTER), "keeps at most 4 of a person")]
    for fields in ({"noise_on": "upload"}, {"clipping": "batch"}):
        responses.append((asked(own, config, TRAIN, **fields), "protect no person"))
    for kind in (TRAIN, EVALUATE):
        for most, message in ((0, "does not suit this node, whose"), (4, "must lie in 1..3"), (-1, "must lie in 1..3")):
            response = asked(own, config, kind, max_records_per_person=most)
            responses.append((response, f"max_records_per_person = {most}: {message}"))
    for response, message in responses:
        assert (response.code, message in response.reason) == (REFUSED, True), response.reason
    with reading(own.policy.ledger) as db:
        assert not [entry for entry in db.entries() if entry.phase == "charged"]
