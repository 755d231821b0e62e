"""A federation of a module of one's own, through everything that a run of a language model goes through."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from fedpriv.config import Fact, RunConfig, checked, parse
from fedpriv.errors import InputError
from fedpriv.learning.data.tensors import TensorRecords, tensor_records
from fedpriv.learning.training import OwnModel, UpdateSpec
from fedpriv.learning.training.local_update import UpdateTask
from fedpriv.learning.training.own_federation import OwnFederation, OwnWorkbench
from fedpriv.learning.training.stacked import execute_one_by_one, execute_stacked
from fedpriv.models.publishing.saved import find
from fedpriv.privacy.mechanisms import SeededSource
from server import checkpoint
from simulations import run, sweep

WIDTH, CLASSES, SIZES = 6, 3, (40, 60, 80)


def rows(num: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Records of three classes, each around a corner of its own."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num) % CLASSES
    corners = 2 * torch.eye(CLASSES, WIDTH)
    return corners[labels] + 0.5 * torch.randn(num, WIDTH, generator=generator), labels


HOLDERS = [rows(size, seed) for seed, size in enumerate(SIZES)]
TEST = rows(90, seed=9)


def network(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), *between, nn.Tanh(), nn.Linear(8, CLASSES))


def own(module: nn.Module, **settings: object) -> OwnModel:
    return OwnModel(module, lambda b: F.cross_entropy(module(b[0]), b[1], reduction="none"), rows(8, 7), **settings)


def build() -> OwnModel:
    return own(network(), rows=16)


GIVEN = {"model": build, "data": HOLDERS, "test_data": TEST}
SHORT = {"rounds": 4, "local_steps": 1, "batch_size": 20, "learning_rate": 2.0, "comparison": False, "progress": False}
SEEDED = {**GIVEN, **SHORT, "simulate": True, "noise_multiplier": 1.0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(**SEEDED, out=tmp_path_factory.mktemp("own") / "run")


def test_a_model_learns_without_noise_and_is_kept_by_the_names_of_its_module(tmp_path):
    result = run(**{**SEEDED, "noise_multiplier": 0.0, "rounds": 6}, out=tmp_path / "run")
    told = result.summary
    assert told["accuracy"] > 0.95 > 0.6 > told["accuracy_initial"]
    module = network()
    module.load_state_dict(load_file(tmp_path / "run" / "variants" / "global" / "model.safetensors"))
    right = (module(TEST[0]).argmax(dim=1) == TEST[1]).float().mean()
    assert float(right) == pytest.approx(told["accuracy"])
    assert np.trace(told["confusion_matrix"]) == round(90 * told["accuracy"])
    assert (told["macro_f1"] > 0.95, told["chance_accuracy"]) == (True, pytest.approx(1 / CLASSES))
    assert result.clients["num_records"].tolist() == list(SIZES)
    assert (result.folder / "report.html").is_file()
    assert result.report()["accuracy"].max() == pytest.approx(told["accuracy"], abs=1e-3)


def test_one_client_at_a_time_and_all_together_give_the_same_run(finished, tmp_path):
    other = run(**SEEDED, engine="in-process", out=tmp_path / "run")
    assert np.allclose(other.rounds["test_loss"], finished.rounds["test_loss"], atol=1e-5)
    assert other.clients["epsilon_local"].equals(finished.clients["epsilon_local"])


def test_a_target_is_kept_and_every_release_is_in_the_ledger(tmp_path):
    result = run(**{**GIVEN, **SHORT, "comparison": None}, target_epsilon=4.0, public_data=True, out=tmp_path / "run")
    assert 3.5 < result.epsilon("local") <= 4.0
    assert result.summary["private"]
    assert result.summary["accuracy_non_private"] > 0.5
    assert {name: result.summary[f"epsilon_{name}_max"] for name in ("local", "rho")}["rho"] > 4.0
    charged = result.ledger[result.ledger["phase"] == "charged"]
    assert len(charged) == 4 * len(SIZES)
    assert (result.folder / "clients.csv").read_text().count("\n") == 1 + 4 * len(SIZES)


def test_a_holder_whose_budget_is_spent_retires(tmp_path):
    result = run(**{**SEEDED, "min_clients": 1}, budget_epsilon=[1.0, 90.0, 90.0], out=tmp_path / "run")
    assert [client["retired"] is None for client in result.summary["clients"]] == [False, True, True]


def test_what_needs_a_language_model_or_other_processes_says_what_is_possible(finished, tmp_path):
    with pytest.raises(InputError, match=r"call fedpriv\.run\(model=\.\.\.\) for each"):
        sweep(model=build, data=HOLDERS, grid={"rounds": [1, 2]}, out=tmp_path / "sweep")
    with pytest.raises(InputError, match=r"is a program's own; load the model\.safetensors"):
        find(finished.folder)
    with pytest.raises(InputError, match="was made by a program"):
        run(model="own:x", data="in-memory", learning_rate=1.0, simulate=True, out=tmp_path / "run", progress=False)
    assert not list(tmp_path.iterdir())


def stopped_after(round_: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is interrupted right after a round."""
    write = checkpoint.write

    def writing(path, state):
        write(path, state)
        if state.round == round_:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write", writing)
        with pytest.raises(KeyboardInterrupt, match=r"resume it: fedpriv\.run\(resume="):
            run(**SEEDED, out=folder)


