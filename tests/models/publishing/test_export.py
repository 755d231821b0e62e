"""What `fedpriv export` wrote answers without fedpriv as `fedpriv predict` does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DebertaConfig,
    DebertaModel,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    ElectraModel,
    RobertaConfig,
    RobertaModel,
)

from fedpriv.models.publishing import export, saved
from tests.chats import chat_model
from tests.cli.command_line import as_json, fedpriv
from tests.served import LABELS, save_run

TEXTS = ["the patient has a rash", "pain in the chest today", "", "a knee cough " * 40]
PROMPTS = ["is this negative or positive?", "what is flu"]
KINDS = ["bert", "distilbert", "electra", "roberta", "deberta"]

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
    if asked == [texts]:
        scores = values["model"].encode(texts, convert_to_tensor=True).softmax(dim=1).tolist()
    found[name] = {"said": said.getvalue(), "scores": scores}
assert not [name for name in sys.modules if name.startswith("fedpriv.")]
print(json.dumps(found))
"""


def make_encoder(kind: str, tiny_bert: Path, folder: Path) -> Path:
    """A random encoder of a kind, with the tiny BERT's tokenizer."""
    if kind == "bert":
        return tiny_bert
    torch.manual_seed(0)
    vocabulary = json.loads((tiny_bert / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocabulary, "pad_token_id": 0, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 40}
    if kind == "distilbert":
        config = DistilBertConfig(
            vocab_size=vocabulary, dim=32, n_layers=2, n_heads=2, hidden_dim=48, max_position_embeddings=40
        )
        DistilBertModel(config).save_pretrained(folder)
    elif kind == "electra":
        ElectraModel(ElectraConfig(**sizes, embedding_size=32)).save_pretrained(folder)
    elif kind == "deberta":
        DebertaModel(DebertaConfig(**sizes)).save_pretrained(folder)
    else:
        RobertaModel(RobertaConfig(**sizes, type_vocab_size=1)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_bert / name).read_bytes())
    return folder


def encoder_run(kind: str, normalize: bool, tiny_bert: Path, folder: Path) -> Path:
    model = make_encoder(kind, tiny_bert, folder / "model")
    targets = {"target_modules": ["in_proj"]} if kind == "deberta" else {}
    recipe = "fedpriv" if normalize else "per-sample"
    values = {"model": str(model), "recipe": recipe, "layers": "all", **targets}
    return save_run(folder / "run", values, ("global",))


def causal_run(instructs: bool, folder: Path) -> Path:
    values: dict[str, object] = {"task": "CAUSAL_LM", "layers": "all", "data": "x.csv", "normalize_features": False}
    values |= {"max_new_tokens": 8, "max_length": 128}
    if instructs:
        values |= {"prompt_column": "p", "response_column": "r", "system_prompt": 'Say "it" kindly \U0001f642'}
        values |= {"prompt_template": "Q: {}\nIn one word?"}
    return save_run(folder / "run", {"model": str(chat_model(folder / "model")), **values}, ("global",), scale=0.5)


@pytest.mark.parametrize(("kind", "normalize"), [("bert", True), ("roberta", True), ("distilbert", False)])
def test_the_parts_of_an_export_give_the_models_probabilities(kind, normalize, tiny_bert, tmp_path):
    run, out = encoder_run(kind, normalize, tiny_bert, tmp_path), tmp_path / "out"
    fedpriv("export", run, out)
    expected = torch.tensor(saved.classify(saved.load(saved.find(run)), TEXTS))
    modules = [each["path"] for each in json.loads((out / "modules.json").read_text())]
    assert ("2_Normalize" in modules) == normalize
    model, tokenizer = AutoModel.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    inputs = tokenizer(TEXTS, truncation=True, max_length=32, padding=True, return_tensors="pt")
    if kind != "bert":
        inputs.pop("token_type_ids", None)
    mask = inputs["attention_mask"].unsqueeze(-1)
    vectors = (model(**inputs).last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)
    vectors = F.normalize(vectors, dim=1) if normalize else vectors
    for path in modules:
        if path.endswith("Dense"):
            part, settings = (
                load_file(out / path / "model.safetensors"),
                json.loads((out / path / "config.json").read_text()),
            )
            vectors = F.linear(vectors, part["linear.weight"], part["linear.bias"])
            vectors = vectors.relu() if settings["activation_function"].endswith("ReLU") else vectors
    assert (expected.std(dim=0) > 1e-3).all(), "the check would be blind"
    torch.testing.assert_close(vectors.softmax(dim=1), expected.float(), atol=1e-5, rtol=0)
    assert model.config.id2label == dict(enumerate(LABELS))


def test_an_exported_language_model_answers_alike(tmp_path):
    run, out = causal_run(True, tmp_path), tmp_path / "out"
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

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    assert "No space left on device" in fedpriv("export", run, out, code=1)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_what_no_library_can_express_is_refused_before_anything_is_loaded(tiny_bert, tmp_path):
    values = {"model": str(tiny_bert), "text_pair_column": "other"}
    run = save_run(tmp_path / "pairs", values, ("global",))
    assert "reads single texts" in fedpriv("export", run, tmp_path / "out", code=2)[1]
    path = run / "variants" / "global" / "fedpriv.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pooling": "unit-model"}))
    assert "pooling = unit-model" in fedpriv("export", run, tmp_path / "out", code=2)[1]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_example_of_every_readme_answers_without_fedpriv_as_predict_does(tiny_bert, tmp_path):
    runs = {}
    for kind in KINDS:
        for normalize in (True, False):
            if (kind, normalize) != ("deberta", True):  # refused: its head has several layers
                runs[f"{kind} {normalize}"] = encoder_run(kind, normalize, tiny_bert, tmp_path / f"{kind}-{normalize}")
    runs |= {
        f"causal {instructs}": causal_run(instructs, tmp_path / f"causal-{instructs}") for instructs in (True, False)
    }
    folders = {name: str(tmp_path / "out" / name.replace(" ", "-")) for name in runs}
    for name, run in runs.items():
        fedpriv("export", run, folders[name])
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


def test_a_classifier_with_its_own_pooling_becomes_a_transformers_model(tiny_bert, tmp_path):
    run, out = encoder_run("deberta", False, tiny_bert, tmp_path), tmp_path / "out"
    fedpriv("export", run, out)
    expected = torch.tensor(saved.classify(saved.load(saved.find(run)), TEXTS[:1]))
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    inputs = AutoTokenizer.from_pretrained(out)(TEXTS[0], return_tensors="pt")
    torch.testing.assert_close(model(**inputs).logits.softmax(dim=1), expected.float(), atol=1e-5, rtol=0)
