"""Texts to tokens, the choice of an answer's next token, and tokens to text.

Tokenizing takes a time that the model's room bounds: no text has more characters than are likely to fit. An answer's
tokens become text in whole characters that ends before a stop.

Log-probabilities are of the model's own distribution, before penalties, temperature, top-k and top-p, as OpenAI's API
and vLLM (its mode `raw_logprobs`) tell them. So they are a function of the variant and the text alone, whatever was
asked of the draw.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedpriv.learning.data import ROLES, records
from fedpriv.learning.data.chat import RESPONSE_MASK, ChatFormat
from fedpriv.models.publishing.saved import NO_LIMIT, chat_prompt
from fedpriv.models.serving.requests import Generate, ScoredToken, ServingError, Tokens, TooLongError

log = logging.getLogger(__name__)

# Of a text, for each token that there is room for. English has four to five.
_CHARACTERS_PER_TOKEN = 16

# Words at the end of a text that its continuation may change: tokenizers look a word ahead, and at white space two.
_UNSETTLED = 3

# What a tokenizer writes for bytes that are no whole character, and the most tokens that may make one.
_INCOMPLETE = "\ufffd"

_MOST_PENDING = 16

# Tokens of the prompt before an answer's first: some tokenizers write no space before the first of a text.
_CONTEXT = 4

# JSON has no infinity; OpenAI's API writes this where a token is impossible.
_IMPOSSIBLE = -9999.0


class Tokenizing:
    """The tokenizer of a served model.

    Args:
        tokenizer: a transformers tokenizer; this object changes its settings.
        model_name: to show in errors.
        chat: how the model's run put prompts to it.
        cuts: whether a text is cut there, as in training, and not refused.
    """

    def __init__(
        self, tokenizer: Any, model_name: str, chat: ChatFormat, max_tokens: int, *, cuts: bool = False
    ) -> None:
        self._tokenizer, self._model_name, self._chat = tokenizer, model_name, chat
        self._max_tokens, self._cuts = max_tokens, cuts
        self.most_characters = _CHARACTERS_PER_TOKEN * max_tokens
        # Tokenizers keep the length at which they cut, so that each is used by one thread at a time.
        self._lock = threading.Lock()

    def encode(self, text: str) -> Tokens:
        """The tokens of a text, cut where it is too long already.

        Raises:
            TooLongError: it has too many characters, or the beginning of a text to be cut does not tell its tokens.
            ServingError: the tokenizer refuses it.
        """
        with self._lock:
            if len(text) > self.most_characters:
                text = self._beginning(text)
            (row,) = records.encode(self._tokenizer, [text], None, self._max_tokens + (not self._cuts))
        if row is None:
            raise ServingError("a text cannot be read by the model's tokenizer")
        return tuple(row["input_ids"])

    def _beginning(self, text: str) -> str:
        """The beginning of a text with too many characters, if it has the same tokens where both are cut."""
        beginning = text[: self.most_characters]
        is_told = self._cuts and self._tokenizer.truncation_side == "right"
        if is_told and _least(self._tokenizer, beginning) >= self._max_tokens:
            return beginning
        raise TooLongError(f"a text has {len(text)} characters: at most {self.most_characters}")

    def encode_chat(self, messages: tuple[tuple[str, str], ...]) -> Tokens:
        """The tokens of a chat up to its answer; a run's system prompt and prompt template are put as in training.

        Raises:
            TooLongError: it has too many characters.
            ServingError: the model has no chat template, or template or tokenizer refuse the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ServingError(f"model {self._model_name} has no chat template; ask for a completion")
        if unknown := next((role for role, _ in messages if role not in ROLES), None):
            raise ServingError(f"messages: role {unknown[:100]!r} is none of {', '.join(ROLES)}")
        if (num := sum(len(content) for _, content in messages)) > self.most_characters:
            raise TooLongError(f"the messages have {num} characters: at most {self.most_characters}")
        try:
            with self._lock:
                if len(messages) == 1 and messages[0][0] == "user" and self._chat.prompt_template:
                    return _prompt(replace(self._chat, has_messages=False), self._tokenizer, messages[0][1])
                return _prompt(replace(self._chat, has_messages=True), self._tokenizer, json.dumps(messages))
        except ServingError:
            raise
        except Exception as error:  # templates raise what they like
            # By its kind alone: what a template says of a message may repeat it.
            log.warning("a chat cannot be put to the model: %s", type(error).__name__)
            raise ServingError("messages: the model's chat template does not take them") from None

    def encode_choice(self, prompt: str, choice: str) -> tuple[Tokens, Tokens]:
        """The tokens of a prompt, put as in training, and of an answer with its end of turn; errors as `encode`."""
        if (num := len(prompt) + len(choice)) > self.most_characters:
            raise TooLongError(f"a prompt and a choice have {num} characters: at most {self.most_characters}")
        with self._lock:
            (row,) = self._chat.encode(self._tokenizer, [prompt], [choice], NO_LIMIT)
        if row is None:
            raise ServingError("input, choices: the model's tokenizer or chat template does not take them")
        begin, tokens = row[RESPONSE_MASK].index(1), row["input_ids"]
        return tuple(tokens[:begin]), tuple(tokens[begin:])


def _least(tokenizer: Any, beginning: str) -> int:
    """Tokens that a text has at least, from its beginning; 0 where the tokenizer does not tell words apart."""
    try:
        words = tokenizer([beginning], add_special_tokens=False).word_ids(0)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException:  # as in `records.encode`; without a tokenizer.json there are no words
        return 0
    last = max((word for word in words if word is not None), default=0) - _UNSETTLED
    # A template may change the first word.
    return sum(word is not None and 0 < word <= last for word in words)


