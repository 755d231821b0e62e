"""A federation whose server sees only sums takes the steps of central DP-SGD, up to its grid's rounding."""

import math

import pandas as pd
import pytest
import torch

from fedpriv.config import RunConfig
from fedpriv.learning.adapters.pooling import BIAS_SCALE
from fedpriv.learning.aggregation import _head_start as head_start
from fedpriv.learning.training.local_update import UpdateSpec, trained_names
from fedpriv.learning.training.rounds import RunSchedule, grid_of
from fedpriv.privacy.mechanisms import discrete_gaussian as grid
from fedpriv.privacy.mechanisms.registry import MECHANISMS
from fedpriv.runs import files
from tests.server.parts import global_adapter, run
from tests.tiny import LABELS, write_table

SIZES = {0: 27, 1: 18, 2: 15}
NUM_RECORDS, NUM_CLASSES = sum(SIZES.values()), len(LABELS)
NOISE_OF_SUM = math.sqrt(len(SIZES))  # each client's noise is 1
# So coarse a grid that rounding to it, and not to float32, is what the adapters differ by.
COARSE_BITS = 18
# Later gradients follow the adapters' difference: the head's by at most half of it, as its features have length one.
# With a rate of 0.3, of which momentum delivers less than half in five rounds, the difference does not double.
GROWTH, RATE = 2.0, 0.3
# Of a class's mean features: at most 1, and noise of 0.7.
LENGTH_OF_MEANS = 2.0
WITHOUT_START = {"head_start": False, "start_noise_multiplier": ""}


def noise(multiplier: float) -> dict[str, object]:
    """Each client's in every round; what the server makes of the start depends on it."""
    return dict.fromkeys(("noise_multiplier", "start_noise_multiplier", "lora_noise_multiplier"), multiplier)


@pytest.fixture(scope="module")
def values(tiny_bert, tmp_path_factory) -> dict[str, object]:
    """Rounds of the head, and two of A, B and head, of all records and with momentum."""
    records = write_table(tmp_path_factory.mktemp("central") / "records.csv", NUM_RECORDS)
    return {
        **{"model": str(tiny_bert), "data": str(records), "test_data": str(records), "layers": "last-1"},
        **{"rounds": 5, "lora_rounds": 2, "sampling_probability": 1.0, "lora_sampling_probability": 1.0},
        **dict.fromkeys(("learning_rate", "lora_learning_rate", "lora_head_learning_rate"), RATE),
        **noise(1.0),
        **{"base_dtype": "float32", "evaluate_every": 1000, "simulate": True, "comparison": False, "baselines": False},
    }


def of_persons(path) -> dict[str, object]:
    """The keys of persons who are as many as the records were, with three records each."""
    records = pd.read_csv(write_table(path, 3 * NUM_RECORDS))
    records.assign(patient=[f"P{row // 3}" for row in records.index]).to_csv(path, index=False)
    return {"data": str(path), "test_data": str(path), "person_column": "patient"}


@pytest.fixture
def noises(monkeypatch) -> list[torch.Tensor]:
    """Of every round: what a federation's clients added to their sums; central DP-SGD adds the same."""
    added: list[torch.Tensor] = []
    discrete, gaussian = (type(MECHANISMS.named(name)) for name in ("discrete-gaussian", "gaussian"))
    draw = discrete.add_noise

    def record(self, sums, request, sources):
        noised, events = draw(self, sums, request, sources)
        points = torch.tensor(request.grids, dtype=torch.float64).unsqueeze(1)
        added.append((noised - (sums * points).round() / points).sum(dim=0))
        return noised, events

    def repeat(self, sums, request, sources):
        return sums + added.pop(0), self.planned_events(request)

    monkeypatch.setattr(discrete, "add_noise", record)
    monkeypatch.setattr(gaussian, "add_noise", repeat)
    monkeypatch.setitem(grid.RANGE_BITS, 32, COARSE_BITS)
    return added


