"""How a saved model reads texts: all of a run's configuration that decides which tokens it sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from fedpriv.config import RunConfig
from fedpriv.data.chat import ChatFormat
from fedpriv.data.encoding import Encoder, PlainText
from fedpriv.errors import InputError


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
        """What `to_json` gave.

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
        """What makes tokens of texts, or of prompts with their responses."""
        return self.chat if self.instructs else PlainText()
