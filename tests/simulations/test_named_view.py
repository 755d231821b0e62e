"""A view under other names changes the live model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.errors import InputError
from fedpriv.learning.adapters.lora import trainable
from fedpriv.models.variants.blocks import layout_of
from fedpriv.models.variants.store import Store
from simulations.benchmarks._store_registry import StoreRegistry, named_view


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def test_view_holds_the_given_objects_under_the_given_names():
    given = {"base.layer.0.lora_A.weight": parameter(2, 3), "base.layer.1.w": parameter(4), "w": parameter(1)}
    view = named_view(given)
    found = view.state_dict(keep_vars=True)
    assert found.keys() == given.keys()
    assert all(found[name] is given[name] for name in given)
    assert named_view({}).state_dict() == {}


def test_loading_into_the_view_changes_what_the_live_model_computes(tmp_path):
    live = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    view = named_view({"adapter.A": live[0].weight, "adapter.B": live[1].weight})
    x = torch.ones(1, 8)
    with Store(tmp_path / "store") as store:
        for number in (1, 2):
            tensors = {"adapter.A": np.full((8, 8), number, "f4"), "adapter.B": np.full((4, 8), number, "f4")}
            layout = layout_of(tensors, 16)
            store.add(f"v{number}", layout, *layout.to_blocks(tensors))
        registry = StoreRegistry(store, 10**4)
        for number in (1, 2, 1):
            registry.load_into(view, f"v{number}")
            assert live(x).tolist() == [[64.0 * number**2] * 4]


def test_one_parameter_may_have_two_names():
    tied = parameter(2)
    assert set(named_view({"a.w": tied, "b.w": tied}).state_dict()) == {"a.w", "b.w"}


def test_adapter_of_a_peft_model_has_a_view(encoder):
    parameters = trainable(encoder())
    found = named_view(parameters).state_dict(keep_vars=True)
    assert found.keys() == parameters.keys()
    assert all(found[name] is parameters[name] for name in parameters)


@pytest.mark.parametrize("names", [["a", "a.b"], ["a.b", "a"], [""], ["a..b"], ["forward.w"]])
def test_names_that_no_module_can_have_are_refused(names):
    with pytest.raises(InputError, match="cannot be in a module"):
        named_view({name: parameter(1) for name in names})
