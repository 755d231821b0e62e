"""`fedpriv plan MODEL`: the memory of a step, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from fedpriv.cli.output import entries


def memory_values(
    *, device: str | None, memory: str | None, target_modules: str, bits: int, **options: Any
) -> dict[str, Any]:
    """What is printed, in bytes.

    Args:
        device: cpu or cuda; None for cuda where the base has 4 bits or there is a GPU.
        memory: that there is, such as 80GB; None for that of this machine, or of its first GPU.
        target_modules: names of layers, comma-separated.
        bits, options: as of `MemorySetting`.

    Raises:
        InputError: a value is out of range, or there is no such model.
    """
    import torch

    from fedpriv.memory import PROCESS_BYTES, MemorySetting, largest_batch, memory_plan
    from fedpriv.texts import parse_bytes

    setting = MemorySetting(
        device=device or ("cuda" if bits == 4 or torch.cuda.is_available() else "cpu"),
        target_modules=tuple(name.strip() for name in target_modules.split(",") if name.strip()),
        bits=bits,
        **options,
    )
    available = _memory_of_machine(setting.device) if memory is None else parse_bytes(memory)
    plan = memory_plan(setting)
    return asdict(setting) | {
        "parameters": plan.num_parameters,
        "trained_parameters": plan.num_trained,
        "base_bytes": plan.base,
        "adapter_bytes": plan.adapter,
        "activation_bytes": plan.activations,
        "activation_bytes_kept": plan.activations_of(False),
        "activation_bytes_recomputed": plan.activations_of(True),
        "logits_bytes": plan.logits,
        "gradient_bytes": plan.gradients,
        "total_bytes": plan.total,
        "process_bytes": PROCESS_BYTES,
        "cache_bytes_per_1000_records": plan.cache_per_1000_records,
        "available_bytes": available,
        "fits": plan.total + PROCESS_BYTES <= available,
        "largest_batch": largest_batch(setting, available) if available else None,
    }


def _memory_of_machine(device: str) -> int:
    """Bytes; 0 without a GPU."""
    import torch

    if device == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


def memory_page(values: Mapping[str, Any]) -> Iterable[str]:
    """Lines for a reader."""
    size = {name: f"{value / 1e9:.2f} GB" for name, value in values.items() if "bytes" in name}
    kind = {4: "4-bit NF4", 16: "bfloat16", 32: "float32"}[values["bits"]]
    kept, again = size["activation_bytes_kept"], size["activation_bytes_recomputed"]
    recomputes = values["activation_checkpointing"]
    shown = {
        "parameters": f"{values['parameters']:,}, and {values['trained_parameters']:,} trained",
        f"base, {kind}": size["base_bytes"],
        "adapter": f"{size['adapter_bytes']}: values, sums, noise, optimizer",
        "activations": (
            f"{again} with layers that run again ({kept} without)"
            if recomputes
            else f"{kept} ({again} with --activation-checkpointing)"
        ),
        "logits": f"{size['logits_bytes']} more",
        "total": f"{size['total_bytes']} at the peak of a step on {values['batch']} records of "
        f"{values['max_length']} tokens",
    }
    yield from entries(shown)
    cache = values["cache_bytes_per_1000_records"]
    yield (
        f"prefix cache: {size['cache_bytes_per_1000_records']} for each 1,000 records, in memory or in a file"
        if cache
        else "prefix cache: none, since the first layer is trained"
    )
    if not values["available_bytes"]:
        yield "This machine has no GPU; --memory 80GB says what fits one."
        return
    verdict = "fits" if values["fits"] else "does not fit"
    yield (
        f"It {verdict} in {size['available_bytes']} ({values['device']}), of which process and libraries take up to "
        f"{size['process_bytes']}; the largest batch that does at once is {values['largest_batch']}."
    )
    yield "A larger batch passes in parts, to the same sum: memory_limit_mb bounds a part."
