"""Continuous batching: answers of many requests grow by a token each in shared passes, and join and leave at any pass.

Keys and values of rows of different lengths come and go, and every row ends at the same place: rows are padded on the
left, as `fedpriv.learning.training.answers` reads prompts. A step writes all rows' new states at one place behind
the last, so nothing is copied until a row joins or leaves, or the room is used up.

Source: Yu et al. 2022 (Orca), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from fedpriv.models.serving._engine import Weights
from fedpriv.models.serving._jobs import PassCounter, ServingJob, checked, failure, tell
from fedpriv.models.serving._texts import Text, TokenTexts, generator_of, next_token, penalized, scored
from fedpriv.models.serving.requests import Failed, Finished, Generate, Piece, ScoredToken, ServingError

_Place = tuple["KeyValues", int]
"""The row of these with the states of all tokens of an answer but its last."""

# Places behind the last token that a new cache has, so that rows grow without being copied.
_ROOM = 64


@dataclass(eq=False)
class _Answer:
    """An answer that grows; `untold` are its tokens whose text was not given yet, if they are to be told."""

    job: ServingJob
    request: Generate
    text: Text
    generator: torch.Generator
    tokens: list[int]
    num_new: int = 0
    weights: Weights | None = None
    num_of_turn: int = 0
    untold: list[ScoredToken] = field(default_factory=list)

    @property
    def most_tokens(self) -> int:
        """The tokens of prompt and answer together."""
        return len(self.request.prompt) + self.request.max_new_tokens


class Generation:
    """Works on `Generate`, in one thread; `ends` are the tokens after which an answer is complete."""

    def __init__(self, counter: PassCounter, tokenizer: Any, ends: frozenset[int]) -> None:
        self._counter, self._tokenizer, self._ends = counter, tokenizer, ends
        self._texts = TokenTexts(tokenizer)
        self._num_layers: int = counter.base.config.num_hidden_layers
        self._answers: list[_Answer] = []
        self._states: KeyValues | None = None  # a row for each of these
        self._paused: dict[ServingJob, _Answer] = {}
        self._is_held_up = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, apart from what waits."""
        return not self._answers

    def step(self) -> None:
        """Take in what there is room for and go one pass further with everything."""
        self._paused = {job: answer for job, answer in self._paused.items() if not job.over}
        kept = [(answer, (self._states, row)) for row, answer in enumerate(self._answers) if self._states]
        kept = self._settled(self._make_room(self._settled(kept)))
        joining = self._joining([answer for answer, _ in kept])
        self._is_held_up = bool(len(self._counter.waiting))
        if kept:
            self._lay(kept)
            kept = self._advanced([answer for answer, _ in kept], self._states)
        self._lay([*kept, *(self._advanced(joining, None) if joining else [])])

    def give_up(self, error: ServingError) -> None:
        """Fail everything under way."""
        for job in self._paused:
            tell(job, Failed(error=error))
        self._paused = {}
        self._lay([])
        self._counter.fail(error)

    def _joining(self, others: Sequence[_Answer]) -> list[_Answer]:
        """Answers that get rows next to others now, as many as there is room for."""
        joining: list[_Answer] = []

        def can_begin(job: ServingJob) -> bool:
            answer = self._paused.get(job) or self._new(job)
            padded = (len(joining) + 1) * max(len(found.tokens) for found in (*joining, answer))
            together = [*others, *joining, answer]
            return (
                len(together) <= self._counter.rows
                and (not joining or padded <= self._counter.limits.pass_tokens)
                # To their ends. One alone always has room.
                and (
                    len(together) == 1
                    or len(together) * max(found.most_tokens for found in together)
                    <= self._counter.limits.cached_tokens
                )
            )

        while (begun := self._counter.next(can_begin)) is not None:
            job, weights = begun
            answer = self._paused.pop(job, None) or self._new(job)
            answer.weights, answer.num_of_turn = weights, 0
            joining.append(answer)
        return joining

    def _new(self, job: ServingJob) -> _Answer:
        request = job.request
        assert isinstance(request, Generate)
        return _Answer(
            job=job,
            request=request,
            text=Text(self._tokenizer, request.prompt, request.stop),
            generator=generator_of(request),
            tokens=list(request.prompt),
        )

    def _make_room(self, kept: list[tuple[_Answer, _Place]]) -> list[tuple[_Answer, _Place]]:
        """All but the answer that has had its row for longest, which pauses if others are held up by it."""
        if not kept or not self._is_held_up or not len(self._counter.waiting):
            return kept
        longest = max((answer for answer, _ in kept), key=lambda answer: answer.num_of_turn)
        if longest.num_of_turn < self._counter.limits.turn_tokens:
            return kept
        longest.weights = None
        self._paused[longest.job] = longest
        self._counter.give_back(longest.job)
        self._counter.waiting.put_back(longest.job)
        return [(answer, place) for answer, place in kept if answer is not longest]

    def _settled(self, rows: list[tuple[_Answer, _Place]]) -> list[tuple[_Answer, _Place]]:
        """Those that are not over; the others give back their variants."""
        for answer, _ in rows:
            if answer.job.over:
                self._counter.give_back(answer.job)
        return [(answer, place) for answer, place in rows if not answer.job.over]

    def _lay(self, rows: Sequence[tuple[_Answer, _Place]]) -> None:
        """Have these answers and no others; states are copied only if their rows change."""
        self._answers = [answer for answer, _ in rows]
        places = [place for _, place in rows]
        if not places:
            self._states = None
            self._counter.base.forget()
        elif len(places) != len(places[0][0].lengths) or any(
            held is not places[0][0] or row != number for number, (held, row) in enumerate(places)
        ):
            self._states = KeyValues.of_rows(places)
        else:
            self._states = places[0][0]

    def _advanced(self, answers: Sequence[_Answer], states: KeyValues | None) -> list[tuple[_Answer, _Place]]:
        """One token further, and where the states are; without those that are over."""
        rows = []
        for answer, (logits, place) in zip(answers, self._read(answers, states), strict=True):
            try:
                if isinstance(logits, ServingError):
                    raise logits
                self._extend(answer, self._chosen(answer, logits))
            except Exception as error:
                tell(answer.job, Failed(error=failure(answer.job.variant, error)))
            rows.append((answer, place))
        return self._settled(rows)

    def _read(self, answers: Sequence[_Answer], states: KeyValues | None) -> list[tuple[Tensor | ServingError, _Place]]:
        """[answers] the logits that follow, or why there are none, and the row with the states.

        Args:
            states: of all their tokens but the last; None if they have none yet.
        """
        held = states or KeyValues([len(answer.tokens) for answer in answers], self._num_layers)
        try:
            logits = self._pass(answers, held, 1 if states else max(held.lengths))
        except Exception as error:
            if len(answers) == 1:
                return [(failure(answers[0].job.variant, error), (held, 0))]
            # Which of them it was shows alone.
            alone = [states and KeyValues.of_rows([(states, row)]) for row in range(len(answers))]
            return [found for answer, own in zip(answers, alone, strict=True) for found in self._read([answer], own)]
        return [
            (checked(answer.job.variant, own), (held, row))
            for row, (answer, own) in enumerate(zip(answers, logits, strict=True))
        ]

    def _pass(self, answers: Sequence[_Answer], states: KeyValues, num_new: int) -> Tensor:
        """The base reads the last tokens of answers; float32 [answers, vocabulary] of what follows."""
        base, rows = self._counter.base, [answer.weights for answer in answers if answer.weights]
        self._counter.count(rows)
        padding = base.config.pad_token_id or 0
        last = [answer.tokens[-num_new:] for answer in answers]
        ids = torch.tensor([[*[padding] * (num_new - len(tokens)), *tokens] for tokens in last])
        mask = states.mask(num_new)
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -num_new:]
        output = base.run(
            rows,
            input_ids=ids.to(base.device),
            attention_mask=mask.to(base.device),
            position_ids=positions.to(base.device),
            past_key_values=states.for_pass(),
            use_cache=True,
            logits_to_keep=1,
        )
        states.advance(num_new)
        logits: Tensor = output.logits[:, -1].float().cpu()
        return logits

    def _chosen(self, answer: _Answer, logits: Tensor) -> int:
        """The answer's next token, which is noted with its log-probability if that is to be told."""
        request, said = answer.request, answer.tokens[len(answer.request.prompt) :]
        if request.forced:
            token = request.forced[len(said)]
        else:
            token = next_token(penalized(logits, said, request), request, answer.generator)
        if request.num_alternatives is not None and (request.forced or token not in self._ends):
            offset = answer.text.num_whole
            answer.untold.append(scored(logits, token, offset, request.num_alternatives, self._texts))
        return token

    def _extend(self, answer: _Answer, token: int) -> None:
        """Put a token to an answer and tell what follows from it."""
        answer.tokens.append(token)
        answer.num_new += 1
        answer.num_of_turn += 1
        is_end = token in self._ends and not answer.request.forced
        text = "" if is_end else answer.text.add(token)
        is_over = is_end or answer.text.stopped or answer.num_new == answer.request.max_new_tokens
        if is_over and not answer.text.stopped:
            text += answer.text.rest()
        tokens = _told(answer, to_the_end=is_over and not answer.text.stopped)
        if text or tokens:
            tell(answer.job, Piece(text=text, tokens=tokens))
        if is_over:
            reason: Literal["stop", "length"] = "stop" if is_end or answer.text.stopped else "length"
            tell(answer.job, Finished(reason=reason, num_new_tokens=answer.num_new))


