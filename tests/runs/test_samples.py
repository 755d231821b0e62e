"""What models answered is read as it was written, and a damaged file is refused by its line."""

from __future__ import annotations

import pytest

from fedpriv.errors import InputError
from fedpriv.runs import _rows as rows
from fedpriv.runs._rows import Sample
from fedpriv.runs._writer import RunWriter

SAMPLES = [
    Sample(prompt="What is\nflu?", reference="\u2028a disease", untrained='"', private="", non_private=None),
    Sample(prompt="ä", reference="<b>", untrained="x\r\ny", private="\u202e", non_private="z"),
]


def test_samples_are_read_as_they_were_written(tmp_path):
    RunWriter(tmp_path).write_answers(SAMPLES)
    assert rows.read_answers(tmp_path / "samples.jsonl", rows.Sample) == tuple(SAMPLES)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_run_without_answers_has_no_samples(tmp_path):
    assert rows.read_answers(tmp_path / "samples.jsonl", rows.Sample) == ()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 2 is damaged"),
        ('{"prompt": "a"}', "line 2 is damaged; it must hold prompt, reference"),
        (
            '{"prompt": "a", "reference": 3, "untrained": "", "private": "", "non_private": null}',
            "line 2: reference = 3: must be text",
        ),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, expected):
    path = tmp_path / "samples.jsonl"
    RunWriter(tmp_path).write_answers(SAMPLES[:1])
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(InputError, match=expected):
        rows.read_answers(path, rows.Sample)
