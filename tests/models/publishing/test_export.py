"""What `fedpriv export` wrote answers without fedpriv as `fedpriv predict` does."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from fedpriv.errors import InputError
from fedpriv.learning import adapters
from fedpriv.models.publishing import export, saved
from tests import architectures
from tests.architectures import random_model
from tests.cli.command_line import as_json, fedpriv
from tests.failing import DISK_IS_FULL, failing
from tests.marks import slow
from tests.models.publishing.runs import chat_run
from tests.served import LABELS, save_run

TEXTS = ["the patient has a rash", "pain in the chest today", "", "a knee cough " * 40]
PROMPTS = ["is this negative or positive?", "what is flu"]
# {architecture: whether `--transformers` writes it} of the page's table of encoders.
PAGE = Path(__file__).parents[3] / "docs" / "base_models.md"
TABLE = dict(re.findall(r"^\| `([\w-]+)` \|.*\| (yes|no) \|$", PAGE.read_text(), re.M))
DESCRIBED = {
    "modules.json": [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_cls_token": True},
    "config_sentence_transformers.json": {"prompts": {"query": "pain today "}},
}

# Runs the example of each folder's README.md, with our texts; prints what it says and all probabilities.
RUNNER = """
import contextlib, io, json, re, sys
sys.modules["fedpriv"] = None  # importing it fails
folders, texts, prompts = json.loads(sys.argv[1])
found = {}
for name, folder in folders.items():
    with open(folder + "/README.md", encoding="utf-8") as file:
        code = re.search("```python\\n(.*?)```", file.read(), re.S)[1].replace('folder = "."', f"folder = {folder!r}")
    said, values = io.StringIO(), {}
    asked = [texts] if '["your text"]' in code else texts if '"your text"' in code else prompts
    for each in asked:
        own = code.replace('["your text"]', repr(each)).replace('"your text"', repr(each))
        with contextlib.redirect_stdout(said):
            exec(own.replace('"your question"', repr(each)), values)
    scores = None
    if "pipeline(" in open(folder + "/README.md", encoding="utf-8").read():
        from transformers import pipeline

        ask = pipeline("text-classification", model=folder, device="cpu", truncation=True, top_k=None)
        found_scores = [{one["label"]: one["score"] for one in each} for each in ask(texts)]
        scores = [[each[label] for label in values["model"].config.id2label.values()] for each in found_scores]
    if asked == [texts]:
        scores = values["model"].encode(texts, convert_to_tensor=True).softmax(dim=1).tolist()
    found[name] = {"said": said.getvalue(), "scores": scores}
assert not [name for name in sys.modules if name.startswith("fedpriv.")]
print(json.dumps(found))
"""


def encoder_run(
    kind: str, normalize: bool, tiny_bert: Path, folder: Path, described: Mapping[str, object] | None = None
) -> Path:
    """A run of a random encoder with the tiny BERT's tokenizer, whose folder may describe itself."""
    vocabulary = json.loads((tiny_bert / "config.json").read_text())["vocab_size"]
    model = random_model(kind, vocab_size=vocabulary)
    # As it comes from pretraining, without a head.
    architectures.save(model.base_model, folder / "model", tokenizer_of=tiny_bert)
    for name, content in (described or {}).items():
        (folder / "model" / name).parent.mkdir(exist_ok=True)
        (folder / "model" / name).write_text(json.dumps(content))
    values = {"model": str(folder / "model"), "recipe": "fedpriv" if normalize else "per-sample", "layers": "all"}
    return save_run(folder / "run", values, ("global",))


INSTRUCTS = {"system_prompt": 'Say "it" kindly \U0001f642', "prompt_template": "Q: {}\nIn one word?"}
PLAIN = {"prompt_column": "", "response_column": ""}


