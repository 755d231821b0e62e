"""`fedpriv plan MODEL`: counts are published ones, and bytes those of the library's own pass on real tensors."""

import json
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fedpriv.learning.adapters import LoraSettings, attach
from fedpriv.learning.adapters._base_models import freeze
from fedpriv.learning.training._passes import Footprint
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import Stack, per_sample_gradients
from fedpriv.learning.training.rehearsal import _LiveBytes, peak_of_pass
from fedpriv.runs.plan import memory
from fedpriv.runs.plan.memory import MemorySetting, _configuration, largest_batch, memory_plan
from fedpriv.texts import parse_bytes
from tests.cli.command_line import as_json, fedpriv
from tests.marks import slow
from tests.tiny import random_records
from tests.tiny_gguf import tiny_llama, write_gguf

SMALL = {
    **{"model_type": "llama", "vocab_size": 300, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"tie_word_embeddings": False, "pad_token_id": 0},
}


@pytest.fixture
def folder(tmp_path):
    """Of a small model's configuration, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return str(tmp_path)


def adapted(num_layers: int = SMALL["num_hidden_layers"]):
    """A small Llama with LoRA in query and value, under the default device."""
    config = AutoConfig.for_model(**SMALL | {"num_hidden_layers": num_layers})
    base = freeze("small", AutoModelForCausalLM.from_config(config), None, task="CAUSAL_LM")
    return attach(base, LoraSettings(rank=4, task="CAUSAL_LM"))


# As the models' pages on the Hub, or sums over their checkpoints' tensors, have them.
PUBLISHED = {
    **{"meta-llama/Llama-2-7b-hf": 6_738_415_616, "SmolLM2-135M-Instruct": 134_515_008, "Qwen2.5-7B": 7_615_616_512},
    **{"mistralai/Mistral-7B-v0.1": 7_241_732_096, "meta-llama/Llama-2-13b-hf": 13_015_864_320},
    **{"meta-llama/Meta-Llama-3-8B": 8_030_261_248, "smollm2-360m": 361_821_120},
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-7b-hf", "SmolLM2-135M-Instruct", *slow(*list(PUBLISHED)[2:])])
def test_well_known_models_have_their_published_numbers_of_parameters(name):
    assert memory_plan(MemorySetting(model=name)).num_parameters == PUBLISHED[name]


def test_trained_values_and_a_base_of_four_bits_are_those_of_the_formulas():
    plan = memory_plan(MemorySetting(model="Llama-2-7b-hf", bits=4, rank=16, device="cuda"))
    assert plan.num_trained == 32 * 2 * 16 * (4096 + 4096)
    quantised = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    blocks = quantised // 64
    rest = 2 * 32000 * 4096 + (2 * 32 + 1) * 4096
    assert plan.base == pytest.approx(quantised / 2 + blocks + 4 * blocks / 256 + 2 * rest, rel=1e-9)


def test_live_bytes_are_of_what_stands_at_the_same_time():
    before = torch.ones(1000)
    with _LiveBytes([before]) as live:
        one = before + 1
        view = one[:10]
        del one  # the view keeps it
        two = view.new_zeros(500)
        del view, two
        _ = before + 2
    assert live.peak == 4 * (1000 + 500)


@pytest.mark.parametrize("again", [False, True])
def test_a_pass_without_values_takes_what_a_real_one_does(again):
    with torch.device("meta"):
        model = adapted()
    planned = peak_of_pass(model, rows=3, tokens=64, activation_checkpointing=again)
    model = TrainingModel(adapted(), memory_limit=2**30, prefix_cache=False, activation_checkpointing=again)
    items = random_records(3, classes=0, vocabulary=300, shortest=50, longest=64).items()
    own = {name: p.detach().unsqueeze(0) for name, p in model.peft_model.named_parameters() if p.requires_grad}
    stack = Stack(parameters=own, owners=torch.zeros(3, dtype=torch.int64))
    with _LiveBytes([*model.peft_model.parameters(), *model.peft_model.buffers()]) as live:
        per_sample_gradients(
            model.layers, lambda: model.predictions(items, cached=False).losses, stack, recomputed=model.recomputed
        )
    assert planned == pytest.approx(live.peak, rel=0.03)


@pytest.mark.parametrize(
    ("layers", "tokens", "again"),
    [
        *((2, 16, True), (2, 16, False)),
        *(pytest.param(6, tokens, again, marks=pytest.mark.slow) for tokens in (16, 128) for again in (False, True)),
    ],
)
def test_what_bounds_the_rows_of_a_pass_is_no_less_than_it_takes(layers, tokens, again):
    """The generous estimate by which a run cuts a batch, against the count."""
    with torch.device("meta"):
        model = adapted(layers)
    counted = peak_of_pass(model, rows=4, tokens=tokens, activation_checkpointing=again)
    trained = [p for p in model.parameters() if p.requires_grad]
    footprint = Footprint.of(model, trained, frozen_layers=0, whole_logits=False, recomputes=again)
    needed = 4 * (2 * footprint.num_values + tokens * footprint.per_token + tokens**2 * footprint.per_token_pair)
    assert counted <= 4 * needed


@pytest.mark.slow
def test_more_of_anything_needs_more_and_layers_that_run_again_less(folder):
    def total(**changes):
        small = {"model": folder, "bits": 32, "batch": 4, "max_length": 64}
        return memory_plan(MemorySetting(**{**small, **changes})).total

    plain = total()
    assert all(total(**more) > plain for more in ({"batch": 5}, {"max_length": 72}, {"rank": 64}))
    assert total(activation_checkpointing=True) < plain
    assert total(layers="last-1") < plain
    setting = MemorySetting(model=folder, bits=32, max_length=64)
    assert largest_batch(setting, memory.PROCESS_BYTES + total(batch=37)) == 37
    assert largest_batch(setting, memory.PROCESS_BYTES) == 0


def test_weights_and_states_below_the_first_trained_layer_are_counted_in_the_bases_format(folder):
    def cache(**changes):
        return memory_plan(MemorySetting(model=folder, max_length=64, **changes)).cache_per_1000_records

    assert cache(layers="last-1", bits=32) == 1000 * 64 * 128 * 4
    assert cache(layers="1", bits=16) == 1000 * 64 * 128 * 2
    assert cache() == 0
    for bits, size in ((32, 4), (16, 2)):
        plan = memory_plan(MemorySetting(model=folder, bits=bits, max_length=64))
        assert plan.base == size * plan.num_parameters


@pytest.mark.parametrize("memory_of", [lambda n: 100 + 7 * n, lambda n: 100 + 7 * n + min(50 * n, 400)])
@pytest.mark.parametrize("room", [100, 160, 520, 10_000])
def test_the_search_returns_a_number_that_fits_and_nearly_the_largest(memory_of, room):
    found = memory._largest(memory_of, room, 8)
    best = max((n for n in range(2000) if n == 0 or memory_of(n) <= room), default=0)
    assert found <= best
    assert found >= 0.9 * best - 1


@pytest.mark.slow
def test_the_command_prints_the_same_for_readers_and_programs(folder):
    arguments = ("plan", folder, "--bits", 32, "--max-length", 32, "--layers", "1,2", "--device", "cpu")
    values = as_json(*arguments, "--memory", "2GB")
    parts = ("base_bytes", "adapter_bytes", "activation_bytes", "logits_bytes")
    assert values["total_bytes"] == sum(values[part] for part in parts)
    assert values["activation_bytes"] == values["activation_bytes_kept"] > values["activation_bytes_recomputed"]
    assert values["fits"]
    assert values["largest_batch"] > 8
    shown, _ = fedpriv(*arguments, "--memory", "2GB")
    assert f"{values['parameters']:,}, and {values['trained_parameters']:,} trained" in shown
    assert f"the largest batch that does at once is {values['largest_batch']}" in shown
    assert "0.02 GB for each 1,000 records" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bits", 8), "bits = 8: must be 4, 16 or 32"),
        (("--rank", 0), "rank = 0: must be >= 1"),
        (("--layers", "first"), "layers = 'first': must be all, last-N, or indices such as 4,5"),
        (("--layers", "last-9"), "layers = 'last-9': the model has 3 layers, 0 to 2"),
        (("--target-modules", "query"), "target_modules = query: not in model"),
        (("--max-length", 999), "max_length = 999: model"),
        *((("--memory", size), "memory = .*must be a size such as 80GB") for size in ("80 apples", "-1GB", "0GB")),
        (("--device", "tpu"), "device = 'tpu': must be cpu or cuda"),
        (("--epsilon", 2), "--epsilon: a MODEL plans memory alone"),
    ],
)
def test_bad_values_are_refused_in_one_line(folder, arguments, message):
    assert (parse_bytes("80GB"), parse_bytes("1.5 GiB")) == (80 * 10**9, 3 * 2**29)
    _, err = fedpriv("plan", folder, *arguments, code=2)
    assert re.match(f"error: {message}", err)
    assert err.count("\n") == 1


def test_a_folder_without_a_configuration_options_without_a_model_and_an_encoder_are_refused(tmp_path):
    assert "has no config.json" in fedpriv("plan", tmp_path, code=2)[1]
    assert "--bits: plans memory, and there is no MODEL" in fedpriv("plan", "--bits", 4, code=2)[1]
    assert "needs --records and --epsilon, or a MODEL" in fedpriv("plan", "--records", 4, code=2)[1]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpnet"}))
    refused = fedpriv("plan", tmp_path, code=2)[1]
    assert "no causal language model that can be built (its model_type is 'mpnet')" in refused


def test_a_gguf_file_is_planned_for_by_its_own_numbers(tmp_path):
    model = tiny_llama()
    found = _configuration(str(write_gguf(tmp_path / "tiny.gguf", model)))
    assert (found.vocab_size, found.hidden_size) == (model.config.vocab_size, model.config.hidden_size)
    assert found.num_hidden_layers == 2
