"""The study of persons: its table says by how much the unit `person` is ahead, and which target that misses."""

from __future__ import annotations

from simulations.studies.harness import append
from simulations.studies.persons import GROUP, PERSON, RECORD, PersonCell, write


def test_a_lead_stands_with_its_target_and_a_missed_one_in_bold(tmp_path):
    accuracies = {PERSON: 0.8, RECORD: 0.82, GROUP: 0.78}
    for method, accuracy in accuracies.items():
        for setting in ("embedded", "MedQuAD by focus"):
            cell = PersonCell(setting=setting, method=method, epsilon=2.0)
            append(tmp_path / "runs.jsonl", {"key": cell.key, "accuracy": accuracy})
    write(tmp_path / "page.md", tmp_path / "runs.jsonl")
    rows = (tmp_path / "page.md").read_text().splitlines()
    leads = {row[2:-2].split(" | ")[0]: row[2:-2].split(" | ")[3:] for row in rows if " | 2 | " in row}
    assert leads["embedded"][:2] == ["-0.020 (one seed) (>= -0.05)", "+0.020 (one seed) (**not** >= 0.05)"]
    assert leads["MedQuAD by focus"][0] == "-0.020 (one seed)"
    assert leads["embedded"][2] == "not run"
