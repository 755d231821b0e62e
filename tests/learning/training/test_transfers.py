"""A step reads nothing back from its device, where a GPU would be waited for, and copies to it a few times a pass.

Torch's meta device has shapes and no values, and reading one raises: it stands in for a GPU that nobody waits for.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm as Norm

from fedpriv.learning.adapters import LoraSettings, attach
from fedpriv.learning.data.records import Records
from fedpriv.learning.training.independence import raising_failures
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_sums import PoissonSampler, add_clipped
from fedpriv.learning.training.stacked import _Clients, _Drawn, _gradient_rows, _plain_gradients, _private_gradients
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.learning.training.test_sensitivity import make_task
from tests.tiny import tiny_causal

META = torch.device("meta")
NUM = 10


class Copies(TorchDispatchMode):
    """Counts the copies from the CPU to the device, and refuses any that come back."""

    num = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and args[0].device != result.device:
            assert args[0].device.type == "cpu", "read back"
            self.num += 1
        return result


@pytest.fixture(params=["classifier", "language model"])
def task(request, encoder, monkeypatch):
    """A model on the device, and a task for it whose records have several lengths."""
    # Transformers itself looks once a pass whether anything is padded, and then takes a faster kernel if nothing is.
    for look in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        monkeypatch.setattr(f"transformers.masking_utils.{look}", lambda *_: False)
    is_classifier = request.param == "classifier"
    if is_classifier:
        peft_model = encoder(layers="last-1")
    else:
        peft_model = attach(tiny_causal("llama"), LoraSettings(rank=2, alpha=4.0, task="CAUSAL_LM"))
    model = TrainingModel(peft_model, memory_limit=2**28, prefix_cache=False, max_length=16)
    tokens = tuple(torch.arange(2, 5 + index % 9) for index in range(NUM))
    labels = torch.arange(NUM) % 3 if is_classifier else torch.zeros(0, dtype=torch.int64)
    every = PoissonSampler(num_registered=NUM, expected_batch_size=NUM, source=SeededSource(0))
    task = make_task(model, Records({"input_ids": tokens}, labels, 0), sampler=every, noise_multiplier=1.0)
    # Made with its values, it goes to the device without any.
    model.initial = {name: tensor.clone() for name, tensor in model.initial.items()}
    model.peft_model.to(META)
    model.device, model._footprint = META, replace(model._footprint, on_cpu=False)
    return model, task


@pytest.mark.parametrize("compute", [_private_gradients, _plain_gradients])
def test_a_step_waits_for_nothing_of_its_device(task, compute):
    model, task = task
    clients = _Clients.of(model, [task])
    num_passes = len(list(model.passes(task.data.items())))
    with Copies() as copies, raising_failures():
        compute(clients, clients.broadcast)
    # Of a pass: tokens, mask, labels or targets with their places and shares, owners, totals; of a step: noise, sizes.
    assert 0 < copies.num <= 9 * num_passes + 2


def test_on_a_nodes_gpu_each_record_has_a_pass_of_its_own_and_one_follows_the_other(task):
    model, task = task
    model.alone = True
    assert model._most_workers(8) == 1, "no process shares the device"
    rows = []
    layer = next(module for module in model.peft_model.modules() if isinstance(module, torch.nn.LayerNorm | Norm))
    layer.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    clients = _Clients.of(model, [task])
    drawn = _Drawn.of_records([list(range(4))])
    with raising_failures():
        found = [len(each) for each, _ in _gradient_rows(clients, clients.broadcast, drawn)]
    assert found == rows == [1] * 4


def test_a_value_that_is_read_would_be_noticed():
    with pytest.raises(RuntimeError, match="meta"):
        bool(torch.ones(1, device=META))
    with Copies(), pytest.raises(NotImplementedError, match="meta"):
        torch.ones(1, device=META).cpu()


def test_rows_that_are_not_finite_count_as_zero_where_nobody_looks_at_them(monkeypatch):
    """The way without a look, taken on the CPU, gives the same sums."""
    rows = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    rows[2, 3], rows[4, 0] = float("nan"), float("inf")
    owners, parts = torch.tensor([0, 0, 1, 1, 1, 0]), (slice(0, 4), slice(4, 10))
    expected = torch.zeros(2, 10, dtype=torch.int64)
    add_clipped(expected, rows, owners, 0.5, parts)
    monkeypatch.setattr("fedpriv.learning.training.private_sums._is_on_cpu", lambda rows: False)
    for given in (rows, rows[[0, 1, 3, 5]]):
        found = torch.zeros(2, 10, dtype=torch.int64)
        add_clipped(found, given, owners[[0, 1, 3, 5]] if len(given) == 4 else owners, 0.5, parts)
        assert torch.equal(found, expected)
