"""Texts of a model card: lines of code that load what a run saved or exported, and names that others wrote.

A name that others wrote, such as a label, becomes Markdown that says it and does nothing else.
"""

from __future__ import annotations

import re
import shlex
import string
from typing import Literal, get_args

from fedpriv.learning.adapters import pooling
from fedpriv.learning.data.records import TextReading
from fedpriv.models.publishing.saved import SavedVariant

GgufForm = Literal["gguf", "gguf-adapter", "gguf-model"]
"""The content of a folder for llama.cpp and Ollama: a LoRA and a whole model, or one of them."""

Form = Literal["adapter", "sentence-transformers", "transformers", GgufForm]
"""The content of a folder: a peft adapter, or a whole model for one of two libraries, or files for llama.cpp."""

Precision = Literal["float16", "bfloat16", "float32"]
"""The format of a GGUF file's matrices."""

_SENTENCES = """
import json
from sentence_transformers import SentenceTransformer

folder = "."  # this folder
model = SentenceTransformer(folder)
with open(f"{folder}/config.json", encoding="utf-8") as file:
    labels = json.load(file)["id2label"]
for scores in model.encode(TEXTS, convert_to_tensor=True).softmax(dim=1):
    best = int(scores.argmax())
    print(labels[str(best)], float(scores[best]))
"""

_CLASSES = """
from transformers import AutoModelForSequenceClassification, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
inputs = tokenizer(ARGUMENTS, truncation=True, max_length=LENGTH, return_tensors="pt")
scores = model(**inputs).logits[0].softmax(dim=0)
best = int(scores.argmax())
print(model.config.id2label[best], float(scores[best]))
"""

_ANSWERS = """
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder).eval()
prompt = "your question"
INPUTS
output = model.generate(**inputs)  # greedy, as generation_config.json says
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
"""

_FEDPRIV = """
fedpriv predict . "your text"
"""

_PEFT_CLASSES = """
import json
from peft import AutoPeftModelForSequenceClassification

folder = "."  # this folder
with open(f"{folder}/fedpriv.json", encoding="utf-8") as file:
    labels = json.load(file)["labels"]
model = AutoPeftModelForSequenceClassification.from_pretrained(
    folder, id2label=dict(enumerate(labels)), label2id={label: index for index, label in enumerate(labels)}
)
"""

_PEFT_ANSWERS = """
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained(".")  # this folder
"""

_VLLM = """
vllm serve BASE --enable-lora --max-lora-rank RANK --lora-modules NAME=.
"""

# The ranks that vLLM takes.
_RANKS_OF_VLLM = (8, 16, 32, 64, 128, 256, 320, 512)

_LLAMA_CHAT = """
from llama_cpp import Llama

model = Llama(FILES, n_ctx=0, verbose=False)
prompt = "your question"
messages = MESSAGES
answer = model.create_chat_completion(messages, temperature=0, max_tokens=LENGTH)
print(answer["choices"][0]["message"]["content"].strip())
"""

_LLAMA_TEXT = """
from llama_cpp import Llama

model = Llama(FILES, n_ctx=0, verbose=False)
prompt = "your question"
answer = model.create_completion(prompt, temperature=0, max_tokens=LENGTH)
print(answer["choices"][0]["text"].strip())
"""

_OLLAMA = """
ollama create my-model -f Modelfile
ollama run my-model "your question"
"""

_MOST = 200

# Letters, digits and what joins them in names: means nothing in Markdown where it begins with a letter.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9 ,/.-]*")


def lines(saved: SavedVariant, form: Form) -> list[str]:
    """The section on use of a card, in Markdown."""
    if form == "adapter":
        return _of_adapter(saved)
    if form in get_args(GgufForm):
        return _of_gguf(saved, form)
    if form == "sentence-transformers":
        return [
            *_code(_SENTENCES.replace("TEXTS", '["your text"]')),
            "Scores are probabilities, in the order of labels.",
        ]
    if saved.task == "SEQ_CLS":
        arguments = '"first text", "second text"' if saved.reading.pairs else '"your text"'
        return _code(_CLASSES.replace("ARGUMENTS", arguments).replace("LENGTH", str(saved.reading.max_length)))
    return _code(_ANSWERS.replace("INPUTS", _inputs(saved.reading)))


