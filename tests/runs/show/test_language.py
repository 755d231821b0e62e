"""The page of a language model's run shows perplexity and answers, and no text of a model becomes markup."""

import json
from pathlib import Path

from fedpriv.runs._rows import Sample
from fedpriv.runs._writer import RunWriter
from fedpriv.runs.show._report_page import write_report
from tests.runs.show.test_page import Page, edit_csv
from tests.runs.written import closing

FIGURES = {
    **{"perplexity": 9.87, "perplexity_initial": 14.2, "perplexity_non_private": 8.5},
    **{"log_perplexity_change": -0.3637, "log_perplexity_change_standard_error": 0.0213},
    **{"rouge_l": 0.2154, "rouge_l_initial": 0.1821, "rouge_l_non_private": 0.2323},
    **{"rouge_l_standard_error": 0.0111, "rouge_l_change": 0.0333, "rouge_l_change_standard_error": 0.0099},
    "num_generated": 12,
}
HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)> & {{ 7 * 7 }}"


def page_of(run_dir: Path) -> tuple[str, Page]:
    html = write_report(run_dir).read_text()
    return html, Page(html)


def language_run(write_run, **changes: object) -> Path:
    run_dir = write_run(**(FIGURES | changes))
    for folder in (run_dir, run_dir / "comparison"):
        edit_csv(folder / "rounds.csv", test_perplexity=lambda row: 14.2 / (1 + int(row["round"])))
    texts = [Sample(prompt=f"p{i}", reference="r", untrained="u", private=f"a{i}", non_private="n") for i in range(11)]
    hostile = Sample(prompt=HOSTILE, reference=HOSTILE, untrained=HOSTILE, private=HOSTILE, non_private=HOSTILE)
    RunWriter(run_dir).write_answers([hostile, *texts])
    return run_dir


def test_the_page_has_ten_samples_escaped_and_all_figures(write_run):
    html, page = page_of(language_run(write_run))
    assert HOSTILE not in html
    assert "<script" not in html
    assert "onerror" not in [name for name, _ in page.attributes]
    assert page.cells.count(HOSTILE) == 5, "a reader sees the text as it is"
    assert {"p0", "a0", "p8", "a8"} <= set(page.cells)
    assert "p9" not in page.cells
    assert "The first 10 of 12 prompts" in page.text
    for figure in ("9.87", "14.20", "8.50", "0.2154 ± 0.0111", "0.1821", "0.2323"):
        assert figure in page.cells
    assert "log perplexity -0.3637 ± 0.0213, ROUGE-L +0.0333 ± 0.0099" in page.text


def test_perplexity_stands_where_accuracy_is_the_share_of_next_tokens(write_run):
    _, page = page_of(language_run(write_run))
    assert "Test perplexity" in page.text
    assert "Test accuracy" not in page.text
    assert "Perplexity with DP" in page.text
    assert "private" in page.cells
    confusion = {"confusion_matrix": [[3, 1], [0, 4]], "labels": ["yes", "no"], "macro_f1": 0.87, "private": False}
    _, page = page_of(language_run(lambda **changes: write_run("answers", **changes), **confusion))
    assert "Test perplexity" in page.text
    assert "Test accuracy" in page.text
    assert "Accuracy" in page.text
    assert "private" not in page.cells, "nor are the answers of a run without privacy called so"
    assert "this run" in page.cells


def test_a_run_without_comparison_or_answers_has_a_page(write_run):
    absent = {key: None for key in FIGURES if "rouge" in key or "non_private" in key or key == "num_generated"}
    run_dir = language_run(write_run, **absent)
    (run_dir / "samples.jsonl").unlink()
    _, page = page_of(run_dir)
    assert "9.87" in page.cells
    assert "prompts with answers" not in page.text
    assert "ROUGE-L compares" not in page.text


def test_the_terminal_shows_perplexity_and_what_changed(write_run):
    text = closing(language_run(write_run), width=100)
    assert "9.87" in text
    assert "against untrained, paired: log perplexity -0.3637 ± 0.0213" in text
    assert json.dumps(0.871)[:5] not in text, "a share of next tokens is no accuracy to be proud of"
