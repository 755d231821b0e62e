"""What node_exporter would read from a metrics file, and which of the shipped alerts would then fire.

The parser is Prometheus' own for Python; the evaluator is not, and knows the comparisons that `alerts.yml` is made of:
a figure, its magnitude or the time since, against a number or another figure. `for` is left out.
"""

import operator
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fedpriv.operate import metrics

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples" / "prometheus"

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]

# When a file was written, as node_exporter tells it.
MTIME = "node_textfile_mtime_seconds"

_COMPARED = re.compile(r'(abs\(|time\(\) - )?([a-z_]+)(?:\{file=~"(.+)"\})?\)? (==|<|>) ([a-z_]+|-?[\d.]+)')
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {"==": operator.eq, "<": operator.lt, ">": operator.gt}


def parsed(text: str) -> Samples:
    """{(name, labels): value}."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def text_of(*sources: metrics.Measured) -> str:
    """What the file of these sources would hold."""
    file = metrics._MetricsFile(Path(os.devnull), sources)
    file._figures = {source.name: tuple(source.read()) for source in sources}
    return generate_latest(file).decode()


def exported(folder: Path) -> Samples:
    """All samples of the metrics file in a kit's folder, and when it was written, as node_exporter tells them."""
    path = metrics.path_in(folder)
    age = MTIME, frozenset({("file", str(path))})
    return {**parsed(path.read_text()), age: path.stat().st_mtime} if path.exists() else {}


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
    function, name, file, compared, other = found.groups()
    change = {"abs(": abs, "time() - ": lambda number: time.time() - number, None: float}[function]
    for (each, labels), number in samples.items():
        bound = samples.get((other, labels)) if other[0].isalpha() else float(other)
        if each != name or bound is None or (file and not re.fullmatch(file, dict(labels)["file"])):
            continue
        if _OPERATORS[compared](change(number), bound):
            return True
    return False
