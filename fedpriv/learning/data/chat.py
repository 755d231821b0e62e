"""Chats as the model's own template writes them, of which the response alone is learned.

The template is rendered with a mark in place of each text, so that it sees the roles of a record and never its texts:
what a record says can neither steer the template nor be taken for a part of it. The texts are put where the marks are,
and the whole is tokenised at once, as it is when the model is asked.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

from fedpriv.errors import InputError, first_line, is_memory_failure
from fedpriv.learning.data.text import Turn, turns_of

RESPONSE_MASK = "response_mask"
"""A feature of each token: 1 where a model is to predict it. Without this feature, it is to predict all of them."""

# The tokens of one record by the tokenizer's names for them, of equal lengths; None if the tokenizer refuses it.
Row = dict[str, list[int]] | None

SLOT = "{}"
"""Where the prompt stands in a prompt template."""

# A prompt that must be cut for the response keeps at least this share of the room for both.
_PROMPT_SHARE = 4

# frame: of the template; text: of the run; prompt and system: of the record; then what is
# learned: what the template writes before a response, the response, and its end.
_Kind = Literal["frame", "text", "prompt", "system", "opening", "response", "end"]
_OF_TEMPLATE = ("frame", "opening", "end")
_LEARNED = ("opening", "response", "end")
# In the order in which they are cut.
_CUTTABLE = ("prompt", "system")

_Span = tuple[str, _Kind]

_Token = tuple[int, int]
"""(id, index of the span that it belongs to)."""


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """The format in which prompts are put to a model.

    Attributes:
        system_prompt: put before chats that have no system turn; empty puts none.
        prompt_template: a text around each prompt, with one `{}` in its place; empty stands for the prompt alone.
        has_messages: whether the texts of records are turns, see `fedpriv.learning.data.text`, or prompts.
    """

    system_prompt: str = ""
    prompt_template: str = ""
    has_messages: bool = False

    def encode(self, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> list[Row]:
        """[records] the tokens of each chat with its `response_mask`; None where there is no response to learn.

        A chat of more than `max_length` tokens loses the ends of its prompts, the oldest first, until a quarter of
        what the template leaves is theirs, and then the end of its response. A special token's name in a text stays
        text. None stands for an empty response, for a text or for roles that tokenizer or template refuse, and for a
        template that leaves no room.

        Args:
            texts: what was said before each response.
            max_length: tokens, the template's included.
        """
        chats = _Chats(tokenizer)
        spans = [self._spans(chats, text, pair) for text, pair in zip(texts, pairs or (), strict=True)]
        tokens = chats.tokens([record or [] for record in spans])
        return [_row(of, record, max_length) for of, record in zip(tokens, spans, strict=True)]

    def names(self, _tokenizer: Any, *, pairs: bool, max_length: int) -> tuple[str, ...]:
        """The names of a record's features."""
        return ("input_ids", RESPONSE_MASK)

    def key(self, tokenizer: Any) -> str:
        """A text that differs wherever the same tokenizer would give other tokens: some templates write the date."""
        frame = _Chats(tokenizer).frame(self._roles(("user",)))
        return json.dumps([asdict(self), str(tokenizer.chat_template), tokenizer.eos_token, frame])

    def end(self, tokenizer: Any) -> int:
        """The token that ends a response that is not cut."""
        return self._frame_tokens(tokenizer)[-1][0]

    def _frame_tokens(self, tokenizer: Any) -> list[_Token]:
        """A chat of one empty prompt and an empty response."""
        chats = _Chats(tokenizer)
        (tokens,) = chats.tokens([self._filled(chats, (("user", ""),), "")])
        return tokens or []

    def check(self, tokenizer: Any, *, model: str, max_length: int) -> None:
        """Refuse a tokenizer or a length that no record could be put to the model with.

        Raises:
            InputError: it has no chat template, or one of another kind; or takes a text of the run for a special token;
                or `max_length` has no room for a token each of prompt and response.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                f"model = {model!r}: its tokenizer has no chat template, in which prompts are put; use a model that is "
                "tuned for instructions, or text_column for plain texts"
            )
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(f"model = {model!r}: instruction data need a tokenizer with a tokenizer.json")
        try:
            _Chats(tokenizer).frame(self._roles(("user",)))
        except Exception as error:  # templates raise what they like
            reason = first_line(error)
            system = " with a system_prompt" if self.system_prompt else ""
            raise InputError(f"model = {model!r}: its chat template cannot be used{system} ({reason})") from None
        frame = self._frame_tokens(tokenizer)
        if not frame:
            raise InputError(
                f"model = {model!r}: its tokenizer takes a part of system_prompt or prompt_template for a special "
                "token; leave it out"
            )
        smallest = 2 + len(frame)
        if max_length < smallest:
            raise InputError(
                f"max_length = {max_length}: must be at least {smallest}, with the chat template of {model!r}"
                + (", system_prompt" if self.system_prompt else "")
                + (" and prompt_template" if self.prompt_template else "")
            )

    def _spans(self, chats: _Chats, text: str, response: str) -> list[_Span] | None:
        """The chat in spans; None if there is none to learn from."""
        if not response.strip():
            return None
        try:
            return self._filled(chats, turns_of(text) if self.has_messages else (("user", text),), response)
        except Exception as error:  # whatever one record's roles make of the template, the others are encoded
            if is_memory_failure(error):
                raise
            return None

    def _filled(self, chats: _Chats, said: Sequence[Turn], response: str) -> list[_Span]:
        """The frame of a chat with its texts in place of the marks."""
        texts: list[list[_Span]] = [[(text.strip(), "text")] for _, text in self._system(role for role, _ in said)]
        before, after = self.around
        for role, text in said:
            # Without white space around it: templates cut it off, and some special tokens swallow it.
            content: _Span = (text.strip(), "system" if role == "system" else "prompt")
            texts.append([content] if self.has_messages else [(before, "text"), content, (after, "text")])
        texts.append([(response.strip(), "response")])
        spans: list[_Span] = []
        for part, kind in chats.frame(self._roles(tuple(role for role, _ in said))):
            spans += [(part, kind)] if isinstance(part, str) else texts[part]
        return [span for span in spans if span[0]]

    def _roles(self, roles: tuple[str, ...]) -> tuple[str, ...]:
        return (*(role for role, _ in self._system(roles)), *roles)

    def _system(self, roles: Iterable[str]) -> tuple[Turn, ...]:
        """The turn of the run's system prompt, if a chat of these roles gets it."""
        if not self.system_prompt or "system" in roles:
            return ()
        return (("system", self.system_prompt),)

    @property
    def around(self) -> tuple[str, str]:
        """The text before and after a prompt."""
        before, _, after = self.prompt_template.partition(SLOT)
        return before.lstrip(), after.rstrip()


