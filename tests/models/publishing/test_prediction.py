"""`fedpriv predict`: the saved model's own answers, each by itself, and one line for whatever is wrong."""

import csv
import json
import re
import shutil

import pytest
import torch
from transformers import AutoTokenizer

from fedpriv.learning.adapters import load, load_base
from fedpriv.models.publishing import saved
from tests.cli.command_line import as_json, fedpriv, refused
from tests.models.publishing.runs import chat_run
from tests.served import LABELS, save_run
from tests.stores import flip

TEXTS = ["the patient has a rash", "pain in the chest today", "cough", "a knee " * 40]


@pytest.fixture(scope="module")
def run(tiny_bert, tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("runs") / "run", {"model": str(tiny_bert)}, ("global", "client-0"))


@pytest.fixture(scope="module")
def loaded(run):
    return saved.load(saved.find(run))


def test_it_answers_as_the_loaded_adapter_does(run, loaded, tiny_bert):
    model = load(str(tiny_bert), run / "variants" / "global")
    tokenizer = load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3).tokenizer
    inputs = tokenizer(TEXTS, truncation=True, max_length=32, padding=True, return_tensors="pt")
    expected = model(**inputs).logits.softmax(dim=1)
    assert (expected.std(dim=0) > 0.01).all(), "the check would be blind"
    torch.testing.assert_close(torch.tensor(saved.classify(loaded, TEXTS)), expected, atol=1e-6, rtol=0)


