"""Answers of a run's models to prompts of the server's test set: untrained, private and not private."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpriv.adapters import Adapter, Merged
from fedpriv.config import AuditSection, DataSection, RunConfig
from fedpriv.data import turns_of
from fedpriv.data.records import usable
from fedpriv.runs import RunWriter, Sample
from fedpriv.training import (
    Tokens,
    ends_of_turn,
    greedy_answers,
    mean_estimate,
    prompt_and_response,
    rouge_l,
    with_adapter,
)
from fedpriv.training.evaluation import text_of
from fedpriv.training.workbench import Workbench
from server.observer import Observer
from server.summary import SeriesOutcome

log = logging.getLogger("flwr")

UNTRAINED, PRIVATE, NON_PRIVATE = "untrained", "private", "non_private"

NOTHING = {
    **dict.fromkeys(("rouge_l", "rouge_l_initial", "rouge_l_non_private", "rouge_l_standard_error")),
    **dict.fromkeys(("rouge_l_change", "rouge_l_change_standard_error", "num_generated")),
}
"""The keys of summary.json about generated answers, of a run without any."""


@dataclass(frozen=True, kw_only=True)
class _Questions:
    """[questions] what is asked, in words and in tokens, and the test set's answers."""

    texts: list[str]
    prompts: list[Tokens]
    references: list[Tokens]


def answered(
    config: RunConfig,
    bench: Workbench,
    outcome: SeriesOutcome,
    comparison: SeriesOutcome | None,
    writer: RunWriter,
    observer: Observer,
) -> dict[str, Any]:
    """The keys of summary.json about generated answers; the answers themselves are written to the run's folder.

    The questions are the first distinct prompts of the test set, so they are the same in every run on the same data.
    """
    if not config.generates_answers:
        if config.instructs:
            why = "generated_answers = 0" if config.has_test_set else "the server has no test set"
            log.info("no answers are generated: %s", why)
        return NOTHING
    questions = _questions(config, bench)
    if not questions.prompts:
        observer.notice("no answers are generated: no test record has a prompt and a response")
        return NOTHING
    models: dict[str, tuple[Adapter, Merged]] = {UNTRAINED: (bench.initial, {})}
    for name, series in ((PRIVATE, outcome), (NON_PRIVATE, comparison)):
        if series is not None:
            models[name] = series.strategy.model.adapter, series.strategy.model.merged
    observer.notice(
        f"{len(models)} models answer {len(questions.prompts)} prompts, in {config.max_new_tokens} tokens each at most"
    )
    texts = {name: _texts(config, bench, questions, name, *of, writer) for name, of in models.items()}
    references = [text_of(bench.base.tokenizer, tokens) for tokens in questions.references]
    none = [None] * len(references)
    rows = zip(questions.texts, references, texts[UNTRAINED], texts[PRIVATE], texts.get(NON_PRIVATE, none), strict=True)
    writer.write_samples(
        [
            Sample(prompt=prompt, reference=reference, untrained=untrained, private=private, non_private=non_private)
            for prompt, reference, untrained, private, non_private in rows
        ]
    )
    return _figures({name: rouge_l(references, of) for name, of in texts.items()})


def _questions(config: RunConfig, bench: Workbench) -> _Questions:
    """The first distinct prompts of the test set with a response, in its order."""
    found: dict[Tokens, tuple[str, Tokens]] = {}
    for item in filter(usable, bench.test.items()):
        prompt, response = prompt_and_response(item)
        if prompt and response and len(found) < config.generated_answers:
            _, index = item
            found.setdefault(prompt, (_in_words(config, bench.data.test.texts[index]), response))
    return _Questions(
        texts=[text for text, _ in found.values()],
        prompts=list(found),
        references=[response for _, response in found.values()],
    )


def _in_words(config: DataSection, text: str) -> str:
    """The question of a record: its prompt, or what was said before its response, a line for each turn."""
    return "\n".join(f"{role}: {said}" for role, said in turns_of(text)) if config.messages_column else text


def _texts(
    config: AuditSection,
    bench: Workbench,
    questions: _Questions,
    name: str,
    adapter: Adapter,
    merged: Merged,
    writer: RunWriter,
) -> list[str]:
    """A model's answers."""

    def tell(num: int) -> None:
        writer.journal.write("answered", model=name, num_answered=num, num_prompts=len(questions.prompts))

    with with_adapter(bench.model, adapter, merged):
        answers = greedy_answers(
            bench.model,
            questions.prompts,
            max_new_tokens=config.max_new_tokens,
            ends=ends_of_turn(bench.model, bench.base.tokenizer, questions.references),
            on_answered=tell,
        )
    return [text_of(bench.base.tokenizer, answer) for answer in answers]


def _figures(scores: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, Any]:
    """The means of the scores, and what they say of the private model."""
    private, change = mean_estimate(scores[PRIVATE]), mean_estimate(scores[PRIVATE] - scores[UNTRAINED])
    return {
        "rouge_l": private.mean,
        "rouge_l_initial": float(scores[UNTRAINED].mean()),
        "rouge_l_non_private": float(scores[NON_PRIVATE].mean()) if NON_PRIVATE in scores else None,
        "rouge_l_standard_error": private.standard_error,
        "rouge_l_change": change.mean,
        "rouge_l_change_standard_error": change.standard_error,
        "num_generated": len(scores[PRIVATE]),
    }
