"""The page of a finished run: its figures, its warnings and plots, and what it refuses to show."""

import csv
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedpriv.config import parse
from fedpriv.runs.show._report_page import write_paper, write_report
from server.observer import LogObserver
from simulations.engines import federation
from tests.pages import without_plots
from tests.runs.show.conftest import change_summary, write_finished_run

WriteRun = Callable[..., Path]  # the fixture in conftest.py
VOID = {"meta", "br", "link", "img", "hr", "input"}
# Of tables, and of what models answered.
CELLS = {"td", "th", "dd", "dt", "h3"}


class Page(HTMLParser):
    """Reads a page: its tags balance or an assertion fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.cells: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = re.sub(r"\s+", " ", "".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag in CELLS:
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)
        if CELLS & set(self.open):
            self.cells[-1] += data


def report(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


def edit_csv(path: Path, **changes: str | Callable[[dict[str, str]], object]) -> None:
    """Give columns of a table another value, or one for each of its rows."""
    rows = [
        row | {name: value(row) if callable(value) else value for name, value in changes.items()}
        for row in csv.DictReader(path.read_text().splitlines())
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """That of a run of five clients."""
    folder = tmp_path_factory.mktemp("page") / "run"
    write_finished_run(folder, num_clients=5, num_rounds=10, changes={})
    with without_plots():
        return report(folder)


def test_the_page_holds_the_headline_and_each_client_s_figures(page: Page) -> None:
    for figure in ("87.1%", "92.4%", "13.1%", "12.5%", "15.4 MB", "Failed replies: timeout 1."):
        assert figure in page.text
    start = page.cells.index("client")
    rows = [", ".join(page.cells[place : place + 8]) for place in (start, start + 8, start + 40)]
    # 0.87 * 340 / N_k * sqrt(10), rounded up; the rho view 2.7 times that.
    assert rows == [
        "client, records, rounds, ε local, ε rho, δ, sent, received",
        "client 0, 1,200, 10, 0.780, 2.11, 1e-5, 3.07 MB, 3.07 MB",
        "client 4, 480, 10, 1.95, 5.27, 1e-5, 3.07 MB, 3.07 MB",
    ]


def test_the_privacy_statement_names_unit_delta_views_source_and_accountants(page: Page) -> None:
    text = page.text
    for words in ("one record of one client", "ε = 1.95 at δ = 1e-5", "ε = 5.27 at δ = 1e-5", "cryptographic stream"):
        assert words in text
    for words in ("final, by pld", "kept live, by rdp", "What no ε here covers"):
        assert words in text
    for words in ("Not private", "did not move", "an upper bound", "Risk: what an attacker finds"):
        assert words not in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"private": False}, "marked as not private"),
        ({"noise_source": "seeded", "epsilon_local_max": "inf"}, "seeded generator"),
        ({"epsilon_local_max": None}, "ε is infinite"),
    ],
)
def test_a_run_that_protects_nobody_says_so_loudly(write_run: WriteRun, change: dict[str, object], reason: str) -> None:
    page = report(write_run(**change))
    assert "Not private" in page.text
    assert reason in page.text
    assert ("role", "alert") in page.attributes
    assert "with DP" not in page.text


def test_adapters_that_did_not_move_figures_by_rdp_and_a_risk_without_a_bound_are_told(write_run: WriteRun) -> None:
    unbounded = {"mu": None, "tpr_at_fpr": dict.fromkeys(RISK["tpr_at_fpr"], 1.0)}
    unbounded |= {"trade_off": {"fpr": [0.01], "tpr": [1.0]}}
    page = report(write_run(**RISK | unbounded, adapters_moved=False, accountant="rdp"))
    assert "The adapters did not move" in page.text
    assert "final, by rdp, an upper bound" in page.text
    assert "it may be all of the records" in page.text
    assert "Found by an attacker" not in page.text


RISK = {
    "mu": 0.5,
    "mu_regret": 0.01,
    "advantage": 0.197,
    "tpr_at_fpr": {"0.001": 0.0048, "0.01": 0.0339, "0.05": 0.1261},
    "trade_off": {"fpr": [0.0005, 0.01, 0.5, 1.0], "tpr": [0.003, 0.0339, 0.69, 1.0]},
}


@pytest.mark.usefixtures("plots")
def test_a_page_with_all_plots_says_what_an_attacker_finds_and_loads_nothing(write_run: WriteRun) -> None:
    run_dir = write_run(num_clients=9, **RISK)
    page = report(run_dir)
    ids = Counter(value for name, value in page.attributes if name == "id")
    assert max(ids.values()) == 1
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "srcset", "action", "data")
        assert name != "href" or value.startswith("#")
        assert not re.search(r"url\((?!#)", value)
    source = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "@import" not in source
    assert set(re.findall(r"https?://[^\s\"'<]+", source)) == {"http://www.w3.org/2000/svg"}  # a name, never loaded
    assert "default-src 'none'" in source
    finds = "wrongly accuses 1 % of outside records identifies at most 3.4 % of the records, on the local view"
    assert finds in page.text
    assert "Found by an attacker" in page.text
    assert "12.7 % at 5 % wrongly accused; advantage 19.7 %; mu 0.500" in page.text
    told = "The share found at most, by the share wrongly accused: 0.5 % at 0.1%, 3.4 % at 1%, 12.7 % at 5%."
    described = [value for name, value in page.attributes if name == "aria-label"]
    assert told in described
    spent = [f"ε so far, {view} view (upper bounds)" for view in ("local", "rho")]
    for series in ("Test accuracy", "Test loss", *spent):
        assert sum(each.startswith(f"{series} over") for each in described) == 1, series


@pytest.mark.slow
@pytest.mark.usefixtures("plots")
@pytest.mark.parametrize("num_clients", [1, 5, 8, 40])
def test_ids_are_unique_on_the_page(write_run: WriteRun, num_clients: int) -> None:
    ids = Counter(value for name, value in report(write_run(num_clients=num_clients)).attributes if name == "id")
    assert max(ids.values()) == 1


def test_settings_are_text_never_markup(write_run: WriteRun) -> None:
    run_dir = write_run("<b>run")
    evil = '</td><script>alert("1")</script>'
    (run_dir / "config.toml").write_text(f"model = '{evil}'\n'<i>' = 1\n")
    (run_dir / "environment.json").write_text(json.dumps({"version": 1, "commit": evil, "list": [evil]}))
    edit_csv(run_dir / "clients.csv", status="<script>")
    page = report(run_dir)
    assert page.tags["script"] == page.tags["i"] == 0
    assert page.cells.count(evil) == 2
    assert "Failed replies: <script> 50." in page.text


def test_infinity_is_shown_as_the_sign(write_run: WriteRun) -> None:
    run_dir = write_run(epsilon_rho_max="inf")
    summary = json.loads((run_dir / "summary.json").read_text())
    summary["clients"][2]["epsilon_rho"] = None
    change_summary(run_dir, **summary)
    edit_csv(run_dir / "clients.csv", epsilon_rho="inf")
    page = report(run_dir)
    assert "ε = ∞ at δ = 1e-5" in page.text
    assert "∞" in page.cells
    assert not re.search(r"\b(inf|nan|None)\b", page.text)


BASELINES = {"probe_accuracy": 0.9, "tfidf_accuracy": 0.91}


def test_the_page_leads_with_what_was_bought_and_folds_theorem_1(write_run: WriteRun) -> None:
    page = report(run_dir := write_run(**BASELINES))
    tiles = page.text.split("received.")[1].split("Round by round")[0]
    order = ["Accuracy with DP", "ε of one record at δ = 1e-5, against the server, which sees every upload"]
    order += ["Best baseline: TF-IDF, no privacy91.0%", "Without noise"]
    places = [tiles.index(words) for words in order]
    assert places == sorted(places)
    text = (run_dir / "report.html").read_text()
    assert write_report(run_dir).read_text() == text
    assert text.index("<details><summary>The rho view") < text.index("ε so far, rho view") < text.index("<ul>")
    assert "Bytes in each round" in text, "one reply failed"
    edit_csv(run_dir / "rounds.csv", bytes_up="100", bytes_down="100")
    change_summary(run_dir, privacy_view="rho")
    text = write_report(run_dir).read_text()
    assert "Bytes in each round" not in text
    assert "<details open><summary>The rho view" in text


def test_a_paper_gets_the_sentence_the_table_and_plots_with_named_axes(write_run: WriteRun, tmp_path: Path) -> None:
    run_dir = write_run(**BASELINES, accuracy_standard_error=0.01)
    summary = json.loads((run_dir / "summary.json").read_text())
    clients = [client | {"num_by_label": [3, 7]} for client in summary["clients"]]
    change_summary(run_dir, labels=["a", "b"], confusion_matrix=None, clients=clients)
    page, sentence = report(run_dir).text.split("For your paper")
    assert "Labels of each client" in page
    for words in (
        "differential privacy for one record, where neighbouring data sets differ in one record of the client added or",
        "against the server, which sees every upload",
        "1e-5)-differential privacy",
        "by the pld accountant",
        "together with no earlier run",
        "Error bars are one standard error over the choice of the test records",
    ):
        assert words in sentence
    written = write_paper(run_dir, tmp_path / "paper")
    assert [path.name for path in written] == ["run.tex", "accuracy.pdf", "epsilon-local.pdf", "labels.pdf"]
    assert all(path.read_bytes().startswith(b"%PDF") for path in written[1:])
    again = write_paper(run_dir, tmp_path / "again")
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]
    tex = written[0].read_text()
    assert r"\begin{tabular}{llll}" in tex
    assert r"$\varepsilon$" in tex
    assert "ε" not in tex


def test_a_run_without_comparison_has_no_empty_card(write_run: WriteRun) -> None:
    run_dir = write_run(accuracy_non_private=None)
    shutil.rmtree(run_dir / "comparison")
    assert "Without noise" not in (text := report(run_dir).text)
    assert "–" not in text.split("Round by round")[0]


@pytest.mark.usefixtures("plots")
def test_a_run_in_which_nobody_took_part_has_a_page(write_run: WriteRun) -> None:
    run_dir = write_run(clients=[])
    header = (run_dir / "clients.csv").read_text().splitlines()[0]
    (run_dir / "clients.csv").write_text(header + "\n")
    assert ("aria-label", "ε so far, local view (upper bounds): no data.") in report(run_dir).attributes


MISSING = ["config.toml", "environment.json", "rounds.csv", "clients.csv", "summary.json"]


@pytest.mark.parametrize("name", [*MISSING, "comparison/rounds.csv", "comparison/summary.json"])
def test_a_missing_file_is_one_line_and_leaves_the_folder_as_it_was(write_run: WriteRun, name: str) -> None:
    run_dir = write_run()
    (run_dir / "report.html").write_text("an older report")
    (run_dir / name).unlink()
    before = sorted(run_dir.iterdir())
    with pytest.raises(ValueError, match=re.escape(name)) as error:
        write_report(run_dir)
    assert "\n" not in str(error.value)
    assert sorted(run_dir.iterdir()) == before
    assert (run_dir / "report.html").read_text() == "an older report"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("rounds.csv", r"(?s).*", "", "not a CSV file"),
        ("summary.json", r"(?s)^.*$", "{", "not valid json"),
        ("environment.json", r"(?s)^.*$", "[1]", "must hold keys and values"),
        ("config.toml", r"^", "a = = 1", "not valid toml"),
        ("rounds.csv", "test_accuracy", "other", "column test_accuracy is missing"),
        ("clients.csv", "epsilon_rho", "other", "column epsilon_rho is missing"),
        ("rounds.csv", ",0.131,", ",plenty,", "column test_accuracy must hold numbers"),
    ],
)
def test_a_broken_file_is_one_line(write_run: WriteRun, name: str, old: str, new: str, message: str) -> None:
    path = write_run() / name
    path.write_text(re.sub(old, new, path.read_text()))
    with pytest.raises(ValueError, match=rf"{name}: {message}") as error:
        write_report(path.parent)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"private": "yes"}, "private = 'yes': must be true or false"),
        ({"accuracy": "high"}, "accuracy = 'high': must be a number"),
        ({"accuracy_interval": 0.9}, "accuracy_interval = 0.9: must be [low, high], both in [0, 1]"),
        ({"accuracy_interval": [0.9, 0.8]}, "accuracy_interval = [0.9, 0.8]: must be [low, high], both in [0, 1]"),
        ({"epsilon_rho_max": -1}, "epsilon_rho_max = -1: must be a number >= 0 or inf"),
        ({"noise_source": "dice"}, "noise_source = 'dice': must be secure or seeded"),
        ({"accountant": "moments"}, "accountant = 'moments': must be pld or rdp"),
        ({"clients": [{"client": 0}]}, "clients[0] is incomplete; an entry needs client, num_records"),
        ({"clients": [3]}, "clients[0] is incomplete"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(write_run: WriteRun, change, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        write_report(write_run(**change))


EVALUATED = {
    **{"accuracy": 0.7654, "accuracy_initial": None, "accuracy_non_private": None},
    **{"accuracy_interval": [0.7123, 0.8234], "evaluation_noise_multiplier": 4.0, "num_evaluated_clients": 4},
}


def untested(run_dir: Path) -> Path:
    """The run's folder without anything that a test set would have given."""
    edit_csv(run_dir / "rounds.csv", test_accuracy="", test_loss="")
    shutil.rmtree(run_dir / "comparison")
    return run_dir


