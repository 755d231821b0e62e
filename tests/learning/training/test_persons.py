"""A person moves a sum by at most what a record would, and by nothing but what the person's own records decide."""

import dataclasses
import math
from collections import Counter

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedpriv.learning.adapters import LoraSettings, attach, load_base
from fedpriv.learning.data.records import Records
from fedpriv.learning.data.text import some_of
from fedpriv.learning.training import stacked
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_evaluation import count
from fedpriv.learning.training.private_sums import PoissonSampler, add_in_turn, clipped_rows
from fedpriv.learning.training.stacked import execute_stacked, local_update
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.sensitivity import clipping_parts, sensitivity_factor
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.learning.training.test_sensitivity import SPEC, Everyone, make_task
from tests.marks import slow
from tests.tiny import move, random_records

CLIP_NORM = SPEC.clip_norm

# Persons of very different sizes.
SIZES = (1, 3, 1, 7, 2)


def of_persons(records: Records, names: list[str]) -> Records:
    return dataclasses.replace(records, persons=tuple(names))


def alone(records: Records) -> Records:
    """The records, each about another person."""
    return of_persons(records, [f"person {index}" for index in range(len(records))])


def shuffled(sizes=SIZES, seed: int = 0) -> Records:
    """Records of persons of these sizes, in an order that mixes them."""
    names = [f"person {number}" for number, size in enumerate(sizes) for _ in range(size)]
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    return of_persons(random_records(len(names), seed=seed), [names[index] for index in order])


def apart(records: Records, person: str) -> tuple[Records, Records]:
    """The records of this person, and those of all others."""
    own = [name == person for name in records.persons]
    return tuple(records.part([index for index, each in enumerate(own) if each is which]) for which in (True, False))


@pytest.fixture(scope="module")
def model(tiny_bert):
    return training_model(tiny_bert, alone=True)


def training_model(tiny_bert, *, alone):
    base = load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3)
    peft_model = move(attach(base, LoraSettings(rank=4, layers="last-1")))
    return TrainingModel(peft_model, memory_limit=2**30, alone=alone)


def task_of(model, records, *, everyone=True, m=3, choices=0, **changes) -> UpdateTask:
    sources = {"source": SeededSource(0, "inclusion"), "choices": SeededSource(choices, "choices")}
    sampler = (Everyone if everyone else PoissonSampler)(num_registered=40, expected_batch_size=8, **sources)
    return make_task(model, records, sampler=sampler, max_records_per_person=m, **changes)


def sums(model, *tasks: UpdateTask) -> list[torch.Tensor]:
    """The sum of each step, before noise, float64 [clients, values]."""
    found, noised = [], stacked._noised

    def seen(clients, totals):
        found.append(totals.clone())
        return noised(clients, totals)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked, "_noised", seen)
        stacked.stacked_updates(model, tasks)
    return found


WAYS = {
    "all": {},
    "adamw": {"optimizer": "adamw"},
    "split": {"clipping": "split"},
    "per-tensor": {"clipping": "per-tensor"},
    "head": {"trains": "head", "num_rounds": 1000},
    "head, not kept": {"trains": "head", "num_rounds": 1},
    "cached": {"num_rounds": 1000},
    "lora": {"trains": "lora-b"},
    "class sums": {"trains": "head", "objective": "class-sums", "local_steps": 1},
}


@pytest.mark.parametrize(
    "way", ["all", "per-tensor", "head", "head, not kept", "cached", "class sums", *slow("adamw", "split", "lora")]
)
@pytest.mark.parametrize("m", [4, *slow(1)])
def test_persons_of_one_record_each_are_records(model, way, m):
    """To the bit, but for the head alone: its sums of records are made without rows."""
    records = random_records(40)
    record_level = make_task(model, records, noise_multiplier=0.5, **WAYS[way])
    persons = task_of(model, alone(records), everyone=False, m=m, noise_multiplier=0.5, **WAYS[way])
    one, other = local_update(model, record_level), local_update(model, persons)
    rounding = 1e-6 if WAYS[way].get("trains") == "head" else 0
    for name, tensor in one.adapter.items():
        torch.testing.assert_close(tensor, other.adapter[name], atol=rounding, rtol=rounding)
    assert (one.event.unit, other.event.unit) == ("record", "person")
    assert dataclasses.replace(other.event, unit="record") == one.event


