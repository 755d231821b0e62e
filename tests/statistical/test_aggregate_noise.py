"""The sum of real uploads has the noise that the `aggregate` view counts, for every kind of sampling and weights."""

import math

import pytest
import torch
from scipy import stats

from fedpriv.config import parse
from fedpriv.learning.adapters import LoraSettings, attach, load_base, read
from fedpriv.learning.aggregation._fedavg import weighted_average, weights_by_size
from fedpriv.learning.data.records import Records
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.rounds import client_masses, record_weights
from fedpriv.learning.training.stacked import local_update
from fedpriv.privacy.accounting.views import aggregate_scale
from fedpriv.privacy.mechanisms.sources import SeededSource

SIZES = {0: 20, 1: 45, 2: 400}
# With more than 10,000 values, the accepted range of the variance at this false-alarm rate is at most +-7 %; the wrong
# formulas below are off by more.
NUM_ROUNDS, FALSE_ALARM = 10, 1e-6
Z, CLIP, RATE = 1.3, 2.5, 0.5
BASE = {"recipe": "per-sample", "local_steps": 1, "noise_multiplier": Z, "clip_norm": CLIP, "learning_rate": RATE}


def accepts(values: torch.Tensor, scale: float) -> bool:
    statistic = float((values.double() / scale).square().sum())
    return 2 * min(stats.chi2.cdf(statistic, len(values)), stats.chi2.sf(statistic, len(values))) > FALSE_ALARM


@pytest.fixture(scope="module")
def model(tiny_bert):
    base = load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3)
    return TrainingModel(attach(base, LoraSettings(rank=4)), memory_limit=2**30)


def summed(model: TrainingModel, spec: UpdateSpec, weights: dict[int, float]) -> torch.Tensor:
    """The values of rounds' weighted sums, less the broadcast, of these clients, none of whose records are drawn."""
    start = read(model.peft_model)
    nobody = Records({"input_ids": ()}, torch.tensor([], dtype=torch.int64), pad_token_id=0)
    values, total = [], sum(weights.values())
    for round_ in range(NUM_ROUNDS):
        uploads = [
            local_update(
                model,
                UpdateTask(
                    adapter=start,
                    data=nobody,
                    spec=spec,
                    round=1,
                    sampler=spec.sampler(size, SeededSource(round_, client, "inclusion")),
                    noise=SeededSource(round_, client, "noise"),
                ),
            ).adapter
            for client, size in SIZES.items()
            if client in weights
        ]
        average = weighted_average(uploads, [weight / total for weight in weights.values()])
        values += [(average[name].double() - tensor.double()).flatten() for name, tensor in start.items()]
    return torch.cat(values) * total


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling_probability": 0.25, "client_weights": "root-records"},
        {"sampling_probability": 0.25, "client_weights": "records"},
        {"batch_size": 8, "client_weights": "root-records"},
        {"batch_size": 8, "client_weights": "records", "clipping": "batch"},
        {"sampling_probability": 0.25, "client_weights": "uniform"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_the_noise_of_a_real_sum_is_the_scale_times_each_clients_own(model, changes):
    config = parse(BASE | changes)
    spec = UpdateSpec.of(config)
    rho = weights_by_size(client_masses(config, SIZES))
    v = record_weights(config, spec, SIZES)
    for client, size in SIZES.items():
        # The loudest other reads the sum, and takes its own part off.
        reader = max(SIZES.keys() - {client}, key=lambda other: v[other])
        left = {k: share for k, share in rho.items() if k != reader}
        values = summed(model, spec, left)
        batch = 1 if spec.clipping == "batch" else changes.get("batch_size", 0.25 * size)
        own = rho[client] * RATE * Z * CLIP / batch
        assert accepts(values, own * aggregate_scale(v, client))
        assert not accepts(values, own * aggregate_scale(v, client) * 0.95)
        if "sampling_probability" in changes:  # as if all batches had one size
            assert not accepts(values, own * math.hypot(*left.values()) / rho[client])
