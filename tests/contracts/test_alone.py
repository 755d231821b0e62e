"""A simulation, whose records share passes, equals a node, where each has its own, up to rounding."""

import dataclasses

import pytest
import torch

from fedpriv.learning.adapters import LoraSettings, attach
from fedpriv.learning.data.records import Records
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.stacked import execute_one_by_one, execute_stacked
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.contracts.test_engines import assert_close, make_tasks, model_of
from tests.tiny import move, random_records, tiny_causal

WAYS = {
    "all": {},
    "adamw": {"optimizer": "adamw"},
    "split": {"clipping": "split"},
    "per-tensor": {"clipping": "per-tensor"},
    "batch": {"clipping": "batch"},
    "upload": {"noise_on": "upload"},
    "cached": {"num_rounds": 1000},
    "head": {"trains": "head", "num_rounds": 1000},
    "centred head": {"trains": "head", "num_rounds": 1000, "centred": True, "bias_scale": 0.2},
    "head by parts": {"trains": "head", "clipping": "per-tensor"},
    "head on the upload": {"trains": "head", "noise_on": "upload"},
    "class sums": {"trains": "head", "objective": "class-sums", "local_steps": 1},
    "persons": {"max_records_per_person": 2},
}


def two_clients(**options) -> list[Records]:
    return [random_records(12, seed=seed, longest=40, **options) for seed in (0, 1)]


@pytest.fixture(scope="module")
def node_and_simulation(tiny_bert) -> list[TrainingModel]:
    """The models of both."""
    options = {"memory_limit": 2**30, "layers": "last-1", "max_length": 40}
    return [model_of(tiny_bert, **options, alone=alone) for alone in (True, False)]


@pytest.mark.parametrize("way", WAYS)
def test_a_node_and_both_engines_give_the_same_update(node_and_simulation, way):
    node, simulation = node_and_simulation
    records = two_clients()
    if way == "persons":
        records = [dataclasses.replace(own, persons=tuple(f"person {i % 5}" for i in range(12))) for own in records]
    expected = execute_one_by_one(node, make_tasks(node, records, **WAYS[way]))
    for execute in (execute_one_by_one, execute_stacked):
        assert_close(expected, execute(simulation, make_tasks(simulation, records, **WAYS[way])), rtol=1e-3)


def test_a_node_gives_the_update_of_a_language_model_of_a_simulation():
    records, updates = two_clients(classes=0, vocabulary=50), []
    for alone, execute in ((True, execute_one_by_one), (False, execute_stacked)):
        peft_model = move(attach(tiny_causal("llama"), LoraSettings(rank=2, task="CAUSAL_LM")))
        model = TrainingModel(peft_model, memory_limit=2**30, max_length=40, alone=alone)
        updates.append(execute(model, make_tasks(model, records)))
    assert_close(*updates, rtol=1e-3)


def test_a_node_and_a_simulation_count_the_same(node_and_simulation):
    records, spec, found = random_records(50, longest=40), UpdateSpec.counts(0.0), []
    for model in node_and_simulation:
        (task,) = make_tasks(model, [records])
        sampler = spec.sampler(50, SeededSource(0))
        (update,) = execute_one_by_one(model, [dataclasses.replace(task, spec=spec, sampler=sampler)])
        found.append(update.noised)
    assert torch.equal(*found)
    assert found[0].sum() == 50


def test_a_simulation_equals_itself_to_the_bit(node_and_simulation):
    _, simulation = node_and_simulation
    one, other = (execute_stacked(simulation, make_tasks(simulation, two_clients())) for _ in range(2))
    for first, second in zip(one, other, strict=True):
        assert all(torch.equal(first.adapter[name], second.adapter[name]) for name in first.adapter)
