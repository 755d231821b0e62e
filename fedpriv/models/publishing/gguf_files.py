"""A saved language model as files of llama.cpp and Ollama: its LoRA, a whole model, and a Modelfile.

Each file says what the run published and no more: of a GGUF base, tokenizer and license are copied; sizes and weights
are those of the model as it was trained. The same variant gives the same bytes.

By the Modelfile Ollama makes a model of them that answers as the run did. It writes chats by a template of Go's. One is
made of a chat template of Jinja's if that puts a text of its own before and after the text of every turn, by its role
alone, and nothing else; it is tried on chats before it is used.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.learning.adapters import gguf_file
from fedpriv.models.publishing._gguf import adapter_tensors, add_sizes, add_tokenizer, architecture_of, model_tensors
from fedpriv.models.publishing.card import GgufForm, Precision
from fedpriv.models.publishing.export import merged, whole_folder
from fedpriv.models.publishing.saved import LoadedVariant, SavedVariant, ends_of

ADAPTER, MODEL = "adapter.gguf", "model.gguf"

_NUMBERS: dict[Precision, tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]] = {
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}

MODELFILE = "Modelfile"

Chat = tuple[tuple[str, str], ...]
"""(role, text) of each turn."""

# No text is a part of another, or of what a template writes.
_SYSTEM, _FIRST, _ANSWER, _SECOND = "Q0systemQ", "Q1firstQ", "Q2answerQ", "Q3secondQ"

_TRIED: tuple[Chat, ...] = (
    (("user", "Is 3 < 5 & {x} 'so'?"),),
    (("system", "Be brief.\nAnd kind."), ("user", "é \U0001f642")),
    (("user", "a"), ("assistant", "b\n\nc"), ("user", "d")),
    (("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")),
)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The names of an export's files, and whether its Modelfile, or else the GGUF file alone, has the chat template."""

    files: tuple[str, ...]
    has_template: bool


def check(saved: SavedVariant) -> None:
    """Refuse, with an InputError, a variant that is no language model: llama.cpp has no classifier's head."""
    if saved.task != "CAUSAL_LM":
        raise InputError(f"gguf: {saved.name} is a classifier, and --gguf is for language models; leave it out")


def export(loaded: LoadedVariant, out: Path, *, form: GgufForm = "gguf", precision: Precision = "float16") -> Exported:
    """Write a language model for llama.cpp and Ollama; the folder is complete or not there.

    Args:
        loaded: the variant; its adapter is merged into its base, so it is of no further use.
        out: the folder; must not exist.
        precision: of the whole model's matrices. Vectors and the LoRA are in float32.

    Raises:
        InputError: the folder exists, or llama.cpp or a file of its cannot express the variant.
        OSError: it cannot be written.
    """
    check(loaded.saved)
    with whole_folder(out, loaded.saved, form) as folder:
        if form != "gguf-model":
            _write_adapter(loaded, folder / ADAPTER)
        content, has_template = modelfile(loaded, has_model=form != "gguf-adapter")
        (folder / MODELFILE).write_text(content, encoding="utf-8")
        if form != "gguf-adapter":
            _write_model(loaded, folder / MODEL, precision)
    return Exported(files=tuple(sorted(path.name for path in out.iterdir())), has_template=has_template)


def _write_adapter(loaded: LoadedVariant, path: Path) -> None:
    alpha, tensors = adapter_tensors(loaded.peft_model)
    writer = _writer(loaded, gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    _write(writer, path, tensors, gguf.GGMLQuantizationType.F32)


def _write_model(loaded: LoadedVariant, path: Path, precision: Precision) -> None:
    kind, file_type = _NUMBERS[precision]
    file = gguf_file(loaded.saved.model)
    source = None if file is None else gguf.GGUFReader(file)
    writer = _writer(loaded, gguf.GGUFType.MODEL)
    writer.add_file_type(file_type)
    if source is not None and (license := source.get_field(gguf.Keys.General.LICENSE)) is not None:
        writer.add_license(license.contents())
    add_sizes(writer, loaded.peft_model.config)
    add_tokenizer(writer, loaded, source)
    _write(writer, path, model_tensors(merged(loaded)), kind)


def _writer(loaded: LoadedVariant, kind: str) -> gguf.GGUFWriter:
    """A writer of a file that names what it is made of."""
    saved = loaded.saved
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[architecture_of(loaded.peft_model.config)])
    writer.add_type(kind)
    writer.add_name(f"{saved.base} {saved.name}")
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, saved.base)
    return writer


def _write(writer: gguf.GGUFWriter, path: Path, tensors: Mapping[str, Tensor], kind: gguf.GGMLQuantizationType) -> None:
    """Write the file, one tensor at a time in the format of the file."""
    kinds = {name: kind if values.dim() > 1 else gguf.GGMLQuantizationType.F32 for name, values in tensors.items()}
    for name, values in tensors.items():
        if kinds[name] is gguf.GGMLQuantizationType.F16 and values.abs().max() > torch.finfo(torch.float16).max:
            raise InputError(f"precision = float16: {name} has a value beyond 65504; give --precision bfloat16")
        num_bytes = values.numel() * gguf.GGML_QUANT_SIZES[kinds[name]][1]
        writer.add_tensor_info(name, values.shape, np.dtype(np.float32), num_bytes, raw_dtype=kinds[name])
    with closing(writer):
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, values in tensors.items():
            writer.write_tensor_data(gguf.quantize(values.contiguous().numpy(), kinds[name]))


