"""`data check` counts what a run would see."""

from __future__ import annotations

import json

import datasets
import pytest

from fedpriv.data.checks import describe
from fedpriv.errors import InputError

ROWS = [
    {"text": "one two three", "label": "a", "site": "x"},
    {"text": "one two three", "label": "b", "site": "x"},
    {"text": "", "label": "b", "site": "y"},
    {"text": None, "label": None, "site": None},
    {"text": "one", "label": "b", "site": "y"},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def test_every_count(file):
    result = describe(file, text="text", label="label", client="site")
    # Texts: one repeats; a missing one counts as empty, so it repeats the empty one. Words: 3, 3, 0, 0, 1.
    assert result == {
        "records": 5,
        "empty_texts": 2,
        "duplicate_texts": 2,
        "words": {"p0": 0.0, "p50": 1.0, "p95": 3.0, "p100": 3.0},
        "records_without_label": 1,
        "labels": {"b": 3, "a": 1},
        "clients": {"x": 2, "y": 2},
    }


def test_labels_are_listed_most_frequent_first(file):
    assert list(describe(file, text="text", label="label")["labels"]) == ["b", "a"]


def test_causal_data_need_no_label(file):
    result = describe(file, text="text")
    assert not {"labels", "clients", "records_without_label"} & result.keys()


@pytest.mark.parametrize("option", ["text", "label", "text_pair", "client"])
def test_missing_column_names_the_option_of_the_command(file, option):
    with pytest.raises(InputError, match=f"--{option.replace('_', '-')} = 'none'"):
        describe(file, **{"text": "text", option: "none"})


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"file = .*none\.csv"):
        describe(str(tmp_path / "none.csv"), text="text")


def test_result_is_plain_json(file):
    result = describe(file, text="text", label="label", client="site")
    assert json.loads(json.dumps(result)) == result


def test_class_labels_carry_the_names_that_a_run_would_use(tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    table = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, 1]}, features=features)
    table.to_parquet(str(tmp_path / "r.parquet"))
    assert describe(str(tmp_path / "r.parquet"), text="text", label="label")["labels"] == {"yes": 2, "no": 1}
