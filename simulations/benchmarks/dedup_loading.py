"""What loading costs when variants share blocks: the registry against plain safetensors files.

    python -m simulations.benchmarks.dedup_loading [--variants 12] [--queries 100]

Models of MiniLM's shape (22.7 million float32 values): a base, and variants with a tenth of the base's blocks of
16,384 values replaced, at random. Random queries each want one of them loaded into a built model. Both arms may use
as much memory as a third of the models takes, and both keep the models that were asked for last:

- plain files: so many sets of tensors, loaded in place with safetensors;
- registry: warm the same; cold less, by what its mapped blocks take.

Warm: all files are in the page cache, and the queries were run once before. Cold: all are dropped from it before the
first query; the registry's blocks, which fit into the memory, may stay from then on, while a file, for which the
plain arm has no memory left beside its models, is dropped each time. There the registry's time includes opening the
store and taking its memory; the plain arm has its memory before.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor
from transformers import BertConfig, BertModel

from fedpriv.dedup.blocks import layout_of
from fedpriv.dedup.serving import Registry
from fedpriv.dedup.store import Store

BLOCK_SIZE = 16_384
REPLACED = 0.1
REPEATS = 3
TARGETS = {"cold": 10.0, "warm": 2.0}

Loader = Callable[[int], None]


class PlainFiles:
    """Loads files into tensors that are there already: a free set, or that of the model not asked for longest."""

    def __init__(self, folder: Path, model: torch.nn.Module, capacity: int, *, cold: bool) -> None:
        self._folder, self._model, self._cold = folder, model, cold
        state = model.state_dict()
        # Negative names stand for sets that hold nothing yet.
        self._sets: OrderedDict[int, dict[str, Tensor]] = OrderedDict(
            (-1 - number, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
            for number in range(capacity)
        )
        self.seconds, self.misses = 0.0, 0

    def load(self, number: int) -> None:
        """Serve a variant."""
        path = self._folder / f"v{number}.safetensors"
        if self._cold:
            drop(path)
        started = time.perf_counter()
        if number not in self._sets:
            _, tensors = self._sets.popitem(last=False)
            with safe_open(path, "pt") as file:
                for name, tensor in tensors.items():
                    tensor.copy_(file.get_tensor(name))
            self._sets[number] = tensors
            self.misses += 1
        self._sets.move_to_end(number)
        for name, target in self._model.state_dict(keep_vars=True).items():
            target.data = self._sets[number][name]
        self.seconds += time.perf_counter() - started


def drop(path: Path) -> None:
    """Out of the page cache with a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def make_variants(folder: Path, model: torch.nn.Module, num_variants: int) -> None:
    """A file and a place in the store for each variant; the first is the base."""
    layout = layout_of(base := {name: tensor.numpy() for name, tensor in model.state_dict().items()}, BLOCK_SIZE)
    with Store(folder / "store") as store:
        for number in range(num_variants):
            blocks, extras = layout.to_blocks(base)
            generator = np.random.default_rng(number)
            if number:
                changed = generator.random(layout.num_blocks) < REPLACED
                blocks[changed] += generator.standard_normal((changed.sum(), BLOCK_SIZE), np.float32)
            tensors = {
                name: np.ascontiguousarray(tensor) for name, tensor in layout.from_blocks(blocks, extras).items()
            }
            save_file(tensors, folder / f"v{number}.safetensors")
            store.add(f"v{number}", layout, *layout.to_blocks(tensors))
    os.sync()


def registry_seconds(folder: Path, model: torch.nn.Module, queries: list[int], capacity: int, *, cold: bool) -> float:
    """Of all queries; cold with opening the store and taking the memory, warm after a round of the same queries."""
    for path in [path for path in (folder / "store").rglob("*") if path.is_file() and cold]:
        drop(path)
    started = time.perf_counter()
    with Store(folder / "store", read_only=True) as store:
        one = store.manifest("v0").layout.padded_bytes
        registry = Registry(store, max(one, capacity * one - (store.bytes_stored if cold else 0)))
        for _ in range(1 if cold else 2):
            started, before = started if cold else time.perf_counter(), registry.statistics
            for number in queries:
                registry.load_into(model, f"v{number}")
        seconds, after = time.perf_counter() - started, registry.statistics
    print(
        f"  registry of {len(registry.names)} models: {after.misses - before.misses} of {len(queries)} loaded, "
        f"{(after.bytes_copied - before.bytes_copied) / 1e6:.0f} MB copied, {seconds:.3f} s"
    )
    check(folder, model, queries[-1])
    return seconds


def plain_seconds(folder: Path, model: torch.nn.Module, queries: list[int], capacity: int, *, cold: bool) -> float:
    """Of all queries, with memory that is there already; warm after a round of the same queries."""
    files = PlainFiles(folder, model, capacity, cold=cold)
    for _ in range(1 if cold else 2):
        files.seconds, files.misses = 0.0, 0
        for number in queries:
            files.load(number)
    print(f"  plain files, {capacity} models: {files.misses} of {len(queries)} loaded, {files.seconds:.3f} s")
    check(folder, model, queries[-1])
    return files.seconds


def check(folder: Path, model: torch.nn.Module, number: int) -> None:
    """Refuse to measure what loads anything but the variant."""
    with safe_open(folder / f"v{number}.safetensors", "pt") as file:
        state = model.state_dict()
        if not all(torch.equal(state[name], file.get_tensor(name)) for name in state):
            raise RuntimeError(f"variant {number} was not loaded bit for bit")


def main() -> None:
    """Print a line for each measurement, and a JSON line for each claim last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=12)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="where 1.3 GB may lie for a while, on a disk; default the system's")
    arguments = parser.parse_args()
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    models = [BertModel(config).eval() for _ in range(2)]
    queries = np.random.default_rng(0).integers(arguments.variants, size=arguments.queries).tolist()
    capacity = max(1, arguments.variants // 3)
    lines = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        make_variants(folder, models[0], arguments.variants)
        for kind, target in TARGETS.items():
            times = [
                [
                    seconds(folder, model, queries, capacity, cold=kind == "cold")
                    for seconds, model in zip((plain_seconds, registry_seconds), models, strict=True)
                ]
                for _ in range(REPEATS)
            ]
            plain, shared = np.median(times, axis=0)
            print(
                f"{kind}: {arguments.queries} queries over {arguments.variants} variants, memory for {capacity}: "
                f"plain files {plain:.3f} s, registry {shared:.3f} s, ratio {plain / shared:.1f}"
            )
            claim = f"{kind} loading of variants, plain safetensors files / registry"
            lines.append(
                {"claim": claim, "ratio": plain / shared, "target": target, "met": bool(plain / shared >= target)}
            )
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