@dataclass(frozen=True, kw_only=True)
class TurnTexts:
    """The texts that a chat template puts around those of the turns.

    Attributes:
        opening: before the first turn of a chat without a system turn.
        system: before and after a system turn.
        user: before a user's turn, and after it up to the answer.
        after_answer: after an answer.
    """

    opening: str
    system: tuple[str, str]
    user: tuple[str, str]
    after_answer: str

    def rendered(self, chat: Chat) -> str:
        """The chat as text, up to the next answer."""
        around = {"system": self.system, "user": self.user, "assistant": ("", self.after_answer)}
        turns = [around[role][0] + text + around[role][1] for role, text in chat]
        return ("" if chat[0][0] == "system" else self.opening) + "".join(turns)

    def in_go(self, *, before: str, after: str) -> str:
        """The template of Go's text/template, as Ollama calls it."""
        opening = f"{{{{ if not .System }}}}{self.opening}{{{{ end }}}}" if self.opening else ""
        return (
            f"{opening}{{{{ range .Messages }}}}"
            f'{{{{ if eq .Role "system" }}}}{self.system[0]}{{{{ .Content }}}}{self.system[1]}'
            f'{{{{ else if eq .Role "user" }}}}{self.user[0]}{before}{{{{ .Content }}}}{after}{self.user[1]}'
            f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{self.after_answer}{{{{ end }}}}{{{{ end }}}}'
        )


def turn_texts(tokenizer: Any) -> TurnTexts | None:
    """The texts that a tokenizer's chat template puts around turns; None if it does anything else as well."""

    def render(chat: Chat) -> str:
        turns = [{"role": role, "content": text} for role, text in chat]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    whole = (("system", _SYSTEM), ("user", _FIRST), ("assistant", _ANSWER), ("user", _SECOND))
    try:
        found = _from_parts(_parts(render(whole), whole), _parts(render(whole[1:2]), whole[1:2]))
        is_so = all(found.rendered(chat) == render(chat) for chat in (*_TRIED, whole))
    except Exception:  # a template raises what it likes, and a part may be missing
        return None
    # Some templates write today's date.
    return found if is_so and "strftime_now" not in str(tokenizer.chat_template) else None


def _parts(text: str, chat: Chat) -> list[str]:
    """The parts of a chat before, between and after the texts of its turns."""
    parts = []
    for _, said in chat:
        before, text = text.split(said)
        parts.append(before)
    return [*parts, text]


def _from_parts(whole: list[str], alone: list[str]) -> TurnTexts:
    """The texts around turns, as far as these two chats tell."""
    start, to_first, _, to_second, end = whole
    before = _common_end(_common_end(to_first, to_second), alone[0])
    return TurnTexts(
        opening=alone[0].removesuffix(before),
        system=(start, to_first.removesuffix(before)),
        user=(before, end),
        after_answer=to_second.removesuffix(before),
    )


def _common_end(one: str, other: str) -> str:
    least = min(len(one), len(other))
    length = next((n for n in range(least, 0, -1) if one[-n:] == other[-n:]), 0)
    return one[len(one) - length :]


def modelfile(loaded: LoadedVariant, *, has_model: bool) -> tuple[str, bool]:
    """(content of the Modelfile, whether it has the chat template).

    Args:
        has_model: whether model.gguf lies with it; else adapter.gguf alone does.

    Raises:
        InputError: no Modelfile can hold the run's system prompt.
    """
    reading, tokenizer = loaded.saved.reading, loaded.tokenizer
    lines = (
        ["FROM ./model.gguf"] if has_model else ["# base.gguf is yours.", "FROM ./base.gguf", "ADAPTER ./adapter.gguf"]
    )
    template = _template(loaded)
    if template is not None:
        lines.append(f"TEMPLATE {_quoted(template)}")
    if reading.instructs and reading.system_prompt:
        if not _can_be_quoted(reading.system_prompt):
            raise InputError('system_prompt: has """ or a character that cannot be seen, which no Modelfile can hold')
        lines.append(f"SYSTEM {_quoted(reading.system_prompt.strip())}")
    stops = [tokenizer.decode([end]) for end in sorted(ends_of(loaded))]
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in stops]
    parameters = {"temperature": 0, "repeat_penalty": 1, "num_predict": reading.max_new_tokens}
    lines += [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    return "\n".join([*lines, ""]), template is not None


def _template(loaded: LoadedVariant) -> str | None:
    """The template of Go's; None if there is none, and the model's own in the GGUF file is left to Ollama."""
    reading = loaded.saved.reading
    if not reading.instructs:
        return "{{ .Prompt }}"
    texts = turn_texts(loaded.tokenizer)
    if texts is None:
        return None
    before, after = reading.chat.around
    literal = "".join([texts.opening, *texts.system, *texts.user, texts.after_answer, before, after])
    made = texts.in_go(before=before, after=after)
    return made if "{{" not in literal and "}}" not in literal and _can_be_quoted(made) else None


def _can_be_quoted(text: str) -> bool:
    """Whether Ollama reads the text as it is: it drops characters that cannot be seen, and has no escapes."""
    return '"""' not in text and all(char.isprintable() or char in "\n\t" for char in text)


def _quoted(text: str) -> str:
    return f'"""{text}"""'
