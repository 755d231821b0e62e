"""The table of lower bounds: runs of every row count, also of those that the page does not show."""

from simulations.studies.audit import tables


def run(claim: float, one_run: float) -> dict[str, object]:
    figures = {"one_run": one_run, "searched": 0.0, "f_dp": 0.2, "ideal_one_run": 0.5, "ideal_f_dp": 0.6}
    return {"kind": "local", "schedule": "q = 1", "claim": claim, "num_canaries": 100, **figures}


def test_a_bound_above_its_claim_is_counted_although_its_row_is_not_shown(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- bounds:begin -->\n<!-- bounds:end -->\n")
    tables.write(page, [run(1.0, 1.1), run(8.0, 1.0), run(8.0, 3.0), run(8.0, 2.0)])
    text = page.read_text()
    assert "| engine, q = 1 | 8.00 | 2.00 (3.00) | 0.20 (0.20) | 0.50, 0.60 |" in text
    assert "| 1.00 |" not in text
    assert "above the claim in 1 of 4 comparisons" in text


def test_the_vault_is_shown_and_not_counted_since_colluders_may_find_more(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- bounds:begin -->\n<!-- bounds:end -->\n")
    vault = {"kind": "vault", "observer": "sums, 2 colluders", "charged": 2.0, "found": 2.5}
    tables.write(page, [vault, run(8.0, 1.0)])
    assert "| vault, sums, 2 colluders | 2.00 |  | 2.50 |  |" in page.read_text()
    assert "above the claim in 0 of 1 comparisons" in page.read_text()
