"""Events of releases, written in one line, and what dp-accounting says of them."""

import dp_accounting
from dp_accounting import pld, rdp

from fedpriv.privacy.accounting.events import SubsampledGaussian


def gaussian(z: float, q: float = 1.0, count: int = 1, **more: str) -> SubsampledGaussian:
    """So many releases with noise of this multiplier, on samples of this probability."""
    return SubsampledGaussian(noise_multiplier=z, sampling_probability=q, count=count, **more)


def by_dp_accounting(
    accountant: str, *events: SubsampledGaussian, interval: float = 1e-4
) -> dp_accounting.PrivacyAccountant:
    """Its own accountant, given the events; a plain Gaussian if every record takes part."""
    composed = rdp.RdpAccountant() if accountant == "rdp" else pld.PLDAccountant(value_discretization_interval=interval)
    for event in events:
        single = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        sampled = dp_accounting.PoissonSampledDpEvent(event.sampling_probability, single)
        composed.compose(single if event.sampling_probability == 1 else sampled, event.count)
    return composed
