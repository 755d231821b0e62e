"""What the server makes of a sum is the weighted average of the uploads that nobody sent."""

import dataclasses
import math

import pytest
import torch

from fedpriv.config import parse
from fedpriv.learning.adapters import read
from fedpriv.learning.aggregation._fedavg import weighted_average, weights_by_size
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.rounds import client_masses, grid_of, mean_of_sum, mean_upload, num_included
from fedpriv.learning.training.stacked import execute_stacked
from fedpriv.privacy.mechanisms.discrete_gaussian import integers
from fedpriv.privacy.mechanisms.sources import SeededSource

SIZES = {0: 20, 1: 45, 2: 90}
BASE = {
    "recipe": "dp-lora-paper",
    "secure_aggregation": True,
    "min_clients": 3,
    "num_clients": 3,
    "rounds": 3,
    "local_steps": 1,
    "learning_rate": 0.5,
    "noise_multiplier": 0.7,
}


@pytest.fixture
def model(encoder):
    return TrainingModel(encoder(), memory_limit=2**30)


def updates(model, make_records, config, spec):
    """{client: its update on its grid}, and the adapter that all of them start from."""
    start = {name: tensor + 0.01 for name, tensor in read(model.peft_model).items()}
    grid = grid_of(config, spec, SIZES)
    tasks = [
        UpdateTask(
            adapter=start,
            data=make_records(size, seed=size),
            spec=spec,
            round=1,
            sampler=spec.sampler(size, SeededSource(client, "inclusion")),
            noise=SeededSource(client, "noise"),
            grid=grid.of(client),
        )
        for client, size in SIZES.items()
    ]
    return dict(zip(SIZES, execute_stacked(model, tasks), strict=True)), start


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling_probability": 0.25},
        {"sampling_probability": 1.0, "client_weights": "root-records"},
        {"batch_size": 8},
        {"batch_size": 8, "clipping": "batch"},
        {"sampling_probability": 0.5, "noise_on": "upload", "local_steps": 3, "optimizer": "adamw"},
        {"sampling_probability": 0.5, "clipping": "split", "normalize_features": True},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
@pytest.mark.parametrize("survivors", [(0, 1, 2), (0, 2)])
def test_the_average_of_the_sum_is_that_of_the_uploads(model, make_records, changes, survivors):
    config = parse(BASE | changes)
    spec = UpdateSpec.of(config)
    found, start = updates(model, make_records, config, spec)
    weights = weights_by_size(client_masses(config, {client: SIZES[client] for client in survivors}))
    expected = weighted_average([found[client].adapter for client in survivors], [weights[c] for c in survivors])
    grid = grid_of(config, spec, SIZES)
    total = sum(integers(found[client].noised, grid.of(client).points) for client in survivors)
    mean = mean_of_sum(config, spec, SIZES, total, survivors)
    summed = mean_upload(start, spec, mean)
    moved = {name: float((tensor - start[name]).abs().max()) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        torch.testing.assert_close(summed[name], tensor, atol=2e-6 + 1e-5 * moved[name], rtol=0, msg=name)
    assert max(moved.values()) > 1e-3, "the updates changed something"
    wrong = mean_upload(start, spec, mean_of_sum(config, spec, SIZES, total, (1,)))
    assert any(not torch.allclose(wrong[name], expected[name], atol=1e-4) for name in expected)


def test_phases_of_a_head_with_centred_features_and_rates_of_their_own_agree_too(model, make_records):
    config = parse(BASE | {"sampling_probability": 0.5, "normalize_features": True})
    for changes in (
        {"trains": "head", "centred": True},
        {"trains": "head", "objective": "class-sums"},
        {"lora_learning_rate": 0.05, "bias_scale": 3.0},
    ):
        spec = dataclasses.replace(UpdateSpec.of(config), **changes)
        found, start = updates(model, make_records, config, spec)
        weights = weights_by_size(client_masses(config, SIZES))
        expected = weighted_average([update.adapter for update in found.values()], list(weights.values()))
        points = {client: grid_of(config, spec, SIZES).of(client).points for client in SIZES}
        total = sum(integers(found[client].noised, points[client]) for client in SIZES)
        summed = mean_upload(start, spec, mean_of_sum(config, spec, SIZES, total, SIZES))
        for name, tensor in expected.items():
            torch.testing.assert_close(summed[name], tensor, atol=1e-5, rtol=1e-5, msg=f"{changes} {name}")


def test_a_vector_beyond_its_share_is_clamped_and_the_noise_is_that_of_the_terms(model, make_records):
    config = parse(BASE | {"sampling_probability": 1.0, "noise_multiplier": 3.0})
    spec = UpdateSpec.of(config)
    grid, (found, _) = grid_of(config, spec, SIZES), updates(model, make_records, config, spec)
    for client, update in found.items():
        assert num_included(spec, SIZES[client]) == SIZES[client]
        steps = integers(update.noised, grid.of(client).points).double()
        stddev = grid.of(client).points * 3.0 * spec.clip_norm
        # Records move few of some thousand values: nearly all are noise alone.
        robust = float(steps.abs().median()) / 0.6745
        assert robust == pytest.approx(stddev, rel=0.1)
        assert math.isfinite(float(steps.abs().max()))
    assert grid_of(parse(BASE | {"secure_aggregation": False}), spec, SIZES) is None
