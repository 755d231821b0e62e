"""Questions of the server's test set, and a causal model's greedy answers to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedpriv.config import DataSection
from fedpriv.learning.data import turns_of
from fedpriv.learning.data.records import usable
from fedpriv.learning.training._decoding import Tokens, ends_of_turn, greedy_answers, prompt_and_response
from fedpriv.learning.training.evaluation import text_of
from fedpriv.learning.training.workbench import Workbench


@dataclass(frozen=True, kw_only=True)
class Questions:
    """[questions] what is asked, in words and in tokens, and the test set's answers."""

    texts: list[str]
    prompts: list[Tokens]
    references: list[Tokens]


def first_questions(bench: Workbench, num: int, records: Sequence[int] | None = None) -> Questions:
    """The first distinct prompts of the test set with a response, in its order.

    Args:
        bench: of the run.
        num: of questions, at most.
        records: among which they are looked for; None for all.
    """
    found: dict[Tokens, tuple[str, Tokens]] = {}
    for item in filter(usable, bench.test.items(records)):
        prompt, response = prompt_and_response(item)
        if prompt and response and len(found) < num:
            _, index = item
            found.setdefault(prompt, (_in_words(bench.config, bench.data.test.texts[index]), response))
    return Questions(
        texts=[text for text, _ in found.values()],
        prompts=list(found),
        references=[response for _, response in found.values()],
    )


def answers_to(
    questions: Questions, bench: Workbench, on_answered: Callable[[int], None] = lambda num: None
) -> list[str]:
    """The answers of the bench's model with the adapter that it has, of at most `max_new_tokens`.

    Args:
        questions: what is asked.
        bench: of the run.
        on_answered: is told how many have been answered.
    """
    answers = greedy_answers(
        bench.model,
        questions.prompts,
        max_new_tokens=bench.config.max_new_tokens,
        ends=ends_of_turn(bench.model, bench.base.tokenizer, questions.references),
        on_answered=on_answered,
    )
    return [text_of(bench.base.tokenizer, answer) for answer in answers]


def _in_words(config: DataSection, text: str) -> str:
    """The question of a record: its prompt, or what was said before its response, a line for each turn."""
    return "\n".join(f"{role}: {said}" for role, said in turns_of(text)) if config.messages_column else text
