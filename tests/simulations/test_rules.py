"""Every aggregation rule in whole runs: what is saved was tested, what is sent was counted, and who moves when."""

import json
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
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import Response
from fedpriv.learning.adapters._arithmetic import INNER_SUFFIX, OUTER_SUFFIX, Adapter, factors_of
from fedpriv.learning.aggregation._fedavg import GlobalModel
from fedpriv.learning.aggregation._products import rebased
from fedpriv.learning.aggregation.rules import RULES
from fedpriv.learning.data.records import tokenize
from fedpriv.learning.training.evaluation import evaluate
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.workbench import workbench
from fedpriv.models.dedup.adapter_variants import AdapterEvaluator
from server.observer import LogObserver
from server.strategy import RuleStrategy
from simulations.engines import federation, grid

# Every day one of each kind that is saved: an adapter, weights, a merged base with adapters, inner matrices.
EVERY_DAY = ("dp-lora", "fedavg", "flora", "fed-sb")
EACH_RULE = [pytest.param(rule, marks=[] if rule in EVERY_DAY else pytest.mark.slow) for rule in RULES]
TURNS = {"dp-lora": ["all"] * 4, "rolora": ["lora-b", "lora-a"] * 2, "fedsvd": ["lora-b"] * 4}
PARTIAL = [rule for rule in TURNS if rule != "dp-lora"]
# Every day the server steps plainly; with momentum, which FedSVD turns with its basis, that rule's run is resumed.
OPTIMIZERS = ["sgd", pytest.param("momentum", marks=pytest.mark.slow)]


def run(values, out: Path, **changes) -> Path:
    federation.run(parse({**values, "out": str(out), **changes}), LogObserver())
    return out


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def clients(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "clients.csv")


@pytest.fixture(scope="module", params=EACH_RULE)
def trained(request, small_run, tmp_path_factory) -> Path:
    """The folder of a run by each rule."""
    rule = request.param
    ranks = [2, 5, 3] if rule == "flora" else []
    # Without noise and with much learning the models differ from the start by far more than rounding.
    changes = {"aggregation": rule, "client_ranks": ranks, "noise_multiplier": 0.0, "rounds": 3, "batch_size": 16}
    return run(small_run, tmp_path_factory.mktemp("rules") / rule, relevance_threshold=0.0, **changes)


def test_saved_global_model_gives_the_accuracy_that_the_server_saw(small_run, trained):
    folder = trained
    # A key's bias moves no softmax, so its gradient is zero.
    unmoved = [n for n in summary(folder)["unmoved_tensors"] if not n.endswith(".key.ln_tuning_layers.bias")]
    assert not unmoved
    bench = workbench(parse(tomllib.loads((folder / "config.toml").read_text())))
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


def test_variants_are_ordinary_peft_adapters(small_run, trained):
    for variant in sorted((trained / "variants").iterdir()):
        base = AutoModelForSequenceClassification.from_pretrained(small_run["model"], num_labels=3)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing.*")
            model = PeftModel.from_pretrained(base, variant)
        stored = load_file(variant / "adapter_model.safetensors")
        found = {name.replace(".default", ""): tensor for name, tensor in model.state_dict().items()}
        for name, tensor in stored.items():
            key = name if name in found else name.replace(".classifier.", ".classifier.modules_to_save.")
            assert torch.equal(found[key], tensor), name
    assert len(list((trained / "variants").iterdir())) == 4


@pytest.fixture(scope="module")
def frozen_a(small_run, tmp_path_factory) -> Path:
    """The folder of a run of which all share A."""
    return run(small_run, tmp_path_factory.mktemp("runs") / "ffa", aggregation="ffa-lora")


def test_a_frozen_shared_factor_is_never_sent_and_never_moves(small_run, frozen_a, tmp_path):
    folder = frozen_a
    bench = workbench(parse(tomllib.loads((folder / "config.toml").read_text())))
    assert not [name for name in bench.initial if "lora_A" in name]
    saved = {v.name: load_file(v / "adapter_model.safetensors") for v in (folder / "variants").iterdir()}
    frozen = [name for name in saved["global"] if "lora_A" in name]
    assert frozen
    assert all(torch.equal(each[name], saved["global"][name]) for each in saved.values() for name in frozen)
    full = clients(run(small_run, tmp_path / "dp", aggregation="dp-lora")).bytes_up.sum()
    assert clients(folder).bytes_up.sum() < full


