"""What a mechanism is asked to add noise to, described by public numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.accounting.composition.law import Unit
    from fedpriv.mechanisms.sources import RandomSource


@dataclass(frozen=True, kw_only=True)
class NoiseRequest:
    """One release by each client of a stack, all with the same specification.

    Attributes:
        parameters: parameters of the mechanism, as text that it parses; empty for a mechanism that takes none.
        noise_multiplier: z >= 0, noise over clip norm.
        clip_norm: C > 0, in units of the noised quantity.
        sensitivity_factor: L2 sensitivity over C, >= 1, from the clipping rule.
        dimension: number of values per client that receive noise, >= 1.
        sampling_probabilities: [clients], q in [0, 1], from the samplers that drew the batches.
        count: number of such releases that are planned, >= 1.
        unit: what is protected.
        grids: [clients], gamma_k > 0, grid points for one unit of the noised quantity; empty where the mechanism
            chooses.
        bounds: [clients], > 0, the largest magnitude of a value of a client's sum, to which each is clamped before it
            is rounded to the grid; empty for none.

    `grids` and `bounds` are for noise on integers; other mechanisms leave them alone.

    Raises:
        ValueError: clip_norm, sensitivity_factor, a grid or a bound is out of range, or there is not one grid or bound
            for every client; the mechanism's events check the rest.
    """

    noise_multiplier: float
    clip_norm: float
    dimension: int
    sampling_probabilities: tuple[float, ...]
    parameters: str = ""
    sensitivity_factor: float = 1.0
    count: int = 1
    unit: Unit = "record"
    grids: tuple[float, ...] = ()
    bounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm = {self.clip_norm}: must be finite and > 0")
        if not 1 <= self.sensitivity_factor < math.inf:
            raise ValueError(f"sensitivity_factor = {self.sensitivity_factor}: must be finite and >= 1")
        for name, values in {"grids": self.grids, "bounds": self.bounds}.items():
            if values and len(values) != len(self.sampling_probabilities):
                raise ValueError(
                    f"{name}: {len(values)} for {len(self.sampling_probabilities)} clients; must be one for each"
                )
            for value in values:
                if not 0 < value < math.inf:
                    raise ValueError(f"{name} = {value}: must be finite and > 0")

    def check_fits(self, sums: Tensor, sources: Sequence[RandomSource]) -> None:
        """Refuse sums, [clients, values], or sources, [clients], that do not fit this request.

        Raises:
            ValueError: there is not exactly one of each per client, or the number of values differs.
        """
        if not len(sums) == len(self.sampling_probabilities) == len(sources):
            raise ValueError(
                f"{len(sums)} sums, {len(self.sampling_probabilities)} sampling probabilities and {len(sources)} "
                "sources: must be one of each for every client"
            )
        if sums.shape[1] != self.dimension:
            raise ValueError(f"dimension = {self.dimension}: the sums have {sums.shape[1]} values")
