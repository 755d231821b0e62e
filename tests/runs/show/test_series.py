from __future__ import annotations

import math

import pandas as pd

from fedpriv.runs.show._plots import MAX_LINES, compared_lines, epsilon_lines, merge_equal, traffic_lines

ROUNDS = pd.DataFrame({"round": [0, 1, 2, 3]})


def spent(*rows: tuple[int, int, str, float]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["round", "client", "status", "epsilon_local"])


def test_what_is_spent_stays_spent_in_missed_rounds() -> None:
    frame = epsilon_lines(spent((1, 0, "ok", 0.5), (3, 0, "ok", 0.8), (2, 4, "ok", 0.1)), ROUNDS, "local")
    assert frame["0"].tolist() == [0.0, 0.5, 0.5, 0.8]
    assert frame["4"].tolist() == [0.0, 0.0, 0.1, 0.1]


def test_a_missing_epsilon_is_infinite_for_a_reply_and_ignored_for_a_failure() -> None:
    frame = epsilon_lines(
        spent((1, 0, "ok", math.nan), (1, 1, "ok", 0.5), (2, 1, "timeout", math.nan)), ROUNDS, "local"
    )
    assert frame["0"].tolist()[1:] == [math.inf] * 3
    assert frame["1"].tolist() == [0.0, 0.5, 0.5, 0.5]


def test_no_client_at_all_gives_an_empty_frame_over_the_rounds() -> None:
    frame = epsilon_lines(spent().astype({"epsilon_local": float}), ROUNDS, "local")
    assert frame.shape == (4, 0)


def test_many_clients_become_quantiles_that_infinity_does_not_break() -> None:
    rows = [(1, k, "ok", float(k)) for k in range(MAX_LINES)] + [(1, MAX_LINES, "ok", math.inf)]
    frame = epsilon_lines(spent(*rows), ROUNDS, "local")
    assert frame.loc[1].to_dict() == {"highest": math.inf, "90%": math.inf, "median": 4.0, "10%": 1.0}


def test_a_round_written_twice_counts_as_last_written() -> None:
    rounds = pd.DataFrame({"round": [1, 0, 1], "test_loss": [9.0, 2.0, 1.0]})
    assert compared_lines(rounds, None, "test_loss", "run")["run"].tolist() == [2.0, 1.0]


def test_traffic_without_a_figure_is_zero() -> None:
    rounds = pd.DataFrame({"round": [0, 1], "bytes_up": [math.nan, 5], "bytes_down": [0, 7]})
    assert traffic_lines(rounds).to_numpy().tolist() == [[0, 0], [5, 7]]


def test_equal_lines_are_one_line_under_all_their_names() -> None:
    frame = pd.DataFrame({"a": [1.0, math.nan], "b": [2.0, 3.0], "c": [1.0, math.nan]})
    assert list(merge_equal(frame)) == [("a", "c"), ("b",)]
