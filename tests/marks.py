"""Which parameters of a test run every day."""

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Parameters of one value each that the long series has, beside those of every day."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
