"""How fast variants that share blocks are loaded: a store's registry against plain safetensors files.

    python -m simulations.benchmarks.dedup_loading [--variants 12] [--queries 100] [--repeats 3]

Models of MiniLM's shape (22.7 million float32 values): a base, and variants with a tenth of the base's blocks of
16,384 values replaced, at random. Each random query loads one of them into a built model, which then runs one batch.
Both arms may use as much memory as a third of the models takes; `fedpriv.dedup.bench` describes what both do, cold and
warm. The rival reads files through safetensors, and in a second claim straight into the memory of a model, which is
faster.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from transformers import BertConfig, BertModel

from fedpriv.dedup.bench import Comparison, bench, restore_all
from fedpriv.dedup.bench_plain_files import Reader
from fedpriv.dedup.blocks import layout_of
from fedpriv.dedup.store import Store

BLOCK_SIZE = 16_384
REPLACED = 0.1
BATCH, TOKENS = 1, 16
TARGETS = {"cold": 10.0, "warm": 2.0}


class Encoding:
    """A `fedpriv.dedup.bench.Workload`: one batch of random tokens through a model of MiniLM's shape."""

    def __init__(self) -> None:
        config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
        self.model = BertModel(config).eval()
        self._tokens = torch.randint(config.vocab_size, (BATCH, TOKENS))

    @torch.inference_mode()
    def infer(self) -> None:
        """Run one batch."""
        self.model(self._tokens)


def make_variants(folder: Path, model: torch.nn.Module, num_variants: int) -> None:
    """A store with the base and its variants."""
    layout = layout_of(base := {name: tensor.numpy() for name, tensor in model.state_dict().items()}, BLOCK_SIZE)
    with Store(folder) as store:
        for number in range(num_variants):
            blocks, extras = layout.to_blocks(base)
            generator = np.random.default_rng(number)
            if number:
                changed = generator.random(layout.num_blocks) < REPLACED
                blocks[changed] += generator.standard_normal((changed.sum(), BLOCK_SIZE), np.float32)
            # Through tensors, because a tensor's last block is padded with zeros.
            store.add(f"v{number}", layout, *layout.to_blocks(layout.from_blocks(blocks, extras)))


def line_of(kind: str, measured: Comparison) -> str:
    """What one repetition took."""
    plain, store = measured.plain, measured.store
    return (
        f"  {kind}: plain files {plain.load_seconds:.3f} s for {plain.misses} loads, registry "
        f"{store.load_seconds:.3f} s for {store.misses}, ratio {measured.load_ratio:.1f}; with inference "
        f"{measured.total_ratio:.2f}"
    )


def main() -> None:
    """Print a line for each measurement, and a JSON line for each claim last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=12)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        help="a folder with 1.3 GB free; default the system's temporary one",
    )
    arguments = parser.parse_args()
    workload = Encoding()
    measurements: dict[tuple[str, Reader], list[Comparison]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        store = Path(name) / "store"
        make_variants(store, workload.model, arguments.variants)
        files = restore_all(store, Path(name))
        for _ in range(arguments.repeats):
            for reader in get_args(Reader):
                report = bench(store, files, num_queries=arguments.queries, reader=reader, workload=workload)
                for kind, measured in (("cold", report.cold), ("warm", report.warm)):
                    if measured is not None:
                        measurements.setdefault((kind, reader), []).append(measured)
                        print(line_of(f"{kind}, {reader}", measured), flush=True)
    print(
        f"{report.num_queries} queries over {report.num_variants} variants, {report.memory_bytes} bytes for each arm; "
        f"page cache dropped: {report.page_cache_dropped}; the claims are medians of {arguments.repeats}"
    )
    for (kind, reader), comparisons in measurements.items():
        ratio, target = float(np.median([each.load_ratio for each in comparisons])), TARGETS[kind]
        claim = f"{kind} loading of variants, plain safetensors files ({reader} reads) / registry"
        print(json.dumps({"claim": claim, "ratio": ratio, "target": target, "met": ratio >= target}))


if __name__ == "__main__":
    main()
