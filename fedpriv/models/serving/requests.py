"""Requests to a server of variants, and their events: the contract between its engine and its HTTP side."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from fedpriv.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Tokens = tuple[int, ...]

BASE = "base"
"""The name of the base itself among the variants: the public model, to which no record was given."""


class ServingError(RuntimeError):
    """A request that is not answered; the message is one line for the one who asked, and names no file."""


class UnknownVariantError(ServingError):
    """There is no variant of that name."""


class UnreadableVariantError(ServingError):
    """The variant is changed, missing, unreadable for this user or of another use; the others are served."""


class TooLongError(ServingError):
    """The request has more tokens than the model, or the server's limit, has room for."""


class BusyError(ServingError):
    """The server lets no more requests wait, or it is about to stop."""


@dataclass(frozen=True, kw_only=True)
class _OfTexts:
    """Texts for one variant.

    Attributes:
        texts: tokens of each; at least one.
        client: who asks; clients take turns, whatever their number of requests. Empty where it is the only one.
    """

    variant: str
    texts: tuple[Tokens, ...]
    client: str = ""


class Classify(_OfTexts):
    """Texts to be classified."""


class Embed(_OfTexts):
    """Texts whose vectors are asked for."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """A prompt to be continued by one variant.

    Attributes:
        prompt: tokens, at least one.
        max_new_tokens: >= 1.
        temperature: >= 0; 0 takes the most likely token.
        top_k: >= 0: so many of the likeliest tokens are drawn from; 0 stands for all.
        top_p: in (0, 1]: the least set of tokens with this probability is drawn from.
        presence_penalty: in [-2, 2]: taken from the logit of each token that the answer holds.
        frequency_penalty: in [-2, 2]: taken from it as often as the answer holds the token.
        num_alternatives: in [0, 20]: likeliest tokens whose log-probabilities are told with that of each token of the
            answer; None tells none.
        seed: of the draws; None draws a new one.
        stop: texts before which the answer ends.
        forced: tokens that are the answer, whatever is likely, of which the log-probabilities are asked; none lets the
            model say what it likes.
        client: who asks; clients take turns, whatever their number of requests. Empty where it is the only one.
    """

    variant: str
    prompt: Tokens
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    num_alternatives: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    forced: Tokens = ()
    client: str = ""


@dataclass(frozen=True, kw_only=True)
class Classified:
    """The answer to `Classify`, and the last event of it: the probabilities of every label, for each text."""

    probabilities: tuple[tuple[float, ...], ...]
    num_tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Embedded:
    """The answer to `Embed`, and its last event: float32 [texts, hidden], of length 1, as pooled for the head."""

    vectors: NDArray[np.float32]
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class ScoredToken:
    """A token of an answer, and how likely the model took it to be.

    Attributes:
        text: of the token alone; holds U+FFFD where its bytes are no whole characters.
        log_probability: <= 0, of the model's own distribution; -9999 stands for minus infinity.
        offset: characters of the answer before it.
        alternatives: the likeliest tokens in its place, the likeliest first: text and log-probability of each.
    """

    text: str
    log_probability: float
    offset: int
    alternatives: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Further text of an answer; whole characters only.

    Attributes:
        text: may be empty where tokens are told.
        tokens: further tokens of the answer, of which at least the first has its text here, if these were asked for.
            The token that ends a turn is not among them, nor are those of which a stop text has left nothing.
    """

    text: str
    tokens: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The last event of a `Generate`.

    Attributes:
        reason: `stop` after an end of turn or one of the stop texts, `length` after `max_new_tokens`.
        num_new_tokens: generated, the one that ended the turn included.
    """

    reason: Literal["stop", "length"]
    num_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The last event of a request that was accepted and not answered."""

    error: ServingError


Event = Classified | Embedded | Piece | Finished | Failed

Request = Classify | Embed | Generate


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Counts of a server's work since it started; every figure but `num_waiting` and `bytes_in_memory` only grows.

    Attributes:
        num_waiting: requests that no pass has begun with.
        num_rows: of all passes, without padding rows: num_rows / num_passes is the mean batch.
        num_variants_of_passes: different variants, summed over passes.
        hits, misses: whether the variant of a request was in memory.
    """

    num_waiting: int = 0
    num_passes: int = 0
    num_rows: int = 0
    num_variants_of_passes: int = 0
    hits: int = 0
    misses: int = 0
    bytes_in_memory: int = 0
    bytes_read: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Bounds of a server's engine; all >= 1.

    Attributes:
        waiting: requests that no pass has begun with.
        rows: of a pass.
        pass_tokens: of a pass, with padding; a longer text has a pass of its own.
        client_tokens: of a pass, with padding, that are of one client with a name; a longer text may come first alone.
        cached_tokens: whose keys and values are kept, with padding; no prompt and answer may have more.
        turn_tokens: that an answer gets before it makes room for others that wait.

    Raises:
        InputError: one is smaller.
    """

    memory_bytes: int = 2 * 10**9
    waiting: int = 256
    rows: int = 32
    pass_tokens: int = 2048
    client_tokens: int = 256
    cached_tokens: int = 16_384
    turn_tokens: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise InputError(f"{field.name} = {getattr(self, field.name)}: must be at least 1")
