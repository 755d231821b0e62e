"""What `fedpriv export --gguf` wrote computes what peft computes, by an independent reading of its files."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the extra llm is not installed")

import gguf
from peft import LNTuningConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Regex, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fedpriv.errors import InputError
from fedpriv.models import publishing
from fedpriv.models.publishing import _gguf, gguf_files, saved
from tests.chats import INST, chat_tokenizer
from tests.cli.command_line import as_json, fedpriv
from tests.failing import DISK_IS_FULL, failing
from tests.marks import slow
from tests.models.publishing.llama_restated import File, logits
from tests.models.publishing.runs import CHAT, finished
from tests.served import save_run
from tests.tiny_gguf import TEMPLATE, tiny_llama, write_gguf

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = [1, 40, 17, 300, 3, 255, 8, 9, 121]
SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.2},
}
ROPE = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA_3 = {"rope_parameters": {**ROPE, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}
BIASED, WIDE = {"attention_bias": True, "mlp_bias": True}, {"head_dim": 12, "tie_word_embeddings": True}
# {name: the architecture, and what is not its default}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biased": ("llama", BIASED),
    "wide": ("llama", WIDE),
    "llama-3": ("llama", LLAMA_3),
    "all options": ("llama", BIASED | WIDE | LLAMA_3),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),
}


def random_model(kind: str = "llama", **values: Any) -> Any:
    architecture, options = KINDS[kind]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **{**SIZES, **options, **values}))


def base_folder(folder: Path, kind: str = "llama", tokenizer: Any = None, **values: Any) -> Path:
    """The folder of a random model with grouped-query attention, whose biases are not zero, and of its tokenizer."""
    tokenizer = tokenizer or chat_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = random_model(kind, vocab_size=len(tokenizer), pad_token_id=0, **values)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def causal_run(folder: Path, model: Path, **values: Any) -> Path:
    """A run whose random adapter moves all linear layers."""
    return finished(folder, model, ("global",), values={**CHAT, "rank": 3, "target_modules": TARGETS, **values})


def reference(run: Path, tokens: list[int] = TOKENS) -> np.ndarray[Any, Any]:
    """[tokens, vocabulary] by peft."""
    with torch.inference_mode():
        model = saved.load(saved.find(run)).peft_model
        return np.asarray(model(input_ids=torch.tensor([tokens])).logits[0].double())


def exported(run: Path, out: Path, **options: Any) -> Path:
    gguf_files.export(saved.load(saved.find(run)), out, **options)
    return out


def base_file(run: Path, out: Path) -> Path:
    """The base of a run alone as a GGUF file: the whole model of an adapter that is zero."""
    loaded = saved.load(saved.find(run))
    for name, parameter in loaded.peft_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(parameter)
    gguf_files.export(loaded, out, form="gguf-model", precision="float32")
    return out / gguf_files.MODEL


def gap(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    assert expected.std() > 0.1, "the check would be blind"
    return float(np.abs(found - expected).max())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return base_folder(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def run(model) -> Path:
    """A run of it, which all tests only read."""
    return causal_run(model.parent / "run", model)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("all options", {}),
        ("llama", {"aggregation": "fed-sb", "rank": 4}),  # r between frozen factors becomes an ordinary LoRA
        *(pytest.param(kind, {}, marks=pytest.mark.slow) for kind in ("llama", "biased", "wide", "llama-3", "mistral")),
    ],
)
def test_a_llama_and_its_lora_compute_what_peft_computes(kind, values, tmp_path):
    run = causal_run(tmp_path / "run", base_folder(tmp_path / "model", kind), **values)
    out, base = exported(run, tmp_path / "out", precision="float32"), base_file(run, tmp_path / "base")
    expected = reference(run)
    assert gap(logits(base, TOKENS), expected) > 0.05, "the adapter does nothing"
    assert gap(logits(base, TOKENS, out / "adapter.gguf"), expected) < 1e-4
    assert gap(logits(out / "model.gguf", TOKENS), expected) < 1e-4
    assert File(out / "model.gguf").kinds["blk.1.ffn_up.weight"] == "F32"


@pytest.mark.parametrize("kind", ["qwen3", *slow("llama", "wide", "qwen2")])
def test_transformers_reads_the_whole_model_back(kind, tmp_path):
    run = causal_run(tmp_path / "run", base_folder(tmp_path / "model", kind))
    out = exported(run, tmp_path / "out", form="gguf-model", precision="float32")
    model = AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32).eval()
    with torch.inference_mode():
        found = np.asarray(model(input_ids=torch.tensor([TOKENS])).logits[0].double())
    assert gap(found, reference(run)) < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(out, gguf_file="model.gguf")
    text = "<|im_start|>user\nThe patient's é 12 years\n\n<|im_end|>"
    own = chat_tokenizer()
    assert tokenizer(text, add_special_tokens=False).input_ids == own(text, add_special_tokens=False).input_ids
    assert tokenizer.chat_template == own.chat_template
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<s>")


def test_without_the_order_of_rows_both_files_are_wrong(run, tmp_path, monkeypatch):
    expected, base = reference(run), base_file(run, tmp_path / "base")
    monkeypatch.setattr(_gguf, "_taking_turns", lambda rows, _heads: rows)
    out = exported(run, tmp_path / "out", precision="float32")
    assert gap(logits(base, TOKENS, out / "adapter.gguf"), expected) > 1e-2
    assert gap(logits(out / "model.gguf", TOKENS), expected) > 1e-2


def attached(kind: Any = LoraConfig, **settings: Any) -> Any:
    return get_peft_model(random_model(vocab_size=50), kind(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"rank_pattern": {"k_proj": 5, "down_proj": 1}},
        {"alpha_pattern": {"q_proj": 3.0}, "use_rslora": True},
        {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 64.0}},
    ],
)
def test_ranks_and_alphas_of_single_layers_are_in_the_factors(settings):
    torch.manual_seed(0)
    model = attached(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights=False, **settings)
    alpha, tensors = _gguf.adapter_tensors(model)
    names = gguf.get_tensor_name_map(_gguf.architecture_of(model.config), 2)
    for name, layer in model.get_base_model().named_modules():
        if name.endswith(tuple(TARGETS)):
            own = names.get_name(name)
            left, right = tensors[f"{own}.weight.lora_b"], tensors[f"{own}.weight.lora_a"]
            delta = layer.get_delta_weight("default")
            if name.endswith(("q_proj", "k_proj")):
                delta = _gguf._taking_turns(delta, 4 if "q_proj" in name else 2)
            torch.testing.assert_close(alpha / len(right) * left @ right, delta)


@pytest.mark.parametrize(
    ("precision", "kind", "bits"), [("float16", "F16", 11), pytest.param("bfloat16", "BF16", 8, marks=pytest.mark.slow)]
)
def test_matrices_are_rounded_once_and_vectors_never(precision, kind, bits, run, tmp_path):
    exact = File(exported(run, tmp_path / "exact", form="gguf-model", precision="float32") / "model.gguf")
    file = File(exported(run, tmp_path / "out", form="gguf-model", precision=precision) / "model.gguf")
    for name, values in exact.tensors.items():
        assert file.kinds[name] == (kind if values.ndim > 1 else "F32")
        error = np.abs(file.tensors[name] - values)
        assert (error <= 2.0**-bits * np.abs(values) + 2.0**-25).all(), name
        assert (error > 0).any() == (values.ndim > 1)


def test_a_value_that_float16_lacks_is_refused(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run = causal_run(tmp_path / "run", folder)
    said = fedpriv("export", run, tmp_path / "out", "--gguf", code=2)[1]
    assert "precision = float16: blk.0.ffn_up.weight has a value beyond 65504; give --precision bfloat16" in said
    assert not (tmp_path / "out").exists()
    as_json("export", run, tmp_path / "out", "--gguf", "--precision", "bfloat16")


def test_a_base_that_came_from_a_gguf_file_keeps_its_tokenizer_and_license(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPRIV_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), license="apache-2.0")
    run = causal_run(tmp_path / "run", file)
    out = exported(run, tmp_path / "out", precision="float32")
    before, after = File(file).fields, File(out / "model.gguf").fields
    kept = [name for name in before if name.startswith("tokenizer.")]
    assert "tokenizer.ggml.merges" in kept
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert (after["tokenizer.chat_template"], after["general.license"]) == (TEMPLATE, "apache-2.0")
    assert gap(logits(file, TOKENS[:3], out / "adapter.gguf"), reference(run, TOKENS[:3])) < 1e-4
    assert gap(logits(out / "model.gguf", TOKENS[:3]), reference(run, TOKENS[:3])) < 1e-4


def test_files_are_a_function_of_the_variant_and_say_nothing_else(run, tmp_path):
    first, second = exported(run, tmp_path / "a"), exported(run, tmp_path / "b")
    names = sorted(path.name for path in first.iterdir())
    assert names == ["Modelfile", "README.md", "adapter.gguf", "model.gguf"]
    for name in names:
        content = (first / name).read_bytes()
        assert content == (second / name).read_bytes()
        for secret in (str(tmp_path), str(run.parent), "Anna", "hospital.csv"):
            assert secret.encode() not in content
    adapter = File(first / "adapter.gguf").fields
    assert (adapter["general.type"], adapter["adapter.type"]) == ("adapter", "lora")
    assert (adapter["general.architecture"], adapter["general.name"]) == ("llama", "model global")
    readme = (first / "README.md").read_text()
    assert "| local | 1.235 | 1e-5 |" in readme
    assert "library_name: gguf" in readme


def test_the_command_writes_both_or_one_and_never_half(run, tmp_path, monkeypatch):
    written = as_json("export", run, tmp_path / "all", "--gguf")["files"]
    assert written == ["Modelfile", "README.md", "adapter.gguf", "model.gguf"]
    found = as_json("export", run, tmp_path / "adapter", "--gguf", "--only", "adapter")
    assert found["files"] == ["Modelfile", "README.md", "adapter.gguf"]
    assert found["modelfile_has_template"]
    assert "ADAPTER ./adapter.gguf" in (tmp_path / "adapter" / "Modelfile").read_text()
    assert "model.gguf" not in (tmp_path / "adapter" / "README.md").read_text()
    found = as_json("export", run, tmp_path / "model-alone", "--gguf", "--only", "model")
    assert found["files"] == ["Modelfile", "README.md", "model.gguf"]
    assert "adapter.gguf" not in (tmp_path / "model-alone" / "README.md").read_text()
    assert "exists; name a new folder" in fedpriv("export", run, tmp_path / "all", "--gguf", code=2)[1]
    for options, said in (
        (["--gguf", "--only", "base"], "must be adapter or model"),
        (["--gguf", "--only", "adapter", "--precision", "float32"], "a LoRA is in float32"),
        (["--only", "adapter"], "are of --gguf"),
        (["--gguf", "--transformers"], "transformers, gguf"),
    ):
        assert said in fedpriv("export", run, tmp_path / "x", *options, code=2)[1]
    monkeypatch.setattr(gguf, "quantize", failing(DISK_IS_FULL))
    assert "No space left on device" in fedpriv("export", run, tmp_path / "x", "--gguf", code=1)[1]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "x"))]


def test_whole_weights_become_a_whole_model_alone_and_a_classifier_none(model, tiny_bert, tmp_path):
    run = causal_run(tmp_path / "run", model, aggregation="fedavg")
    assert "whole weights were trained" in fedpriv("export", run, tmp_path / "out", "--gguf", code=2)[1]
    assert not (tmp_path / "out").exists()
    out = exported(run, tmp_path / "out", form="gguf-model", precision="float32")
    assert gap(logits(out / "model.gguf", TOKENS), reference(run)) < 1e-4
    classifier = save_run(tmp_path / "classifier", {"model": str(tiny_bert)}, ("global",))
    assert "is a classifier" in fedpriv("export", classifier, tmp_path / "none", "--gguf", code=2)[1]


def refusal(function: Any, *arguments: Any) -> str:
    with pytest.raises(InputError) as refused:
        function(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_no_lora_file_holds_is_refused_by_name():
    whole = attached(LNTuningConfig, target_modules=["model.layers.0.mlp.up_proj"])
    assert "whole weights were trained" in refusal(_gguf.adapter_tensors, whole)
    for targets, more, said in (
        (["q_proj"], {"use_dora": True}, "use_dora = True: model.layers.0.self_attn.q_proj"),
        (["q_proj"], {"lora_bias": True}, "lora_bias = True"),
        (["q_proj"], {"modules_to_save": ["embed_tokens"]}, "modules_to_save = model.embed_tokens"),
        (["embed_tokens"], {}, "target_modules = model.embed_tokens"),
        (["lm_head"], {}, "target_modules = lm_head"),
    ):
        assert said in refusal(_gguf.adapter_tensors, attached(r=2, target_modules=targets, **more))


def test_models_that_llama_cpp_computes_otherwise_are_refused_by_name():
    assert "hidden_act = 'gelu'" in refusal(_gguf.model_tensors, random_model(vocab_size=50, hidden_act="gelu"))
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
    assert "rope_type = 'yarn'" in refusal(_gguf.model_tensors, random_model(vocab_size=50, rope_parameters=yarn))
    model = random_model(vocab_size=50)
    model.model.extra = torch.nn.Linear(2, 2)
    assert "tensor = 'model.extra.weight'" in refusal(_gguf.model_tensors, model)
    model.config.sliding_window = 64
    assert "sliding_window = 64" in refusal(_gguf.model_tensors, model)
    model.config.model_type = "gemma2"
    assert "model_type = 'gemma2': --gguf knows llama, mistral" in refusal(_gguf.architecture_of, model.config)


def divided(name: str) -> Any:
    """A tokenizer that divides texts as the one of this name in llama.cpp does."""
    tokenizer = chat_tokenizer()
    backend = tokenizer.backend_tokenizer
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name != "gpt-2":
        words = _gguf._WORDS_OF_QWEN if name == "qwen2" else _gguf._WORDS_OF_LLAMA_3
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), whole])
        if name == "qwen2":
            backend.normalizer = normalizers.NFC()
        else:
            backend.model.ignore_merges = True
    return tokenizer


@pytest.mark.parametrize("name", ["qwen2", *slow("gpt-2", "smollm", "llama-bpe")])
def test_a_tokenizers_words_are_named_as_llama_cpp_names_them_and_its_template_is_left_to_the_file(name, tmp_path):
    tokenizer = divided(name)
    tokenizer.chat_template = INST  # which Go cannot express
    run = causal_run(tmp_path / "run", base_folder(tmp_path / "model", tokenizer=tokenizer))
    out = tmp_path / "out"
    assert not as_json("export", run, out, "--gguf", "--only", "model")["modelfile_has_template"]
    assert "TEMPLATE" not in (out / "Modelfile").read_text()
    fields = File(out / "model.gguf").fields
    assert fields["tokenizer.chat_template"] == INST
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", name)
    tokenizer = chat_tokenizer()
    assert fields["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert fields["tokenizer.ggml.token_type"][:6] == [3, 3, 3, 3, 3, 1]
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert not fields["tokenizer.ggml.add_bos_token"]


def test_other_tokenizers_are_refused_and_need_none_for_the_adapter_alone(tmp_path):
    by_spaces = divided("gpt-2")
    by_spaces.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for number, tokenizer in enumerate((chat_tokenizer(spaces=True), by_spaces)):
        run = causal_run(tmp_path / f"run-{number}", base_folder(tmp_path / f"model-{number}", tokenizer=tokenizer))
        said = fedpriv("export", run, tmp_path / "out", "--gguf", code=2)[1]
        assert "tokenizer = BPE: --gguf knows byte-level BPE that divides texts as gpt-2, smollm" in said
    as_json("export", run, tmp_path / "adapter", "--gguf", "--only", "adapter")
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_larger_than_the_tokenizers_is_filled(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    larger = AutoModelForCausalLM.from_pretrained(folder)
    larger.resize_token_embeddings(len(tokenizer) + 3)
    larger.save_pretrained(folder)
    fields = File(exported(causal_run(tmp_path / "run", folder), tmp_path / "out") / "model.gguf").fields
    assert fields["tokenizer.ggml.tokens"][-1] == f"[PAD{len(tokenizer) + 2}]"
    assert fields["tokenizer.ggml.token_type"][-3:] == [5, 5, 5]


def test_without_its_package_the_option_says_which_is_missing(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    for name in ("gguf_files", "_gguf"):
        monkeypatch.delitem(sys.modules, f"fedpriv.models.publishing.{name}")
        monkeypatch.delattr(publishing, name)
    assert "pip install 'fedpriv[llm]'" in fedpriv("export", run, tmp_path / "out", "--gguf", code=2)[1]


PLAIN = {"prompt_column": "", "response_column": "", "text_column": "t"}


def beginning(*, begins: bool) -> Any:
    """A tokenizer that puts a token before a text, or none."""
    tokenizer = chat_tokenizer()
    if begins:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    return tokenizer


@pytest.mark.parametrize("begins", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_plain_text_begins_as_in_training_and_a_chat_as_its_template_says(begins, tmp_path):
    folder = base_folder(tmp_path / "model", tokenizer=beginning(begins=begins))
    out = exported(causal_run(tmp_path / "plain", folder, **PLAIN), tmp_path / "out")
    assert File(out / "model.gguf").fields["tokenizer.ggml.add_bos_token"] == begins
    assert "{{ .Prompt }}" in (out / "Modelfile").read_text()
    assert "create_completion" in (out / "README.md").read_text()
    chat = exported(causal_run(tmp_path / "chat", folder), tmp_path / "chats", form="gguf-model")
    assert not File(chat / "model.gguf").fields["tokenizer.ggml.add_bos_token"]


def test_an_end_of_turn_that_is_no_end_of_text_is_noted(tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<s>"
    run = causal_run(tmp_path / "run", base_folder(tmp_path / "model", tokenizer=tokenizer, eos_token_id=1))
    out = exported(run, tmp_path / "out", form="gguf-model")
    fields = File(out / "model.gguf").fields
    assert fields["tokenizer.ggml.eot_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    stops = [line for line in (out / "Modelfile").read_text().splitlines() if "stop" in line]
    assert stops == ['PARAMETER stop """<s>"""', 'PARAMETER stop """<|im_end|>"""']
