"""The attack on published models, in small: it finds members without noise, in each form that a model may take."""

import pytest

from simulations.studies.audit import published


@pytest.mark.slow
def test_members_are_found_without_noise_in_every_form(monkeypatch, tmp_path):
    monkeypatch.setattr(published, "POOL", 60)
    monkeypatch.setattr(published, "SHADOWS", 3)
    line = published.membership_run(tmp_path, "embedded", "no noise", tmp_path / "roc.png")
    assert line["epsilon"] is None
    assert line["loss_members"] < line["loss_others"] - 0.3
    assert line["forms"].keys() == {"deduplicated", "float16"}
    assert line["forms"]["float16"]["distance"] < 1e-3
    for found in (line["attacks"]["LiRA"], line["uploads"], *line["forms"].values()):
        assert found["auc"][0] > 0.55
    assert (tmp_path / "roc.png").stat().st_size > 10_000
