"""Whole runs on the in-process engine: reproducible in `simulate`, complete on disk, marked for what they are."""

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from peft import get_peft_model_state_dict
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import fedpriv.learning.adapters
from fedpriv.config import BY_RECIPE, parse
from fedpriv.errors import InputError
from fedpriv.learning.aggregation._fedavg import GlobalModel
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.risk import risk_of
from server.summary import unmoved_tensors
from tests.adversary.models import with_words
from tests.marks import slow
from tests.server.parts import run, summary
from tests.tiny import LABELS, llama_config, write_rows

SECURE = {"simulate": False, "public_data": True, "baselines": False, "rounds": 1}


def rounds(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "rounds.csv").drop(columns="seconds")


def clients(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "clients.csv")


@pytest.fixture(scope="module")
def finished(small_run, tmp_path_factory) -> Path:
    return run(small_run, tmp_path_factory.mktemp("runs") / "one", comparison=True)


def test_the_same_seed_gives_the_same_numbers_to_the_bit_and_another_seed_others(finished, small_run, tmp_path):
    again = run(small_run, tmp_path / "again", comparison=True)
    assert rounds(finished).equals(rounds(again))
    assert rounds(finished / "comparison").equals(rounds(again / "comparison"))
    other = run(small_run, tmp_path / "other", seed=1, rounds=1)
    assert not rounds(finished)[:2].equals(rounds(other))


def test_without_a_simulation_no_seed_fixes_noise_and_inclusion(finished, small_run, tmp_path):
    one, two = (run(small_run, tmp_path / name, **SECURE) for name in ("one", "two"))
    assert rounds(one).test_loss[0] == rounds(two).test_loss[0], "the initial model does take its seed"
    assert rounds(one).test_loss[1] != rounds(two).test_loss[1]
    assert (summary(one)["private"], summary(one)["noise_source"]) == (True, "secure")
    assert (summary(finished)["private"], summary(finished)["noise_source"]) == (False, "seeded")
    assert "not private" in (finished / "report.html").read_text().lower()


def test_folder_holds_everything(finished):
    names = {str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file()}
    expected = {"config.toml", "environment.json", "rounds.csv", "clients.csv", "summary.json", "report.html"}
    files = [finished / f"variants/{name}" for name in ("global", "client-0", "client-1", "client-2")]
    adapters = {str(path.relative_to(finished) / "adapter_model.safetensors") for path in files}
    assert expected | adapters | {"comparison/rounds.csv", "comparison/summary.json"} <= names
    assert not [name for name in names if name.endswith(".tmp")]
    # A card says first that a seeded run is not private.
    for path in files:
        card = (path / "README.md").read_text().split("\n---\n")[1]
        assert card.lstrip().startswith("> **NOT PRIVATE**")


def test_epsilons_and_risks_are_those_of_what_was_sampled(finished):
    sizes = clients(finished).groupby("client").num_records.first()
    rho_bar = np.sqrt(((sizes / sizes.sum()) ** 2).sum())
    told, live = summary(finished), clients(finished).query("round == 2").set_index("client").epsilon_local
    for row in told["clients"]:
        for view, scale in (("local", 1.0), ("rho", rho_bar)):
            probability = 8 / row["num_records"]
            event = SubsampledGaussian(noise_multiplier=float(scale), sampling_probability=probability, count=4)
            assert row[f"epsilon_{view}"] == pytest.approx(epsilon_of([event], 1e-5, "pld").epsilon, rel=1e-6)
            if view == "local":
                risk = risk_of([event], 1e-5).values
                assert {key: row[key] for key in risk} == risk
        assert row["delta"] == 1e-5
        assert row["epsilon_local"] <= row["epsilon_rho"]
        assert live[row["client"]] >= row["epsilon_local"] * (1 - 1e-3), "rdp is never below pld"
    assert told["epsilon_rho_max"] == max(row["epsilon_rho"] for row in told["clients"])
    assert told["tpr_at_fpr"]["0.01"] == max(row["tpr_at_fpr"]["0.01"] for row in told["clients"])
    assert told["trade_off"]["tpr"][told["trade_off"]["fpr"].index(0.01)] == told["tpr_at_fpr"]["0.01"]
    theorem = told["theorem_1"]
    by_hand = 2 * (8 / sizes.min()) * np.sqrt(4 * np.log(1e5)) / (rho_bar * 1.0)
    assert theorem["epsilon"] == pytest.approx(by_hand)
    assert not theorem["conditions_hold"]
    assert theorem["violated"][0] == "rho_bar * sigma >= 1", "0.59, as nearly always"
    assert f"gives {by_hand:.3g}, and is no bound: these of its" in (finished / "report.html").read_text()


