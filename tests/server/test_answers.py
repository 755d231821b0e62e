"""A run of a causal model is judged by what it answers on the server's test set: untrained, private, not private."""

import csv
import json
import math
import random
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import fedpriv.learning.adapters
from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.training.workbench import workbench
from fedpriv.models.dedup.adapter_variants import AdapterEvaluator
from fedpriv.models.dedup.validation import proof_records
from fedpriv.models.variants import folders
from fedpriv.runs import RunFolder
from fedpriv.runs import _rows as rows
from server.figures import rouge_l
from tests.cli.command_line import as_json
from tests.cli.command_line import fedpriv as fedpriv_command
from tests.instructions import END, number_tokenizer
from tests.server.parts import StopsAfter, run, summary
from tests.tiny import VOCABULARY, llama_config

PROMPT_TOKENS = 3
KEYS = ("rouge_l", "rouge_l_initial", "rouge_l_non_private", "rouge_l_standard_error", "num_generated")


@pytest.fixture(scope="module")
def values(tmp_path_factory) -> dict[str, object]:
    """A federation of two holders, whose responses say a prompt's first word again, and then one of two others."""
    folder = tmp_path_factory.mktemp("answers")
    torch.manual_seed(0)
    special = {"eos_token_id": END, "bos_token_id": None}
    config = llama_config(VOCABULARY, num_hidden_layers=2, max_position_embeddings=64, **special)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer = number_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder / "model")
    words = random.Random(0)
    with (folder / "records.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "response", "site"])
        for row in range(160):
            # So few prompts that some occur twice.
            prompt = [f"w{words.randrange(4, 14)}", f"w{20 + row % 2}", "w30"]
            response = " ".join([prompt[0], *["w40"] * (row % 3), f"w{50 + row % 2}"])
            writer.writerow([" ".join(prompt), response, f"site-{row % 2}"])
    return {
        **{"model": str(folder / "model"), "recipe": "per-sample", "data": str(folder / "records.csv")},
        **{"prompt_column": "prompt", "response_column": "response", "client_column": "site", "max_length": 16},
        **{"rank": 4, "rounds": 2, "local_steps": 2, "batch_size": 32, "optimizer": "adamw", "learning_rate": 0.02},
        **{"noise_multiplier": 0.3, "generated_answers": 9, "max_new_tokens": 5},
        **{"simulate": True, "variant_clients": False},
    }


@pytest.fixture(scope="module")
def finished(values, tmp_path_factory) -> Path:
    return run(values, tmp_path_factory.mktemp("runs") / "one")


def assert_answered(folder: Path, tokenizer: Any, answers: list[tuple[str, str, str]]) -> None:
    """Hold each prompt's two answers against those of the saved model, with its adapter and without."""
    model = fedpriv.learning.adapters.load(tokenizer.name_or_path, folder / "variants" / "global")
    for prompt, *texts in answers:
        asked = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        for text, context in zip(texts, (torch.no_grad(), model.disable_adapter()), strict=True):
            with context:
                answer = model.generate(input_ids=asked, max_new_tokens=5, do_sample=False)[0, PROMPT_TOKENS:]
            assert tokenizer.decode(answer, skip_special_tokens=True) == text


@pytest.mark.slow
def test_samples_are_the_first_distinct_prompts_with_what_the_saved_models_answer(finished, values):
    found = rows.read_answers(finished / "samples.jsonl", rows.Sample)
    test = workbench(parse(values)).test.features["input_ids"]
    prompts = dict.fromkeys(tuple(tokens[:PROMPT_TOKENS].tolist()) for tokens in test)
    tokenizer = AutoTokenizer.from_pretrained(values["model"])
    assert [s.prompt for s in found] == [tokenizer.decode(list(prompt)) for prompt in list(prompts)[:9]]
    assert len(test) > len(prompts) > 9
    assert_answered(finished, tokenizer, [(each.prompt, each.private, each.untrained) for each in found])
    assert any(s.private != s.untrained for s in found)
    assert all(s.non_private is not None for s in found)


def test_rouge_is_that_of_the_samples_which_the_report_shows(finished):
    found, figures = rows.read_answers(finished / "samples.jsonl", rows.Sample), summary(finished)
    references = [s.reference for s in found]
    names = {"rouge_l": "private", "rouge_l_initial": "untrained", "rouge_l_non_private": "non_private"}
    scores = {key: rouge_l(references, [getattr(s, name) for s in found]) for key, name in names.items()}
    assert {key: figures[key] for key in scores} == {key: pytest.approx(of.mean()) for key, of in scores.items()}
    assert figures["rouge_l_standard_error"] == pytest.approx(pd.Series(scores["rouge_l"]).sem())
    change = pd.Series(scores["rouge_l"] - scores["rouge_l_initial"])
    assert figures["rouge_l_change"] == pytest.approx(change.mean())
    assert figures["rouge_l_change_standard_error"] == pytest.approx(change.sem())
    assert figures["num_generated"] == 9
    page = (finished / "report.html").read_text()
    assert all(text in page for text in ("Perplexity", *references))


def test_perplexities_are_those_of_the_rounds_and_training_lowers_them(finished):
    figures = summary(finished)
    rounds = pd.read_csv(finished / "rounds.csv").test_perplexity.tolist()
    plain = pd.read_csv(finished / "comparison" / "rounds.csv").test_perplexity.tolist()
    assert [figures["perplexity_initial"], figures["perplexity"]] == [rounds[0], rounds[-1]]
    assert [rounds[0], figures["perplexity_non_private"]] == [plain[0], plain[-1]]
    assert rounds[-1] < rounds[0]
    assert figures["log_perplexity_change"] == pytest.approx(math.log(rounds[-1] / rounds[0]), rel=1e-4)
    assert figures["log_perplexity_change"] < -2 * figures["log_perplexity_change_standard_error"] < 0
    assert figures["accuracy"] > figures["accuracy_initial"], "of next tokens, as ever"


def test_answers_stand_side_by_side_to_questions_by_which_nothing_was_chosen(finished, values):
    config = parse({**values, "test_fraction": 0.7, "batch_size": 8})
    bench = workbench(config)
    judge = AdapterEvaluator(bench)
    trained = folders.read_tensors(finished / "variants" / "global")
    # Of the untrained model, since B is zero.
    untrained = {name: np.zeros_like(values) for name, values in trained.items()}
    outcomes = [
        SimpleNamespace(name=name, num_replaced=num, loss_limit=limit)
        for name, num, limit in (("little", 5, 0.1), ("most", 5, 0.2), ("nothing", 0, None))
    ]
    found = judge.answers_side_by_side(outcomes, {"most": trained}.__getitem__, {"most": untrained}.__getitem__)
    tokens = bench.test.features["input_ids"]
    prompts = dict.fromkeys(tuple(tokens[place][:PROMPT_TOKENS].tolist()) for place in proof_records(len(tokens)))
    tokenizer = AutoTokenizer.from_pretrained(values["model"])
    assert [each.prompt for each in found] == [tokenizer.decode(list(prompt)) for prompt in list(prompts)[:5]]
    assert_answered(finished, tokenizer, [(each.prompt, each.before, each.after) for each in found])
    assert any(each.before != each.after for each in found)
    assert judge.answers_side_by_side(outcomes[2:], {}.__getitem__, {}.__getitem__) == []


def test_a_runs_report_and_the_command_show_answers_before_and_after(values, tmp_path):
    bounds = {"dedup_utility_bound": 1.0, "dedup_epsilon_bound": 100.0, "dedup_block_size": 16}
    enough = {"test_fraction": 0.7, "batch_size": 8}
    out = run(values, tmp_path / "run", dedup="drd", variant_rounds=[1], comparison=False, **bounds, **enough)
    asked = RunFolder(out).stored_answers
    assert 1 <= len(asked) <= 5
    page = (out / "report.html").read_text()
    assert f"Answers of {asked[0].variant}" in page
    assert {each.reference for each in asked} <= set(re.findall(r"<dd[^>]*>([^<]*)</dd>", page))
    command = ["dedup", "run", out / "variants", tmp_path / "store", "--fairness", "outcome", "--block-size", "16"]
    assert as_json(*command)["answers"] == [asdict(each) for each in asked]
    assert f"{asked[0].variant} asked: {asked[0].prompt}" in fedpriv_command(*command)[0]


def test_with_allowed_answers_accuracy_is_by_likelihood(values, tmp_path):
    table = pd.read_csv(values["data"])
    table["response"] = [f"w{50 + row % 2}" for row in range(len(table))]
    table.to_csv(tmp_path / "choices.csv", index=False)
    changes = {"data": str(tmp_path / "choices.csv"), "answers": ["w50", "w51"], "generated_answers": 0}
    found = summary(run(values, tmp_path / "out", **changes, comparison=False, rounds=4))
    confusion = torch.tensor(found["confusion_matrix"])
    assert found["accuracy"] == confusion.trace() / confusion.sum()
    assert confusion.sum() == 32
    assert found["labels"] == ["w50", "w51"]
    assert found["majority_accuracy"] == confusion.sum(dim=1).max() / 32
    assert found["chance_accuracy"] == 0.5
    assert found["accuracy"] > found["majority_accuracy"], "the second word of a prompt tells the answer"
    assert [found[key] for key in KEYS] == [None] * len(KEYS)
    assert not (tmp_path / "out" / "samples.jsonl").exists()


def test_with_choices_of_each_record_accuracy_is_by_the_mean_likelihood_on_a_server_and_on_nodes(values, tmp_path):
    """Each record has two or three texts of one to three words, the right one in a place of its own."""
    rows = []
    for row in range(160):
        right = row % (2 + row % 2)
        texts = [f"w{60 + (row + place) % 5}" + " w40" * ((row + place) % 3) for place in range(2 + row % 2)]
        texts[right] = f"w{50 + row % 2}"
        prompt = f"w{4 + row % 10} w{20 + row % 2}"
        rows.append({"prompt": prompt, "c": texts, "response": right, "site": f"s{row % 2}"})
    data = tmp_path / "choices.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data": str(data), "choice_columns": ["c"], "max_choices": 3, "generated_answers": 0}
    changes |= {"comparison": False, "rounds": 4}
    found = summary(run(values, tmp_path / "out", **changes))
    confusion = np.array(found["confusion_matrix"])
    assert (confusion.shape, confusion.sum(), found["labels"]) == ((3, 3), 32, ["0", "1", "2"])
    assert found["accuracy"] == confusion.trace() / 32 > found["majority_accuracy"]
    assert 1 / 3 < found["chance_accuracy"] < 1 / 2
    assert found["accuracy"] > found["accuracy_initial"]
    assert "Chance" not in (tmp_path / "out" / "report.html").read_text(), "the best constant place says more"
    changes |= {"rounds": 3, "evaluation_noise_multiplier": 0.5, "test_fraction": 0.4}
    private = summary(run(values, tmp_path / "private", **changes))
    assert (private["accuracy"] > 0.5, private["chance_accuracy"]) == (True, None)