def _of_adapter(saved: SavedVariant) -> list[str]:
    found = [
        "Where fedpriv is installed, in this folder:",
        "",
        *_code(_FEDPRIV, "sh"),
        "`fedpriv export . OUT` writes a model that loads without fedpriv and answers alike.",
        "",
    ]
    if saved.task != "SEQ_CLS":
        return [
            *found,
            "With peft alone, which has neither the prompts' form nor the end of an answer:",
            "",
            *_code(_PEFT_ANSWERS),
            *_for_vllm(saved),
        ]
    if saved.pooling == "model":
        return [*found, "With peft alone:", "", *_code(_PEFT_CLASSES)]
    kind = (
        "mean pooling and vectors of a fixed length"
        if saved.pooling == "unit-mean"
        else ("mean pooling" if saved.pooling == "mean" else "vectors of a fixed length")
    )
    found += [
        f"**Plain peft loads the tensors and gives other probabilities**: the head was trained on {kind}, which peft "
        "does not know. `fedpriv.learning.adapters.load`, `fedpriv predict` and `fedpriv export` bring that; without "
        "them use this for the tensors alone:",
        "",
        *_code(_PEFT_CLASSES),
    ]
    if saved.pooling == "unit-mean":
        found += [
            f"Bases of the types {', '.join(sorted(pooling.REPLACED))} have another head here, "
            "which peft alone refuses."
        ]
    return found


def _for_vllm(saved: SavedVariant) -> list[str]:
    ranks = [rank for rank in _RANKS_OF_VLLM if rank >= int(saved.settings.get("r") or _RANKS_OF_VLLM[-1] + 1)]
    if not ranks:
        return ["vLLM takes no adapter of this kind or rank; serve what `fedpriv export . OUT` writes."]
    words = {"BASE": shlex.quote(_one_line(saved.base)), "RANK": str(ranks[0]), "NAME": shlex.quote(saved.name)}
    code = _VLLM
    for word, value in words.items():
        code = code.replace(word, value)
    return ["With vLLM, as one of the adapters of its base:", "", *_code(code, "sh")]


def _of_gguf(saved: SavedVariant, form: str) -> list[str]:
    reading = saved.reading
    code = _LLAMA_CHAT.replace("MESSAGES", _messages(reading)) if reading.instructs else _LLAMA_TEXT
    code = code.replace("LENGTH", str(reading.max_new_tokens))
    found = []
    if form != "gguf-adapter":
        found += ["`model.gguf` is the whole model. With llama-cpp-python:", ""]
        found += [*_code(code.replace("FILES", '"model.gguf"')), "With llama.cpp:", ""]
        found += _code(_asked(reading, "-m model.gguf"), "sh")
    if form != "gguf-model":
        base = f"{markdown(saved.base)} as a GGUF file, here `base.gguf`"
        found += [f"`adapter.gguf` is the LoRA for {base}. With llama-cpp-python:", ""]
        found += _code(code.replace("FILES", '"base.gguf", lora_path="adapter.gguf"'))
        found += ["With llama.cpp:", "", *_code(_asked(reading, "-m base.gguf --lora adapter.gguf"), "sh")]
    return [*found, "With Ollama:", "", *_code(_OLLAMA, "sh")]


def _asked(reading: TextReading, files: str) -> str:
    """The command of llama.cpp that asks a question as in training."""
    options = f"{files} --temp 0 -n {reading.max_new_tokens}"
    if not reading.instructs:
        return f"llama-completion {options} -no-cnv -p 'your question'"
    before, after = reading.chat.around
    system = f" -sys {shlex.quote(reading.system_prompt.strip())}" if reading.system_prompt else ""
    return f"llama-cli {options} -st{system} -p {shlex.quote(before + 'your question' + after)}"


def _inputs(reading: TextReading) -> str:
    """Lines that make tokens of `prompt` as in training."""
    if not reading.instructs:
        return 'inputs = tokenizer(prompt, return_tensors="pt")'
    return (
        f"messages = {_messages(reading)}\n"
        "inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"\n'
        ")"
    )


def _messages(reading: TextReading) -> str:
    """The turns that put `prompt` as in training, in Python."""
    before, after = reading.chat.around
    content = f"{before!r} + prompt.strip() + {after!r}" if reading.prompt_template else "prompt.strip()"
    system = f'{{"role": "system", "content": {reading.system_prompt.strip()!r}}}, ' if reading.system_prompt else ""
    return f'[{system}{{"role": "user", "content": {content}}}]'


def _code(text: str, language: str = "python") -> list[str]:
    """A block of code; a text of the operator's in it stays within its quotes and the block."""
    fence = "`" * (1 + max(2, *map(len, re.findall("`+", text)), 0))
    return [f"{fence}{language}", *text.strip().splitlines(), fence, ""]


def _one_line(text: str) -> str:
    """The text on one line, without characters that steer a reader's screen, cut to 200 characters."""
    line = " ".join(text.split())
    printable = "".join(char if char.isprintable() else "\ufffd" for char in line)
    return printable if len(printable) <= _MOST else printable[: _MOST - 1] + "…"


def markdown(text: str) -> str:
    """The text on one line, as no markup, link, HTML, table cell or heading: unless it is plain, all is escaped."""
    line = _one_line(text)
    if _PLAIN.fullmatch(line) and "www." not in line.lower():
        return line
    return "".join(f"\\{char}" if char in string.punctuation else char for char in line)
