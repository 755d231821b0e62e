"""ROUGE-L of answers: how much of a reference is found in them, in its order."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InputError


def require(num_answers: int) -> None:
    """Refuse to score answers where the package for it is missing.

    Raises:
        InputError: it is; says how to install it.
    """
    if find_spec("rouge_score") is None:
        raise InputError(
            f"generated_answers = {num_answers}: scoring answers needs rouge-score, which is not installed; "
            "pip install fedpriv[llm], or use 0"
        )


def rouge_l(references: Sequence[str], answers: Sequence[str]) -> npt.NDArray[np.float64]:
    """The F1 of each answer's longest common subsequence of words with its reference, in [0, 1], [answers].

    Words are runs of the letters a to z, in lower case, and digits; they are not stemmed.

    Source: Lin 2004, section 3.1.
    """
    from rouge_score.rouge_scorer import RougeScorer  # deferred: only runs that generate answers need it

    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    pairs = zip(references, answers, strict=True)
    return np.array([scorer.score(reference, answer)["rougeL"].fmeasure for reference, answer in pairs], dtype=float)
