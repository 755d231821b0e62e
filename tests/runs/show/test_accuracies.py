"""The accuracies beside each other: on the page, in the terminal and in a run's status, and of older runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedpriv.errors import InputError
from fedpriv.runs._folder import RunFolder
from fedpriv.runs.figures import format_percent
from fedpriv.runs.show import joining_table, open_run
from fedpriv.runs.show._report_page import write_report
from fedpriv.runs.show._tables import MOST_CLASSES, accuracy_table, confusion_table
from tests.runs.written import closing

WARNING = "accuracy 0.871 ± 0.010 is not above 0.860 <b>"
QUALITY: dict[str, Any] = {
    **{"majority_accuracy": 0.6, "accuracy_standard_error": 0.0106, "macro_f1": 0.8512, "warnings": [WARNING]},
    **{"confusion_matrix": [[590, 10], [119, 281]], "labels": ["no & <i>", "yes"]},
    **{"probe_accuracy": 0.9011, "tfidf_accuracy": 0.8834},
    **{"alone_accuracy": 0.702, "alone_accuracy_min": 0.61, "alone_accuracy_max": 0.8015},
    "baselines": {"num_trained_on": 20_000, "num_available": 60_614, "folds": None},
}


def page_of(run_dir: Path) -> str:
    return write_report(run_dir).read_text(encoding="utf-8")


def rows_of(run_dir: Path) -> list[tuple[str, ...]]:
    return list(accuracy_table(RunFolder(run_dir).summary).rows)


def test_every_accuracy_has_a_row_the_private_one_first(write_run):
    (first, *others) = rows_of(write_run(**QUALITY))
    assert first[:3] == ("private", "0.8710 ± 0.0106", "0.8512")
    assert others == [
        ("without noise", "0.9240", "", "z = 0, clipping kept"),
        ("each alone", "0.7020", "", "0.6100 to 0.8015 on own records"),
        ("linear probe", "0.9011", "", "20,000 of 60,614 records, no privacy"),
        ("TF-IDF", "0.8834", "", "20,000 of 60,614 records, no privacy"),
        ("largest class", "0.6000", "", "always guessing it"),
        ("untrained", "0.1310", "", ""),
    ]
    folds = {"baselines": {"num_trained_on": 800, "num_available": 1000, "folds": 5}}
    assert rows_of(write_run("cross-validated", **QUALITY | folds))[3][3] == "5-fold on 1,000 test records"


def test_the_page_shows_warnings_baselines_and_the_confusion_matrix_escaped(write_run):
    page = page_of(write_run(**QUALITY))
    assert '<div class="banner alarm" role="alert"><strong>Warning</strong>' in page
    assert "ccuracy 0.871 ± 0.010 is not above 0.860 &lt;b&gt;" in page
    assert "no &amp; &lt;i&gt;" in page
    assert "<i>" not in page
    cells = re.findall(r'<td( class="right")? style="--share: ([\d.]+)">(\d+)</td>', page)
    assert [int(count) for _, _, count in cells] == [590, 10, 119, 281]
    assert [bool(right) for right, _, _ in cells] == [True, False, False, True]
    shares = [590 / 600, 10 / 600, 119 / 400, 281 / 400]
    assert [float(share) for _, share, _ in cells] == pytest.approx(shares, abs=5.1e-4)
    assert "Chance" not in page


def test_what_each_holder_gains_by_joining_is_shown_with_its_own_model(write_run):
    run_dir = write_run(**QUALITY)
    summary = json.loads((run_dir / "summary.json").read_text())
    for client, accuracy in zip(summary["clients"], (0.61, 0.8015, 0.7, None, 0.6965), strict=True):
        client["alone_accuracy"] = accuracy
    table = joining_table(summary)
    assert [row[2] for row in table.rows] == ["61.0%", "80.2%", "70.0%", "69.7%"]
    assert {row[3] for row in table.rows} == {format_percent(summary["accuracy"])}
    assert open_run(run_dir).report().loc["each alone", "accuracy"] == 0.702
    assert "each alone" not in [row[0] for row in rows_of(write_run("older", **QUALITY | {"alone_accuracy": None}))]


def test_a_run_without_measures_of_quality_opens(write_run):
    run = write_run()
    page = page_of(run)
    assert 'role="alert"' not in page
    assert "Chance" in page
    assert "Confusion matrix" not in page
    assert [row[0] for row in rows_of(run)] == ["private", "without noise", "untrained"]


@pytest.mark.parametrize("num_classes", [MOST_CLASSES, MOST_CLASSES + 1])
def test_a_large_confusion_matrix_is_left_to_the_summary(write_run, num_classes):
    names, rows = [f"class {c}" for c in range(num_classes)], [[1] * num_classes] * num_classes
    run_dir = write_run(**QUALITY | {"labels": names, "confusion_matrix": rows})
    assert (confusion_table(RunFolder(run_dir).summary) is None) == (num_classes > MOST_CLASSES)
    assert (f"of {num_classes} classes is in" in page_of(run_dir)) == (num_classes > MOST_CLASSES)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("warnings", value) for value in ("one line", [3])),
        *(("confusion_matrix", [[1, 2], *rows]) for rows in ([], [[3]], [[3, -4]], [[3, 4.5]])),
        *(("labels", value) for value in (None, ["a", "b", "c"])),
        *(("probe_accuracy", "high"), ("majority_accuracy", True)),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(write_run, key, value):
    name = "confusion_matrix" if key == "labels" else key
    with pytest.raises(InputError, match=rf"summary\.json: {name}"):
        RunFolder(write_run(**QUALITY | {key: value})).checked()


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_shows_warnings_and_the_same_table(write_run, width):
    run_dir = write_run(**QUALITY)
    text = closing(run_dir, width, accuracy_interval=None, unmoved_tensors=[])
    assert "WARNING" in text
    assert "is not above 0.860" in text
    for row in rows_of(run_dir):
        line = next(line for line in text.splitlines() if line.lstrip().startswith(row[0]))
        assert all(cell in line for cell in row)
    assert "chance" not in text