def test_a_person_adds_the_clipped_sum_of_the_gradients_of_its_records(model):
    records, everyone = shuffled(), Everyone(num_registered=40, expected_batch_size=8, source=None)
    single = dataclasses.replace(records, persons=None)
    how = {"sampler": everyone, "local_steps": 1, "clip_norm": 30.0}  # which clips nothing, in a record-level update
    gradients = [sums(model, make_task(model, single.part([index]), **how))[0] for index in range(len(records))]
    by_record = torch.cat(gradients).float()
    expected = torch.zeros(by_record.shape[1], dtype=torch.float64)
    for _, places in records.by_person:
        total = by_record[places].double().sum(dim=0, keepdim=True)
        expected += clipped_rows(total, CLIP_NORM, (slice(0, total.shape[1]),))[0]
    (total,) = sums(model, task_of(model, records, m=7, local_steps=1))
    torch.testing.assert_close(total[0], expected, atol=1e-6, rtol=1e-5)
    assert float(expected.norm()) > CLIP_NORM, "nothing much was added up"


@settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    seed=st.integers(0, 99),
    m=st.integers(1, 4),
    rule=st.sampled_from(["joint", "split", "per-tensor"]),
    clip_norm=st.sampled_from([1e-3, 0.05, 10.0]),
)
def test_removing_a_person_moves_the_sum_by_this_person_alone_within_the_bound(model, sizes, seed, m, rule, clip_norm):
    records = shuffled(sizes, seed)

    def total(part: Records) -> torch.Tensor:
        return sums(model, task_of(model, part, m=m, local_steps=1, clipping=rule, clip_norm=clip_norm))[0][0]

    whole = total(records)
    bound = clip_norm * sensitivity_factor(rule, len(clipping_parts(rule, model.parameters)))
    for person, _ in records.by_person:
        only, others = map(total, apart(records, person))
        moved = whole - others
        assert torch.equal(moved, only), "another person's presence changed something"
        assert float(moved.norm()) <= bound


def test_records_clipped_one_by_one_and_summed_would_exceed_the_bound(model):
    """So the test above can fail."""
    records = random_records(6)
    persons = of_persons(records, ["one"] * 6), alone(records)
    one, six = (sums(model, task_of(model, each, m=6, local_steps=1, clip_norm=0.01))[0] for each in persons)
    assert float(one.norm()) <= 0.01 < 0.02 < float(six.norm())


@pytest.mark.parametrize(("way", "num_workers"), [("all", 2), ("head", 1)])
def test_the_order_of_persons_changes_no_bit(model, monkeypatch, way, num_workers):
    monkeypatch.setattr(model, "num_workers", num_workers)
    records = shuffled()
    places = [place for _, own in reversed(records.by_person) for place in own]  # a person's own order stays
    how = {"local_steps": 1, **WAYS[way]}
    (expected,) = sums(model, task_of(model, records, **how))
    (reversed_,) = sums(model, task_of(model, records.part(places), **how))
    assert torch.equal(expected, reversed_)


@pytest.mark.parametrize("way", ["all", "head", *slow("cached", "split")])
def test_records_that_share_passes_as_in_a_simulation_give_the_same_sums(model, tiny_bert, monkeypatch, way):
    sharing = training_model(tiny_bert, alone=False)
    how = {"local_steps": 1, **WAYS[way]}
    (expected,) = sums(model, task_of(model, shuffled(), **how))
    (found,) = sums(sharing, task_of(sharing, shuffled(), **how))
    monkeypatch.setattr(stacked, "_persons_at_once", lambda *_: 2)
    (in_pairs,) = sums(sharing, task_of(sharing, shuffled(), **how))
    for each in (found, in_pairs):
        torch.testing.assert_close(each, expected, atol=1e-6, rtol=1e-5)


