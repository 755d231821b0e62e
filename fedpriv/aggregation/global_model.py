"""What the server knows of the global model between two rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedpriv.adapters.arithmetic import Adapter
from fedpriv.adapters.merged import Merged


@dataclass(frozen=True, kw_only=True)
class GlobalModel:
    """The global model, as aggregation rules change it.

    Attributes:
        initial: the trained tensors before the first round, which every client knows from the run's seed.
        adapter: the trained tensors now.
        merged: what was added to frozen weights.
        last_update: the last round's change of `adapter`, where the rule has use for it; empty before the first.
    """

    initial: Adapter = field(repr=False)
    adapter: Adapter = field(repr=False)
    merged: Merged = field(default_factory=dict, repr=False)
    last_update: Adapter = field(default_factory=dict, repr=False)
