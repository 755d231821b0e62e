"""The study of integral privacy: its page names the other trainings whose mean beats the majority class."""

from __future__ import annotations

from simulations.studies.integral import _other_ways


def line(way: str, architecture: str, accuracy: float) -> dict[str, object]:
    test = {"test": {"accuracy": accuracy}}
    own = {"data": "Adult", "architecture": architecture, "way": way, "num_subsamples": 22}
    whole = {"recurrence": 3, "num_subsamples": 32, "accuracy": accuracy}
    majority = {"test": {"accuracy": 0.76}}
    return own | {"majority": majority, "chosen": {"recurrence": 2, "mean": test}, "whole_table": whole}


def test_only_means_above_the_majority_class_are_named():
    first = [line("SGD", "dnn-1", 0.76), line("SGD", "dnn-2", 0.83)]
    others = [line("Adam", "dnn-1", 0.76), line("Adam", "dnn-2", 0.84), line("plain", "dnn-1", 0.24)]
    adam, plain, whole = _other_ways([*first, *others]).splitlines()
    assert adam == "- Adam: Adult DNN-2 (2 of 22, 0.8400)."
    assert plain == "- plain: nowhere."
    assert whole.endswith("test records among them: Adult DNN-2 (3 of 32, 0.8300).")