def test_a_stack_of_clients_gives_each_what_it_has_alone(model):
    records = [shuffled(), shuffled((2, 2), 1), shuffled((), 2), alone(random_records(5, seed=3))]
    tasks = [task_of(model, each, everyone=False, noise_multiplier=0.5) for each in records]
    one_by_one_ = [local_update(model, task_of(model, each, everyone=False, noise_multiplier=0.5)) for each in records]
    for found, expected in zip(execute_stacked(model, tasks), one_by_one_, strict=True):
        for name, tensor in expected.adapter.items():
            torch.testing.assert_close(found.adapter[name], tensor, atol=1e-6, rtol=1e-5)


def test_a_record_that_cannot_be_read_is_a_zero_in_its_persons_sum(model):
    both = of_persons(random_records(2), ["one", "one"])
    broken = dataclasses.replace(both, unusable=torch.tensor([False, True]))
    loose = {"local_steps": 1, "clip_norm": 1e4}
    (with_other,), (whole,) = (sums(model, task_of(model, each, **loose)) for each in (broken, both.part([0])))
    torch.testing.assert_close(with_other, whole, atol=1e-4, rtol=1e-5)


def test_a_row_that_is_not_finite_adds_nothing_and_each_total_is_in_its_own_order():
    rows = torch.tensor([[1e8], [1.0], [math.inf], [-1e8], [1.0], [9.0]])
    totals = torch.zeros(3, 1, dtype=torch.float64)
    add_in_turn(totals, rows, torch.tensor([0, 1, 1, 0, 0]))
    assert totals.flatten().tolist() == [1.0, 1.0, 0.0]
    same, plain = torch.zeros(1, 1, dtype=torch.float64), 0.0
    values = torch.rand(50, 1, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-25, 25).unsqueeze(1)
    add_in_turn(same, values, torch.zeros(50, dtype=torch.int64))
    for value in values.double().flatten().tolist():
        plain += value
    assert float(same) == plain


def test_epsilon_is_what_dp_accounting_says_of_a_poisson_sample_of_persons(model):
    records = shuffled()
    event = local_update(model, task_of(model, records, noise_multiplier=1.3, everyone=False)).event
    assert (event.unit, event.sampling_probability, event.count) == ("person", 8 / 40, SPEC.local_steps)
    other = PLDAccountant()
    other.compose(dp_accounting.PoissonSampledDpEvent(8 / 40, dp_accounting.GaussianDpEvent(1.3)), SPEC.local_steps)
    assert epsilon_of([event], 1e-5).epsilon == pytest.approx(other.get_epsilon(1e-5), rel=1e-5)


def test_every_choice_of_a_persons_records_is_as_likely_as_any_other():
    """Over 6,000 keys each of the 15 pairs of six records comes 400 times; 5 standard deviations are 97."""
    seen = Counter(tuple(some_of("one", range(6), 2, SeededSource(seed).words(4).tobytes())) for seed in range(6000))
    assert len(seen) == 15
    assert all(abs(number - 400) < 97 for number in seen.values())


def test_a_persons_choice_depends_on_nobody_else_and_on_the_step(model):
    key = b"key"
    places = [some_of("one", [offset + step for step in range(9)], 4, key) for offset in (0, 50)]
    assert [place + 50 for place in places[0]] == places[1]
    assert some_of("other", range(9), 4, key) != places[0]
    records = of_persons(random_records(30), ["one"] * 30)
    sampler = task_of(model, records).sampler
    assert len({tuple(sampler.draw_persons(records, 3)[0]) for _ in range(10)}) > 5


def test_an_evaluation_counts_the_mean_of_a_persons_records(model):
    records = shuffled()
    pairs = [count(model, model.initial, {}, records.part([index])) for index in range(len(records))]
    expected = sum(torch.stack([pairs[place] for place in own]).mean(dim=0) for _, own in records.by_person)
    spec = UpdateSpec.counts(0.0, max_records_per_person=7)
    sampler = spec.sampler(9, SeededSource(0), SeededSource(1))
    task = dataclasses.replace(task_of(model, records), adapter=model.initial, spec=spec, sampler=sampler)
    found = local_update(model, task)
    torch.testing.assert_close(found.noised, expected, atol=1e-5, rtol=0)
    assert float(found.noised.sum()) <= len(SIZES)
    assert found.event.unit == "person"
    of_one_each = count(model, model.initial, {}, alone(records), [[index] for index in range(len(records))])
    assert torch.equal(of_one_each, sum(pairs)), "persons of one record each count as records do"
