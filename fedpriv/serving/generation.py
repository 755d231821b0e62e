"""Continuous batching: answers of many requests grow by a token each in shared passes, and join and leave at any pass.

Source: Yu et al. 2022 (Orca), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpriv.serving.answers import Text, generator_of, next_token
from fedpriv.serving.desk import Counter, check_finite, failure, tell
from fedpriv.serving.engine import Weights
from fedpriv.serving.key_values import KeyValues
from fedpriv.serving.requests import Failed, Finished, Generate, Piece, ServingError
from fedpriv.serving.waiting import Job


@dataclass(eq=False)
class _Answer:
    """An answer that grows.

    Attributes:
        job, request: whose it is.
        text: of its tokens.
        generator: of its draws.
        tokens: prompt and answer.
        num_new: of the answer.
        weights: of its variant, while it has a row.
        num_of_turn: tokens since it got its row.
    """

    job: Job
    request: Generate
    text: Text
    generator: torch.Generator
    tokens: list[int]
    num_new: int = 0
    weights: Weights | None = None
    num_of_turn: int = 0

    @property
    def most_tokens(self) -> int:
        """Of prompt and answer together."""
        return len(self.request.prompt) + self.request.max_new_tokens


_Place = tuple[KeyValues, int]
"""Where the states of all tokens of an answer but its last are: a row of these."""


class Generation:
    """A `fedpriv.serving.desk.Desk` for `Generate`.

    Args:
        counter: of the server.
        tokenizer: of transformers.
        ends: tokens after which an answer is complete.
    """

    def __init__(self, counter: Counter, tokenizer: Any, ends: frozenset[int]) -> None:
        self._counter, self._tokenizer, self._ends = counter, tokenizer, ends
        self._num_layers: int = counter.base.config.num_hidden_layers
        self._answers: list[_Answer] = []
        self._states: KeyValues | None = None  # a row for each of these
        self._paused: dict[Job, _Answer] = {}
        self._is_held_up = False

    @property
    def is_idle(self) -> bool:
        """See `Desk`."""
        return not self._answers

    def step(self) -> None:
        """See `Desk`."""
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
        """See `Desk`."""
        for job in self._paused:
            tell(job, Failed(error=error))
        self._paused = {}
        self._lay([])
        self._counter.fail(error)

    def _joining(self, others: Sequence[_Answer]) -> list[_Answer]:
        """Answers that get rows beside others now, as many as there is room for."""
        joining: list[_Answer] = []

        def can_begin(job: Job) -> bool:
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

    def _new(self, job: Job) -> _Answer:
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
                check_finite(answer.job.variant, logits)
                self._extend(answer, next_token(logits, answer.request, answer.generator))
            except Exception as error:
                tell(answer.job, Failed(error=failure(answer.job.variant, error)))
            rows.append((answer, place))
        return self._settled(rows)

    def _read(self, answers: Sequence[_Answer], states: KeyValues | None) -> list[tuple[Tensor | ServingError, _Place]]:
        """[answers] the logits that follow, or why there are none, and the row with the states.

        Args:
            answers: at least one.
            states: of all their tokens but the last; None if they have none yet.
        """
        held = states or KeyValues.for_prompts([len(answer.tokens) for answer in answers], self._num_layers)
        try:
            logits = self._pass(answers, held, 1 if states else max(held.lengths))
        except Exception as error:
            if len(answers) == 1:
                return [(failure(answers[0].job.variant, error), (held, 0))]
            # Which of them it was shows alone.
            alone = [states and KeyValues.of_rows([(states, row)]) for row in range(len(answers))]
            return [found for answer, own in zip(answers, alone, strict=True) for found in self._read([answer], own)]
        return [(own, (held, row)) for row, own in enumerate(logits)]

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

    def _extend(self, answer: _Answer, token: int) -> None:
        """Put a token to an answer and tell what follows from it."""
        answer.tokens.append(token)
        answer.num_new += 1
        answer.num_of_turn += 1
        is_end = token in self._ends
        is_last = is_end or answer.num_new == answer.request.max_new_tokens
        text = "" if is_end else answer.text.add(token)
        if is_last and not answer.text.stopped:
            text += answer.text.rest()
        if text:
            tell(answer.job, Piece(text=text))
        if is_end or answer.text.stopped:
            tell(answer.job, Finished(reason="stop", num_new_tokens=answer.num_new))
        elif is_last:
            tell(answer.job, Finished(reason="length", num_new_tokens=answer.num_new))
