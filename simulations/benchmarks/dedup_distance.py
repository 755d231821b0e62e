"""How much time and memory the search for the nearest blocks of many models takes.

    python -m simulations.benchmarks.dedup_distance [--models 10] [--values 22000000] [--block-size 16384] [--seed 0]

The models lie in one memory-mapped file. They descend from two starts, half of them from each, with a tenth of a
start's size as noise: in pairs with one start each block has one near block; in the other pairs all
blocks are about equally far apart. The search runs once for each pair, on one core in its own process. The memory is
that process's peak of resident memory, the file's pages included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from fedpriv.models.dedup.distance import nearest
from simulations.benchmarks._measuring import claim, fresh_process, resident

TARGET_SECONDS, TARGET_BYTES = 60.0, 2 * 10**9


def write_models(file: Path, num_models: int, num_values: int, block_size: int, seed: int) -> None:
    """Write the models, float32 [models, blocks, block size]."""
    num_blocks = -(-num_values // block_size)
    models = np.lib.format.open_memmap(file, "w+", np.float32, (num_models, num_blocks, block_size))
    starts = [np.random.default_rng([seed, start]) for start in range(2)]
    for block in range(num_blocks):
        values = [start.standard_normal(block_size, dtype=np.float32) for start in starts]
        noise = np.random.default_rng([seed, 2, block])
        for model in range(num_models):
            models[model, block] = values[model % 2] + 0.1 * noise.standard_normal(block_size, dtype=np.float32)
    models.flush()


def search(file: Path) -> dict[str, float]:
    """Search each pair once, the later model as the target.

    Returns:
        Seconds, peak resident bytes, and the share of blocks in pairs with one start that found their relative.
    """
    models = np.load(file, mmap_mode="r")
    started, num_found, num_related = time.perf_counter(), 0, 0
    for base, target in itertools.combinations(range(len(models)), 2):
        indices, _ = nearest(models[target], models[base])
        if (target - base) % 2 == 0:
            num_found += int((indices == np.arange(len(indices))).sum())
            num_related += len(indices)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "bytes": resident("VmHWM"), "found": num_found / max(num_related, 1)}


def main() -> None:
    """Print the measurements and then the claim as a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--values", type=int, default=22_000_000)
    parser.add_argument("--block-size", type=int, default=16_384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--search", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.search:
        print(json.dumps(search(arguments.search)))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.npy"
        write_models(file, arguments.models, arguments.values, arguments.block_size, arguments.seed)
        one_core = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        row = fresh_process("dedup_distance", "--search", file, environment=one_core)
    print(f"{row['seconds']:.1f} s, {row['bytes'] / 1e9:.2f} GB at its peak, {row['found']:.1%} of relatives found")
    claim(
        f"nearest blocks in each pair of {arguments.models} models of {arguments.values} values at blocks of "
        f"{arguments.block_size}, on one core, within {TARGET_BYTES / 1e9:g} GB",
        at_most=TARGET_SECONDS,
        holds=row["bytes"] <= TARGET_BYTES,
        seconds=row["seconds"],
        bytes=row["bytes"],
    )


if __name__ == "__main__":
    main()
