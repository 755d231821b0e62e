"""What a user would do without a federation: LoRA and full fine-tuning of a classifier learn its pooled records."""

from __future__ import annotations

import json
import sys

import pytest
import tomli_w

from simulations.studies import plain_lora


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(("--rate", "1e-2"), id="lora"),
        pytest.param(("--weights", "--rate", "1e-2"), id="weights", marks=pytest.mark.slow),
    ],
)
def test_a_classifier_learns_its_pooled_records(kind, small_run, tmp_path, monkeypatch, capsys):
    """Tested on the records that it trains on: whether anything is learned, not how much of it holds elsewhere."""
    values = {key: small_run[key] for key in ("model", "data")} | {"public_data": True, "layers": "all"}
    values |= {"test_data": small_run["data"], "num_clients": 2, "partition": "iid"}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(values))
    command = ["plain_lora", str(tmp_path / "run.toml"), *kind, "--epochs", "8", "--out", str(tmp_path / "lines.jsonl")]
    monkeypatch.setattr(sys, "argv", command)
    plain_lora.main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["accuracy"] > line["accuracy_initial"] + 0.2
    monkeypatch.setattr(plain_lora, "trained", pytest.fail)
    plain_lora.main()  # has its line, and does not train again
