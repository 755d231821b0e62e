"""How often the bounds exceed the truth, over many trials of exactly epsilon-DP and exactly Gaussian mechanisms."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import special

from fedpriv.audit import f_dp, ladder, num_correct, one_run_epsilon

TRIALS, CONFIDENCE = 2000, 0.95


def randomised_response(epsilon: float, num_canaries: int, seed: int) -> dict[str, Any]:
    """The share of trials in which the one-run bound exceeds epsilon, all canaries guessed."""
    generator = np.random.default_rng([21, seed])
    correct = generator.binomial(num_canaries, special.expit(epsilon), size=TRIALS)
    bounds = one_run_epsilon(
        num_canaries=num_canaries, num_guesses=num_canaries, num_correct=correct, delta=0.0, confidence=CONFIDENCE
    )
    return {
        "kind": "coverage",
        "mechanism": "randomised response",
        "epsilon": epsilon,
        "num_canaries": num_canaries,
        "trials": TRIALS,
        "num_exceeding": int((bounds > epsilon).sum()),
        "median": float(np.median(bounds)),
    }


def graded(epsilon: float, num_canaries: int, seed: int) -> dict[str, Any]:
    """The same with graded scores and a number of guesses that is fixed, searched for, or searched for and paid for.

    Each canary's answer is randomised response; its score is the answer's sign times an uninformative size.
    """
    generator = np.random.default_rng([22, seed])
    sizes = ladder(num_canaries)
    correct = np.empty((TRIALS, len(sizes)), dtype=np.int64)
    for trial in range(TRIALS):
        included = generator.random(num_canaries) < 0.5
        truthful = generator.random(num_canaries) < special.expit(epsilon)
        signs = np.where(included == truthful, 1.0, -1.0)
        correct[trial] = num_correct(signs * generator.random(num_canaries), included, sizes)
    fixed = len(sizes) // 2

    def bound(confidence: float) -> np.ndarray:
        return one_run_epsilon(
            num_canaries=num_canaries, num_guesses=sizes, num_correct=correct, delta=0.0, confidence=confidence
        )

    alone = bound(CONFIDENCE)
    paid = bound(1 - (1 - CONFIDENCE) / len(sizes))
    return {
        "kind": "graded",
        "epsilon": epsilon,
        "num_canaries": num_canaries,
        "trials": TRIALS,
        "num_sizes": len(sizes),
        "num_exceeding_fixed": int((alone[:, fixed] > epsilon).sum()),
        "num_exceeding_unpaid": int((alone.max(axis=1) > epsilon).sum()),
        "num_exceeding_paid": int((paid.max(axis=1) > epsilon).sum()),
    }


def gaussian(mu: float, num_canaries: int, num_guesses: int, seed: int) -> dict[str, Any]:
    """The share of trials in which the f-DP test rejects mu-GDP at the level 5 % for an exactly mu-GDP mechanism."""
    generator = np.random.default_rng([23, seed])
    sizes = np.array([num_guesses])
    counts = np.empty(TRIALS, dtype=np.int64)
    for trial in range(TRIALS):
        included = generator.random(num_canaries) < 0.5
        scores = included + generator.standard_normal(num_canaries) / mu
        counts[trial] = num_correct(scores, included, sizes)[0]
    worst = {
        int(count): bool(f_dp.rejected(f_dp.gaussian(mu), 1 - CONFIDENCE, num_canaries, num_guesses, int(count))[0])
        for count in np.unique(counts)
    }
    return {
        "kind": "coverage",
        "mechanism": "Gaussian, f-DP bound",
        "epsilon": f_dp.gaussian_epsilon(mu, 1e-5),
        "num_canaries": num_canaries,
        "trials": TRIALS,
        "num_exceeding": sum(worst[int(count)] for count in counts),
        "median": None,
    }