def test_no_other_text_changes_an_answer_by_more_than_rounding(loaded):
    texts = [*TEXTS, *(" ".join(["pain", "rash"] * length) for length in range(1, 20))]
    together = torch.tensor(saved.classify(loaded, texts))
    alone = torch.tensor([saved.classify(loaded, [text])[0] for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


def test_a_file_gives_its_columns_with_the_answers(run, tmp_path):
    file, out = tmp_path / "letters.csv", tmp_path / "answers.csv"
    file.write_text('id,letter\n007,"a rash, today"\nNA,cough\n')
    printed, _ = fedpriv("predict", run, file, "--text", "letter")
    rows = list(csv.DictReader(printed.splitlines()))
    assert [(row["id"], row["letter"]) for row in rows] == [("007", "a rash, today"), ("NA", "cough")]
    assert all(row["predicted_label"] in LABELS for row in rows)
    assert sum(float(rows[0][f"probability_{label}"]) for label in LABELS) == pytest.approx(1)
    found = as_json("predict", run, file, "--text", "letter")
    assert [each["label"] for each in found["predictions"]] == [row["predicted_label"] for row in rows]
    fedpriv("predict", run, file, "--text", "letter", "--out", out)
    assert out.read_text() == printed
    fedpriv("predict", run, file, "--text", "letter", "--out", out, code=2)
    assert "has a column predicted_label already" in fedpriv("predict", run, out, "--text", "letter", code=2)[1]


def test_a_variant_that_was_copied_elsewhere_needs_no_run(run, loaded, tiny_bert, tmp_path):
    alone = shutil.copytree(run / "variants" / "global", tmp_path / "alone" / "global")
    found = as_json("predict", alone, TEXTS[0], "--model", tiny_bert)
    expected = dict(zip(LABELS, saved.classify(loaded, TEXTS[:1])[0], strict=True))
    assert found["probabilities"] == expected


def test_what_is_wrong_is_told_in_one_line(run, tmp_path):
    for arguments, message in (
        (("x", "--variant", "../global"), "variant = '../global': "),
        (("x", "--model", "/nowhere"), "model = '/nowhere': no such folder"),
        (("missing.csv",), "FILE = 'missing.csv': no such file"),
        (("x", "--pair", "y"), "reads single texts"),
        (("x", "--out", "y.csv"), "is for the answers to a file"),
        (("leters.txt",), "FILE = 'leters.txt': no such file; name a "),
        (("leters.xlsx",), "FILE = 'leters.xlsx': no such file"),
        (("notes/monday",), "FILE = 'notes/monday': no such file"),
        (("-",), "FILE = '-': no such file"),
        (("/dev/null",), "FILE = '/dev/null': is no regular file"),
        ((" ",), "TEXT = ' ': is empty"),
        (("missing.csv", "--out", "answers/y.csv"), "out = 'answers/y.csv': answers is no folder; make it first"),
    ):
        assert message in refused("predict", run, *arguments, folder=tmp_path)


def test_what_only_looks_like_a_files_name_is_a_text_with_a_blank(run):
    for text in ("leters.txt ", "and/or ", "cough.", "39.5", "a rash, see letters.txt"):
        assert as_json("predict", run, text)["label"] in LABELS


def test_a_row_without_a_text_gets_no_answer_and_is_counted(run, loaded, tmp_path):
    file = tmp_path / "letters.csv"
    file.write_text(f"id,text\n1,{TEXTS[0]}\n2,\n3,  \n4,{TEXTS[2]}\n")
    printed, err = fedpriv("predict", run, file)
    assert "2 of 4 rows without a text: they have no answer" in err
    rows = list(csv.DictReader(printed.splitlines()))
    assert [bool(row["predicted_label"]) for row in rows] == [True, False, False, True]
    found = json.loads(fedpriv("predict", run, file, "--json")[0])["predictions"]
    assert found[1] == {"label": None, "probabilities": dict.fromkeys(LABELS)}
    assert list(found[3]["probabilities"].values()) == pytest.approx(saved.classify(loaded, TEXTS[2:3])[0], abs=1e-6)


def test_changed_tensors_are_refused_and_restored_from_a_store_without_loss_as_the_refusal_advises(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    fedpriv("dedup", "run", copy / "variants", tmp_path / "store", "--algorithm", "lossless")
    tensors = copy / "variants" / "global" / "adapter_model.safetensors"
    before = tensors.read_bytes()
    flip(tensors)
    assert "is damaged or was changed" in fedpriv("predict", copy, "x", code=2)[1]
    tensors.write_bytes(before[:-1])
    assert "cannot be read" in fedpriv("predict", copy, "x", code=2)[1]
    tensors.unlink()
    fedpriv("dedup", "restore", tmp_path / "store", "global", "--out", tensors)
    assert tensors.read_bytes() == before
    assert as_json("predict", copy, "x")["label"] in LABELS


def test_a_language_model_tells_the_likeliest_choice_of_each_record(tmp_path):
    """By the mean log-likelihood that transformers and peft alone give each choice in the template's own text."""
    prompts, choices = ["What is flu?", "a rash"], [("a disease", "pain today"), ("a cough", "no", "yes")]
    chooser, folder = chat_run(tmp_path, prompt_template="{}, in a word?"), tmp_path / "model"
    model, tokenizer = load(str(folder), chooser / "variants" / "global"), AutoTokenizer.from_pretrained(folder)

    def score(prompt: str, choice: str) -> float:
        chat = [{"role": "user", "content": f"{prompt}, in a word?"}]
        before = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        known, whole = (tokenizer(text)["input_ids"] for text in (before, f"{before}{choice}<|im_end|>"))
        of_tokens = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(dim=1)
        return float(of_tokens[range(len(known) - 1, len(whole) - 1), whole[len(known) :]].mean())

    expected = [{choice: score(prompt, choice) for choice in own} for prompt, own in zip(prompts, choices, strict=True)]
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps({"q": q, "c": c}) + "\n" for q, c in zip(prompts, choices, strict=True)))
    found = as_json("predict", chooser, file, "--text", "q", "--choices", "c")["predictions"]
    for each, scores in zip(found, expected, strict=True):
        assert each["log_likelihoods"] == pytest.approx(list(scores.values()), abs=1e-4)
        assert each["predicted_choice"] == max(scores, key=scores.get) == list(scores)[each["predicted_number"]]
    asked = ["predict", chooser, prompts[0], *(word for choice in choices[0] for word in ("--choices", choice))]
    assert as_json(*asked)["predicted_choice"] == found[0]["predicted_choice"]
    assert fedpriv(*asked)[0].splitlines()[0].startswith(found[0]["predicted_choice"])
    for choices, message in (("a",), "no list"), (("a", "a "), "a choice twice"), (("a", " "), "an empty choice"):
        asked = ["predict", chooser, "flu?", *(word for choice in choices for word in ("--choices", choice))]
        assert re.search(f"--choices: (has|holds) {message}", fedpriv(*asked, code=2)[1])
