"""The other library's products are the same up to rounding, row by row, and are taken only where they are faster."""

import math

import pytest
import torch
from torch import nn

from fedpriv.learning.adapters import _products, use_the_faster


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256, bias=False)).eval()


@pytest.mark.parametrize("most_copied", [0, 2**29])
@pytest.mark.parametrize(("usual", "other", "taken"), [(1.0, 0.5, True), (1.0, 0.97, False), (0.5, 1.0, False)])
def test_the_faster_is_taken_and_gives_the_same(layers, monkeypatch, usual, other, taken, most_copied):
    if not _products._has_onednn():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(_products, "_seconds", lambda p: other if p.func is _products._onednn_linear else usual)
    monkeypatch.setattr(_products, "_MOST_COPIED", most_copied)
    x = torch.randn(3, 5, 256)
    with torch.inference_mode():
        expected = layers(x)
        assert use_the_faster(layers) is taken
        assert torch.allclose(layers(x), expected, atol=1e-5)
        x[1] = math.nan
        found = layers(x)
    assert found[1].isnan().all()
    assert torch.allclose(found[::2], expected[::2], atol=1e-5)


def test_other_formats_and_small_models_keep_their_products(layers):
    assert not use_the_faster(layers.to(torch.bfloat16))
    assert not use_the_faster(nn.Linear(8, 8))