def test_a_resumed_run_ends_as_if_nobody_had_stopped_it_and_takes_no_other_model(finished, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    stopped_after(2, folder, monkeypatch)
    for given, message in (
        ({}, "was made by a program"),
        ({**GIVEN, "model": lambda: own(network(nn.Identity()))}, "give the function that built the first"),
        ({**GIVEN, "test_data": None}, "began with data and test_data in memory, not data"),
        ({**GIVEN, "rounds": 9}, "give nothing else but its model and records"),
        ({**GIVEN, "data": HOLDERS[:2]}, "'client 2' held records and holds none now"),
    ):
        with pytest.raises(InputError, match=message):
            run(**given, resume=folder, progress=False)
    resumed = run(**GIVEN, resume=folder, progress=False)
    same = [name for name in resumed.rounds if name != "seconds"]
    assert resumed.rounds[same].equals(finished.rounds[same])


class SmallNet(nn.Module):
    """A frozen convolution, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16, CLASSES)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.head(self.base(x))


def test_lora_on_a_convolutional_net_is_trained_alone(tmp_path):
    def build() -> OwnModel:
        return own(get_peft_model(SmallNet(), LoraConfig(r=2, target_modules=["head"])).eval())

    changes = {"model": build, "noise_multiplier": 0.0, "rounds": 8, "clipping": "split"}
    result = run(**{**SEEDED, **changes}, out=tmp_path / "run")
    tensors = load_file(result.folder / "variants" / "global" / "model.safetensors")
    assert sorted(tensors) == [f"base_model.model.head.lora_{part}.default.weight" for part in "AB"]
    assert result.summary["adapters_moved"]
    assert result.summary["accuracy"] > 0.8 > result.summary["accuracy_initial"]


def regression() -> OwnModel:
    module = nn.Linear(WIDTH, 1)

    def losses(batch):
        return (module(batch["x"]).squeeze(1) - batch["y"]).square()

    return OwnModel(module, losses, table(8, 7), evaluate=lambda batch: (losses(batch) < 0.5).float())


def table(num: int, seed: int) -> dict[str, torch.Tensor]:
    x, labels = rows(num, seed)
    return {"x": x, "y": labels.float()}


def test_another_loss_is_tested_by_a_function_of_its_own_and_privately_too(tmp_path):
    values = {**SEEDED, "model": regression, "data": {"north": table(60, 1), "south": table(90, 2)}}
    values |= {"learning_rate": 0.1, "out": tmp_path / "tested"}
    tested = run(**{**values, "test_data": table(90, 9), "rounds": 12, "noise_multiplier": 0.0})
    assert tested.clients["name"].tolist() == ["north", "south"]
    assert tested.summary["accuracy"] > 0.6 > tested.summary["accuracy_initial"]
    assert tested.summary["confusion_matrix"] is None
    values |= {"test_data": None, "rounds": 2, "out": tmp_path / "counted"}
    counted = run(**values, evaluation_noise_multiplier=1.0)
    low, high = counted.summary["accuracy_interval"]
    assert 0 <= low <= counted.summary["accuracy"] <= high <= 1
    assert counted.summary["num_evaluated_clients"] == 2
    assert counted.rounds["test_accuracy"].isna().all()


@pytest.mark.slow
def test_a_sum_is_all_that_the_server_sees_if_it_is_asked_for(tmp_path):
    result = run(**{**GIVEN, **SHORT, "rounds": 2}, secure_aggregation=True, target_epsilon=4.0, out=tmp_path / "run")
    assert result.epsilon("aggregate") <= 4.0 < result.epsilon("local")


class Rows(torch.utils.data.Dataset):
    """Records as pairs of a NumPy array and a number."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._x, self._y = x.numpy(), y.tolist()

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int):
        return self._x[index], self._y[index]


