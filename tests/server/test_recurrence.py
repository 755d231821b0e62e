"""Integral privacy in a run: whose variants recur, their mean as a variant, and a report that keeps it apart."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters._arithmetic import factors_of, non_lora_tensors
from fedpriv.models.variants import folders
from server.observer import LogObserver
from simulations.engines import federation


def run(values, out: Path, **changes) -> tuple[Path, dict]:
    federation.run(parse({**values, "out": str(out), **changes}), LogObserver())
    return out, json.loads((out / "summary.json").read_text())["integral"]


def test_the_mean_of_what_recurs_is_a_variant_of_all_uploads_that_were_compared(small_run, tmp_path):
    folder, found = run(small_run, tmp_path / "run", integral_epsilon=1000.0)
    (cluster,) = found["clusters"]
    assert cluster["clients"] == ["client-0", "client-1", "client-2"]
    assert cluster["recurrence"] == cluster["k"] == 3
    adapters = [load_file(folder / "variants" / name / "adapter_model.safetensors") for name in cluster["clients"]]
    mean = load_file(folder / "variants" / found["mean"] / "adapter_model.safetensors")
    for layer, (b, a) in factors_of(mean).items():
        products = torch.stack([factors_of(each)[layer][0] @ factors_of(each)[layer][1] for each in adapters])
        torch.testing.assert_close(b @ a, products.mean(dim=0), atol=1e-5, rtol=1e-4)
    for name, tensor in non_lora_tensors(mean).items():
        torch.testing.assert_close(tensor, torch.stack([each[name] for each in adapters]).mean(dim=0))
    config = json.loads((folder / "variants" / found["mean"] / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == pytest.approx(16 / 4), "the products count as in training"
    described = {name: folders.read(folder / "variants" / name) for name in (found["mean"], "global")}
    assert described[found["mean"]].history.ancestors == described["global"].history.ancestors
    page = (folder / "report.html").read_text()
    assert "Variants that recur" in page
    assert "This is not differential privacy" in " ".join(page.split())


def test_where_nothing_recurs_every_client_is_alone_and_no_claim_is_made(small_run, tmp_path):
    folder, found = run(small_run, tmp_path / "run", integral_epsilon=0.0)
    assert [cluster["recurrence"] for cluster in found["clusters"]] == [1, 1, 1]
    assert {cluster["k"] for cluster in found["clusters"]} == {1}
    assert "1, no claim" in (folder / "report.html").read_text()


def test_nobody_compares_what_nobody_asked_to_or_may_see(small_run, tmp_path):
    assert run(small_run, tmp_path / "run", rounds=1)[1] is None
    hidden = {"secure_aggregation": True, "min_clients": 3, "local_steps": 1, "privacy_view": "aggregate"}
    with pytest.raises(InputError, match="integral_epsilon: it compares single uploads"):
        parse({**small_run, **hidden, "integral_epsilon": 0.1})


@pytest.mark.parametrize("rule", ["ffa-lora", "fed-sb"])
def test_uploads_that_hold_one_factor_have_no_products_to_compare(small_run, rule):
    with pytest.raises(InputError, match=f"integral_epsilon: .* aggregation = {rule} uploads one factor alone"):
        parse({**small_run, "aggregation": rule, "integral_epsilon": 0.1})
