"""The noise is in what is uploaded: every tensor of a zero-gradient client's upload has the scale z C lr / B."""

import dataclasses

import pytest
import torch
from scipy import stats

from fedpriv.config import RunConfig
from fedpriv.learning.adapters import LoraSettings, attach, load_base, read
from fedpriv.learning.data.records import Records
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_sums import PoissonSampler
from fedpriv.learning.training.stacked import local_update
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import LmoParameters
from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource

# The smallest tensor, a bias of 3, gives 3 * 200 = 600 values; at this false-alarm rate the accepted range of the
# variance is about +-29%, while scales of 2/3 and 3/2 change it by -56% and +125%.
NUM_UPLOADS, FALSE_ALARM = 200, 1e-6
SPEC = UpdateSpec.of(
    RunConfig(rounds=1, local_steps=1, batch_size=16, learning_rate=0.5, clip_norm=2.5, noise_multiplier=1.3)
)
SCALE = 1.3 * 2.5 * 0.5 / 16


def accepts(values: torch.Tensor, scale: float) -> bool:
    statistic = float((values.double() / scale).square().sum())
    tails = 2 * min(stats.chi2.cdf(statistic, len(values)), stats.chi2.sf(statistic, len(values)))
    return tails > FALSE_ALARM


def uploads(model: TrainingModel, make_source, spec: UpdateSpec) -> dict[str, torch.Tensor]:
    """{tensor name: differences of many uploads to the broadcast}, of a client none of whose records is drawn."""
    start = read(model.peft_model)
    nobody = Records({"input_ids": ()}, torch.tensor([], dtype=torch.int64), pad_token_id=0)
    differences = []
    for upload in range(NUM_UPLOADS):
        sampler = PoissonSampler(num_registered=64, expected_batch_size=16, source=SeededSource(upload))
        task = UpdateTask(adapter=start, data=nobody, spec=spec, round=1, sampler=sampler, noise=make_source(upload))
        adapter = local_update(model, task).adapter
        differences.append({name: (adapter[name] - start[name]).flatten() for name in start})
    return {name: torch.cat([difference[name] for difference in differences]) for name in start}


@pytest.fixture(scope="module")
def model(tiny_bert):
    base = load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3)
    return TrainingModel(attach(base, LoraSettings(rank=4)), memory_limit=2**30)


@pytest.mark.parametrize("make_source", [lambda _: SecureSource(), lambda i: SeededSource(i)], ids=["secure", "seeded"])
def test_every_uploaded_tensor_has_noise_of_the_claimed_scale(model, make_source):
    by_tensor = uploads(model, make_source, SPEC)
    assert len(by_tensor) == 10  # A and B of query and value in two layers, the head's weight and bias
    for name, values in by_tensor.items():
        assert accepts(values, SCALE), name
        assert not accepts(values, SCALE * 2 / 3), name
        assert not accepts(values, SCALE * 3 / 2), name


def test_every_uploaded_tensor_has_lmo_noise_of_the_claimed_scale(model):
    parts = '{"combination": "mixture", "uniform": {"weight": 1.0, "low": 0.1, "high": 0.5}}'
    distribution = Columns.of(LmoParameters.from_json(parts)).cdf
    by_tensor = uploads(model, SeededSource, dataclasses.replace(SPEC, mechanism="lmo", mechanism_parameters=parts))
    assert len(by_tensor) == 10
    for name, values in by_tensor.items():
        sizes = values[:20_000].double().numpy() / SCALE
        assert stats.kstest(sizes, distribution).pvalue > FALSE_ALARM, name
        if len(sizes) > 2000:  # the bias's few values have no power at this false-alarm rate
            assert stats.kstest(sizes * 2 / 3, distribution).pvalue < FALSE_ALARM, name
            assert stats.kstest(sizes * 3 / 2, distribution).pvalue < FALSE_ALARM, name


def test_noise_of_several_steps_adds_up(model):
    by_tensor = uploads(model, SeededSource, dataclasses.replace(SPEC, local_steps=4))
    for name, values in by_tensor.items():
        assert accepts(values, SCALE * 2), name


def test_noise_of_different_tensors_is_independent(model):
    by_tensor = uploads(model, SeededSource, SPEC)
    weight, bias = (next(v for n, v in by_tensor.items() if n.endswith(end)) for end in ("classifier.weight", "bias"))
    correlation = stats.pearsonr(weight[: len(bias)].numpy(), bias.numpy())
    assert correlation.pvalue > FALSE_ALARM
