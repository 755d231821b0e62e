"""A simulation, whose records share passes, equals a node, where each has its own, up to rounding."""

import dataclasses

import pytest
import torch

from fedpriv.learning.adapters import LoraSettings, attach, load_base
from fedpriv.learning.training import local_update as updates
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.stacked import execute_one_by_one, execute_stacked
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.learning.training.test_local_update import make_task
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


def models(kind: str, tiny_bert) -> list[TrainingModel]:
    """A node's and a simulation's."""
    found = []
    for alone in (True, False):
        if kind == "classifier":
            peft_model = attach(load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3), LoraSettings(layers="last-1"))
        else:
            peft_model = attach(tiny_causal("llama"), LoraSettings(rank=2, task="CAUSAL_LM"))
        found.append(TrainingModel(move(peft_model), memory_limit=2**30, max_length=40, alone=alone, num_workers=1))
    return found


@pytest.fixture(scope="module")
def classifiers(tiny_bert):
    return models("classifier", tiny_bert)


def executed(model, records, execute, **changes):
    """The updates of two clients, the same in each model but for rounding."""
    tasks = [make_task(model, own, noise_multiplier=0.5, seed=seed, **changes) for seed, own in enumerate(records)]
    results = execute(model, tasks)
    assert all(isinstance(result, updates.ClientUpdate) for result in results), results
    return results


def assert_equal_up_to_rounding(node, simulation):
    for one, other in zip(node, simulation, strict=True):
        assert one.event == other.event
        for name, tensor in one.adapter.items():
            torch.testing.assert_close(tensor, other.adapter[name], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_a_node_and_both_engines_give_the_same_update(classifiers, way):
    alone, sharing = classifiers
    records = [random_records(12, seed=seed, longest=40) for seed in (0, 1)]
    if "max_records_per_person" in WAYS[way]:
        records = [dataclasses.replace(own, persons=tuple(f"person {i % 5}" for i in range(12))) for own in records]
    node = executed(alone, records, execute_one_by_one, **WAYS[way])
    for execute in (execute_one_by_one, execute_stacked):
        assert_equal_up_to_rounding(node, executed(sharing, records, execute, **WAYS[way]))


def test_a_language_model_gives_the_same_update(tiny_bert):
    alone, sharing = models("language model", tiny_bert)
    records = [random_records(30, classes=0, vocabulary=50, seed=seed, longest=40) for seed in (0, 1)]
    node = executed(alone, records, execute_one_by_one)
    assert_equal_up_to_rounding(node, executed(sharing, records, execute_stacked))


def test_a_node_and_a_simulation_count_the_same(classifiers):
    records, spec = random_records(50, longest=40), UpdateSpec.counts(0.0)
    found = []
    for model in classifiers:
        task = make_task(model, records)
        sampler = spec.sampler(50, SeededSource(0))
        (update,) = execute_one_by_one(model, [dataclasses.replace(task, spec=spec, sampler=sampler)])
        found.append(update.noised)
    assert torch.equal(*found)
    assert found[0].sum() == 50


def test_a_simulation_equals_itself_to_the_bit(classifiers):
    records = [random_records(12, seed=seed, longest=40) for seed in (0, 1)]
    one, other = (executed(classifiers[1], records, execute_stacked) for _ in range(2))
    for first, second in zip(one, other, strict=True):
        assert all(torch.equal(first.adapter[name], second.adapter[name]) for name in first.adapter)
