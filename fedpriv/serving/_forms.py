"""Answers held to a JSON schema: at each step only tokens are drawn that some continuation makes a valid document.

llguidance turns a schema and a tokenizer into a matcher; it works outside Python's lock. Its limits bound the work of
every step, but for some keywords not well enough: one `multipleOf` took 20 seconds to compile, one regular expression
minutes for a token. So a schema may have the keywords that are listed here and no others, and `$ref` leads to
definitions alone.

Documents are written on one line, as Python's `json.dumps` writes them, so that no answer is lost in white space.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpriv.serving.requests import ServingError

# Keywords whose values are schemas by name, schemas in a list, and a schema or a truth value.
_NAMED, _LISTED, _SINGLE = (
    ("properties", "$defs", "definitions"),
    ("anyOf", "prefixItems"),
    (
        "items",
        "additionalProperties",
    ),
)
_PLAIN = frozenset(
    {
        *("type", "enum", "const", "required", "$ref", "$schema", "title", "description", "default", "examples"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minLength", "maxLength", "minItems", "maxItems", "format"),
    }
)
_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")

# Of a schema as JSON; and what a matcher may use. Ordinary schemas use a tenth of it.
_MOST_CHARACTERS = 8192
_LIMITS = {
    "max_items_in_row": 200,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 2_000,
    "max_lexer_states": 1_000,
    "max_grammar_size": 20_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
_ON_ONE_LINE = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": False,
    "coerce_one_of": False,
}


class JsonForms:
    """Forms for the answers of one model.

    Args:
        tokenizer: a fast one of transformers.
        ends: tokens that end an answer, at least one.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int]) -> None:
        self._tokenizer, self._ends = tokenizer, sorted(ends)
        self._lock, self._compiled = threading.Lock(), None

    def of(self, schema: Mapping[str, Any]) -> JsonForm:
        """The form of documents that a schema describes; takes up to a fifth of a second.

        Raises:
            ServingError: the schema is too large, has keywords that are not known here, describes no document or needs
                more work than a step may take; or llguidance is missing, or does not know the tokenizer.
        """
        check_schema(schema)
        try:
            import llguidance
        except ModuleNotFoundError:
            message = "response_format: this server has no llguidance; pip install 'fedpriv[forms]' there"
            raise ServingError(message) from None
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_ON_ONE_LINE)
            limits = llguidance.LLParserLimits(**_LIMITS)
            matcher = llguidance.LLMatcher(self._known_tokenizer(), grammar, log_level=0, limits=limits)
        except ValueError as error:
            raise ServingError(f"response_format: {_first_line(str(error))}") from None
        if matcher.is_error():
            raise ServingError(f"response_format: {_first_line(matcher.get_error())}")
        form = JsonForm(matcher)
        form.begin().allowed(torch.zeros(len(self._tokenizer)))  # else it would be found in the first pass
        return form

    def _known_tokenizer(self) -> Any:
        """The tokenizer as llguidance knows it, which takes it half a second to learn."""
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._compiled is None:
                self._compiled = from_tokenizer(self._tokenizer, eos_token=self._ends or None)
            return self._compiled


class JsonForm:
    """A `fedpriv.serving.requests.AnswerForm`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def begin(self) -> _Document:
        """See `AnswerForm`."""
        return _Document(self._matcher.deep_copy())


class _Document:
    """A `fedpriv.serving.requests.FormedAnswer`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, logits: Tensor) -> Tensor:
        """See `FormedAnswer`."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        allowed[: len(bits)] = torch.from_numpy(bits[: len(logits)]).bool()
        if self._matcher.is_error() or not allowed.any():
            # The library's own words may repeat the schema, and the engine logs this.
            raise ServingError(
                "response_format: no token may follow by this schema, or finding one takes too much work"
            )
        return logits.masked_fill(~allowed, -torch.inf)

    def accept(self, token: int) -> None:
        """See `FormedAnswer`."""
        self._matcher.consume_token(token)


def check_schema(schema: Mapping[str, Any]) -> None:
    """Refuse what could cost more than its size.

    Raises:
        ServingError: the schema is too long, or has another keyword or reference than those that are known here.
    """
    if (num := len(json.dumps(schema))) > _MOST_CHARACTERS:
        raise ServingError(f"response_format: the schema has {num} characters; at most {_MOST_CHARACTERS}")
    waiting: list[Any] = [schema]
    while waiting:
        found = waiting.pop()
        if not isinstance(found, Mapping):
            continue  # a truth value, or what llguidance refuses
        for keyword, value in found.items():
            if keyword in _NAMED:
                waiting += value.values() if isinstance(value, Mapping) else ()
            elif keyword in _LISTED:
                waiting += value if isinstance(value, list) else ()
            elif keyword in _SINGLE:
                waiting.append(value)
            elif keyword not in _PLAIN:
                raise ServingError(f"response_format: keyword {keyword[:60]!a} is not known here")
            elif keyword == "$ref" and not (isinstance(value, str) and _REFERENCE.fullmatch(value)):
                raise ServingError("response_format: $ref must lead to '#' or to a definition, such as '#/$defs/item'")


def _first_line(text: str) -> str:
    return ascii(text.partition("\n")[0][:150])[1:-1]
