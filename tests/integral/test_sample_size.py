"""The paper's rules for the size of a subsample."""

from __future__ import annotations

import math

import pytest

from fedpriv.errors import InputError
from fedpriv.integral._subsamples import advice


@pytest.mark.parametrize(("weights", "records"), [(172, 1720), (197, 1970)])
def test_the_papers_examples(weights, records):
    """Section 4.1: 172 and 197 weights need 1720 and 1970 records, which leaves 5 disjoint subsamples of 10,000."""
    found = advice(weights, 10_000)
    assert found.rule_of_thumb.records == records
    assert found.rule_of_thumb.num_subsamples == 5


def test_the_pac_form():
    found = advice(100, 10**6, excess_loss=0.1, failure_probability=math.exp(-5), subsample_size=500)
    assert found.pac.records == pytest.approx(10_500, abs=1)
    assert found.pac.num_subsamples == 95
    assert found.chosen.num_subsamples == 2000
    assert advice(100, 10**6, excess_loss=0.2).pac.records < advice(100, 10**6, excess_loss=0.1).pac.records


@pytest.mark.parametrize(
    "changes",
    [
        {"num_parameters": 0},
        {"num_records": 0},
        {"subsample_size": 0},
        {"excess_loss": 1.0},
        {"failure_probability": 0.0},
    ],
)
def test_values_out_of_range_are_refused_by_name(changes):
    with pytest.raises(InputError, match=next(iter(changes))):
        advice(**({"num_parameters": 10, "num_records": 100} | changes))