@pytest.mark.parametrize("kind", ["bert", "distilbert", *slow("roberta")])
def test_the_parts_of_an_export_give_the_models_probabilities(kind, tiny_bert, tmp_path):
    normalize = kind != "distilbert"
    run, out = encoder_run(kind, normalize, tiny_bert, tmp_path), tmp_path / "out"
    fedpriv("export", run, out)
    expected = torch.tensor(saved.classify(saved.load(saved.find(run)), TEXTS))
    modules = [each["path"] for each in json.loads((out / "modules.json").read_text())]
    assert modules == ["0_Transformer", "1_Pooling", *["2_Normalize"] * normalize, f"{2 + normalize}_Dense"]
    encoder = out / "0_Transformer"
    model, tokenizer = AutoModel.from_pretrained(encoder).eval(), AutoTokenizer.from_pretrained(encoder)
    inputs = tokenizer(TEXTS, truncation=True, max_length=32, padding=True, return_tensors="pt")
    mask = inputs["attention_mask"].unsqueeze(-1)
    vectors = (model(**inputs).last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)
    vectors = F.normalize(vectors, dim=1) if normalize else vectors
    part = load_file(out / modules[-1] / "model.safetensors")
    vectors = F.linear(vectors, part["linear.weight"], part["linear.bias"])
    assert (expected.std(dim=0) > 1e-3).all(), "the check would be blind"
    torch.testing.assert_close(vectors.softmax(dim=1), expected.float(), atol=1e-5, rtol=0)
    assert model.config.id2label == dict(enumerate(LABELS))
    with pytest.raises((OSError, ValueError), match=r"config\.json"):  # no classifier with a random head
        pipeline("text-classification", model=str(out))


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_texts_of_other_lengths_beside_one_change_nothing_whatever_side_the_base_pads(kind, tiny_bert, tmp_path):
    settings = json.loads((tiny_bert / "tokenizer_config.json").read_text())
    described = {"tokenizer_config.json": {**settings, "padding_side": "left"}}
    run, out = encoder_run(kind, True, tiny_bert, tmp_path, described), tmp_path / "out"
    fedpriv("export", run, out)
    texts = TEXTS[:2] + TEXTS[3:]
    expected = torch.tensor(saved.classify(saved.load(saved.find(run)), texts)).float()
    found = SentenceTransformer(str(out), device="cpu").encode(texts, convert_to_tensor=True).softmax(dim=1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("kind", "described"),
    [
        ("bert", DESCRIBED),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("bert", None), ("electra", None), ("mpnet", None))),
        pytest.param("mpnet", DESCRIBED, marks=pytest.mark.slow),
    ],
)
def test_a_class_of_transformers_with_other_weights_gives_the_models_probabilities(
    kind, described, normalize, tiny_bert, tmp_path
):
    run, out = encoder_run(kind, normalize, tiny_bert, tmp_path, described), tmp_path / "out"
    fedpriv("export", run, out, "--transformers")
    expected = torch.tensor(saved.classify(saved.load(saved.find(run)), TEXTS))
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.model_max_length == 32
    inputs = tokenizer(TEXTS, truncation=True, padding=True, return_tensors="pt")
    assert (expected.std(dim=0) > 1e-3).all(), "the check would be blind"
    torch.testing.assert_close(model(**inputs).logits.softmax(dim=1), expected.float(), atol=2e-6, rtol=0)
    assert "pipeline_tag" not in (out / "README.md").read_text()  # its run is not finished, so it has no card
    assert 'pipeline("text-classification"' in (out / "README.md").read_text()


def test_an_exported_language_model_answers_alike(tmp_path):
    run, out = chat_run(tmp_path, **INSTRUCTS), tmp_path / "out"
    assert as_json("export", run, out)["library"] == "transformers"
    loaded = saved.load(saved.find(run))
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert (model.dtype, model.generation_config.do_sample) == (torch.float32, False)
    prompt = saved.prompt_tokens(loaded, PROMPTS[0], 1)
    output = model.generate(input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)))
    text = loaded.tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True).strip()
    assert text == saved.generate(loaded, PROMPTS[:1])[0]
    assert text == as_json("predict", run, PROMPTS[0])["answer"]