def test_comparison_has_no_noise_and_infinite_epsilon(finished):
    without = finished / "comparison"
    assert (clients(without).noise_multiplier == 0).all()
    assert np.isinf(clients(without).epsilon_local).all()
    assert summary(finished)["accuracy_non_private"] == summary(without)["accuracy"]
    assert (summary(without)["mu"], summary(without)["advantage"]) == ("inf", 1.0)
    assert summary(without)["tpr_at_fpr"]["0.001"] == 1.0


def test_bytes_are_those_of_the_adapters(finished):
    adapter = fedpriv.learning.adapters.read(workbench_of(finished).model.peft_model)
    floats = 4 * sum(tensor.numel() for tensor in adapter.values())
    bytes_up = clients(finished).bytes_up
    assert (bytes_up >= floats).all()
    assert (bytes_up <= floats + 500 * len(adapter) + 1000).all()
    assert rounds(finished).bytes_up.sum() == bytes_up.sum() == summary(finished)["bytes_up"]


def workbench_of(folder: Path):
    return workbench(parse(tomllib.loads((folder / "config.toml").read_text())))


def test_a_run_that_moved_nothing_says_so(small_run, tmp_path):
    still = run(small_run, tmp_path / "still", noise_multiplier=0.0, learning_rate=1e-30, rounds=1)
    assert summary(still)["adapters_moved"] is False
    assert summary(still)["unmoved_tensors"]
    start = {"a": torch.ones(2)}
    for after, trained, unmoved in ((1, ["a"], ["a"]), (1, [], []), (0, ["a"], [])):
        model = GlobalModel(initial=start, adapter={"a": torch.full((2,), float(after))})
        assert unmoved_tensors(model, trained) == unmoved


def test_clients_are_sampled_by_partition_id_and_the_seed(small_run, tmp_path):
    """With AdamW and without a cache, in the second run with the first's: who is chosen depends on none of them."""
    changes = {"clients_per_round": 2, "rounds": 2}
    others = {"optimizer": "adamw", "learning_rate": 0.01, "prefix_cache": False}
    one, two = run(small_run, tmp_path / "one", **changes), run(small_run, tmp_path / "two", **changes, **others)
    chosen = [clients(folder)[["round", "client"]] for folder in (one, two)]
    assert chosen[0].equals(chosen[1])
    assert (chosen[0].groupby("round").client.nunique() == 2).all()
    assert np.allclose(clients(one).groupby("round").weight.sum(), 1.0)
    assert summary(two)["adapters_moved"] is True


@pytest.mark.parametrize("rule", ["batch", *slow("split", "per-tensor")])
def test_clipping_rules_change_what_is_spent(finished, small_run, tmp_path, rule):
    other = run(small_run, tmp_path / rule, clipping=rule, rounds=1)
    # One of two layers carries A and B of query and value; the head adds a weight and a bias.
    factor = {"split": 3**0.5, "per-tensor": 6**0.5, "batch": 2 * 3**0.5}[rule]
    assert np.allclose(clients(other).effective_noise_multiplier, 1.0 / factor)
    first = clients(finished).query("round == 1")
    assert (clients(other).epsilon_local > first.epsilon_local).all()