class _Chats:
    """A tokenizer's chats, as spans and as tokens; the frames that it has rendered are kept."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._frames: dict[tuple[str, ...], list[tuple[str | int, _Kind]]] = {}
        template = str(tokenizer.chat_template)
        # The token for unknown characters means nothing, unless it is also one of the others, as in GPT-2.
        named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
        unknown = {tokenizer.unk_token} - {*named}
        control = {
            token.content: id_
            for id_, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip() and (token.special or token.content in template) and token.content not in unknown
        }
        self._control_ids = frozenset(control.values())
        # Every place where one begins, also within another.
        self._control = re.compile(f"(?={'|'.join(map(re.escape, control))})" if control else r"(?!)")

    def frame(self, roles: tuple[str, ...]) -> list[tuple[str | int, _Kind]]:
        """The template's texts for turns of these roles and a response, and the turns' numbers; it may refuse them."""
        if roles not in self._frames:
            self._frames[roles] = self._rendered(roles)
        return self._frames[roles]

    def _rendered(self, roles: tuple[str, ...]) -> list[tuple[str | int, _Kind]]:
        chat = [{"role": role, "content": f"\ue000{i}\ue001"} for i, role in enumerate((*roles, "assistant"))]
        render = self._tokenizer.apply_chat_template
        asked = render(chat[:-1], add_generation_prompt=True, tokenize=False)
        whole = render(chat, tokenize=False)
        if not whole.startswith(asked):
            raise ValueError("it does not begin a chat with its response as it begins one that asks for it")
        parts = re.split("\ue000([0-9]+)\ue001", whole[len(asked) :])
        before = re.split("\ue000([0-9]+)\ue001", asked)
        if sorted(map(int, before[1::2])) != list(range(len(roles))) or parts[1::2] != [str(len(roles))]:
            raise ValueError("it does not write each turn's text once")
        frame: list[tuple[str | int, _Kind]] = [
            (int(part), "prompt") if i % 2 else (part, "frame") for i, part in enumerate(before)
        ]
        return [*frame, (parts[0], "opening"), (len(roles), "response"), (self._end(parts[2]), "end")]

    def _end(self, tail: str) -> str:
        """The end of a response in the template's text behind it: through the end of the sequence or turn."""
        eos = self._tokenizer.eos_token
        if eos and eos in tail:
            return tail[: tail.index(eos) + len(eos)]
        end = tail.rstrip()
        if self._control.search(end):
            return end
        if not eos:
            raise ValueError("nothing ends a response: neither it nor the tokenizer has a token for that")
        return end + str(eos)

    def tokens(self, records: Sequence[Sequence[_Span]]) -> list[list[_Token] | None]:
        """[records] the tokens of each; None where the tokenizer fails, or takes a text for a special token."""
        cut = [self._pieces(spans) for spans in records]
        found = iter(_tokenised(self._tokenizer, [piece for pieces in cut for _, piece in pieces]))
        return [
            self._placed(spans, [(start, next(found)) for start, _ in pieces])
            for spans, pieces in zip(records, cut, strict=True)
        ]

    def _pieces(self, spans: Sequence[_Span]) -> list[tuple[int, str]]:
        """(start, text) of what is tokenised at once: all, unless texts hold names of special tokens, cut in two."""
        text, cuts = "".join(part for part, _ in spans), [0]
        for start, (part, kind) in zip(_starts(spans), spans, strict=True):
            if kind not in _OF_TEMPLATE:
                cuts += [start + match.start() + 1 for match in self._control.finditer(part)]
        return [
            (begin, text[begin:end]) for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True) if end > begin
        ]

    def _placed(
        self, spans: Sequence[_Span], pieces: Sequence[tuple[int, list[tuple[int, int, int]] | None]]
    ) -> list[_Token] | None:
        """The tokens with the spans that their last characters are in."""
        starts, tokens = _starts(spans), []
        for begin, piece in pieces:
            if piece is None:
                return None
            for id_, start, end in piece:
                first, last = (bisect_right(starts, begin + max(at, 0)) - 1 for at in (start, end - 1))
                if id_ in self._control_ids and any(kind not in _OF_TEMPLATE for _, kind in spans[first : last + 1]):
                    return None
                tokens.append((id_, last))
        return tokens