def _prompt(chat: ChatFormat, tokenizer: Any, text: str) -> Tokens:
    """The tokens that precede the response of a chat, as in training."""
    tokens = chat_prompt(chat, tokenizer, text)
    if tokens is None:
        raise ServingError("messages: the model's chat template does not take these roles or texts")
    return tokens


class Text:
    """An answer's text as its tokens come; gives only what no later token can change or take back.

    Args:
        prompt: tokens before the answer.
        stop: texts before which the answer ends; empty ones never occur.

    Attributes:
        stopped: whether one of them came.
        num_given: characters that were given.
        num_whole: characters of whole tokens so far, given or held back: the next token's text begins behind them.
    """

    def __init__(self, tokenizer: Any, prompt: Tokens, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        # Tokens that the tokenizer is given at a time: those whose text was given already, and those whose was not.
        self._given, self._pending = list(prompt[-_CONTEXT:]), list[int]()
        self._held = ""  # characters that may begin a stop text
        self.stopped = False
        self.num_given = self.num_whole = 0

    def add(self, token: int) -> str:
        """The further text with one more token; empty while a character or a stop text may be incomplete."""
        self._pending.append(token)
        before, whole = self._decoded(self._given), self._decoded([*self._given, *self._pending])
        if whole.endswith(_INCOMPLETE) and len(self._pending) < _MOST_PENDING:
            return ""
        self._given, self._pending = self._pending, []
        return self._before_stop(whole[len(before) :])

    def rest(self) -> str:
        """The text that was held back, without bytes that are no whole character; the answer has ended."""
        before, whole = self._decoded(self._given), self._decoded([*self._given, *self._pending])
        self._pending = []
        text = self._before_stop(whole[len(before) :].rstrip(_INCOMPLETE))
        held, self._held = self._held, ""
        self.num_given += len(held)
        return text + held

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _before_stop(self, text: str) -> str:
        self.num_whole += len(text)
        text, self._held = self._held + text, ""
        if places := [place for stop in self._stop if (place := text.find(stop)) >= 0]:
            self.stopped = True
            end = min(places)
        else:
            end = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
            self._held = text[end:]
        self.num_given += end
        return text[:end]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that are the beginning of a stop text, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def generator_of(request: Generate) -> torch.Generator:
    """The source of a request's draws, which no other request has."""
    generator = torch.Generator()
    if request.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.seed % 2**63)
    return generator


def penalized(logits: Tensor, said: Sequence[int], request: Generate) -> Tensor:
    """The logits less what tokens pay that the answer holds already; the same tensor where there is nothing to pay.

    A token that was said c >= 1 times pays c frequency_penalty + presence_penalty, as OpenAI's API defines it.

    Args:
        logits: [vocabulary].
        said: the answer's tokens so far, without its prompt.
    """
    if not said or not (request.presence_penalty or request.frequency_penalty):
        return logits
    tokens, counts = torch.tensor(said).unique(return_counts=True)
    found = logits.clone()
    found[tokens] -= counts * request.frequency_penalty + request.presence_penalty
    return found


def next_token(logits: Tensor, request: Generate, generator: torch.Generator) -> int:
    """The most likely token, or one drawn from the `top_k` likeliest, and of these from the least set of likely tokens
    that has the probability `top_p` among them.

    Args:
        logits: float32 [vocabulary], on the CPU.
        generator: of the request; a greedy choice leaves it as it is.

    Source: Holtzman et al. 2020, section 3.1.
    """
    if request.temperature == 0:
        return int(logits.argmax())
    candidates = None
    if 0 < request.top_k < len(logits):
        logits, candidates = logits.topk(request.top_k)
    # The largest is subtracted first: a temperature near zero then makes zeros of the others and no infinity.
    probabilities = ((logits.double() - logits.max()) / request.temperature).softmax(dim=0)
    if request.top_p < 1:
        ordered, places = probabilities.sort(descending=True, stable=True)
        ordered[ordered.cumsum(dim=0) - ordered >= request.top_p] = 0
        probabilities, candidates = ordered, places if candidates is None else candidates[places]
    drawn = int(torch.multinomial(probabilities, 1, generator=generator))
    return drawn if candidates is None else int(candidates[drawn])


def scored(logits: Tensor, token: int, offset: int, num_alternatives: int, texts: TokenTexts) -> ScoredToken:
    """A token with its log-probability and those of the likeliest tokens, the chosen one among them if it is one."""
    log_probabilities = logits.double().log_softmax(dim=0)
    values, tokens = log_probabilities.topk(min(num_alternatives, len(logits)))
    return ScoredToken(
        text=texts[token],
        log_probability=max(float(log_probabilities[token]), _IMPOSSIBLE),
        offset=offset,
        alternatives=tuple(
            (texts[other], max(value, _IMPOSSIBLE))
            for value, other in zip(values.tolist(), tokens.tolist(), strict=True)
        ),
    )


class TokenTexts(dict[int, str]):
    """{token: its text behind another token}, special ones as they are written; each is found when it is asked for."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        # Behind itself: some tokenizers write no space before the first token of a text.
        alone, twice = (self._tokenizer.decode([token] * times, clean_up_tokenization_spaces=False) for times in (1, 2))
        text: str = twice[len(alone) :]
        self[token] = text
        return text
