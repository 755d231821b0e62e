"""How much noise a release has, in one number that can be limited and shown: the effective noise multiplier."""

from __future__ import annotations

import math

from fedpriv.accounting.events import Event, SubsampledGaussian, SubsampledLmo
from fedpriv.accounting.lmo.moments import columns
from fedpriv.accounting.lmo.renyi import sound

# Of the Renyi divergence by which noise of another kind is compared with Gaussian noise.
ORDER = 8


def effective_noise_multiplier(event: Event) -> float:
    """Noise over sensitivity, whoever is sampled; 0 for an event that says nothing of its noise.

    LMO noise has that of the Gaussian noise with its sound Renyi divergence at order 8: a / (2 z^2) there.
    """
    if isinstance(event, SubsampledGaussian):
        return event.noise_multiplier
    if isinstance(event, SubsampledLmo):
        curve = sound(columns(event.parameters), [ORDER], dimension=event.dimension, sensitivity=event.sensitivity)
        return math.sqrt(ORDER / (2 * float(curve[..., 0])))
    return 0.0
