"""The timing behind plans counts the records of whole updates."""

import time

import pytest

from fedpriv.learning.training import workbench
from fedpriv.learning.training._passes import RECORDS_OF_A_STEP


@pytest.mark.slow
def test_the_speed_is_the_records_of_all_timed_updates_over_their_time(monkeypatch):
    updates = []
    compute = workbench.local_update

    def counted(model, task):
        assert len(task.data) == RECORDS_OF_A_STEP
        updates.append(time.perf_counter())
        return compute(model, task)

    monkeypatch.setattr(workbench, "local_update", counted)
    found = workbench.records_per_second(at_least_seconds=0.01)
    passed = time.perf_counter() - updates[1]
    assert len(updates) >= 2
    assert found >= (len(updates) - 1) * RECORDS_OF_A_STEP / passed
    assert found <= 1.5 * (len(updates) - 1) * RECORDS_OF_A_STEP / passed
