"""What a sweep compares its runs by: accuracy, or the perplexity of a language model that answers freely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulations.sweeps.plan import Sweep


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure of a run's summary.

    Attributes:
        name: its column.
        label: for axes and tables.
        text: a value as plots write it.
        references: (column, label, line style) of what runs are compared with.
        far: how far from the runs, in units of the metric, a reference is only named instead of drawn.
    """

    name: str
    label: str
    text: Callable[[float], str]
    references: tuple[tuple[str, str, str], ...]
    far: float


ACCURACY = Metric(
    name="accuracy",
    label="test accuracy",
    text=lambda value: f"{100 * value:.0f} %",
    references=(
        ("accuracy_non_private", "z = 0, clipping kept", "--"),
        ("probe_accuracy", "linear probe", "-."),
        ("majority_accuracy", "largest class", ":"),
        ("chance_accuracy", "chance", ":"),
    ),
    far=0.05,
)

PERPLEXITY = Metric(
    name="perplexity",
    label="test perplexity",
    text=lambda value: f"{value:.3g}",
    references=(
        ("perplexity_non_private", "z = 0, clipping kept", "--"),
        ("perplexity_initial", "untrained", ":"),
    ),
    far=0.5,
)

METRICS = (ACCURACY, PERPLEXITY)


def metric_of(sweep: Sweep) -> Metric:
    """Perplexity if every run's model answers freely; accuracy wherever there are classes or allowed answers."""
    free = all(run.config.task == "CAUSAL_LM" and not run.config.answers for run in sweep.runs)
    return PERPLEXITY if free else ACCURACY