def _told(answer: _Answer, *, to_the_end: bool) -> tuple[ScoredToken, ...]:
    """The tokens whose text has been given in part at least, or all that are left; they are not told again."""
    given = answer.text.num_given
    told = tuple(token for token in answer.untold if to_the_end or token.offset < given)
    answer.untold = answer.untold[len(told) :]
    return told


class KeyValues:
    """The states of some rows, to be read by one model.

    Args:
        lengths: tokens that each row holds, or will hold once the next pass has written them; at least one row.
        written: whether it holds them; else one pass of `max(lengths)` tokens a row is about to write them.

    Attributes:
        end: the place behind every row's last token.
    """

    def __init__(self, lengths: Sequence[int], num_layers: int, *, written: bool = False) -> None:
        self.lengths = list(lengths)
        longest = max(self.lengths)
        self.end, self._capacity = longest if written else 0, longest + _ROOM
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    @property
    def begin(self) -> int:
        """The place of the longest row's first token."""
        return max(0, self.end - max(self.lengths))

    def mask(self, num_new: int) -> Tensor:
        """int64 [rows, end - begin + num_new], 1 for each row's own tokens, in a pass of so many new places."""
        width = self.end - self.begin + num_new
        own = torch.tensor(self.lengths if not self.end else [length + num_new for length in self.lengths])
        return (torch.arange(width) >= width - own.unsqueeze(1)).long()

    def for_pass(self) -> Cache:
        """The cache into which the model writes the states of a pass; `advance` makes them part of the rows."""
        layers: list[Any] = [_Layer(self, index) for index in range(len(self._layers))]
        return Cache(layers=layers)

    def advance(self, num_new: int) -> None:
        """A pass has written so many places of every row; without this it is as if it had not been."""
        if self.end:
            self.lengths = [length + num_new for length in self.lengths]
        self.end += num_new

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The states of a layer, [rows, heads, places, width] each, with those of a pass behind them."""
        num_new = keys.shape[2]
        held = self._layers[layer]
        if held is None or self.end + num_new > held[0].shape[2]:
            held = self._layers[layer] = (self._grown(held, 0, keys), self._grown(held, 1, values))
        places = slice(self.end, self.end + num_new)
        for buffer, new in zip(held, (keys, values), strict=True):
            buffer[:, :, places] = new
        begin = self.begin
        return held[0][:, :, begin : places.stop], held[1][:, :, begin : places.stop]

    def _grown(self, held: tuple[Tensor, Tensor] | None, which: int, new: Tensor) -> Tensor:
        rows, heads, num_new, width = new.shape
        buffer = new.new_zeros(rows, heads, max(self._capacity, self.end + num_new + _ROOM), width)
        if held is not None:
            buffer[:, :, : self.end] = held[which][:, :, : self.end]
        return buffer

    @classmethod
    def of_rows(cls, parts: Sequence[tuple[KeyValues, int]]) -> KeyValues:
        """The given rows of given states, copied, so that what they came from may be freed."""
        num_layers = len(parts[0][0]._layers)
        made = cls([held.lengths[row] for held, row in parts], num_layers, written=True)
        for layer in range(num_layers):
            sources = [held._layers[layer] for held, _ in parts]
            if any(source is None for source in sources):
                continue  # a layer that keeps nothing
            buffers = []
            for which in (0, 1):
                like = sources[0][which]  # type: ignore[index]
                buffer = like.new_zeros(len(parts), like.shape[1], made._capacity, like.shape[3])
                for index, ((held, row), source) in enumerate(zip(parts, sources, strict=True)):
                    length = held.lengths[row]
                    own = source[which][row, :, held.end - length : held.end]  # type: ignore[index]
                    buffer[index, :, made.end - length : made.end] = own
                buffers.append(buffer)
            made._layers[layer] = (buffers[0], buffers[1])
        return made


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of `KeyValues`, as transformers' attention asks for it."""

    is_sliding = False

    def __init__(self, held: KeyValues, index: int) -> None:
        super().__init__()
        self._held, self._index = held, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: `KeyValues` makes room when states are written."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `KeyValues.write`."""
        return self._held.write(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(places that attention sees, the first of them)."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Places before those of the pass."""
        return self._held.end - self._held.begin if self._held.end else 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1
