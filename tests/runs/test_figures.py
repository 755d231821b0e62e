"""A figure is declared in one place, and every page shows it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import fedpriv
from fedpriv.models.publishing import card
from fedpriv.models.publishing.saved import SavedVariant, find
from fedpriv.runs._folder import RunFolder
from fedpriv.runs.figures import EVERY_PAGE, FIGURES, Figure, figures
from fedpriv.runs.show._report_page import write_report
from fedpriv.runs.show._tracker import Place
from fedpriv.runs.show._tracking import RunTeller
from tests.models.publishing.runs import finished
from tests.runs.show.conftest import change_summary, write_finished_run
from tests.runs.show.tracking.test_told import Recorded
from tests.runs.written import WriteRun, closing, shown, status

NEW = Figure(
    "letters_a_round",
    "letters",
    lambda folder: folder.summary["bytes_up"] / 2 / folder.summary["num_rounds"],
    lambda value: f"{value:g} a round",
)


@pytest.fixture
def folder(write_run: WriteRun, tmp_path: Path) -> Path:
    """A finished run of three clients, whose clients sent 1,234 bytes in two rounds."""
    run = write_run(rounds=2)
    write_finished_run(tmp_path / "other", num_clients=3, num_rounds=2, changes={"bytes_up": 1234})
    shutil.copy(tmp_path / "other" / "summary.json", run)
    return run


@pytest.fixture
def saved(folder: Path, tiny_bert: Path, tmp_path: Path) -> SavedVariant:
    """An adapter of the run."""
    return replace(find(finished(tmp_path / "saved", tiny_bert)), run=RunFolder(folder))


def told(folder: Path) -> dict[str, float]:
    tracker = Recorded()
    RunTeller(tracker, "recorded", Place(name="run", folder=folder))("finished")
    (final,) = (call[2] for call in tracker.calls if call[0] == "final")
    return final


def test_a_new_figure_is_declared_once_and_every_page_shows_it(folder: Path, saved: SavedVariant, monkeypatch) -> None:
    def pages() -> dict[str, str]:
        return {
            "terminal": shown(status(folder)),
            "closing": closing(folder),
            "report": write_report(folder).read_text(),
            "card": card.text(saved),
        }

    assert not [name for name, text in pages().items() if "308.5 a round" in text]
    monkeypatch.setattr("fedpriv.runs.figures.FIGURES", (*FIGURES, NEW))
    found = pages()
    assert [name for name, text in found.items() if "308.5 a round" in text] == list(found)
    assert [name for name, text in found.items() if "letters" in text.lower()] == list(found)
    assert told(folder)["final/letters_a_round"] == 308.5
    assert fedpriv.open_run(folder).summary["letters_a_round"] == 308.5
    assert {"tracker", "result", *found} == EVERY_PAGE


def test_the_holders_own_models_are_shown_with_the_largest_class_everywhere(folder: Path, saved: SavedVariant) -> None:
    alone = {"alone_accuracy": 0.702, "alone_accuracy_min": 0.61, "alone_accuracy_max": 0.8015}
    change_summary(folder, **alone, majority_accuracy=0.6)
    saved = replace(saved, run=RunFolder(folder))
    pages = [shown(status(folder), 120), write_report(folder).read_text()]
    for page in (*pages, card.text(saved)):
        assert "70.2% on average, 61.0% to 80.2%; largest class 60.0%" in page
    assert "each alone" in closing(folder)
    assert told(folder)["final/alone_accuracy"] == fedpriv.open_run(folder).summary["alone_accuracy"] == 0.702


def test_a_figure_that_a_run_does_not_have_is_left_out(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("fedpriv.runs.figures.FIGURES", (Figure("nothing", "nothing", lambda folder: None),))
    assert figures(RunFolder(folder), "card") == ()


def test_all_readers_of_one_look_see_the_same_bytes(folder: Path) -> None:
    look = RunFolder(folder)
    before = look.round_rows(("round",))
    (folder / "rounds.csv").write_text("damaged")
    assert look.round_rows(("round", "seconds"))[-1]["round"] == before[-1]["round"] == 2
    assert len(look.rounds) == 3
    with pytest.raises(fedpriv.InputError, match=r"rounds\.csv: column round is missing"):
        _ = RunFolder(folder).rounds