def causal_folder(kind: str, tiny_bert: Path, folder: Path) -> Path:
    """A random causal model with the tiny BERT's tokenizer."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_bert / name).read_bytes())
    ends = {"bos_token_id": 2, "eos_token_id": 3}
    torch.manual_seed(0)
    if kind == "llama":
        config = llama_config(21, num_hidden_layers=3, max_position_embeddings=64, **ends)
        LlamaForCausalLM(config).save_pretrained(folder)
    else:
        sizes = {"vocab_size": 21, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
        GPT2LMHeadModel(GPT2Config(**sizes, **ends)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", *slow("gpt2")])
@pytest.mark.parametrize("task", ["CAUSAL_LM", *slow("SEQ_CLS")])
def test_causal_models_run_and_reload(small_run, tmp_path, tiny_bert, kind, task):
    folder = causal_folder(kind, tiny_bert, tmp_path / kind)
    finished = run(small_run, tmp_path / "out", model=str(folder), task=task)
    assert summary(finished)["adapters_moved"] is True
    if task == "CAUSAL_LM":
        assert summary(finished)["chance_accuracy"] == pytest.approx(1 / 21)
        assert summary(finished)["accuracy"] > summary(finished)["accuracy_initial"]
    loaded = fedpriv.learning.adapters.load(str(folder), finished / "variants" / "global")
    saved = get_peft_model_state_dict(loaded)
    assert saved.keys() == workbench_of(finished).initial.keys()


@pytest.mark.parametrize(
    ("target", "least", "most"),
    [
        ({"target_epsilon": 3.0, "privacy_view": "rho"}, 2.98, 3.0),
        ({"target_risk": "tpr=0.05@fpr=0.01"}, 0.049, 0.05),
        pytest.param({"target_epsilon": 3.0, "privacy_view": "local"}, 2.98, 3.0, marks=pytest.mark.slow),
    ],
    ids=["rho", "risk", "local"],
)
def test_a_target_is_met_and_not_wasted(small_run, tmp_path, target, least, most):
    # Of equal clients rho_bar is that of the worst case over who may drop out, for which the noise is.
    equal = {"client_column": "", "partition": "iid", "num_clients": 3}
    values = {**small_run, **equal, "noise_multiplier": BY_RECIPE, "clipping": "split", "rounds": 1}
    folder = run(values, tmp_path / "run", **target)
    told = summary(folder)
    of_view = f"epsilon_{target.get('privacy_view')}_max"
    assert least < (told["tpr_at_fpr"]["0.01"] if "target_risk" in target else told[of_view]) <= most
    resolved = parse(tomllib.loads((folder / "config.toml").read_text()))
    assert resolved.target_epsilon == target.get("target_epsilon")
    assert clients(folder).noise_multiplier.eq(resolved.noise_multiplier).all()


@pytest.mark.parametrize("engine", ["stacked", *slow("in-process")])
def test_a_run_whose_first_round_is_noise_alone_says_so_and_stops(engine, small_run, tiny_bert, tmp_path):
    """All texts are of a word that the model has no embedding for; with one other word in one record all is well."""
    model = with_words(tiny_bert, tmp_path / "model", jane=9999)
    rows = [("jane jane", LABELS[row % 3], f"site-{row % 2}") for row in range(40)]
    changes = {"model": str(model), "engine": engine, "sampling_probability": 1.0, "test_data": ""}
    changes |= {"labels": LABELS, "simulate": False, "table_checks": "warn", "local_steps": 1}
    for text, ends in (("jane", "stops"), ("pain", "goes on")):
        added = [("text", "label", "site"), *rows, (text, LABELS[0], "site-0")]
        table = write_rows(tmp_path / f"{ends}.csv", added)
        if ends == "stops":
            with pytest.raises(InputError, match=r"^round 1: is noise alone, since none of the records .* gradient"):
                run(small_run, tmp_path / ends, data=str(table), **changes)
        else:
            assert len(rounds(run(small_run, tmp_path / ends, data=str(table), **changes))) == 3
