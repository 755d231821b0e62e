"""The tokens of records, as texts or as chats of which the response is learned; and how a saved model reads texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from fedpriv.config import DataSection, RunConfig
from fedpriv.data import records
from fedpriv.data.chat import ChatFormat
from fedpriv.data.records import Records, Row, num_tokens, usable
from fedpriv.errors import InputError


class Encoder(Protocol):
    """Gives the tokens of records. No record decides another's."""

    def encode(self, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> list[Row]:
        """[records] the features of each record, at most `max_length` tokens; None for one that no model can read."""

    def names(self, tokenizer: Any, *, pairs: bool, max_length: int) -> tuple[str, ...]:
        """The names of the features, whatever the records are; none if the tokenizer fails on an empty text."""

    def key(self, tokenizer: Any) -> str:
        """A text that differs wherever the same tokenizer would give other tokens."""


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """Texts, or pairs of texts, as the tokenizer frames them.

    Attributes:
        ends: whether the end-of-sequence token follows a text, where the tokenizer adds none and there is room.
    """

    ends: bool = False

    def encode(self, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> list[Row]:
        """See `Encoder`."""
        rows = records.encode(tokenizer, texts, pairs, max_length)
        end = getattr(tokenizer, "eos_token_id", None) if self.ends else None
        return rows if end is None else [_ended(row, end, max_length) for row in rows]

    def names(self, tokenizer: Any, *, pairs: bool, max_length: int) -> tuple[str, ...]:
        """See `Encoder`."""
        (row,) = records.encode(tokenizer, [""], [""] if pairs else None, max_length)
        return tuple(row or ())

    def key(self, tokenizer: Any) -> str:
        """See `Encoder`."""
        return f"text {getattr(tokenizer, 'eos_token_id', None)}" if self.ends else ""


def chat_format_of(config: DataSection) -> ChatFormat:
    """How a run puts its prompts."""
    return ChatFormat(
        system_prompt=config.system_prompt,
        prompt_template=config.prompt_template,
        has_messages=bool(config.messages_column),
    )


def encoder_of(config: RunConfig) -> Encoder:
    """The encoder of a run's records."""
    return chat_format_of(config) if config.instructs else PlainText(ends=config.task == "CAUSAL_LM")


def num_cut(found: Records, end: int | None) -> int:
    """How many of the usable records have no end: their text, or response, was longer than there was room for.

    Args:
        found: of a causal model.
        end: id of the token that ends a record; None if there is no such token.
    """
    if end is None:
        return 0
    lasts = [int(row[-1]) for row, item in zip(found.features["input_ids"], found.items(), strict=True) if usable(item)]
    return sum(last != end for last in lasts)


def num_full(found: Records, max_length: int) -> int:
    """How many of the usable records have `max_length` tokens: something of each may be cut."""
    return sum(usable(item) and num_tokens(item) >= max_length for item in found.items())


def _ended(row: Row, end: int, max_length: int) -> Row:
    """The tokens with an end behind them, if they lack one and there is room."""
    if row is None or len(row["input_ids"]) >= max_length or row["input_ids"][-1:] == [end]:
        return row
    return {name: [*column, end if name == "input_ids" else (column or [0])[-1]] for name, column in row.items()}


@dataclass(frozen=True, kw_only=True)
class TextReading:
    """How texts become tokens, and how long an answer is.

    Attributes:
        max_length: tokens of a text, special ones included.
        pairs: whether a record is two texts.
        instructs: whether a text is a prompt, put in the model's chat template.
        system_prompt: put before a prompt; empty puts none.
        prompt_template: a text around each prompt, with one `{}` in its place; empty for the prompt alone.
        max_new_tokens: of an answer.
    """

    max_length: int
    pairs: bool = False
    instructs: bool = False
    system_prompt: str = ""
    prompt_template: str = ""
    max_new_tokens: int = 96

    @classmethod
    def of(cls, config: RunConfig) -> TextReading:
        """How the models of a run read."""
        return cls(
            max_length=config.max_length,
            pairs=bool(config.text_pair_column),
            instructs=config.instructs,
            system_prompt=config.system_prompt,
            prompt_template=config.prompt_template,
            max_new_tokens=config.max_new_tokens,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, where: str) -> TextReading:
        """The reading whose fields `to_json` gave.

        Args:
            values: of a file.
            where: the file, for errors.

        Raises:
            InputError: a value is missing, unknown, or of another type.
        """
        kinds = {"int": int, "bool": bool, "str": str}
        wrong = sorted({field.name for field in fields(cls)} ^ values.keys())
        wrong += [f.name for f in fields(cls) if f.name in values and type(values[f.name]) is not kinds[str(f.type)]]
        if wrong:
            raise InputError(f"{where}: reading.{wrong[0]} is missing, unknown or of another type")
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)

    @property
    def chat(self) -> ChatFormat:
        """How one prompt is put to the model."""
        return ChatFormat(system_prompt=self.system_prompt, prompt_template=self.prompt_template)

    @property
    def encoder(self) -> Encoder:
        """The encoder that turns texts, or prompts with their responses, into tokens."""
        return self.chat if self.instructs else PlainText()
