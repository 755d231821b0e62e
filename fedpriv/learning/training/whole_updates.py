"""Client-level privacy of a whole update: clipped as one vector, with exact discrete noise on every value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.learning.training.clipping import clipped_rows
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.sensitivity import UPLOAD_FACTOR
from fedpriv.privacy.mechanisms.registry import FOR_SUMS, MECHANISMS, NoiseRequest
from fedpriv.privacy.mechanisms.sources import RandomSource, SecureSource


@dataclass(frozen=True, kw_only=True)
class UpdateNoise:
    """The release of one client's update at a time: clip, noise, and the event that pays.

    Guarantee: replacing all data of the client costs what `event` says. The client is known to take part, so any two
    of its updates count, and these are up to 2 C apart.

    Attributes:
        clip_norm: C, finite, > 0, in units of the update.
        noise_multiplier: z > 0, the noise over C; the event has z / 2, less what rounding to the noise's grid adds.

    Raises:
        InputError: clip_norm or noise_multiplier is out of range.
    """

    clip_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0:
            raise InputError(f"noise_multiplier = {self.noise_multiplier}: must be > 0")
        try:
            self.noised(torch.zeros(1, dtype=torch.float64), SecureSource())
        except ValueError as error:
            raise InputError(str(error)) from None

    def event(self, num_values: int) -> Event:
        """The cost of one release of so many values, or of fewer; rounding adds a little for each."""
        (event,) = MECHANISMS[FOR_SUMS].planned_events(self._request(num_values))
        return event

    def noised(self, update: Tensor, source: RandomSource) -> Tensor:
        """The clipped update with noise of standard deviation z C on every value, float64 [values].

        Args:
            update: [values]; one that is not finite counts as zero.
            source: of the noise.
        """
        clipped = clipped_rows(update.unsqueeze(0), self.clip_norm, [slice(0, len(update))])
        noised, _ = MECHANISMS[FOR_SUMS].add_noise(clipped, self._request(len(update)), [source])
        return noised[0]

    def _request(self, num_values: int) -> NoiseRequest:
        return NoiseRequest(
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.clip_norm,
            sensitivity_factor=UPLOAD_FACTOR,
            dimension=num_values,
            sampling_probabilities=(1.0,),
            unit="client",
        )
