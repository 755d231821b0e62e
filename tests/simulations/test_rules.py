"""Every aggregation rule in whole runs: what is saved was tested, what is sent was counted, and who moves when."""

import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import fedpriv
from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters._arithmetic import INNER_SUFFIX, OUTER_SUFFIX, Adapter, factors_of
from fedpriv.learning.aggregation._fedavg import GlobalModel
from fedpriv.learning.aggregation._products import rebased
from fedpriv.learning.aggregation.rules import RULES
from fedpriv.learning.data.records import tokenize
from fedpriv.learning.training.evaluation import evaluate
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.workbench import Workbench, workbench
from fedpriv.models.dedup.adapter_variants import AdapterEvaluator
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from server.observer import LogObserver
from server.strategy import RuleStrategy
from simulations.engines import federation
from tests.marks import slow
from tests.server.parts import StopsAfter, run, summary

# Every day one of each kind that is saved: an adapter, weights, a merged base with adapters, inner matrices.
EVERY_DAY = ("dp-lora", "fedavg", "flora", "fed-sb")
EACH_RULE = [pytest.param(rule, marks=[] if rule in EVERY_DAY else pytest.mark.slow) for rule in RULES]
TURNS = {"dp-lora": ["all"] * 4, "rolora": ["lora-b", "lora-a"] * 2, "fedsvd": ["lora-b"] * 4}
PARTIAL = [rule for rule in TURNS if rule != "dp-lora"]
# Every day the server steps plainly; with momentum, which FedSVD turns with its basis, that rule's run is resumed.
OPTIMIZERS = ["sgd", *slow("momentum")]
SHARES = [("bfloat16", 0.52), ("int8", 0.27)]


def clients(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "clients.csv")


