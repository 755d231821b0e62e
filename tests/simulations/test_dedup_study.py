"""The deduplication study: its training releases what its events say, and its check sees a broken bound."""

import gzip
import json
import math
import shutil
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from fedpriv.errors import InputError
from fedpriv.models.dedup._base_selection import Candidate, select_bases
from fedpriv.models.variants import folders
from fedpriv.models.variants.composition import Guarantee
from fedpriv.models.variants.store import Store
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.mechanisms.sources import SeededSource
from simulations.studies.dedup import check, data, run, scenarios, train
from simulations.studies.dedup.cells import IN_STEPS, cells
from simulations.studies.dedup.data import IMAGE_SIZES
from simulations.studies.dedup.dp_sgd import DpSgdSchedule, add_clipped_gradients, clipped_sum, losses, train_privately
from simulations.studies.dedup.networks import encoder, load, network, to_arrays, whole
from simulations.studies.dedup.records import TokenRecords, Vectors
from simulations.studies.dedup.report import page as study_page
from simulations.studies.dedup.report import paper
from simulations.studies.dedup.report.results import keep
from simulations.studies.dedup.scenarios import FIFTY, SCENARIOS, Model, Scenario
from simulations.studies.harness import lines

ONE_STEP = DpSgdSchedule(steps=1, expected_batch_size=50, learning_rate=1.0, clip_norm=0.5)


@cache
def digits():
    """Read when a test needs them: that takes seconds, and each worker collects this file."""
    return data.images("digits", "tuning").first(200)


def flat(model):
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def released(noise_multiplier):
    """The noised sum of one step, from what it did to the weights; the same sample and noise each time."""
    model = network("vit")
    before = flat(model).double()
    train_privately(model, digits(), ONE_STEP, noise_multiplier=noise_multiplier, source=SeededSource("step"))
    return (before - flat(model).double()) * ONE_STEP.expected_batch_size / ONE_STEP.learning_rate


def clipped_gradients(model, records, indices, clip_norm=ONE_STEP.clip_norm):
    """Each record's gradient by a backward pass of its own, clipped."""
    rows = []
    for index in indices:
        model.zero_grad()
        (one,) = records.passes([index])
        losses(model, one).sum().backward()
        row = torch.cat([value.grad.flatten() for value in model.parameters()])
        rows.append(row * min(1.0, clip_norm / float(row.norm())))
    return torch.stack(rows)


def sample(source):
    """The records of one step, at the rate that the events state."""
    return source.bernoulli(len(digits()), 0.25).nonzero().squeeze(1).tolist()


def some_tokens(num, lengths):
    """Random states of texts of these lengths."""
    generator = np.random.default_rng(0)
    sizes = np.array([lengths[index % len(lengths)] for index in range(num)])
    states = generator.standard_normal((sizes.sum(), 384)).astype(np.float16)
    return TokenRecords(states, sizes.cumsum() - sizes, sizes, torch.arange(num) % 2)