# Every day test_baselines.py finishes a run again, and test_checkpoint.py resumes one to the same figures.
@pytest.mark.slow
def test_a_resumed_run_is_judged_like_one_that_was_not_interrupted(finished, values, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(values, tmp_path / "out", StopsAfter(1))
    out = run(values, tmp_path / "out", resume=str(tmp_path / "out"))
    free = {"seconds", "run_id", "ledger_head", "clients", "configuration_digest"}
    one, other = ({k: v for k, v in summary(folder).items() if k not in free} for folder in (finished, out))
    assert one == other
    assert (out / "samples.jsonl").read_bytes() == (finished / "samples.jsonl").read_bytes()


def test_a_run_that_stops_early_is_judged_by_its_last_model(finished, values, tmp_path):
    spent = pd.read_csv(finished / "clients.csv").groupby("round").epsilon_local.max()
    out = run(values, tmp_path / "out", budget_epsilon=[(spent[1] + spent[2]) / 2], comparison=False)
    found = summary(out)
    assert found["num_rounds"] < 2
    assert found["stopped_early"]
    assert found["perplexity"] == pd.read_csv(out / "rounds.csv").test_perplexity.iloc[-1]
    assert found["perplexity"] == summary(out)["perplexity"] != found["perplexity_initial"]
    assert found["num_generated"] == 9
    assert {sample.non_private for sample in rows.read_answers(out / "samples.jsonl", rows.Sample)} == {None}


def test_without_the_package_for_scores_the_error_says_what_to_install(values, tmp_path, monkeypatch):
    monkeypatch.setattr("fedpriv.learning.training.evaluation.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"rouge-score, which is not installed; pip install fedpriv\[llm\], or use 0"):
        run(values, tmp_path / "out")
    assert not (tmp_path / "out").exists()