@pytest.fixture(scope="module")
def trained_by(small_run, tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a run by a rule, which is made once.

    Without noise and with much learning the models differ from the start by far more than rounding.
    """
    changes = {"noise_multiplier": 0.0, "rounds": 3, "batch_size": 16, "relevance_threshold": 0.0}

    @cache
    def trained_by(rule: str) -> Path:
        ranks = [2, 5, 3] if rule == "flora" else []
        folder = tmp_path_factory.mktemp("rules") / rule
        return run(small_run, folder, **changes, aggregation=rule, client_ranks=ranks)

    return trained_by


def bench_of(folder: Path) -> Workbench:
    return workbench(parse(tomllib.loads((folder / "config.toml").read_text())))


def saved_in(folder: Path) -> dict[str, Adapter]:
    return {each.name: load_file(each / "adapter_model.safetensors") for each in (folder / "variants").iterdir()}


@pytest.mark.parametrize("rule", EACH_RULE)
def test_saved_models_are_ordinary_peft_adapters_and_give_the_accuracy_that_the_server_saw(small_run, trained_by, rule):
    folder = trained_by(rule)
    # A key's bias moves no softmax, so its gradient is zero.
    unmoved = [n for n in summary(folder)["unmoved_tensors"] if not n.endswith(".key.ln_tuning_layers.bias")]
    assert not unmoved
    bench = bench_of(folder)
    test = tokenize(bench.data.test, bench.base.tokenizer, label_names=bench.data.label_names, max_length=64)
    losses = pd.read_csv(folder / "rounds.csv").test_loss

    loaded = fedpriv.learning.adapters.load(str(small_run["model"]), folder / "variants" / "global")
    loaded.requires_grad_(False)
    for name, parameter in loaded.named_parameters():
        parameter.requires_grad_(".modules_to_save." in name or "lora_" in name or "ln_tuning_layers" in name)
    result = evaluate(TrainingModel(loaded, memory_limit=2**30, prefix_cache=False), test)
    assert result.accuracy == summary(folder)["accuracy"]
    assert result.loss == pytest.approx(losses.iloc[-1], rel=1e-5)
    assert abs(losses.iloc[-1] - losses.iloc[-2]) > 1e-4 * losses.iloc[-1], "the test would be blind"

    assert len(saved_in(folder)) == 4
    for variant, stored in saved_in(folder).items():
        base = AutoModelForSequenceClassification.from_pretrained(small_run["model"], num_labels=3)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing.*")
            model = PeftModel.from_pretrained(base, folder / "variants" / variant)
        found = {name.replace(".default", ""): tensor for name, tensor in model.state_dict().items()}
        if rule == "dp-lora":
            assert get_peft_model_state_dict(model).keys() == bench.initial.keys()
        for name, tensor in stored.items():
            key = name if name in found else name.replace(".classifier.", ".classifier.modules_to_save.")
            assert torch.equal(found[key], tensor), name


def test_a_frozen_shared_factor_is_never_sent_and_never_moves(trained_by):
    folder = trained_by("ffa-lora")
    assert not [name for name in bench_of(folder).initial if "lora_A" in name]
    saved = saved_in(folder)
    frozen = [name for name in saved["global"] if "lora_A" in name]
    assert frozen
    assert all(torch.equal(each[name], saved["global"][name]) for each in saved.values() for name in frozen)
    assert clients(folder).bytes_up.sum() < clients(trained_by("dp-lora")).bytes_up.sum()


def test_r_alone_is_sent_between_factors_that_never_move(trained_by):
    folder = trained_by("fed-sb")
    bench = bench_of(folder)
    inner = {name for name in bench.initial if name.endswith(INNER_SUFFIX)}
    assert inner
    assert {name for name in bench.initial if "lora_" in name} == inner
    frozen = get_peft_model_state_dict(bench.model.peft_model)
    for each in saved_in(folder).values():
        for name in (name for name in each if "lora_A" in name):
            stem = name.removesuffix(".lora_A.weight")
            outer, b = frozen[stem + OUTER_SUFFIX], each[stem + ".lora_B.weight"]
            assert torch.equal(each[name], frozen[name])
            assert b.any()
            torch.testing.assert_close(outer @ (outer.T @ b), b, atol=1e-6, rtol=0)
    assert clients(folder).bytes_up.sum() < clients(trained_by("ffa-lora")).bytes_up.sum()


def test_variants_that_the_runs_model_could_not_validate_are_refused_before_the_run(small_run):
    with pytest.raises(InputError, match="dedup = greedy: aggregation = fed-sb trains R alone"):
        parse({**small_run, "aggregation": "fed-sb", "dedup": "greedy"})
    with pytest.raises(InputError, match="aggregation: the run trained R, and its variants hold B R"):
        AdapterEvaluator(workbench(parse({**small_run, "aggregation": "fed-sb"})))


def test_a_variant_with_other_frozen_factors_is_evaluated_with_them(small_run):
    """Deduplication may replace blocks of a frozen A, which no round ever trains."""
    evaluator = AdapterEvaluator(workbench(parse({**small_run, "aggregation": "ffa-lora"})))
    generator = torch.Generator().manual_seed(0)
    first = {n: 9 * torch.randn(p.shape, generator=generator).numpy() for n, p in evaluator.parameters.items()}
    other = {n: -value if ".lora_A." in n else value for n, value in first.items()}
    everyone = np.arange(evaluator.num_records)
    means = [evaluator.utilities(tensors, everyone).mean() for tensors in (first, other)]
    evaluator.model.features = None  # by whole passes
    assert means == [evaluator.utilities(tensors, everyone).mean() for tensors in (first, other)]
    assert means[0] != means[1], "both are the same, so the test would prove nothing"


def test_ternary_weights_send_a_fourteenth_both_ways(small_run, tmp_path):
    values = {**small_run, "layers": "all"}
    ternary, full = (clients(run(values, tmp_path / name, aggregation=name)) for name in ("t-fedavg", "fedavg"))
    assert ternary.bytes_up.sum() <= full.bytes_up.sum() / 14
    # In the first round fedavg's equal biases travel once; after it nothing is equal.
    later = ternary["round"] > 1
    assert ternary[later].bytes_down.sum() <= full[later].bytes_down.sum() / 14


@pytest.fixture(scope="module")
def uploaded_by(small_run, tmp_path_factory) -> Callable[[str], int]:
    """The bytes of all uploads in a codec, of adapters so large that little else is sent."""

    @cache
    def uploaded_by(codec: str) -> int:
        changes = {"upload_codec": codec, "rank": 64, "rounds": 1}
        rows = clients(run(small_run, tmp_path_factory.mktemp("runs") / codec, **changes))
        assert (rows.status == "ok").all()
        return rows.bytes_up.sum()

    return uploaded_by


@pytest.mark.parametrize(
    ("codec", "share"), [("ternary", 0.075), *[pytest.param(*each, marks=pytest.mark.slow) for each in SHARES]]
)
def test_codecs_send_the_share_that_they_promise(uploaded_by, codec, share):
    assert uploaded_by(codec) <= share * uploaded_by("float32")


def test_silent_clients_send_a_tiny_message_and_pay_all_the_same(small_run, tmp_path):
    folder = run(small_run, tmp_path / "cmfl", aggregation="cmfl", relevance_threshold=1.0, rounds=2)
    rows = clients(folder)
    first, later = rows[rows["round"] == 1], rows[rows["round"] > 1]
    assert (first.status == "ok").all()
    assert (later.status == "silent").all()
    assert later.bytes_up.max() < 1000 < first.bytes_up.min() / 50
    assert summary(folder)["num_silent"] == 3
    assert all(one < two for one, two in rows.groupby("client").epsilon_local.apply(list))
    assert {client["rounds"] for client in summary(folder)["clients"]} == {2}
    assert pd.read_csv(folder / "rounds.csv").test_loss[1:].nunique() == 1


@pytest.mark.parametrize(
    ("rule", "frozen"), [("fedavg", ()), pytest.param("bitfit", (".ln_tuning_layers.weight",), marks=pytest.mark.slow)]
)
def test_weights_and_biases_of_one_round_are_the_uploads_average_and_charged_as_adapters_are(
    small_run, tmp_path, rule, frozen
):
    folder = run(small_run, tmp_path / rule, aggregation=rule, rounds=1)
    bench, saved = bench_of(folder), saved_in(folder)
    merged, parts, sizes = saved["global"], [saved[f"client-{k}"] for k in range(3)], list(map(len, bench.data.clients))
    assert sum(tensor.numel() for tensor in merged.values()) > 30_000
    for name, tensor in merged.items():
        expected = sum(size * part[name].double() for size, part in zip(sizes, parts, strict=True)) / sum(sizes)
        torch.testing.assert_close(tensor.double(), expected, atol=1e-7, rtol=1e-6)
    trained = bench.model.initial
    assert merged.keys() - trained.keys() == {name for name in merged if name.endswith(frozen)}
    assert not any(torch.equal(merged[name], tensor) for name, tensor in trained.items())
    assert all(torch.equal(part[name], merged[name]) for part in parts for name in merged.keys() - trained.keys())
    events = [SubsampledGaussian(noise_multiplier=1.0, sampling_probability=8 / size, count=2) for size in sizes]
    assert clients(folder).epsilon_local.tolist() == pytest.approx(
        [epsilon_of([event], 1e-5, "rdp").epsilon for event in events]
    )


@dataclass(frozen=True)
class Seen:
    """What the server saw of a round."""

    before: GlobalModel
    uploads: Sequence[Adapter]
    weights: Sequence[float]
    after: GlobalModel


def values_of(small_run, rule: str, out: Path, **changes) -> dict[str, object]:
    kept = {
        key: value for key, value in small_run.items() if key not in ("local_steps", "batch_size", "noise_multiplier")
    }
    recipe = {"recipe": "fedpriv", "rounds": 6, "lora_rounds": 4, "target_epsilon": 8.0, "aggregation": rule}
    recipe |= {"lora_share": 0.5, "lora_learning_rate": 0.5}  # moves that float32 holds beside A
    return {**kept, **recipe, "out": str(out), **changes}


@pytest.fixture(scope="module")
def run_of(small_run, tmp_path_factory) -> Callable[[str, str], tuple[Path, list[Seen]]]:
    """Runs a rule with a server optimizer once: the folder, and what the server saw of each round."""
    plain = RuleStrategy._next_model

    @cache
    def run_of(rule: str, optimizer: str) -> tuple[Path, list[Seen]]:
        seen: list[Seen] = []

        def watched(self, adapters, weights, sizes):
            before, after = self.model, plain(self, adapters, weights, sizes)
            seen.append(Seen(before, list(adapters), list(weights), after))
            return after

        folder = tmp_path_factory.mktemp("runs") / f"{rule}-{optimizer}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RuleStrategy, "_next_model", watched)
            federation.run(parse(values_of(small_run, rule, folder, server_optimizer=optimizer)), LogObserver())
        return folder, seen

    return run_of


def kind(name: str) -> str:
    return "A" if ".lora_A." in name else "B" if ".lora_B." in name else "head"


MOVES = {"all": ("A", "B", "head"), "head": ("head",), "lora-a": ("A", "head"), "lora-b": ("B", "head")}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", PARTIAL)
def test_every_trained_value_is_noised_and_every_other_one_comes_back_as_it_was_sent(run_of, rule, optimizer):
    _, seen = run_of(rule, optimizer)
    for round_, (each, trains) in enumerate(zip(seen, ["head", "head", *TURNS[rule]], strict=True)):
        for name, sent in each.before.adapter.items():
            is_trained = kind(name) in MOVES[trains]
            for upload in each.uploads:
                if is_trained:
                    assert (upload[name] != sent).float().mean() > 0.99, f"{name}: float32 may round a move away"
                else:
                    assert torch.equal(upload[name], sent), name
            if rule == "rolora" and round_:  # the start leaves the bias at zero
                assert torch.equal(sent, each.after.adapter[name]) is not is_trained, name


def products(adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: b.double() @ a.double() for name, (b, a) in factors_of(adapter).items()}


def error(each: Seen) -> float:
    """How far the product of the averages is from the average of the products, relative to the latter's change."""
    total = {name: torch.zeros_like(p) for name, p in products(each.before.adapter).items()}
    for client, upload in enumerate(each.uploads):
        for name, product in products(upload).items():
            total[name] += each.weights[client] * product
    after = products(each.after.adapter)
    before = products(each.before.adapter)
    off = sum(float((after[name] - t).square().sum()) for name, t in total.items())
    moved = sum(float((before[name] - t).square().sum()) for name, t in total.items())
    return (off / moved) ** 0.5


@pytest.mark.parametrize("rule", PARTIAL)
def test_averaging_is_exact_in_every_round_and_that_of_dp_lora_is_not(run_of, rule):
    assert max(error(each) for each in run_of(rule, "sgd")[1][2:]) < 1e-5
    assert max(error(each) for each in run_of("dp-lora", "sgd")[1][2:]) > 1e-2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", PARTIAL)
def test_turns_cost_what_rounds_that_train_everything_cost(run_of, rule, optimizer):
    tables = [pd.read_csv(run_of(each, optimizer)[0] / "rounds.csv") for each in (rule, "dp-lora")]
    for view in ("local", "rho"):
        assert tables[0][f"epsilon_{view}_max"].equals(tables[1][f"epsilon_{view}_max"])
    told = summary(run_of(rule, optimizer)[0])
    assert 7.9 < told["epsilon_local_max"] <= 8.0
    assert not told["unmoved_tensors"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fedsvd_sends_an_orthonormal_a_that_turns_in_its_row_space_once_b_has_moved(run_of, optimizer):
    _, seen = run_of("fedsvd", optimizer)
    a = {name: tensor for name, tensor in seen[0].before.initial.items() if kind(name) == "A"}
    assert a
    for each in seen[:2]:
        assert all(torch.equal(each.after.adapter[name], rows) for name, rows in a.items())
    for each in seen[2:]:
        for name, rows in a.items():
            new = each.after.adapter[name]
            assert not torch.allclose(new, each.before.adapter[name], atol=1e-3)
            torch.testing.assert_close(new @ new.T, torch.eye(len(new)), atol=1e-5, rtol=0)
            torch.testing.assert_close(new @ rows.T @ rows, new, atol=1e-5, rtol=0)


def test_without_noise_fedsvd_is_training_b_with_a_frozen_orthonormal_a(small_run, tmp_path):
    """Each record is clipped, and the server's momentum must turn with the basis: it is stale in the old one."""

    def stale(model: GlobalModel) -> GlobalModel:
        return replace(rebased(model), optimizer_state=model.optimizer_state)

    changes = {"target_epsilon": "", "noise_multiplier": 0.0, "clip_norm": 0.1, "rounds": 4, "lora_rounds": 3}
    changes |= {"rank": 3, "alpha": 60.0, "lora_learning_rate": 400.0, "lora_head_learning_rate": 1.0}
    losses = {}
    for name, finish in (("turning", rebased), ("frozen", None), ("stale", stale)):
        with pytest.MonkeyPatch.context() as patch:
            changed = replace(RULES["fedsvd"], finish=finish)
            patch.setitem(RULES._entries, "fedsvd", changed)  # in its place, so that the order of names stays
            federation.run(parse(values_of(small_run, "fedsvd", tmp_path / name, **changes)), LogObserver())
        losses[name] = pd.read_csv(tmp_path / name / "rounds.csv").test_loss.tolist()
    assert losses["turning"] == pytest.approx(losses["frozen"], rel=1e-5)
    assert losses["stale"] != pytest.approx(losses["frozen"], rel=1e-3), "the test could not see a wrong basis"


@pytest.mark.parametrize("rule", [pytest.param("rolora", marks=pytest.mark.slow), "fedsvd"])
def test_a_run_that_is_resumed_between_turns_ends_as_a_whole_one(run_of, small_run, tmp_path, rule):
    whole, _ = run_of(rule, "momentum")
    values = values_of(small_run, rule, tmp_path / "run", server_optimizer="momentum")
    with pytest.raises(KeyboardInterrupt):
        federation.run(parse(values), StopsAfter(4))  # in the middle of the turns
    federation.run(parse(values | {"resume": str(tmp_path / "run")}), LogObserver())
    tables = [pd.read_csv(folder / "rounds.csv").drop(columns="seconds") for folder in (tmp_path / "run", whole)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    tensors = [load_file(f / "variants/global/adapter_model.safetensors") for f in (tmp_path / "run", whole)]
    assert all(torch.equal(tensors[0][name], tensor) for name, tensor in tensors[1].items())