def test_a_folder_is_whole_or_not_there_and_never_replaced(tiny_bert, tmp_path, monkeypatch):
    run, out = save_run(tmp_path / "run", {"model": str(tiny_bert)}, ("global",)), tmp_path / "out"
    out.mkdir()
    assert "exists; name a new folder" in fedpriv("export", run, out, code=2)[1]
    out.rmdir()
    monkeypatch.setattr(export, "save_file", failing(DISK_IS_FULL))
    assert "No space left on device" in fedpriv("export", run, out, code=1)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_what_no_library_can_express_is_refused_and_nothing_is_written(tiny_bert, tmp_path):
    pairs = save_run(tmp_path / "pairs", {"model": str(tiny_bert), "text_pair_column": "other"}, ("global",))
    assert "reads single texts" in fedpriv("export", pairs, tmp_path / "out", code=2)[1]
    loaded = saved.load(saved.find(encoder_run("bert", True, tiny_bert, tmp_path)))
    loaded.saved.convention["labels"] = list(map(str, range(33)))
    with pytest.raises(InputError, match="33 labels, and its own head has room for 32"):
        export.export(loaded, tmp_path / "out", "transformers")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_every_encoder_runs_and_all_its_exports_answer_without_fedpriv_as_predict_does(tiny_bert, table, tmp_path):
    runs, folders = {}, {}
    for kind, is_expressible in {**TABLE, "gpt2": "no"}.items():
        made = encoder_run(kind, True, tiny_bert, tmp_path / kind, DESCRIBED if kind == "mpnet" else None)
        values = {"model": tmp_path / kind / "model", "data": table, "client_column": "site", "max_length": 32}
        values |= {"rounds": 3, "noise_multiplier": 0.3, "layers": "all", "comparison": "false", "simulate": "true"}
        values |= {"out": tmp_path / kind / "trained", "train": "head" if kind == "albert" else "all"}
        fedpriv("run", *(word for key, value in values.items() if value for word in ("-c", f"{key}={value}")))
        for name, run in (("random", made), ("trained", tmp_path / kind / "trained")):
            loaded = saved.load(saved.find(run))
            stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / kind / "model", num_labels=3)
            again = adapters.load(stock, run / "variants" / "global")
            inputs = loaded.tokenizer(TEXTS[0], return_tensors="pt")
            torch.testing.assert_close(again(**inputs).logits, loaded.peft_model(**inputs).logits)
            for option in ((), ("--transformers",)):
                key = f"{kind} {name}{''.join(option)}"
                if option and is_expressible == "no":
                    with pytest.raises(InputError, match=f"of a {kind} pool by (mean|last)"):
                        export.export(loaded, tmp_path / "none", "transformers")
                    continue
                runs[key], folders[key] = run, str(tmp_path / "out" / key.replace(" ", "-"))
                fedpriv("export", run, folders[key], *option)
    for name, values in (("instructed", INSTRUCTS), ("plain", PLAIN)):
        key = f"causal {name}"
        runs[key], folders[key] = chat_run(tmp_path / f"causal-{name}", **values), str(tmp_path / "out" / key)
        fedpriv("export", runs[key], folders[key])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", RUNNER, json.dumps([folders, TEXTS, PROMPTS])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, found in json.loads(done.stdout.splitlines()[-1]).items():
        loaded = saved.load(saved.find(runs[name]))
        if name.startswith("causal"):
            assert found["said"] == "".join(f"{answer}\n" for answer in saved.generate(loaded, PROMPTS)), name
            continue
        expected = torch.tensor(saved.classify(loaded, TEXTS))
        said = [line.rsplit(" ", 1) for line in found["said"].splitlines()]
        assert [label for label, _ in said] == [LABELS[best] for best in expected.argmax(dim=1)], name
        torch.testing.assert_close(
            torch.tensor([float(score) for _, score in said]), expected.max(dim=1).values.float(), atol=1e-5, rtol=0
        )
        if found["scores"] is not None:
            torch.testing.assert_close(torch.tensor(found["scores"]), expected.float(), atol=1e-5, rtol=0)
