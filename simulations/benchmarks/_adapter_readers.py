"""Small adapters read one after another by the two readers that a server has: a store's, and that of folders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.numpy

from fedpriv.errors import StoreError
from fedpriv.models.variants import folders
from fedpriv.models.variants.blocks import Tensors, layout_of
from fedpriv.models.variants.composition import History
from fedpriv.models.variants.folders import Described, VariantFolders
from fedpriv.models.variants.store import Store
from simulations.benchmarks._dedup_process import digest
from simulations.benchmarks._measuring import alternate, claim

NUM_ADAPTERS = 50
ADAPTER_BLOCK, ADAPTER_SHARE = 64, 0.4


def make_adapters(folder: Path, num_variants: int) -> None:
    """LoRA of MiniLM's last layer and a head for each variant, in a store and in folders of their own."""
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"classifier.weight": (8, 384), "classifier.bias": (8,)}
    for module in ("query", "value"):
        shapes |= {f"{module}.lora_A": (8, 384), f"{module}.lora_B": (384, 8)}
    layout = layout_of({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, ADAPTER_BLOCK)
    shared = generator.standard_normal((layout.num_blocks, ADAPTER_BLOCK), np.float32)
    with Store(folder / "store") as store:
        for number in range(num_variants):
            name, own = f"v{number}", generator.random(layout.num_blocks) < ADAPTER_SHARE
            blocks = np.where(own[:, None], generator.standard_normal(shared.shape, np.float32), shared)
            tensors = layout.from_blocks(blocks, {"classifier.bias": np.zeros(8, np.float32)})
            described = Described(
                name=name,
                architecture="MiniLM",
                utility=None,
                epsilon_bound=0.0,
                utility_bound=0.0,
                deltas={},
                history=History(name=name, ancestors=frozenset()),
            )
            store.add(name, layout, *layout.to_blocks(tensors), described=described)
            folders.write(folder / "variants" / name, described, tensors)


def load_all(load: Callable[[str], Tensors], names: list[str]) -> None:
    """Load one after the other."""
    for name in names:
        load(name)


def measure_adapters(folder: Path, num_variants: int, num_queries: int, repeats: int) -> None:
    """Print claims about loading adapters by the readers of a server, the store's and that of folders."""
    make_adapters(folder, num_variants)
    own = VariantFolders(folder / "variants")
    queries = np.random.default_rng(0).choice(own.names, num_queries).tolist()
    with Store(folder / "store", read_only=True) as store:
        arms: dict[str, Callable[[str], Tensors]] = {
            "the store": store.tensors,
            "a folder each": own.tensors,
            "`load_file`, unchecked": lambda name: safetensors.numpy.load_file(own.path / name / "model.safetensors"),
        }
        for name in own.names:
            given = {digest(load(name)) for load in arms.values()}
            if len(given) > 1:
                raise StoreError(f"variant {name!r}: was not loaded bit for bit")
        seconds = alternate({arm: partial(load_all, load, queries) for arm, load in arms.items()}, repeats)
    middle = {arm: float(np.median(taken)) / num_queries for arm, taken in seconds.items()}
    print("adapters: " + ", ".join(f"{arm} {1e6 * each:.0f} microseconds a load" for arm, each in middle.items()))
    ratio = middle["a folder each"] / middle["the store"]
    claim("adapters: loading of checked variants, a folder each / the store", at_least=1.0, ratio=ratio)
    unchecked = middle["`load_file`, unchecked"] / middle["the store"]
    claim("adapters: loading, `load_file` without a check / the store", ratio=unchecked)
