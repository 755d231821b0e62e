"""The deduplication study: its training releases what its events say, and its check sees a broken bound."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.dedup.store import Store
from fedpriv.errors import InputError
from fedpriv.mechanisms.sources import SeededSource
from simulations.studies.dedup import check, run, train
from simulations.studies.dedup.cells import cells
from simulations.studies.dedup.digits import SIZES, digits
from simulations.studies.dedup.dp_sgd import Schedule, per_sample_rows, train_privately
from simulations.studies.dedup.lines import append, lines
from simulations.studies.dedup.networks import load, network, to_arrays
from simulations.studies.dedup.scenarios import SCENARIOS, Model, Scenario

RECORDS = digits("other")
ONE_STEP = Schedule(steps=1, expected_batch_size=50, learning_rate=1.0, clip_norm=0.5)


def flat(model):
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def released(noise_multiplier):
    """The noised sum of one step, from what it did to the weights; the same sample and noise each time."""
    model = network("mlp")
    before = flat(model).double()
    train_privately(model, RECORDS, ONE_STEP, noise_multiplier=noise_multiplier, source=SeededSource("step"))
    return (before - flat(model).double()) * ONE_STEP.expected_batch_size / ONE_STEP.learning_rate


def clipped_gradients(model, indices):
    """Each record's gradient by a backward pass of its own, clipped."""
    rows = []
    for index in indices:
        model.zero_grad()
        F.cross_entropy(model(RECORDS.images[index : index + 1]), RECORDS.labels[index : index + 1]).backward()
        row = torch.cat([value.grad.flatten() for value in model.parameters()])
        rows.append(row * min(1.0, ONE_STEP.clip_norm / float(row.norm())))
    return torch.stack(rows)


def sample(source):
    """The records of one step, at the rate that the events state."""
    return source.bernoulli(len(RECORDS), 0.25).nonzero().squeeze(1).tolist()


def test_no_record_is_in_two_splits_and_tasks_differ():
    found = [tuple(map(bytes, digits(split).images.numpy())) for split in SIZES]
    assert [len(images) for images in found] == list(SIZES.values())
    assert sum(SIZES.values()) == 1797
    # Scikit-learn's digits hold no image twice.
    assert len({image for images in found for image in images}) == 1797
    assert torch.equal(digits("test", "mirrored").images.flip(2), digits("test").images)


@pytest.mark.parametrize("architecture", ["mlp", "vit"])
def test_per_sample_gradients_are_those_of_single_records(architecture):
    model = network(architecture)
    few = RECORDS.part(0, 50)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    rows = per_sample_rows(model, parameters, few)
    for place in range(len(few)):
        model.zero_grad()
        F.cross_entropy(model(few.images[place : place + 1]), few.labels[place : place + 1]).backward()
        expected = torch.cat([value.grad.flatten() for value in model.parameters()])
        assert torch.allclose(rows[place], expected, rtol=1e-3, atol=1e-6)


def test_a_step_sums_the_clipped_gradients_of_its_poisson_sample():
    chosen = sample(SeededSource("step"))
    rows = clipped_gradients(network("mlp"), chosen).double()
    expected = rows.sum(dim=0)
    assert torch.allclose(released(0.0), expected, atol=1e-4)
    assert not torch.allclose(released(0.0), expected - rows[-1], atol=1e-4), "the test would be blind"


def test_a_steps_noise_is_what_its_event_states():
    noise = (released(3.0) - released(0.0)).numpy()
    accepted, *rejected = (stats.kstest(noise, "norm", args=(0, 3.0 * 0.5 * scale)).pvalue for scale in (1, 2 / 3, 1.5))
    assert accepted > 1e-6
    assert max(rejected) < 1e-6
    schedule = replace(ONE_STEP, steps=3)
    events = train_privately(network("mlp"), RECORDS, schedule, noise_multiplier=3.0, source=SeededSource("steps"))
    assert events == [SubsampledGaussian(noise_multiplier=3.0, sampling_probability=0.25)] * 3


def test_a_model_is_the_mean_of_the_later_half_of_its_iterates():
    found, expected, source, iterates = network("mlp"), network("mlp"), SeededSource("mean"), []
    schedule = replace(ONE_STEP, steps=3)
    train_privately(found, RECORDS, schedule, noise_multiplier=0.0, source=SeededSource("mean"))
    for _ in range(3):
        total = clipped_gradients(expected, sample(source)).sum(dim=0)
        iterates.append(flat(expected) - total / ONE_STEP.expected_batch_size)
        torch.nn.utils.vector_to_parameters(iterates[-1], expected.parameters())
    assert torch.allclose(flat(found), (iterates[1] + iterates[2]) / 2, atol=1e-5)
    assert not torch.allclose(flat(found), iterates[2], atol=1e-5), "the test would be blind"


