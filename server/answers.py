"""Answers of a run's models to prompts of the server's test set: untrained, private and not private."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpriv.config import RunConfig
from fedpriv.learning.adapters import Adapter, Merged
from fedpriv.learning.training import with_adapter
from fedpriv.learning.training.answers import answers_to, first_questions
from fedpriv.learning.training.evaluation import text_of
from fedpriv.learning.training.workbench import Workbench
from fedpriv.runs import RunWriter, Sample
from server.figures import mean_estimate, rouge_l
from server.observer import Observer
from server.summary import SeriesOutcome

log = logging.getLogger("flwr")

UNTRAINED, PRIVATE, NON_PRIVATE = "untrained", "private", "non_private"

NOTHING = {
    **dict.fromkeys(("rouge_l", "rouge_l_initial", "rouge_l_non_private", "rouge_l_standard_error")),
    **dict.fromkeys(("rouge_l_change", "rouge_l_change_standard_error", "num_generated")),
}
"""The keys of summary.json about generated answers, of a run without any."""


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
    questions = first_questions(bench, config.generated_answers)
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
    texts: dict[str, list[str]] = {}
    for name, (adapter, merged) in models.items():

        def tell(num: int, name: str = name) -> None:
            writer.journal.write("answered", model=name, num_answered=num, num_prompts=len(questions.prompts))

        with with_adapter(bench.model, adapter, merged):
            texts[name] = answers_to(questions, bench, tell)
    references = [text_of(bench.base.tokenizer, tokens) for tokens in questions.references]
    none = [None] * len(references)
    rows = zip(questions.texts, references, texts[UNTRAINED], texts[PRIVATE], texts.get(NON_PRIVATE, none), strict=True)
    writer.write_answers(
        [
            Sample(prompt=prompt, reference=reference, untrained=untrained, private=private, non_private=non_private)
            for prompt, reference, untrained, private, non_private in rows
        ]
    )
    return _figures({name: rouge_l(references, of) for name, of in texts.items()})


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
