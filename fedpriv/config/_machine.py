"""The section of a configuration on the machine that a run takes, and where its files are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedpriv.config._section import ConfigSection, Count, Fact

BaseFormat = Literal["auto", "float32", "bfloat16", "nf4"]
"""Formats of the frozen weights."""

Track = Literal["none", "mlflow", "tensorboard", "wandb"]
"""Trackers that show a run's figures while it goes on."""


@dataclass(frozen=True, kw_only=True)
class MachineSection(ConfigSection, title="Execution", facts=Fact.RELOADS):
    """The machine's part in a run: formats, memory, devices, processes and folders."""

    base_dtype: BaseFormat = "auto"
    """the format in which the frozen base computes: `float32`, `bfloat16`, `nf4` ([4
    bits](architecture.md#the-frozen-base-in-4-bits), for less memory; needs the extra `quantized` and the rule
    `dp-lora`, `ffa-lora`, `rolora` or `fedsvd`), or `auto`, which is bfloat16 on a GPU, and on a CPU bfloat16 where a
    pass of synthetic records takes a fifth less time in it on this machine (narrow models, of less than 128, stay in
    float32). Adapters, heads, gradients, noise and sums are float32 or float64 in any case. In a deployment each node
    decides for itself what `auto` is. `config.toml` and `environment.json` of a run hold what it came to, and a resumed
    run keeps it"""
    prefix_cache: bool = True
    """whether to cache the states below the first trainable layer"""
    activation_checkpointing: bool = False
    """whether the layers from the first trainable one on keep their inputs alone and run again in the backward pass:
    less memory for long records, up to half more time, the same bits"""
    memory_limit_mb: Count = 1024
    """memory limit for one pass, in MiB, and the same again for the prefix cache"""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """where the model runs: `cpu`, `cuda` or `cuda:1`; `auto` uses a GPU if there is one; on a node `vault.toml`
    decides, and its `auto` is the CPU unless `device_couples_records = true`."""
    engine: Literal["stacked", "in-process", "ray", "flower"] = "stacked"
    """`stacked`: the clients of a round share passes of the frozen base; `in-process`: one client at a time; `ray`: one
    actor per core or GPU, each stacking its share (needs the extra `ray`). The results are the same except for
    rounding. `flower` is set by `flwr run`"""
    ray_address: Annotated[str, Fact.HIDDEN] = ""
    """an existing Ray cluster, such as `auto` or `head:6379` ([ray_cluster.md](ray_cluster.md)); empty takes
    `RAY_ADDRESS`, and without that starts one on this machine"""
    ray_workers: Annotated[int, Field(ge=0)] = 0
    """maximum number of actors; 0 means one per GPU, or one per core if there is no GPU"""
    track: Annotated[Track, Fact.OUTSIDE] = "none"
    """where the figures are also shown: `mlflow`, `tensorboard` or `wandb`, each with the extra of that name; see
    [trackers](trackers.md). A resumed run may change it"""
    ledger: Annotated[str, Fact.LOCATION | Fact.BY_SWEEP] = ""
    """an SQLite file in which spending accumulates over runs; simulated nodes keep their ledgers next to it, in
    `<ledger>.nodes/`. By default a new one in the run's folder, with nothing spent before"""
    out: Annotated[str, Fact.LOCATION | Fact.BY_SWEEP | Fact.ARGUMENT] = ""
    """the folder for the results; it must be new or empty"""
    resume: Annotated[str, Fact.LOCATION | Fact.ARGUMENT] = ""
    """the folder of an interrupted run, or one of its checkpoints, to continue from; all other keys must be unchanged.
    `python -m simulations run --resume DIR` reads them from there"""