def few_records(architecture):
    if architecture == "perceptron":
        return Vectors(torch.randn(12, 384, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 15)
    return some_tokens(4, (3, 7)) if architecture == "minilm" else digits().first(12)


def test_no_image_is_in_two_splits_and_a_view_changes_nothing_else():
    found = [tuple(map(bytes, data.images("digits", split).inputs.numpy())) for split in IMAGE_SIZES]
    assert [len(each) for each in found] == list(IMAGE_SIZES.values())
    assert sum(IMAGE_SIZES.values()) == 5000
    # The 5,000 images hold none twice.
    assert len({image for each in found for image in each}) == 5000
    assert torch.equal(data.images("mirrored", "test").inputs.flip(2), data.images("digits", "test").inputs)


def test_public_images_come_from_another_source(monkeypatch):
    monkeypatch.setattr(data, "NUM_PUBLIC", 1000)
    data._drawings.cache_clear()
    public, private = data.images("digits", "public"), data.images("digits", "private")
    data._drawings.cache_clear()
    assert len(public) == 1000
    assert not {bytes(image) for image in public.inputs.numpy()} & {bytes(image) for image in private.inputs.numpy()}
    assert 0 <= float(public.inputs.min()) <= float(public.inputs.max()) <= 1


def test_passes_of_tokens_hold_every_text_once_and_nothing_but_its_own_tokens():
    records = some_tokens(30, (5, 2, 9))
    found = {}
    for inputs, _ in records.passes(range(1, 30, 2)):
        for row in inputs:
            index = int((records.states[records.starts] == row[0].numpy()).all(axis=1).argmax())
            found[index] = row
    assert sorted(found) == list(range(1, 30, 2))
    for index, row in found.items():
        begin = records.starts[index]
        assert np.array_equal(row.numpy(), records.states[begin : begin + records.lengths[index]])


def with_a_head(architecture):
    model = network(architecture)
    if architecture == "minilm":
        nn.init.normal_(model.classifier.weight, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("architecture", ["perceptron", "vit", "resnet", "minilm"])
@pytest.mark.parametrize("clip_norm", [0.3, 1e6])
def test_a_clipped_sum_is_that_of_single_records(architecture, clip_norm, exact_minilm):
    model, records = with_a_head(architecture), few_records(architecture)
    found = clipped_sum(model, records, list(range(len(records))), clip_norm)
    rows = clipped_gradients(model, records, range(len(records)), clip_norm)
    near = partial(torch.allclose, found, rtol=2e-3, atol=1e-3 * float(rows.abs().max()))
    assert near(rows.sum(dim=0))
    assert not near(rows[:-1].sum(dim=0)), "the test would be blind"


@pytest.mark.parametrize("architecture", ["perceptron", "vit", "resnet", "minilm"])
def test_no_record_moves_a_sum_by_more_than_the_clip_norm(architecture, exact_minilm):
    model, records = with_a_head(architecture), few_records(architecture)
    moved = [float(clipped_sum(model, records, [index], 0.1).norm()) for index in range(len(records))]
    assert max(moved) <= 0.1
    assert max(moved) > 0.099, "the test would be blind"


def test_a_record_without_a_finite_gradient_counts_as_zero():
    model = network("vit")
    broken = Vectors(digits().inputs[:3].clone(), digits().labels[:3])
    broken.inputs[1] = math.nan
    assert torch.allclose(
        clipped_sum(model, broken, [0, 1, 2], 1.0), clipped_sum(model, broken, [0, 2], 1.0), atol=1e-6
    )


def test_a_layer_of_unknown_gradient_and_one_that_runs_twice_are_refused():
    batch = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(TypeError, match="1: gradients of a BatchNorm1d are not known here"):
        add_clipped_gradients({}, batch, lambda: batch(torch.ones(2, 4)).sum(dim=1), 1.0)
    layer = nn.Linear(4, 4)
    twice = nn.Sequential(layer, layer)
    with pytest.raises(ValueError, match="0: called twice"):
        add_clipped_gradients({}, twice, lambda: twice(torch.ones(2, 4)).sum(dim=1), 1.0)


def test_a_step_sums_the_clipped_gradients_of_its_poisson_sample():
    chosen = sample(SeededSource("step"))
    rows = clipped_gradients(network("vit"), digits(), chosen).double()
    expected = rows.sum(dim=0)
    assert torch.allclose(released(0.0), expected, rtol=2e-3, atol=1e-3)
    assert not torch.allclose(released(0.0), expected - rows[-1], rtol=2e-3, atol=1e-3), "the test would be blind"


def test_a_steps_noise_is_what_its_event_states():
    noise = (released(3.0) - released(0.0)).numpy()
    accepted, *rejected = (stats.kstest(noise, "norm", args=(0, 3.0 * 0.5 * scale)).pvalue for scale in (1, 2 / 3, 1.5))
    assert accepted > 1e-6
    assert max(rejected) < 1e-6
    # The test above sees all values together, and would not see that a small tensor has none.
    tensors = np.split(noise, np.cumsum([each.numel() for each in network("vit").parameters()])[:-1])
    assert min(float(np.median(np.abs(tensor))) for tensor in tensors) > 0.3
    assert int((np.abs(noise) < 1e-4).sum()) <= 20, "about seven are expected"
    schedule = replace(ONE_STEP, steps=3)
    events = train_privately(network("vit"), digits(), schedule, noise_multiplier=3.0, source=SeededSource("steps"))
    assert events == [SubsampledGaussian(noise_multiplier=3.0, sampling_probability=0.25)] * 3


def test_a_model_is_the_mean_of_the_later_half_of_its_iterates():
    found, expected, source, iterates = network("vit"), network("vit"), SeededSource("mean"), []
    schedule = replace(ONE_STEP, steps=3)
    train_privately(found, digits(), schedule, noise_multiplier=0.0, source=SeededSource("mean"))
    for _ in range(3):
        total = clipped_sum(expected, digits(), sample(source), ONE_STEP.clip_norm)
        iterates.append(flat(expected) - total / ONE_STEP.expected_batch_size)
        torch.nn.utils.vector_to_parameters(iterates[-1], expected.parameters())
    assert torch.allclose(flat(found), (iterates[1] + iterates[2]) / 2, atol=1e-5)
    assert not torch.allclose(flat(found), iterates[2], atol=1e-5), "the test would be blind"


def test_the_scenarios_are_those_of_the_papers_table_1():
    counts = {name: len(SCENARIOS[name].models) for name in SCENARIOS}
    assert counts == {
        "A1": 5, "A2": 5, "A3": 5, "A4": 5, "A5": 5, "B1": 10, "B2": 10, "B3": 20,
        "C1": 5, "C2": 5, "C3": 5, "C4": 4, "minilm": 5, "hetero": 7, "fifty": 50,
    }  # fmt: skip
    assert len({model.name for name in FIFTY for model in SCENARIOS[name].models}) == 50
    for scenario in SCENARIOS.values():
        lowest = sorted(model.epsilon for model in scenario.models)[0 if scenario.base else 1]
        assert scenario.validation_epsilon <= lowest + scenario.epsilon_bound
    for name, papers in paper.SCENARIOS.items():
        own = SCENARIOS[name]
        assert sorted(model.epsilon for model in own.models) == sorted(papers.epsilons)
        assert papers.epsilon_bound in (None, own.epsilon_bound)
        assert papers.utility_bound in (None, own.utility_bound)


@pytest.mark.parametrize("name", ["C1", "C2", "C3", "C4"])
def test_every_candidate_becomes_the_base_of_all_models_of_its_scenario(name):
    scenario = SCENARIOS[name]

    def summed(target, bases):
        own = [each.epsilon for each in (target, *bases) if each.data_sets == target.data_sets]
        return Guarantee(epsilon=max([sum(own), *(each.epsilon for each in bases)]), delta=1e-5)

    chosen = [cell for cell in cells(scenario) if cell.table == "base"]
    assert [cell.base for cell in chosen] == [model.name for model in scenario.candidates]
    for cell in chosen:
        variants = [
            Candidate(
                name=model.name, architecture=model.architecture, data_sets=frozenset({model.data_set}), delta=1e-5,
                epsilon=model.epsilon, utility=0.8, epsilon_bound=cell.epsilon_bound, utility_bound=0.02,
                tags=model.tags,
            )
            for model in scenario.stored(cell.base)
        ]  # fmt: skip
        found = select_bases(variants, summed, fairness="outcome", max_distance=cell.max_distance)
        assert {target: each.bases for target, each in found.assignments.items()} == {
            model.name: (cell.base,) for model in scenario.models
        }


def test_models_of_the_small_architectures_have_260_to_290_blocks_and_load_back():
    for architecture in ("perceptron", "vit", "resnet"):
        arrays = to_arrays(network(architecture, seed=1))
        assert 260 <= sum(math.ceil(value.size / 512) for value in arrays.values() if value.size >= 512) <= 290
        again = to_arrays(load(network(architecture), arrays))
        assert all(np.array_equal(again[name], value) for name, value in arrays.items())


def test_minilms_trained_part_continues_the_whole_model():
    base = encoder()
    ids = torch.tensor([[101, 7592, 2088, 999, 102]])
    model = network("minilm")
    nn.init.normal_(model.classifier.weight, generator=torch.Generator().manual_seed(0))
    base.model.load_state_dict(whole(to_arrays(model)))
    with torch.no_grad():
        hidden = base.model.bert.embeddings(input_ids=ids)
        for layer in base.model.bert.encoder.layer[:4]:
            hidden = layer(hidden)
        expected = base.model(input_ids=ids).logits
        found = model(hidden)
    assert float((found - expected).abs().max()) < 0.03 * float(expected.abs().max())  # bfloat16


def test_texts_without_their_files_and_a_study_without_results_are_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"--data .*: holds no sst2_train.csv.gz; name the folder that does"):
        data.prepare(tmp_path, tmp_path, "sst2")
    with pytest.raises(InputError, match=r"sst2.starts.npy: is missing; train writes it, from --data FOLDER"):
        data.tokens(tmp_path, "sst2", "tuning")
    with pytest.raises(InputError, match="split = 'parts': medquad has public, tuning"):
        data.embedded(tmp_path, "medquad", "parts")
    with pytest.raises(InputError, match="holds no results; train and run come first"):
        check.check_all(tmp_path, jobs=1)
    with pytest.raises(InputError, match=r"scenario = A1: .*holds no models of it"):
        run.run_all(tmp_path, [SCENARIOS["A1"]])


@pytest.mark.parametrize("name", ["A1", "A2", "A3", "B1"])
def test_a_scenario_alone_encodes_all_that_its_models_start_from(name, tmp_path, monkeypatch):
    encoded = []
    monkeypatch.setattr(train, "in_processes", lambda _, tasks, jobs: encoded.extend(tasks) or ())
    for writes in ("_write_missing", "write_scenario"):
        monkeypatch.setattr(train, writes, lambda *_: None)
    train.train_all(tmp_path, [SCENARIOS[name]], data=tmp_path)
    assert encoded == ["sst2", "medquad"]


def test_encoded_texts_keep_their_labels_and_splits_share_none(tmp_path, monkeypatch, capsys):
    rows = [(f"this is film number {index}", index % 2) for index in range(40)]
    with gzip.open(tmp_path / "sst2_train.csv.gz", "wt") as file:
        file.write("text,label\n" + "".join(f"{text},{label}\n" for text, label in [*rows, rows[0]]))
    monkeypatch.setitem(data.TEXT_SIZES, "sst2", {"public": 4, "test": 6, "parts": 30})
    data.prepare(tmp_path, tmp_path, "sst2")
    assert "sst2: 40 of 40 texts are encoded" in capsys.readouterr().out
    found = {split: data.embedded(tmp_path, "sst2", split) for split in ("public", "test", "parts")}
    vectors = torch.cat([each.inputs for each in found.values()])
    assert len(torch.unique(vectors, dim=0)) == 40, "a text is in two splits"
    assert torch.allclose(vectors.square().mean(dim=1), torch.ones(40), atol=1e-4)
    # The perceptron's embedding is the mean of the states that MiniLM's trained part makes of the kept ones.
    kept = data.tokens(tmp_path, "sst2", "test")
    assert torch.equal(kept.labels, found["test"].labels)
    model = network("minilm")
    for index in range(len(kept)):
        (one,) = kept.passes([index])
        hidden = one[0]
        with torch.no_grad():
            for layer in model.bert["encoder"]["layer"].values():
                hidden = layer(hidden)
        again = F.normalize(hidden.mean(dim=1), dim=1) * 384**0.5
        assert F.cosine_similarity(again, found["test"].inputs[index : index + 1]) > 0.999


@pytest.fixture
def exact_minilm(monkeypatch):
    """MiniLM without bfloat16, whose rounding hides small differences."""
    monkeypatch.setattr(torch, "autocast", partial(torch.autocast, enabled=False))


@pytest.fixture(autouse=True)
def one_thread():
    """As the study runs; more would wait for each other on networks this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A scenario of two transformers that train for a few steps, deduplicated in two ways, and its folder."""
    epsilons, out = (2.0, 8.0), tmp_path_factory.mktemp("study")
    models = tuple(Model(architecture="vit", task="digits", epsilon=epsilon, part=(0, 15)) for epsilon in epsilons)
    scenario = Scenario(
        name="tiny", models=models, epsilon_bound=2.0, utility_bound=0.1, block_size=4096, validation_epsilon=4.0
    )
    proven = [cell for cell in cells(scenario) if cell.acceptance == "proof"]
    chosen = [cell for cell in proven if cell.row in ("drd", IN_STEPS) and cell.seed == 0]
    assert {cell.private for cell in chosen} == {False, True}
    caches = scenarios.schedule, data._drawings, train.records
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCENARIOS, "tiny", scenario)
        patch.setitem(scenarios.RECIPES, "vit", replace(scenarios.RECIPES["vit"], steps=4))
        patch.setattr(scenarios, "noise_multiplier_for", lambda epsilon, *_, **__: 8 / epsilon)  # takes seconds
        patch.setattr(data, "NUM_PUBLIC", 640)
        patch.setattr(data, "IMAGE_SIZES", {"tuning": 30, "validation": 300, "test": 30, "private": 3000})
        patch.setattr(run, "cells", lambda scenario: chosen)
        for each in caches:
            each.cache_clear()
        train.train_all(out, [scenario], data=out, jobs=1)
        run.run_all(out, [scenario], jobs=1)
        yield scenario, out
    for each in caches:
        each.cache_clear()