def test_records_come_as_tensors_arrays_or_a_data_set():
    x, y = HOLDERS[0]
    for given in ((x, y), (x.numpy(), y.numpy()), Rows(x, y)):
        found = tensor_records(given, name="data")
        assert torch.equal(found.batch[0], x)
        assert torch.equal(found.batch[1], y)
        assert found.content == TensorRecords((x, y)).content
    assert tensor_records((x, y.flip(0)), name="data").content != found.content
    assert torch.equal(found.part([3, 1]).batch[0], x[[3, 1]])


def without_evaluation() -> OwnModel:
    module = nn.Linear(WIDTH, 1)
    return OwnModel(module, lambda batch: module(batch[0]).squeeze(1).square(), rows(8))


def one_of(holder: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The test records, and one of a holder."""
    return tuple(torch.cat([tested, own[3:4]]) for tested, own in zip(TEST, holder, strict=True))


REFUSED = {
    "batch norm": ({"model": lambda: own(network(nn.BatchNorm1d(8).requires_grad_(False)))}, r"^1 \(BatchNorm1d\): "),
    "dropout": ({"model": lambda: own(network(nn.Dropout()))}, r"^1 \(Dropout\): draws random numbers"),
    "no function": ({"model": network()}, "^model = Sequential: must be a function that builds an OwnModel"),
    "an own model": ({"model": build()}, "^model = OwnModel: records in memory need a function"),
    "another result": ({"model": network}, "^model: its function returned a Sequential; must return an OwnModel"),
    "a name": ({"model": "all-MiniLM-L6-v2"}, "^model = all-MiniLM-L6-v2: records in memory need a function"),
    "a file": ({"data": "records.csv"}, "^data = 'records.csv': a model of your own takes a sequence"),
    "one array": ({"data": np.zeros((5, 2))}, "^data: a ndarray with no records of a holder"),
    "no holder": ({"data": []}, "^data: a list with no records of a holder"),
    "columns": ({"data": HOLDERS[0]}, r"^data, client 0: are tensor of float32 \[6\]; must be tuple of"),
    "no record": ({"data": [rows(0), rows(40)]}, "^data, client 0: has no records; leave it out"),
    "lengths": ({"data": [(HOLDERS[0][0], HOLDERS[1][1])]}, "^data, client 0: must be tensors with one row per record"),
    "a holder's own records": (
        {"test_data": HOLDERS[0], "simulate": False},
        r"^test_data = 'in-memory': 40 records \(1, 2, 3, 4, 5 and 35 more\) equal one in data",
    ),
    "one record of a holder": (
        {"test_data": one_of(HOLDERS[2]), "simulate": False},
        r"^test_data = 'in-memory': 1 record \(91\) equal one in data",
    ),
    "a test of another form": ({"test_data": TEST[0]}, "^test_data: are tensor of float32"),
    "Ray": ({"engine": "ray"}, "^engine = ray: .* use stacked or in-process"),
    "a rank": ({"rank": 4}, "^rank = 4: is for language models"),
    "deduplication": ({"dedup": "drd"}, "^dedup = 'drd': is for language models"),
    "a recipe": ({"recipe": "fedpriv"}, "^recipe = fedpriv: is for language models"),
    "a rate": ({"learning_rate": "auto"}, "^learning_rate = auto: .* give a number"),
    "a rule": ({"aggregation": "fedex-lora"}, "^aggregation = fedex-lora: .* use dp-lora, fedavg"),
    "clients": ({"num_clients": 3}, "^num_clients = 3: data says how many"),
    "batches": ({"batch_size": 50}, r"^batch_size = 50: client 0 \(client 0\) has only 40 records"),
    "no noise": ({"noise_multiplier": 0.0, "simulate": False}, "^noise_multiplier = 0: allowed only on public data"),
    "nothing that evaluates": ({"model": without_evaluation}, "^evaluate: the losses are no cross-entropy"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_run_is_refused_in_one_line_before_anything_is_written(given, message, tmp_path):
    with pytest.raises(InputError, match=message) as refused:
        run(**{**SEEDED, **given}, out=tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_every_key_about_texts_is_refused_by_name_even_at_its_default():
    own_keys = {"model": "own:x", "data": "in-memory", "learning_rate": 1.0}
    assert parse(own_keys).recipe == "per-sample"
    for key in RunConfig.keys_with(Fact.TEXTS):
        value = getattr(RunConfig(), key)
        found, problems = checked(own_keys | {key: "" if value is None else value})
        assert found is None
        assert f"{key} = " in problems[0], problems


def updates(records: list[TensorRecords], execute=execute_one_by_one) -> list[torch.Tensor]:
    """The sum of the clipped gradients of each holder, who takes one step of rate B on all records without noise."""
    config = parse({"model": "own:x", "data": "in-memory", "learning_rate": 1.0, "noise_multiplier": 0.0,
                    "simulate": True, "local_steps": 1, "sampling_probability": 1.0, "clip_norm": 0.1})  # fmt: skip
    spec = replace(UpdateSpec.of(config), learning_rate=1.0)
    federation = OwnFederation.of(build, {str(k): HOLDERS[0] for k in range(len(records))}, seed=0)
    model, of_all = OwnWorkbench(config, federation).model, {"adapter": federation.initial, "spec": spec, "round": 1}
    tasks = [
        UpdateTask(data=each, sampler=spec.sampler(40, SeededSource(0, k)), noise=SeededSource(0, k), **of_all)
        for k, each in enumerate(records)
    ]
    found = execute(model, tasks)
    flat = [torch.cat([(each.adapter[n] - federation.initial[n]).flatten() for n in each.adapter]) for each in found]
    return [40 * each.double() for each in flat]


HOSTILE = {
    "large": (torch.full((1, WIDTH), 1e30), torch.tensor([0])),
    "not a number": (torch.full((1, WIDTH), torch.nan), torch.tensor([1])),
    "a class that is none": (torch.ones(1, WIDTH), torch.tensor([99])),
    "ordinary": (torch.ones(1, WIDTH), torch.tensor([2])),
}


@pytest.mark.parametrize("execute", [execute_one_by_one, execute_stacked], ids=["one by one", "stacked"])
@pytest.mark.parametrize("record", HOSTILE)
def test_no_record_moves_the_sum_by_more_than_the_clip_norm(record, execute):
    own_rows, added = rows(33, seed=5), HOSTILE[record]
    without = TensorRecords(own_rows)
    # In the midst of the others, so that it shares a pass with them and moves their places.
    joined = TensorRecords(tuple(torch.cat([a[:7], b, a[7:]]) for a, b in zip(own_rows, added, strict=True)))
    one, other, before, after = updates(
        [without, joined, TensorRecords(HOLDERS[0]), TensorRecords(HOLDERS[0])], execute
    )
    moved = float((one - other).norm())
    assert moved <= 0.1 * (1 + 1e-4)
    assert (moved > 0.05) == (record in ("ordinary", "large")), moved
    assert torch.equal(before, after)
    assert float(one.norm()) > 0.5, "the step shows nothing"


def test_the_name_of_a_model_changes_with_every_value_and_not_with_its_records():
    def built(module: nn.Module) -> str:
        return OwnFederation.of(lambda: own(module), HOLDERS, seed=0).name

    torch.manual_seed(0)
    first, frozen = network(), network()
    names = [built(first), OwnFederation.of(lambda: own(first), HOLDERS[:1], seed=0).name]
    assert names[0] == names[1]
    frozen.load_state_dict(first.state_dict())
    frozen[0].requires_grad_(False)
    moved = network()
    moved.load_state_dict(first.state_dict())
    with torch.no_grad():
        moved[2].bias[0] += 1e-3
    assert len({names[0], built(frozen), built(moved)}) == 3
    seeds = [OwnFederation.of(build, HOLDERS, seed=seed).name for seed in (0, 0, 1)]
    assert [one == other for one, other in itertools.pairwise(seeds)] == [True, False]