@pytest.fixture(autouse=True)
def one_thread():
    """As the study runs; more would wait for each other on networks this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(monkeypatch):
    """A scenario of two perceptrons that train for a few steps, deduplicated in two ways."""
    epsilons = (2.0, 8.0)
    models = tuple(Model(architecture="mlp", task="upright", split="other", epsilon=epsilon) for epsilon in epsilons)
    scenario = Scenario(
        name="tiny", models=models, epsilon_bound=2.0, utility_bound=0.02, block_size=256, validation_epsilon=4.0
    )
    chosen = [cell for cell in cells(scenario) if cell.row == "drd" and cell.seed == 0]
    assert {cell.cutoff for cell in chosen} == {None, 3}
    monkeypatch.setitem(SCENARIOS, "tiny", scenario)
    monkeypatch.setattr(train, "STEPS", 4)
    monkeypatch.setattr(train, "noise_multiplier_for", lambda epsilon, *_, **__: 8 / epsilon)  # searching takes seconds
    monkeypatch.setattr(run, "cells", lambda scenario: chosen)
    train.schedule.cache_clear()
    yield scenario
    train.schedule.cache_clear()


def test_a_scenario_from_training_to_check_and_a_tampered_bound_is_seen(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    train.train_all(out, [tiny])
    run.run_all(out, [tiny])
    first = (out / "runs.jsonl").read_bytes()
    run.run_all(out, [tiny])
    assert (out / "runs.jsonl").read_bytes() == first, "a cell was computed twice"
    public, private = lines(out / "runs.jsonl")
    assert public["num_validations"] > 0
    assert public["block_ratio"] < 1
    assert public["outcomes"][1]["epsilon_after"] <= public["outcomes"][1]["epsilon_before"] + 2.0
    assert private["outcomes"][1]["correct_after"] is None
    assert check.check_all(out)

    described = out / "cells" / public["key"] / "variants" / tiny.models[1].name / "variant.json"
    original = described.read_text()
    for field, bound in (("epsilon_bound", 0.01), ("utility_bound", -0.5)):
        described.write_text(json.dumps({**json.loads(original), field: bound}))
        assert not check.check_all(out)
        assert f"{field.split('_')[0]} {tiny.models[1].name}" in capsys.readouterr().out
    described.write_text(original)
    (rows,) = (out / "cells" / public["key"] / "store").glob("blocks*")
    damaged = bytearray(rows.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    rows.write_bytes(damaged)
    assert not check.check_all(out)
    assert "damaged" in capsys.readouterr().out


def test_blocks_of_a_variant_that_nobody_names_are_seen(tiny, tmp_path, capsys):
    train.train_all(tmp_path, [tiny])
    run.run_all(tmp_path, [tiny])
    line, _ = lines(tmp_path / "runs.jsonl")
    name = tiny.models[1].name
    with Store(tmp_path / "cells" / line["key"] / "store") as store:
        manifest = store.manifest(name)
        tensors = {**store.restore(name), "layers.2.weight": np.zeros((192, 192), np.float32)}
        blocks, extras = manifest.layout.to_blocks(tensors)
        store.remove(name)
        store.add(name, manifest.layout, blocks, extras, privacy=manifest.privacy, provenance=manifest.provenance)
    assert not check.check_all(tmp_path)
    assert f"blocks {name}: 144 neither its own nor of a base" in capsys.readouterr().out


def test_a_line_that_was_cut_off_is_written_anew(tmp_path):
    path = tmp_path / "lines.jsonl"
    append(path, {"key": 1})
    with path.open("a") as file:
        file.write('{"key": 2')
    assert lines(path) == [{"key": 1}]
    append(path, {"key": 3})
    assert lines(path) == [{"key": 1}, {"key": 3}]


def test_a_study_without_results_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no results; train and run come first"):
        check.check_all(tmp_path)
    with pytest.raises(InputError, match=r"scenario = A1: .*holds no models of it"):
        run.run_all(tmp_path, [SCENARIOS["A1"]])


def test_weights_load_back():
    arrays = to_arrays(network("vit", seed=1))
    again = to_arrays(load(network("vit"), arrays))
    assert all(np.array_equal(again[name], value) for name, value in arrays.items())