def test_r_alone_is_sent_between_factors_that_never_move(small_run, frozen_a, tmp_path):
    folder = run(small_run, tmp_path / "sb", aggregation="fed-sb")
    bench = workbench(parse(tomllib.loads((folder / "config.toml").read_text())))
    inner = {name for name in bench.initial if name.endswith(INNER_SUFFIX)}
    assert inner
    assert {name for name in bench.initial if "lora_" in name} == inner
    saved = [load_file(v / "adapter_model.safetensors") for v in (folder / "variants").iterdir()]
    frozen = get_peft_model_state_dict(bench.model.peft_model)
    for name in (name for name in saved[0] if "lora_A" in name):
        stem = name.removesuffix(".lora_A.weight")
        outer = frozen[stem + OUTER_SUFFIX]
        for each in saved:
            assert torch.equal(each[name], frozen[name])
            b = each[stem + ".lora_B.weight"]
            assert b.any()
            torch.testing.assert_close(outer @ (outer.T @ b), b, atol=1e-6, rtol=0)
    less = clients(frozen_a).bytes_up.sum()
    assert clients(folder).bytes_up.sum() < less


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
def wide(small_run) -> dict[str, object]:
    """Adapters so large that little else is sent."""
    return {**small_run, "rank": 64, "rounds": 1}


@pytest.fixture(scope="module")
def uncoded(wide, tmp_path_factory) -> int:
    """The bytes of all uploads in float32."""
    return clients(run(wide, tmp_path_factory.mktemp("runs") / "float32")).bytes_up.sum()


@pytest.mark.parametrize(
    ("codec", "share"),
    [
        pytest.param("bfloat16", 0.52, marks=pytest.mark.slow),
        pytest.param("int8", 0.27, marks=pytest.mark.slow),
        ("ternary", 0.075),
    ],
)
def test_codecs_send_the_share_that_they_promise(wide, uncoded, tmp_path, codec, share):
    coded = clients(run(wide, tmp_path / codec, upload_codec=codec))
    assert coded.bytes_up.sum() <= share * uncoded
    assert (coded.status == "ok").all()


def test_silent_clients_send_a_tiny_message_and_pay_all_the_same(small_run, tmp_path):
    folder = run(small_run, tmp_path / "cmfl", aggregation="cmfl", relevance_threshold=1.0, rounds=3)
    rows = clients(folder)
    first, later = rows[rows["round"] == 1], rows[rows["round"] > 1]
    assert (first.status == "ok").all()
    assert (later.status == "silent").all()
    assert later.bytes_up.max() < 1000 < first.bytes_up.min() / 50
    assert summary(folder)["num_silent"] == 6
    spent = rows.groupby("client").epsilon_local.apply(list)
    assert all(one < two < three for one, two, three in spent)
    assert {client["rounds"] for client in summary(folder)["clients"]} == {3}
    (losses,) = {tuple(pd.read_csv(folder / "rounds.csv").test_loss[1:])}
    assert len(set(losses)) == 1


def test_mixed_ranks_are_refused_where_there_is_not_one_for_each_client(small_run, tmp_path):
    with pytest.raises(InputError, match=r"client_ranks = \[2, 4\]: has 2 entries for 3 clients"):
        run(small_run, tmp_path / "x", aggregation="flora", client_ranks=[2, 4])


def test_a_client_that_sends_nonsense_is_named_in_the_table_and_the_run_goes_on(small_run, tmp_path, monkeypatch):
    honest = grid.message_of

    def poisoned(response, message):
        if message.metadata.dst_node_id == 3 and kinds.ADAPTER in response.arrays:
            next(iter(response.arrays[kinds.ADAPTER].values())).fill(float("nan"))
            response = Response.of(fields=response.fields, arrays=response.arrays)
        return honest(response, message)

    monkeypatch.setattr(grid, "message_of", poisoned)
    folder = run(small_run, tmp_path / "poisoned")
    rows = clients(folder)
    assert set(rows[rows.status == "malformed"].client) == {1}
    assert rows[rows.client == 1].detail.str.contains("holds NaN or infinity").all()
    assert summary(folder)["num_refused"] == 2
    assert not (folder / "variants" / "client-1").exists()
    assert rows[rows.client == 1].epsilon_local.iloc[-1] > 0


def test_full_weights_and_biases_of_one_round_are_the_uploads_average_and_charged_alike(small_run, tmp_path):
    charged = []
    for rule, frozen in (("fedavg", ()), ("bitfit", (".ln_tuning_layers.weight",))):
        folder = run(small_run, tmp_path / rule, aggregation=rule, rounds=1)
        charged.append(clients(folder).epsilon_local.tolist())
        bench = workbench(parse(tomllib.loads((folder / "config.toml").read_text())))
        sizes = [len(client) for client in bench.data.clients]
        parts = [load_file(folder / "variants" / f"client-{k}" / "adapter_model.safetensors") for k in range(3)]
        merged = load_file(folder / "variants" / "global" / "adapter_model.safetensors")
        assert sum(tensor.numel() for tensor in merged.values()) > 30_000
        for name, tensor in merged.items():
            expected = sum(size * part[name].double() for size, part in zip(sizes, parts, strict=True)) / sum(sizes)
            torch.testing.assert_close(tensor.double(), expected, atol=1e-7, rtol=1e-6)
        trained = bench.model.initial
        assert merged.keys() - trained.keys() == {name for name in merged if name.endswith(frozen)}
        assert not any(torch.equal(merged[name], tensor) for name, tensor in trained.items())
        assert all(torch.equal(part[name], merged[name]) for part in parts for name in merged.keys() - trained.keys())
    assert charged[0] == charged[1]


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


