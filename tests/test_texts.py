"""JSON that every reader accepts, whatever numbers it is made of."""

import json
import math

import numpy as np
import pytest

from fedpriv import texts


@pytest.mark.parametrize(
    ("number", "written"),
    [
        (math.inf, '"inf"'),
        (-math.inf, '"-inf"'),
        (np.float64("inf"), '"inf"'),
        (math.nan, "null"),
        (np.float64("nan"), "null"),
    ],
)
def test_an_infinity_is_not_what_is_unknown_at_any_depth(number, written):
    text = texts.strict_json({"epsilon": number, "rows": [{"loss": (1.5, number)}]})
    assert text == f'{{"epsilon": {written}, "rows": [{{"loss": [1.5, {written}]}}]}}'


def test_everything_else_is_as_json_writes_it():
    value = {"epsilon": 0.1 + 0.2, "largest": 1.7976931348623157e308, "count": 2**70, "name": "NaN", "none": None}
    assert texts.strict_json(value) == json.dumps(value)
    assert texts.strict_json(value, indent=2) == json.dumps(value, indent=2)


def test_what_json_cannot_express_is_refused():
    with pytest.raises(TypeError, match="set"):
        texts.strict_json({"names": {"a"}})