def _starts(spans: Sequence[_Span]) -> list[int]:
    """The place at which each span begins, in characters."""
    return list(accumulate((len(text) for text, _ in spans), initial=0))[:-1]


def _tokenised(tokenizer: Any, texts: Sequence[str]) -> list[list[tuple[int, int, int]] | None]:
    """[texts] (id, start, end) of each token, without any that frame a text; None where the tokenizer fails."""
    if not texts:
        return []
    try:
        batch = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # as in `records.encode`
        if len(texts) > 1:
            return [_tokenised(tokenizer, [text])[0] for text in texts]
        if is_memory_failure(error):
            raise
        return [None]
    return [
        [(id_, start, end) for id_, (start, end) in zip(ids, offsets, strict=True)]
        for ids, offsets in zip(batch["input_ids"], batch["offset_mapping"], strict=True)
    ]


def _row(tokens: Sequence[_Token] | None, spans: Sequence[_Span] | None, max_length: int) -> Row:
    """The tokens that are kept, and which of them are learned."""
    if not tokens or not spans:
        return None
    kinds = [spans[span][1] for _, span in tokens]
    learned = [place for place, kind in enumerate(kinds) if kind in _LEARNED]
    prompt = _cut_last(tokens, spans)
    room = max_length - (len(tokens) - len(learned) - len(prompt))
    num_prompt = min(len(prompt), max(room // _PROMPT_SHARE, room - len(learned)))
    num_learned = min(len(learned), room - num_prompt)
    dropped = {*prompt[num_prompt:], *learned[max(num_learned, 0) :]}
    kept = [place for place in range(len(tokens)) if place not in dropped]
    if room < 1 or not any(kinds[place] == "response" for place in kept):
        return None
    mask = [int(kinds[place] in _LEARNED) for place in kept]
    return {"input_ids": [tokens[place][0] for place in kept], RESPONSE_MASK: mask}


def _cut_last(tokens: Sequence[_Token], spans: Sequence[_Span]) -> list[int]:
    """The places of the tokens that may be cut, those that are cut last in front: oldest prompts go first, by the end.

    A cut takes the end of a text, as that of a plain text does: what is asked tends to stand at its beginning.
    """
    order = [index for kind in _CUTTABLE for index, span in enumerate(spans) if span[1] == kind]
    places: dict[int, list[int]] = {index: [] for index in order}
    for place, (_, span) in enumerate(tokens):
        if span in places:
            places[span].append(place)
    return [place for index in reversed(order) for place in places[index]]