def trained(values, out, **changes) -> tuple[RunConfig, dict[str, torch.Tensor]]:
    """The run's configuration and its last global adapter."""
    run(values, out, **changes)
    return files.read_config(out), global_adapter(out)


def summed(values, out, **changes) -> tuple[RunConfig, dict[str, torch.Tensor]]:
    """The federation's, whose server sees sums of all uploads."""
    sizes = {"partition": "sizes", "client_sizes": list(SIZES.values()), "num_clients": len(SIZES)}
    return trained(values, out, **sizes, secure_aggregation=True, min_clients=len(SIZES), **changes)


def central(values, out, **changes) -> dict[str, torch.Tensor]:
    """That of one client with all records, whose noise is that of the sum."""
    return trained({**values, **noise(NOISE_OF_SUM), **changes}, out, num_clients=1, partition="iid")[1]


def rounding(config: RunConfig, adapter: dict[str, torch.Tensor]) -> float:
    """How far rounding moves the adapter at most, in L2: half a step of each client in each value, in each round."""
    return GROWTH * sum(
        num_rounds * moved_by(spec, len(SIZES) / 2 / grid_of(config, spec, SIZES).gamma / NUM_RECORDS, adapter)
        for spec, num_rounds in RunSchedule.of(config).totals.items()
    )


def moved_by(spec: UpdateSpec, error: float, adapter: dict[str, torch.Tensor]) -> float:
    """How far a round moves the adapter, in L2, that is off by this in each value of the mean gradient.

    A step has the rate, for the bias times its scale s < 1, and momentum delivers at most that. The start divides a
    class's sum by its share of the records, which the bias gives over s, and multiplies that by a factor; the mean of
    all features is added.
    """
    dimension = sum(adapter[name].numel() for name in trained_names(adapter, spec.trains))
    if spec.objective != "class-sums":
        return RATE * error * math.sqrt(dimension)
    of_feature = NOISE_OF_SUM / NUM_RECORDS
    share = max(head_start._SMALLEST_SHARE / NUM_CLASSES, 2 * of_feature / BIAS_SCALE)
    factor = head_start._NOISE_AT_START / (of_feature * NUM_CLASSES)
    of_means = math.sqrt(dimension) + LENGTH_OF_MEANS / BIAS_SCALE * math.sqrt(NUM_CLASSES)
    return error * (factor / share * of_means + NUM_CLASSES * math.sqrt(dimension))


def length(adapter) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in adapter.values()))


def distance(ones, others) -> float:
    return length({name: ones[name].double() - others[name].double() for name in ones})


def of_float32(adapter) -> float:
    """Rounding of five rounds' steps and the shifts of the head's coordinates."""
    return 20 * 2.0**-24 * length(adapter)


@pytest.mark.parametrize(
    ("starts", "masks", "unit"),
    [
        (True, True, "record"),
        pytest.param(True, True, "person", marks=pytest.mark.slow),
        pytest.param(False, False, "record", marks=pytest.mark.slow),
    ],
)
def test_sums_train_what_central_steps_of_their_noise_do_up_to_the_grid(values, noises, tmp_path, starts, masks, unit):
    start = {} if starts else WITHOUT_START
    if unit == "person":
        values = values | of_persons(tmp_path / "persons.csv")
    config, found = summed(values, tmp_path / "summed", secure_masks=masks, **start)
    assert len(noises) == config.rounds
    expected = central(values, tmp_path / "central", **start)
    assert not noises, "central training has taken as many steps"
    assert distance(found, expected) <= rounding(config, found) + of_float32(found)


def test_other_weights_than_the_records_do_not(values, noises, tmp_path):
    config, found = summed(values, tmp_path / "summed", client_weights="root-records", **WITHOUT_START)
    expected = central(values, tmp_path / "central", **WITHOUT_START)
    assert distance(found, expected) > 10 * (rounding(config, found) + of_float32(found))