@pytest.mark.usefixtures("plots")
def test_an_estimate_is_shown_with_its_interval(write_run: WriteRun) -> None:
    page = write_report(untested(write_run(**EVALUATED))).read_text()
    words = " ".join(page.split())
    assert "76.5%" in words
    assert "between 71.2% and 82.3%. 4 of 5 clients answered, with noise of standard deviation 4" in words
    assert "Accuracy after round 10: 76.5%, 95% interval 71.2% to 82.3%." in words
    assert "Test loss" not in words
    drowned = EVALUATED | {"accuracy": None, "accuracy_interval": [0.0, 1.0]}
    words = " ".join(write_report(untested(write_run("drowned", **drowned))).read_text().split())
    assert "The noise left nothing to see" in words, "the estimate is no number"
    assert "nan" not in words


def test_a_run_without_a_test_set_says_that_no_accuracy_was_measured(write_run: WriteRun) -> None:
    nothing = {"accuracy": None, "accuracy_initial": None, "accuracy_non_private": None}
    page = write_report(untested(write_run(**nothing))).read_text()
    assert "No accuracy was measured" in page
    assert "Test accuracy" not in page
    assert "Test accuracy" in write_report(write_run("tested")).read_text()


PRIVATE = {"simulate": False, "evaluation_noise_multiplier": 2.0}


@pytest.mark.slow
@pytest.mark.usefixtures("plots")
@pytest.mark.parametrize(
    ("changes", "measured"), [({"comparison": True}, ["Test accuracy", "Test loss"]), (PRIVATE, ["Accuracy"])]
)
def test_every_series_of_a_run_is_drawn(small_run, tmp_path: Path, changes, measured: list[str]) -> None:
    federation.run(parse({**small_run, **changes, "out": str(tmp_path / "run")}), LogObserver())
    page = (tmp_path / "run" / "report.html").read_text()
    series = [*measured, "ε so far, local view (upper bounds) over", "ε so far, rho view (upper bounds) over"]
    series += ["Labels of each client,"] if changes.get("comparison") else []
    assert page.count("<svg") == len(series) + 1
    assert page.count('aria-label="The share found at most, ') == 1
    for name in series:
        assert page.count(f'aria-label="{name} ') == 1, name
