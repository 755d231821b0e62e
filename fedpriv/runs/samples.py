"""What a run's models answered to prompts of the server's test set, a line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fedpriv.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt of the server's test set with its answers, as text.

    Attributes:
        prompt: as the models read it, without special tokens.
        reference: the test set's own response.
        untrained, private: answers of the model before and after the run.
        non_private: that of the comparison run; None without one.
    """

    prompt: str
    reference: str
    untrained: str
    private: str
    non_private: str | None


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write the samples atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(f"{json.dumps(asdict(sample))}\n" for sample in samples), encoding="utf-8")
    temporary.replace(path)


def read_samples(path: Path) -> tuple[Sample, ...]:
    """The samples of a run; none if it has generated no answers.

    Raises:
        InputError: a line is damaged; names it.
    """
    if not path.is_file():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(_parse_sample(path, number, line) for number, line in enumerate(lines, start=1))


def _parse_sample(path: Path, number: int, line: str) -> Sample:
    names = [field.name for field in fields(Sample)]
    try:
        values = json.loads(line)
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.keys() != set(names):
        raise InputError(f"{path}: line {number} is damaged; it must hold {', '.join(names)}")
    for name, value in values.items():
        if not isinstance(value, str) and not (value is None and name == "non_private"):
            raise InputError(f"{path}: line {number}: {name} = {value!r}: must be text")
    return Sample(**values)
