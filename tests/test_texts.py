"""JSON that every reader accepts, whatever numbers it is made of."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fedpriv import texts


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, np.float64("inf"), np.float64("nan")])
def test_a_number_that_json_lacks_is_null_at_any_depth(number):
    text = texts.strict_json({"epsilon": number, "rows": [{"loss": (1.5, number)}]})
    assert text == '{"epsilon": null, "rows": [{"loss": [1.5, null]}]}'


def test_everything_else_is_as_json_writes_it():
    value = {"epsilon": 0.1 + 0.2, "largest": 1.7976931348623157e308, "count": 2**70, "name": "NaN", "none": None}
    assert texts.strict_json(value) == json.dumps(value)
    assert texts.strict_json(value, indent=2) == json.dumps(value, indent=2)


def test_what_json_cannot_express_is_refused():
    with pytest.raises(TypeError, match="set"):
        texts.strict_json({"names": {"a"}})
