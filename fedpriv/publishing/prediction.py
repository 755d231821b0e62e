"""Answers of a saved model to texts: a class with probabilities, or a generated answer.

Each text has a pass of its own, without padding, so an answer depends on no other text by a bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedpriv.data import TextData, records
from fedpriv.data.chat import RESPONSE_MASK
from fedpriv.data.records import collate, tokenize, usable
from fedpriv.errors import InputError
from fedpriv.publishing.saved import LoadedVariant
from fedpriv.training import Tokens, ends_of_turn, greedy_answers
from fedpriv.training.evaluation import text_of

# Prompts are not cut: one that is too long is refused.
_NO_LIMIT = 1 << 20


@torch.inference_mode()
def classify(
    loaded: LoadedVariant, texts: Sequence[str], pairs: Sequence[str] | None = None
) -> list[tuple[float, ...]]:
    """[texts] the probabilities of each label, in their order.

    Args:
        loaded: a classifier.
        texts: each cut to the run's `max_length` tokens.
        pairs: the second texts, for a model of pairs.

    Raises:
        InputError: the model reads pairs and there are none, or the other way round; or a text cannot be read.
    """
    reading = loaded.saved.reading
    if reading.pairs != (pairs is not None):
        right = "pairs of texts; give the second one too" if reading.pairs else "single texts, not pairs"
        raise InputError(f"model {loaded.saved.name}: reads {right}")
    found = tokenize(
        TextData(tuple(texts), (), None if pairs is None else tuple(pairs)),
        loaded.tokenizer,
        label_names=(),
        max_length=reading.max_length,
        vocabulary=loaded.peft_model.get_input_embeddings().num_embeddings,
        encode=reading.encoder.encode,
        names=reading.encoder.names(loaded.tokenizer, pairs=reading.pairs, max_length=reading.max_length),
    )
    answers = []
    for number, item in enumerate(found.items(), start=1):
        if not usable(item):
            raise InputError(f"text {number}: the model's tokenizer cannot read it")
        logits = loaded.peft_model(**collate([item])).logits[0]
        if not logits.isfinite().all():
            raise InputError(f"text {number}: the model {loaded.saved.name} gives no number; its weights are damaged")
        answers.append(tuple(logits.double().softmax(dim=0).tolist()))
    return answers


def generate(loaded: LoadedVariant, prompts: Sequence[str], *, max_new_tokens: int | None = None) -> list[str]:
    """[prompts] the model's most likely answers, token by token.

    Args:
        loaded: a causal model.
        prompts: put as in training: in the model's chat template, or as they stand.
        max_new_tokens: of an answer, >= 1; None for the run's.

    Raises:
        InputError: a prompt cannot be read, or leaves no room for an answer.
    """
    tokens = [_prompt_tokens(loaded, prompt, number) for number, prompt in enumerate(prompts, start=1)]
    most, ends = max_new_tokens or loaded.saved.reading.max_new_tokens, ends_of(loaded)
    answers = [greedy_answers(loaded, [prompt], max_new_tokens=most, ends=ends)[0] for prompt in tokens]
    return [text_of(loaded.tokenizer, answer) for answer in answers]


def ends_of(loaded: LoadedVariant) -> frozenset[int]:
    """The tokens that end a causal model's answer."""
    reading = loaded.saved.reading
    turns = [(reading.chat.end(loaded.tokenizer),)] if reading.instructs else []
    return ends_of_turn(loaded, loaded.tokenizer, turns)


def _prompt_tokens(loaded: LoadedVariant, prompt: str, number: int) -> Tokens:
    """The tokens of a prompt.

    Args:
        loaded: a causal model.
        prompt: its text.
        number: of the prompt, for errors.

    Raises:
        InputError: it cannot be read, or leaves no room for an answer.
    """
    reading, tokenizer = loaded.saved.reading, loaded.tokenizer
    if reading.instructs:
        (row,) = reading.chat.encode(tokenizer, [prompt], ["x"], _NO_LIMIT)
        tokens = () if row is None else tuple(row["input_ids"][: row[RESPONSE_MASK].index(1)])
    else:
        (row,) = records.encode(tokenizer, [prompt], None, _NO_LIMIT)
        tokens = () if row is None else tuple(row["input_ids"])
    if not tokens:
        raise InputError(f"text {number}: the model's tokenizer or chat template cannot read it")
    most = getattr(loaded.peft_model.config, "max_position_embeddings", None)
    if most is not None and len(tokens) >= most:
        raise InputError(f"text {number}: has {len(tokens)} tokens, and the model takes fewer than {most}")
    return tokens
