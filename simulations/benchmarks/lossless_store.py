"""A store without loss beside plain files and zstandard alone: bytes, and gigabytes a second packed and loaded.

    python -m simulations.benchmarks.lossless_store [--models MiniLM-bfloat16 ...] [--steps 30]

Fine-tunes of one model each on messages of a hospital of its own, without privacy and by AdamW, and that model itself:
all weights of MiniLM in float32 and in bfloat16, all weights of SmolLM2 in bfloat16 (`make llm`); and the adapters that
a federation with noise leaves. Every tensor that is restored is compared with the original, byte by byte. Loading
reads from files that the system has cached; for plain files that is `safetensors.numpy.load_file` and a copy.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from fedpriv.learning.adapters import BUNDLED_ENCODER, load_base
from fedpriv.learning.data import hospital
from fedpriv.models.variants.blocks import Tensors, layout_of
from fedpriv.models.variants.lossless import Reference, best_reference, sample
from fedpriv.models.variants.store import Store
from simulations.benchmarks._measuring import claim, seconds_of
from simulations.benchmarks.dedup_resume import make_run

ADAPTERS = "adapters"
SMOLLM2 = "SmolLM2-135M-Instruct"
FAMILIES = {
    "MiniLM-float32": (BUNDLED_ENCODER, torch.float32),
    "MiniLM-bfloat16": (BUNDLED_ENCODER, torch.bfloat16),
    "SmolLM2-bfloat16": (SMOLLM2, torch.bfloat16),
}

ROW = (
    "| {family}, {models} models | {zstandard:.2f} | {stored:.2f} | {packed_gb_per_s:.2g} | {loaded_gb_per_s:.2g} | "
    "{zstandard_loaded_gb_per_s:.2g} | {plain_loaded_gb_per_s:.2g} |"
)
NUM_FINE_TUNES, BATCH, RATE, MAX_LENGTH, REPEATS = 3, 16, 2e-5, 48, 5


def fine_tunes(name: str, dtype: torch.dtype, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of a model, and of fine-tunes of it: a classifier's or a causal model's, trained in float32."""
    causal = name == SMOLLM2
    messages, _ = hospital.generate()
    for part in range(-1, NUM_FINE_TUNES):
        base = load_base(name, task="CAUSAL_LM" if causal else "SEQ_CLS", num_labels=len(hospital.DEPARTMENTS))
        model = base.model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), RATE)
        for step in range(steps if part >= 0 else 0):
            batch = [messages[(NUM_FINE_TUNES * (BATCH * step + row) + part) % len(messages)] for row in range(BATCH)]
            texts = [message.text for message in batch]
            tokens = base.tokenizer(texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
            tokens.pop("token_type_ids", None)
            labels = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)
            if not causal:
                labels = torch.tensor([hospital.DEPARTMENTS.index(message.department) for message in batch])
            model(**tokens, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        # As `save_pretrained` writes them: a tied output layer is the embedding.
        tied = set(getattr(model, "_tied_weights_keys", None) or ())
        yield {key: value.detach().to(dtype) for key, value in model.state_dict().items() if key not in tied}


def written(folder: Path, models: Iterator[dict[str, torch.Tensor]]) -> list[Path]:
    """The files of these models."""
    files = []
    for number, tensors in enumerate(models):
        files.append(folder / f"model-{number}.safetensors")
        save_file(tensors, files[-1])
    return files


def speed(num_bytes: int, work: Callable[[], Any]) -> float:
    """Gigabytes of a model a second, the median of some."""
    return num_bytes / 1e9 / statistics.median(seconds_of(work) for _ in range(REPEATS))


def same(one: Tensors, other: Mapping[str, NDArray[Any]]) -> bool:
    """Whether all bytes are equal."""
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def measured(files: list[Path], store: Path) -> dict[str, Any]:
    """The row of these models: what a store without loss takes of their bytes, and how fast it is."""
    plain = sum(file.stat().st_size for file in files)
    zstd = pa.Codec("zstd", compression_level=3)
    alone = sum(len(zstd.compress(file.read_bytes(), asbytes=True)) for file in files)
    models = {file.parent.name + file.stem: safetensors.numpy.load_file(file) for file in files}
    layout = layout_of(next(iter(models.values())), 64)
    best = best_reference([sample(model, layout) for model in models.values()], len(models))
    reference = Reference.zeros(layout) if best is None else Reference.of(list(models.values())[best], layout)
    with Store(store) as opened:
        for name, model in models.items():
            opened.add(name, layout, reference, reference.pack(model))
        stored = opened.bytes_stored
    name = list(models)[-1]
    with Store(store, read_only=True) as opened:
        equal = all(same(opened.tensors(each), models[each]) for each in models)
        loaded = speed(layout.num_bytes, lambda: opened.tensors(name))
    return {
        "models": len(files),
        "zstandard": alone / plain,
        "stored": stored / plain,
        "packed_gb_per_s": speed(layout.num_bytes, lambda: reference.pack(models[name])),
        "loaded_gb_per_s": loaded,
        "plain_loaded_gb_per_s": speed(
            layout.num_bytes, lambda: {k: v.copy() for k, v in safetensors.numpy.load_file(files[-1]).items()}
        ),
        "zstandard_loaded_gb_per_s": zstandard_speed(files[-1], zstd),
        "equal": equal,
    }


def zstandard_speed(file: Path, codec: Any) -> float:
    """Gigabytes a second of a model that zstandard alone has compressed as a file."""
    content = file.read_bytes()
    packed = codec.compress(content, asbytes=True)
    return speed(len(content), lambda: codec.decompress(packed, decompressed_size=len(content)))


def main() -> None:
    """Print a row for each family of models, and its claim last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*FAMILIES, ADAPTERS], default=[*FAMILIES, ADAPTERS])
    parser.add_argument("--steps", type=int, default=30, help="of each fine-tune")
    parser.add_argument("--run", type=Path, help="a run with variants, in place of a federation made for this")
    arguments = parser.parse_args()
    rows = {}
    print("| models | zstandard alone | stored | packed, GB/s | loaded | loaded from zstandard | plain files loaded |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for family in arguments.models:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if family == ADAPTERS:
                run = arguments.run or make_run(folder, 8)
                files = sorted((run / "variants").glob("*/*.safetensors"))
            else:
                files = written(folder, fine_tunes(*FAMILIES[family], arguments.steps))
            rows[family] = measured(files, folder / "store")
            print(ROW.format(family=family, **rows[family]), flush=True)
    for family, row in rows.items():
        text = f"{family}: bytes of a store without loss / of plain files"
        claim(text, at_most=1.0, holds=row["equal"], ratio=row["stored"])


if __name__ == "__main__":
    main()
