"""LoRA, or all weights, by AdamW on all records in one place, without clipping, noise or federation.

    python -m simulations.studies.plain_lora simulations/configs/medical-answers.toml -c data=medquad.csv.gz
    python -m simulations.studies.plain_lora simulations/configs/sst2.toml -c layers=all --weights --rate 5e-5

That is what a user would do otherwise: the same model, records and test set as the configuration's run, and the loop
that a tutorial of peft or transformers would show: shuffled batches, mean loss, a falling rate. With allowed answers
TF-IDF, which needs no language model, is a second comparison. Everything here reads records as they are: for public
data. The figures are a line of results/studies/plain_lora.jsonl; the same configuration is not trained again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from simulations.studies.harness import Line, lines, parser, run_missing


@dataclass(frozen=True, kw_only=True)
class PlainCell:
    """One training: the resolved configuration by its digest, the learning rate, records a step, and epochs."""

    config: str
    rate: float
    batch: int
    epochs: int

    @property
    def key(self) -> str:
        """Unique for what decides the figures."""
        return f"{self.config}/{self.rate:g}/{self.batch}/{self.epochs}"


def trained(bench: Workbench, config: RunConfig, how: PlainCell) -> None:
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


def measure(config: RunConfig, how: PlainCell) -> Line:
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


def _shown(line: Line) -> str:
    return ", ".join(f"{figure} {line[figure]:.4f}" for figure in ("accuracy", "perplexity") if figure in line)


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


def main() -> None:
    """Print the line, which is trained for if it is not there."""
    own = parser(__doc__)
    own.add_argument("config", type=Path, help="of a run, or of a sweep, whose base counts")
    own.add_argument("-c", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    own.add_argument("--rate", type=float, default=1e-3)
    own.add_argument("--batch", type=int, default=16)
    own.add_argument("--epochs", type=int, default=1)
    own.add_argument("--weights", action="store_true", help="train the layers' weights in full, in place of LoRA")
    own.add_argument("--out", type=Path, default=Path("results/studies/plain_lora.jsonl"))
    arguments = own.parse_args()
    values = configuration.read(arguments.config)
    values = {key: value for key, value in values.items() if key not in ("title", "runs", "grid")}
    values |= configuration.parse_overrides(arguments.overrides)
    config = configured(values, weights=arguments.weights)
    if not config.data_are_public:
        own.error("needs public_data = true")
    digest = hashlib.blake2b(repr(config).encode(), digest_size=8).hexdigest()
    cell = PlainCell(config=digest, rate=arguments.rate, batch=arguments.batch, epochs=arguments.epochs)
    run_missing(arguments.out, [cell], partial(measure, config), _shown)
    print(next(json.dumps(line) for line in lines(arguments.out) if line["key"] == cell.key))


if __name__ == "__main__":
    main()
