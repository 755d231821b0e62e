"""What Prometheus would read from a port, and which of the shipped alerts would then fire.

The parser is Prometheus' own for Python; the evaluator is not, and knows the comparisons that `alerts.yml` is made of:
a figure or its magnitude, against a number or another figure. `for` is left out.
"""

from __future__ import annotations

import contextlib
import operator
import re
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fedpriv.deployment import metrics

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples" / "prometheus"

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]

_COMPARED = re.compile(r"(abs\()?([a-z_]+)\)? (==|<|>) ([a-z_]+|-?[\d.]+)")
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {"==": operator.eq, "<": operator.lt, ">": operator.gt}


def parsed(text: str) -> Samples:
    """{(name, labels): value}."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def text_of(*sources: metrics.Measured) -> str:
    """What a reader of these sources would get, without a port."""
    readings = [metrics._Reading(source) for source in sources]
    for reading, source in zip(readings, sources, strict=True):
        reading.figures = tuple(source.read())
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics._Registered(readings))
    return generate_latest(registry).decode()


def scraped(port: int) -> Samples:
    """All samples at a port of this machine; `up` is 0, and alone, if nothing answers, as in Prometheus.

    Asks three times: a busy machine may not answer within ten seconds, and Prometheus asks again too.
    """
    url = f"http://127.0.0.1:{port}/metrics"
    for _ in range(3):
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            return {**parsed(answer.read().decode()), ("up", frozenset()): 1.0}
    return {("up", frozenset()): 0.0}


def value(samples: Samples, name: str, **labels: str) -> float:
    """The only sample of this name with these labels among its own."""
    (found,) = [v for (n, of), v in samples.items() if n == name and labels.items() <= dict(of).items()]
    return found


def names(samples: Samples) -> set[str]:
    return {name for name, _ in samples}


def rules() -> dict[str, str]:
    """{alert: its expression}."""
    (group,) = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def firing(samples: Samples) -> set[str]:
    """The alerts whose expression holds for a sample."""
    return {alert for alert, expression in rules().items() if _holds(expression, samples)}


def _holds(expression: str, samples: Samples) -> bool:
    found = _COMPARED.fullmatch(expression)
    assert found, f"{expression}: is no comparison that this evaluator knows"
    magnitude, name, compared, other = found.groups()
    for (each, labels), number in samples.items():
        bound = samples.get((other, labels)) if other[0].isalpha() else float(other)
        if each == name and bound is not None and _OPERATORS[compared](abs(number) if magnitude else number, bound):
            return True
    return False
