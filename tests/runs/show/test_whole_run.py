"""The page that a run writes has its plots, which `tests/conftest.py` leaves out everywhere else."""

from pathlib import Path

import pytest

from fedpriv.config import parse
from server.observer import LogObserver
from simulations.engines import federation

PRIVATE = {"simulate": False, "evaluation_noise_multiplier": 2.0}


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        pytest.param({"comparison": True}, ["Test accuracy", "Test loss"], id="tested"),
        pytest.param(PRIVATE, ["Accuracy"], id="evaluated on private records", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("plots")
def test_every_series_of_a_run_is_drawn(
    small_run: dict[str, object], tmp_path: Path, changes: dict[str, object], measured: list[str]
) -> None:
    federation.run(parse({**small_run, **changes, "out": str(tmp_path / "run")}), LogObserver())
    page = (tmp_path / "run" / "report.html").read_text()
    series = [*measured, "ε so far, local view (upper bounds) over", "ε so far, rho view (upper bounds) over"]
    series += ["Labels of each client,"] if changes.get("comparison") else []
    assert page.count("<svg") == len(series) + 1
    assert page.count('aria-label="The share found at most, ') == 1
    for name in series:
        assert page.count(f'aria-label="{name} ') == 1, name