def moves_in(trains: str) -> set[str]:
    return set({"all": "A B head", "head": "head", "lora-a": "A head", "lora-b": "B head"}[trains].split())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", PARTIAL)
def test_every_trained_value_is_noised_and_every_other_one_comes_back_as_it_was_sent(run_of, rule, optimizer):
    _, seen = run_of(rule, optimizer)
    for each, trains in zip(seen, ["head", "head", *TURNS[rule]], strict=True):
        for upload in each.uploads:
            for name, sent in each.before.adapter.items():
                if kind(name) in moves_in(trains):
                    assert (upload[name] != sent).float().mean() > 0.99, f"{name}: float32 may round a move away"
                else:
                    assert torch.equal(upload[name], sent), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_rolora_a_factor_moves_in_its_own_rounds_alone(run_of, optimizer):
    _, seen = run_of("rolora", optimizer)
    for each, trains in zip(seen[1:], ["head", *TURNS["rolora"]], strict=True):  # the start leaves the bias at zero
        for name, before in each.before.adapter.items():
            assert torch.equal(before, each.after.adapter[name]) == (kind(name) not in moves_in(trains)), name


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
    summary = json.loads((run_of(rule, optimizer)[0] / "summary.json").read_text())
    assert 7.9 < summary["epsilon_local_max"] <= 8.0
    assert not summary["unmoved_tensors"]


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


def without_moments(model: GlobalModel) -> GlobalModel:
    """The re-basing, with the server's momentum left in the old basis."""
    return replace(rebased(model), optimizer_state=model.optimizer_state)


def test_without_noise_fedsvd_is_training_b_with_a_frozen_orthonormal_a(small_run, tmp_path):
    """Each record is clipped, and the server's momentum must turn with the basis."""
    changes = {"target_epsilon": "", "noise_multiplier": 0.0, "clip_norm": 0.1, "rounds": 5, "lora_rounds": 4}
    changes |= {"rank": 3, "alpha": 60.0, "lora_learning_rate": 400.0, "lora_head_learning_rate": 1.0}
    losses = {}
    for name, finish in (("turning", rebased), ("frozen", None), ("stale", without_moments)):
        with pytest.MonkeyPatch.context() as patch:
            changed = replace(RULES["fedsvd"], finish=finish)
            patch.setitem(RULES._entries, "fedsvd", changed)  # in its place, so that the order of names stays
            federation.run(parse(values_of(small_run, "fedsvd", tmp_path / name, **changes)), LogObserver())
        losses[name] = pd.read_csv(tmp_path / name / "rounds.csv").test_loss.tolist()
    assert losses["turning"] == pytest.approx(losses["frozen"], rel=1e-5)
    assert losses["stale"] != pytest.approx(losses["frozen"], rel=1e-3), "the test could not see a wrong basis"


class Interrupted(LogObserver):
    """Ends the run in the middle of the turns, as Ctrl-C would."""

    def round_done(self, row):
        if row.round == 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize("rule", [pytest.param("rolora", marks=pytest.mark.slow), "fedsvd"])
def test_a_run_that_is_resumed_between_turns_ends_as_a_whole_one(run_of, small_run, tmp_path, rule):
    whole, _ = run_of(rule, "momentum")
    values = values_of(small_run, rule, tmp_path / "run", server_optimizer="momentum")
    with pytest.raises(KeyboardInterrupt):
        federation.run(parse(values), Interrupted())
    federation.run(parse(values | {"resume": str(tmp_path / "run")}), LogObserver())
    tables = [pd.read_csv(folder / "rounds.csv").drop(columns="seconds") for folder in (tmp_path / "run", whole)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    tensors = [load_file(f / "variants/global/adapter_model.safetensors") for f in (tmp_path / "run", whole)]
    assert all(torch.equal(tensors[0][name], tensor) for name, tensor in tensors[1].items())


@pytest.mark.slow
@pytest.mark.parametrize("rule", PARTIAL)
def test_a_budget_stops_the_run_in_the_round_that_would_exceed_it(small_run, tmp_path, rule):
    """Both turns cost the same, so it is the round in which dp-lora would stop as well."""
    ends = {}
    for each in (rule, "dp-lora"):
        values = values_of(small_run, each, tmp_path / each, budget_epsilon=[7.0])
        federation.run(parse(values), LogObserver())
        ends[each] = json.loads((tmp_path / each / "summary.json").read_text())
    assert ends[rule]["epsilon_local_max"] == ends["dp-lora"]["epsilon_local_max"] <= 7.0
    assert 2 < ends[rule]["num_rounds"] == ends["dp-lora"]["num_rounds"] < 6
