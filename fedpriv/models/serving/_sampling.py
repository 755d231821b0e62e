"""The next token of an answer: penalties, temperature, top-k and top-p; and the log-probabilities that are told of it.

Log-probabilities are of the model's own distribution, before any of these, as OpenAI's API and vLLM (its mode
`raw_logprobs`) tell them. So they are a function of the variant and the text alone, whatever was asked of the draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedpriv.models.serving.requests import Generate, ScoredToken

# JSON has no infinity; OpenAI's API writes this where a token is impossible.
_IMPOSSIBLE = -9999.0


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
        request: has the penalties.
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
        request: says how to choose.
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
    """A token with its log-probability and those of the likeliest tokens, the chosen one among them if it is one.

    Args:
        logits: float32 [vocabulary] of the model, as they are.
        token: that was chosen.
        offset: characters of the answer before it.
        num_alternatives: likeliest tokens to tell, >= 0.
        texts: of all tokens.
    """
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
    """{token: its text behind another token}, special ones as they are written; each is found when it is asked for.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        # Behind itself: some tokenizers write no space before the first token of a text.
        alone, twice = (self._tokenizer.decode([token] * times, clean_up_tokenization_spaces=False) for times in (1, 2))
        text: str = twice[len(alone) :]
        self[token] = text
        return text
