"""What is logged is a function of the released tables: all of their figures, no path and nothing else."""

import json
import math
from dataclasses import asdict, fields
from typing import get_type_hints

import tomli_w

from fedpriv.config import RunConfig
from fedpriv.runs._rows import RoundRow
from fedpriv.runs.show import _tracker, _tracking
from fedpriv.runs.show._tables import nothing_stored
from fedpriv.runs.show._tracker import MOST_CLIENTS, ROUND_METRICS, MetricPoint, run_name
from tests.runs.show.tracking.folders import SECRET, client_row, config, round_row, summary


def nowhere(path: str) -> bool:
    return False


def test_a_row_is_logged_but_for_what_is_empty_or_infinite():
    assert ROUND_METRICS.keys() == {field.name for field in fields(RoundRow)} - {"round"}
    assert len(set(ROUND_METRICS.values())) == len(ROUND_METRICS)
    row = asdict(round_row(3))
    told = {point.metric: (point.value, point.round) for point in _tracker.round_points([row])}
    columns = [name for name, value in row.items() if value is not None and value != math.inf and name != "round"]
    assert told == {ROUND_METRICS[name]: (row[name], 3) for name in columns}
    assert "epsilon/rho_max" not in told
    assert told["epsilon/local_max"] == (1.5, 3)


def test_a_client_s_epsilons_and_nothing_else_of_it_are_logged():
    told = _tracker.client_points([asdict(client_row(2, 1))])
    assert told == [
        MetricPoint(metric="epsilon_local/client_01", value=1.5, round=2),
        MetricPoint(metric="epsilon_rho/client_01", value=1.0, round=2),
    ]


def test_final_figures_are_the_summary_s_numbers_and_facts_its_words():
    assert _tracker.final_figures(summary()) == {
        **{"final/accuracy": 0.625, "final/epsilon_local_max": 2.0, "final/num_rounds": 5.0},
        **{"final/audit_epsilon_lower": 0.25},
        **{"final_epsilon_local/client_00": 1.0, "final_epsilon_local/client_01": 2.0},
    }
    many = summary() | {"clients": summary()["clients"] * MOST_CLIENTS}
    assert not any(name.startswith("final_") for name in _tracker.final_figures(many)), "more than a page can show"
    assert _tracker.facts(summary()) == {"private": "true", "noise_source": "secure", "ledger_head": "abc"}
    assert _tracker.facts(summary() | {"private": False})["private"] == "false"


def test_no_path_is_in_what_goes_to_a_tracker_as_files(write_run, tmp_path):
    run_dir, sent = write_run(), tmp_path / "sent"
    kept = {key: value for key, value in asdict(config(run_dir)).items() if value is not None}
    (run_dir / "config.toml").write_text(tomli_w.dumps(kept))
    sent.mkdir()
    _tracking.stage_run(run_dir, sent, nothing_stored)
    text = "".join(path.read_text() for path in sent.iterdir())
    assert "We fine-tuned my-model with" in text
    assert SECRET not in text
    assert str(tmp_path) not in text


def test_no_path_and_no_machine_is_in_the_parameters():
    values = {key: "" if value is None else value for key, value in asdict(config("/x")).items()}
    told = _tracker.parameters(_tracker.configuration(values, nowhere))
    assert SECRET not in json.dumps(told)
    assert (told["data"], told["model"]) == ("letters.csv", "my-model")
    assert not told.keys() & {"out", "ledger", "node_keys", "resume", "ray_address", "track"}
    told = _tracker.parameters({"labels": ["a", "b"], "system_prompt": "x" * 6000, "seed": 0, "out": "", "answers": ()})
    assert told == {"labels": "a, b", "system_prompt": "x" * 499 + "…", "seed": 0}, "long texts fit a table"
    assert run_name({"rank": 4, "data": f"/home/{SECRET}/b.csv", "delta": None}) == "rank=4, data=b.csv"
    assert run_name({}) == "base"


def test_every_key_of_free_text_is_known_to_hold_no_path_or_is_shortened_or_left_out():
    # The values of the last two are bound by patterns.
    texts = {key for key, type_ in get_type_hints(RunConfig).items() if type_ is str} - {"layers", "device"}
    told = _tracker.configuration(dict.fromkeys(texts, f"/home/{SECRET}/x"), nowhere)
    columns = {key for key in texts if key.endswith("_column")}
    free = {"system_prompt", "prompt_template", "mechanism", "aggregation", "target_risk"}
    assert {key for key, value in told.items() if SECRET in value} == columns | free


def test_a_name_at_the_hub_stays_whole_and_a_folder_here_does_not():
    assert _tracker.without_folders("sentence-transformers/all-MiniLM-L6-v2", nowhere) == (
        "sentence-transformers/all-MiniLM-L6-v2"
    )
    assert _tracker.without_folders("patients/st-anna.csv", lambda path: True) == "st-anna.csv"
    assert _tracker.without_folders("../patients/st-anna.csv", nowhere) == "st-anna.csv"
    assert _tracker.without_folders("~/st-anna.csv", nowhere) == "st-anna.csv"
    assert _tracker.without_folders("x" * 10_000) == "x" * 10_000


def test_paths_are_replaced_longest_first():
    values = {"data": "/a", "out": "/a/b", "model": "org/name"}
    assert list(_tracker.paths(values, nowhere).items()) == [("/a/b", "b"), ("/a", "a")]
