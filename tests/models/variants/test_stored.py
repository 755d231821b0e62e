"""What deduplication saved and cost, in the few rows that close a run."""

from typing import Any

from fedpriv.models.variants.stored import StoredVariants


def outcome(name: str, **changes: Any) -> dict[str, Any]:
    values = {"epsilon_before": 2.0, "epsilon_after": 2.0, "utility_before": 0.80, "utility_after": 0.80}
    return {"name": name, "utility": "accuracy", "num_records": 100, "delta": 1e-5} | values | changes


def rows_of(*outcomes: dict[str, Any], base_bytes: int | None = 90_000_000) -> dict[str, tuple[str, ...]]:
    stored = StoredVariants(lossless=False, outcomes=outcomes, bytes_stored=1_000_000, bytes_logical=3_000_000)
    table = stored.closing_table(base_bytes)
    assert table.caption == f"{len(outcomes)} variants in shared blocks"
    return {name: tuple(rest) for name, *rest in table.rows}


def test_it_says_what_adapters_and_whole_models_take_and_which_variant_changed_most():
    rows = rows_of(
        outcome("global"),
        outcome("a", epsilon_after=2.301, utility_after=0.79),
        outcome("b", epsilon_after=2.1, utility_before=0.82, utility_after=0.78),
    )
    assert rows == {
        "adapters": ("3 MB", "1 MB", "3 times smaller"),
        "whole models": ("273 MB", "91 MB", "3 times smaller, the base once"),
        "largest rise of ε": ("2.00", "2.31", "a, δ 1e-5"),
        "largest fall of accuracy": ("82.0%", "78.0%", "b"),
    }


def test_where_nothing_rose_fell_or_was_measured_it_says_so():
    same = rows_of(outcome("a"), outcome("b", epsilon_before=float("inf"), epsilon_after=float("inf")))
    assert same["largest rise of ε"][2] == "none rose"
    assert same["largest fall of accuracy"][2] == "none fell"
    private = rows_of(outcome("a", utility_before=None, utility_after=None), base_bytes=None)
    assert "whole models" not in private
    assert private["largest fall of accuracy"][2] == "not measured: validated privately"
    lost = rows_of(outcome("a", epsilon_after=float("inf")), outcome("b", epsilon_after=3.0))
    assert lost["largest rise of ε"] == ("2.00", "∞", "a, δ 1e-5")
    likelihoods = {"utility": "log likelihood", "utility_before": -2.0, "utility_after": -2.1}
    assert rows_of(outcome("a", **likelihoods))["largest rise of perplexity"] == ("7.39", "8.17", "a")
