"""The Modelfile of a language model: by what Ollama makes a model of GGUF files that answers as the run did.

Ollama writes chats by a template of Go's. One is made of a chat template of Jinja's if that puts a text of its own
before and after the text of every turn, by its role alone, and nothing else; it is tried on chats before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedpriv.errors import InputError
from fedpriv.models.publishing.saved import LoadedVariant, ends_of

FILE = "Modelfile"

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
        """The template of Go's text/template, as Ollama calls it.

        Args:
            before: of the run's, before what a user says.
            after: of the run's, after it.
        """
        opening = f"{{{{ if not .System }}}}{self.opening}{{{{ end }}}}" if self.opening else ""
        return (
            f"{opening}{{{{ range .Messages }}}}"
            f'{{{{ if eq .Role "system" }}}}{self.system[0]}{{{{ .Content }}}}{self.system[1]}'
            f'{{{{ else if eq .Role "user" }}}}{self.user[0]}{before}{{{{ .Content }}}}{after}{self.user[1]}'
            f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{self.after_answer}{{{{ end }}}}{{{{ end }}}}'
        )


def turn_texts(tokenizer: Any) -> TurnTexts | None:
    """The texts that a tokenizer's chat template puts around turns; None if it does anything else as well.

    Args:
        tokenizer: of transformers, with a chat template.
    """

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
        loaded: a language model.
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
