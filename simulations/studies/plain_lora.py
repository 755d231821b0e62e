"""LoRA, or all weights, by AdamW on all records in one place, without clipping, noise or federation.

That is what a user would do otherwise: the same model, records and test set as the configuration's run, and the loop
that a tutorial of peft or transformers would show: shuffled batches, mean loss, a falling rate. With allowed answers
TF-IDF, which needs no language model, is a second comparison. Everything here reads records as they are: for public
data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from fedpriv import config as configuration
from fedpriv.config import RunConfig
from fedpriv.learning.data.records import Item, usable
from fedpriv.learning.training.evaluation import evaluate
from fedpriv.learning.training.workbench import Workbench, workbench
from server.figures import log_perplexity_change
from simulations.studies.harness import Line


@dataclass(frozen=True, kw_only=True)
class PlainTraining:
    """The learning rate, records a step, and epochs."""

    rate: float
    batch: int
    epochs: int


def trained(bench: Workbench, config: RunConfig, how: PlainTraining) -> None:
    """Train the workbench's own adapter on the pooled records of all clients."""
    items = [item for k in range(bench.num_clients) for item in filter(usable, bench.client(k).items())]
    parameters = [p for p in bench.model.peft_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=how.rate)
    steps = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=how.epochs * -(-len(items) // how.batch))
    for chosen in _batches(items, how.batch, how.epochs, config.seed):
        optimizer.zero_grad()
        for together in bench.model.passes(chosen):
            part = [chosen[position] for position in together]
            (bench.model.predictions(part, cached=True).losses.sum() / len(chosen)).backward()
        optimizer.step()
        steps.step()


def _batches(items: list[Item], batch: int, epochs: int, seed: int) -> Iterator[list[Item]]:
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        order = generator.permutation(len(items))
        for begin in range(0, len(order), batch):
            yield [items[position] for position in order[begin : begin + batch]]


def tfidf_accuracy(bench: Workbench) -> float:
    """The accuracy of a logistic regression on words and pairs of words of the prompts."""
    pooled = [
        (text, answer) for data in bench.data.clients for text, answer in zip(data.texts, data.pairs or (), strict=True)
    ]
    texts, answers = zip(*pooled, strict=True)
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    classifier = LogisticRegression(C=10.0, max_iter=1000).fit(words.fit_transform(texts), answers)
    test = bench.data.test
    return float(classifier.score(words.transform(test.texts), test.pairs))


def measure(config: RunConfig, how: PlainTraining) -> Line:
    """Accuracies before and after, and a causal model's perplexities."""
    bench = workbench(config)
    before = evaluate(bench.model, bench.test)
    trained(bench, config, how)
    after = evaluate(bench.model, bench.test)
    accuracies = {"accuracy_initial": before.accuracy, "accuracy": after.accuracy}
    if before.tokens is None or after.tokens is None:  # a classifier has none
        return accuracies
    change = log_perplexity_change(before.tokens, after.tokens)
    found = {
        "perplexity_initial": before.perplexity,
        "perplexity": after.perplexity,
        "log_perplexity_change": change.mean if change else None,
        "log_perplexity_change_standard_error": change.standard_error if change else None,
    }
    return found | accuracies | ({"tfidf_accuracy": tfidf_accuracy(bench)} if config.answers else {})


def configured(values: Mapping[str, Any], *, weights: bool) -> RunConfig:
    """The configuration whose model and records are trained in one place.

    Args:
        values: of a federation.
        weights: whether to train the layers' weights in full, in place of LoRA.
    """
    # Both factors as peft trains them, and a head that reads what the model pools.
    plain: dict[str, Any] = {"aggregation": "fedavg" if weights else "dp-lora", "factors": "weights"}
    # What the run's own recipe puts around a prompt stays, whatever is trained.
    plain["prompt_template"] = configuration.parse(values).prompt_template
    if not (values.get("prompt_column") or values.get("messages_column")):
        plain |= {"recipe": "per-sample", "sampling_probability": 1.0}  # of which nothing is drawn here
    return configuration.parse({**values, **plain})
