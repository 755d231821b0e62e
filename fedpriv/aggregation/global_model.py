"""The state of the global model between two rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedpriv.adapters.arithmetic import Adapter, Merged


@dataclass(frozen=True, kw_only=True)
class GlobalModel:
    """The global model, as aggregation rules update it.

    Attributes:
        initial: the trained tensors before the first round, which every client can derive from the run's seed.
        adapter: the current trained tensors.
        merged: what has been added to the frozen weights.
        optimizer_state: {moment: {tensor: its value}} of the server's optimizer, float32; empty before its first step.
        last_update: how the last round changed `adapter`, if the rule uses it; empty before the first round.
    """

    initial: Adapter = field(repr=False)
    adapter: Adapter = field(repr=False)
    merged: Merged = field(default_factory=dict, repr=False)
    optimizer_state: Mapping[str, Adapter] = field(default_factory=dict, repr=False)
    last_update: Adapter = field(default_factory=dict, repr=False)