@pytest.fixture
def copied(tiny, tmp_path):
    """The same with a copy of its folder, to be changed."""
    return tiny[0], shutil.copytree(tiny[1], tmp_path / "out")


@pytest.mark.slow
def test_a_scenario_from_training_to_tables_and_a_tampered_bound_is_seen(copied, tmp_path, capsys):
    (tiny, out), page = copied, tmp_path / "page.md"
    first = [(out / name).read_bytes() for name in ("runs.jsonl", "models.jsonl")]
    train.train_all(out, [tiny], data=out, jobs=1)
    run.run_all(out, [tiny], jobs=1)
    assert [(out / name).read_bytes() for name in ("runs.jsonl", "models.jsonl")] == first, "computed twice"
    public, private = lines(out / "runs.jsonl")
    assert public["num_validations"] > 0
    assert public["block_ratio"] < 1
    assert public["outcomes"][1]["epsilon_after"] <= public["outcomes"][1]["epsilon_before"] + 2.0
    assert private["outcomes"][1]["utility_after"] is None
    assert check.check_all(out, jobs=1)
    keep(out, tmp_path / "kept.jsonl")
    study_page.write(page, tmp_path / "kept.jsonl")
    assert "of 2 models beat their public start" in " ".join(page.read_text().split())

    described = out / "cells" / public["key"] / "variants" / tiny.models[1].name / "variant.json"
    original = described.read_text()
    for field, bound in (("epsilon_bound", 0.01), ("utility_bound", -0.5)):
        described.write_text(json.dumps({**json.loads(original), field: bound}))
        assert not check.check_all(out, jobs=1)
        assert f"{field.split('_')[0]} {tiny.models[1].name}" in capsys.readouterr().out
    described.write_text(original)
    (rows,) = (out / "cells" / public["key"] / "store").glob("blocks*")
    damaged = bytearray(rows.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    rows.write_bytes(damaged)
    assert not check.check_all(out, jobs=1)
    assert "damaged" in capsys.readouterr().out


@pytest.mark.slow
def test_the_lines_of_models_say_whether_each_beats_its_start(tiny):
    tiny, out = tiny
    (reference,), models = lines(out / "references.jsonl"), lines(out / "models.jsonl")
    for line, model in zip(models, tiny.models, strict=True):
        gained = line["accuracy"]["test"] - line["accuracy_start"]["test"]
        assert line["gain"] == pytest.approx(gained)
        assert line["beats_start"] == (gained > 2 * line["gain_standard_error"])
        # Of the differences -1, 0 and 1 of 30 records, at most one record lost for each gained.
        assert line["gain_standard_error"] <= 1 / math.sqrt(29)
        assert line["accuracy_without_noise"] == reference["accuracy"]
        assert line["accuracy"] == train.accuracies(out, model, folders.read_tensors(out / "models" / model.name))


@pytest.mark.slow
def test_targets_are_trained_anew_with_the_epsilon_after_deduplication(copied, tmp_path, monkeypatch):
    tiny, out = copied
    monkeypatch.setattr(train, "SCENARIO_NAMES", ("tiny",))
    train.retrain_all(out, jobs=1)
    (line,), outcome = lines(out / "retrain.jsonl"), lines(out / "runs.jsonl")[0]["outcomes"][1]
    assert (line["name"], line["epsilon"]) == (tiny.models[1].name, outcome["epsilon_after"])
    again, events = train.trained(out, tiny.models[1], epsilon=line["epsilon"])
    assert line["accuracy"] == train.accuracies(out, tiny.models[1], again)
    assert {event.noise_multiplier for event in events} == {8 / line["epsilon"]}
    with pytest.raises(InputError, match="holds no results of drd in A1 to A5; run comes first"):
        train.retrain_all(tmp_path / "elsewhere")


@pytest.mark.slow
def test_blocks_of_a_variant_that_nobody_names_are_seen(copied, capsys):
    tiny, out = copied
    line, _ = lines(out / "runs.jsonl")
    name = tiny.models[1].name
    with Store(out / "cells" / line["key"] / "store") as store:
        manifest = store.manifest(name)
        tensors = {**store.tensors(name), "layers.2.qkv.weight": np.zeros((192, 64), np.float32)}
        blocks, extras = manifest.layout.to_blocks(tensors)
        store.remove(name)
        store.add(name, manifest.layout, blocks, extras, privacy=manifest.privacy, provenance=manifest.provenance)
    assert not check.check_all(out, jobs=1)
    assert f"blocks {name}: 3 neither its own nor of a base" in capsys.readouterr().out
