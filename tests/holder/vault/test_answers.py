"""What a node answers, in every phase of a run: of persons, under an earlier version's digests, on other heads."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedpriv.config import ON_NODES, parse, to_flower
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder, bench_of, run_of
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import EVALUATE, REFUSED, REGISTER, TRAIN, Request
from fedpriv.learning.adapters import lora
from fedpriv.learning.aggregation._head_start import head_of
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.noise_plan import calibrated, with_learning_rates
from fedpriv.learning.training.private_evaluation import EvaluationSpec
from fedpriv.learning.training.rounds import RunSchedule
from fedpriv.privacy.ledger.reader import reading
from tests import architectures
from tests.architectures import random_model
from tests.marks import slow
from tests.tiny import LABELS, WORDS
from tests.vaults import make_vault, write_records
from tests.wire import arrays_of

pytestmark = pytest.mark.usefixtures("quick_nodes", "fresh_benches")

P_K = 12
OF_PERSONS = {"person_column": "patient", "max_records_per_person": 4, "num_records": P_K}


@pytest.fixture
def data(tmp_path):
    rows = [(f"{WORDS[i % 13]} {i}", LABELS[i % 3], f"P{i * i % P_K}") for i in range(40)]
    return write_records(tmp_path / "own.csv", rows)


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


# A request that was answered before an upgrade still finds its stored reply: its digest in the ledger is the same.
RUN = {
    **{"model": "tiny", "layers": "last-1", "rank": 4, "data": ON_NODES, "labels": list(LABELS), "num_clients": 3},
    **{"learning_rate": 0.5, "lora_learning_rate": 0.1, "lora_head_learning_rate": 0.2, "seed": 4},
    **{"noise_multiplier": 1.5, "start_noise_multiplier": 2.0, "lora_noise_multiplier": 3.0},
    "evaluation_noise_multiplier": 2.0,
}

# {round: the digest under which it is charged from 0.2.0 on}, of an adapter of zeros.
BEFORE = {
    1: "389b9bc83383f86f2d1bafa2699c9131e9d7612a8b373334538a4e44b4e7b1ba",
    2: "8d66f1a8f3124f01e2e0ebc37ab5f015308ec96b81837b62e4315747fa8692fe",
    40: "4384833114e9485c00262c0dd27474e6b935f56030c1d8bf4e10184de1060b39",
    41: "9c095e75a1db960b22dfdc7920d89c9e6dd2c633472988a70dc22fc0d5b2e929",
}


def test_requests_have_the_digests_that_they_had_before(tiny_bert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny").symlink_to(tiny_bert)
    data = write_records(tmp_path / "data.csv", [(f"note {i}", LABELS[i % 3]) for i in range(60)])
    settings = make_vault(tmp_path / "node", data, Path("tiny"))
    holder = Holder.of(settings)
    run_config = to_flower(parse(RUN))
    config = run_of(run_config, holder)
    zeros = {name: np.zeros(tensor.shape, np.float32) for name, tensor in bench_of(config, holder).initial.items()}
    for round_ in BEFORE:
        is_last = round_ > config.rounds
        spec = EvaluationSpec(noise_multiplier=2.0) if is_last else RunSchedule.of(config).spec(round_)
        fields = kinds.pack_instruction("run", round_, spec)
        asked = {"run_config": run_config, "fields": fields, "arrays": {kinds.ADAPTER: zeros}}
        response = answer(Request.of(kind=EVALUATE if is_last else TRAIN, **asked), holder)
        assert not response.code, response.reason
    with reading(settings.ledger) as db:
        requests = [entry.request for entry in db.entries() if entry.request]
    assert requests == [digest for digest in BEFORE.values() for _ in ("charged", "released")]


# A node trains an encoder whose head is replaced as it does any other: in every phase with its records.
NUM = 60
ROWS = [(f"{WORDS[i % 13]} {WORDS[i % 7]} {LABELS[i % 3]}", LABELS[i % 3]) for i in range(NUM)]


@pytest.fixture(params=["roberta", *slow("bert", "distilbert")])
def model(request, tmp_path, tiny_bert):
    return architectures.save(random_model(request.param), tmp_path / request.param, tokenizer_of=tiny_bert)


def test_it_registers_and_trains_start_head_and_adapter(model, tmp_path):
    data = write_records(tmp_path / "own.csv", ROWS)
    policy = "min_effective_noise_multiplier = 1e-6\n"
    settings = make_vault(tmp_path / "node", data, model, policy=policy, budget_epsilon=1e12)
    holder = Holder.of(settings)
    run = {"model": str(model), "data": ON_NODES, "labels": list(LABELS), "num_clients": 3, "rounds": 4}
    config = parse(run | {"lora_rounds": 1, "noise_multiplier": 1e-4, "lora_noise_multiplier": 1e-4})
    run_config = to_flower(config)
    registered = answer(Request.of(kind=REGISTER, run_config=run_config), holder)
    assert kinds.unpack(kinds.Registration, registered.fields).num_records == NUM

    bench = bench_of(run_of(run_config, holder), holder)
    sizes = [NUM] * 3
    planned = with_learning_rates(calibrated(config, sizes, bench.initial), sizes, bench.initial)
    schedule, uploads = RunSchedule.of(planned), {}
    moved = {name: tensor + 0.05 for name, tensor in bench.initial.items()}
    for phase, round_ in {"start": 1, "head": 2, "all": 4}.items():
        assert schedule.phase(round_).name == phase
        fields = kinds.pack_instruction("run", round_, schedule.spec(round_))
        asked = {"run_config": run_config, "fields": fields, "arrays": {kinds.ADAPTER: arrays_of(moved)}}
        response = answer(Request.of(kind=TRAIN, **asked), holder)
        assert not response.code, response.reason
        named = response.arrays[kinds.ADAPTER]
        uploads[phase] = {name: torch.from_numpy(array.copy()) - moved[name] for name, array in named.items()}
    with reading(settings.ledger) as db:
        assert [e.phase for e in db.entries() if e.phase in ("charged", "released")] == ["charged", "released"] * 3

    # The start by hand: each class's features, summed, over the number of records. Noise is of a thousandth of that.
    weight, _ = head_of(moved)
    lora.write(bench.model.peft_model, moved)
    seen = []
    head = bench.model.layers[bench.model.head].module
    handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    records = bench.client(0)
    bench.model.logits(records.items(), cached=False)
    handle.remove()
    sums = F.one_hot(records.labels, 3).float().T @ seen[0] / NUM
    torch.testing.assert_close(uploads["start"][weight], sums, atol=1e-3, rtol=0)
    assert all(not tensor.any() for name, tensor in uploads["head"].items() if "lora" in name)
    assert all(tensor.any() for tensor in uploads["all"].values())
