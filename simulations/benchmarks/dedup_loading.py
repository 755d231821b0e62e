"""How fast variants that share blocks are loaded: a store's registry against three ways of loading plain files.

    python -m simulations.benchmarks.dedup_loading [--cases cluster scattered] [--queries 100] [--repeats 3]

Models of MiniLM's shape (22.7 million float32 values), in two cases. `cluster`: eight models with equal embeddings and
first four layers (84 % of the values); of the blocks of 1,024 values in the rest, two thirds are a model's own, and so
are all small tensors there. `scattered`: twelve models, in each of which a tenth of all blocks of 16,384 values is its
own, at random. Each random query loads one of them into a built model, which then runs one batch. Every arm has a
process of its own with a bound on all its memory; `fedpriv.dedup.bench` describes what they do, cold and warm.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BertConfig, BertModel

from fedpriv.dedup.bench import KINDS, Report, bench, restore_all
from fedpriv.dedup.blocks import Layout, layout_of
from fedpriv.dedup.store import Store

BATCH, TOKENS = 1, 16
TARGETS = {("cold", "safetensors"): 10.0, ("cold", "straight"): 3.0}


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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of variants.

    Attributes:
        num_variants: with the base.
        block_size: values in a block.
        share: of the blocks that may differ from the base's, how many do.
        may_differ: whether a tensor of this name may.
    """

    num_variants: int
    block_size: int
    share: float
    may_differ: Callable[[str], bool]


def is_late(name: str) -> bool:
    """Whether a tensor is in the last two layers, or behind them."""
    return name.startswith(("encoder.layer.4.", "encoder.layer.5.", "pooler."))


CASES = {
    "cluster": Case(num_variants=8, block_size=1024, share=2 / 3, may_differ=is_late),
    "scattered": Case(num_variants=12, block_size=16_384, share=0.1, may_differ=lambda _name: True),
}


def make_variants(folder: Path, model: torch.nn.Module, case: Case, num_variants: int) -> None:
    """A store with the base and its variants."""
    base = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    layout = layout_of(base, case.block_size)
    with Store(folder) as store:
        for number in range(num_variants):
            tensors = changed(base, layout, case, np.random.default_rng(number)) if number else base
            store.add(f"v{number}", layout, *layout.to_blocks(tensors))


def changed(
    base: dict[str, NDArray[Any]], layout: Layout, case: Case, generator: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """A variant of the base."""
    blocks, extras = layout.to_blocks(base)
    for name, positions in layout.blocked.items():
        if case.may_differ(name):
            own = positions.start + np.flatnonzero(generator.random(len(positions)) < case.share)
            blocks[own] += generator.standard_normal((len(own), case.block_size), np.float32)
    late = {name: values + np.float32(generator.normal()) for name, values in extras.items() if is_late(name)}
    return dict(layout.from_blocks(blocks, {**extras, **late}))


def lines_of(case: str, report: Report) -> list[str]:
    """What one repetition took."""
    lines = [
        f"{case}: {report.num_queries} queries over {report.num_variants} variants, {report.memory_bytes / 1e6:.0f} MB "
        f"for each arm by {report.limited_by}; the disk reads {report.disk_bytes_per_second / 1e6:.0f} MB/s; page "
        f"cache dropped: {report.page_cache_dropped}"
    ]
    for kind in KINDS:
        loads, totals = report.load_ratios(kind), report.total_ratios(kind)
        for name, arm in report.arms(kind).items():
            ratio = f"; ratio {loads[name]:.1f}, with inference {totals[name]:.2f}" if name in loads else ""
            lines.append(
                f"  {kind}, {name}: load {arm.load_seconds:.3f} s for {arm.misses} misses, infer "
                f"{arm.infer_seconds or 0:.3f} s; copied {arm.bytes_read / 1e6:.0f} MB, from disk "
                f"{(arm.disk_bytes or 0) / 1e6:.0f} MB, cached at the end {arm.cached_bytes / 1e6:.0f} MB{ratio}"
            )
    return lines + [f"  {name}: {why}" for name, why in report.failures.items()]


def claims_of(case: str, reports: list[Report]) -> list[dict[str, Any]]:
    """The medians and ranges of the ratios."""
    claims = []
    for kind in KINDS:
        for name in reports[0].load_ratios(kind):
            loads = [report.load_ratios(kind)[name] for report in reports]
            ratio = float(np.median(loads))
            claim = {
                "claim": f"{case}: {kind} loading of variants, plain files by {name} / registry",
                "ratio": ratio,
                "range": [min(loads), max(loads)],
                "with inference": float(np.median([report.total_ratios(kind)[name] for report in reports])),
            }
            if target := TARGETS.get((kind, name)):
                claim |= {"target": target, "met": ratio >= target}
            claims.append(claim)
    return claims


def main() -> None:
    """Print a line for each measurement, and a JSON line for each claim last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--variants", type=int, help="in each case; default 8 and 12")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        help="a folder with 1.3 GB free; default the system's temporary one",
    )
    arguments = parser.parse_args()
    workload = Encoding()
    measured: dict[str, list[Report]] = {}
    for name in arguments.cases:
        case = CASES[name]
        with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
            store = Path(temporary) / "store"
            make_variants(store, workload.model, case, arguments.variants or case.num_variants)
            files = restore_all(store, Path(temporary))
            measured[name] = []
            for _ in range(arguments.repeats):
                report = bench(store, files, num_queries=arguments.queries, workloads=dict.fromkeys(files, workload))
                measured[name].append(report)
                print("\n".join(lines_of(name, report)), flush=True)
    for name, reports in measured.items():
        for claim in claims_of(name, reports):
            print(json.dumps(claim))


if __name__ == "__main__":
    main()
