"""The privacy cost of releases: events, the accountants that compose them, and the noise that a budget requires.

Forty noisy steps on Poisson samples of, on average, 64 of 1,200 records:

>>> from fedpriv.privacy.accounting import SubsampledGaussian, epsilon_of, noise_multiplier_for, risk_of
>>> steps = SubsampledGaussian(noise_multiplier=1.2, sampling_probability=64 / 1200, count=40)
>>> spent = epsilon_of([steps], delta=1e-5)
>>> print(f"epsilon {spent.epsilon:.3f} at delta {spent.delta:g}, by {spent.accountant}")
epsilon 1.783 at delta 1e-05, by pld
>>> found = risk_of([steps], delta=1e-5).tpr_at_fpr["0.01"]
>>> print(f"who wrongly accuses 1 % of outside records finds at most {found:.1%} of the records")
who wrongly accuses 1 % of outside records finds at most 2.6% of the records
>>> z = noise_multiplier_for(1.0, 1e-5, sampling_probability=64 / 1200, steps=40)
>>> print(f"noise multiplier {z:.3f} for epsilon 1")
noise multiplier 1.660 for epsilon 1
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.privacy.accounting.accountants import PrivacySpent as PrivacySpent
    from fedpriv.privacy.accounting.accountants import closed_form as closed_form
    from fedpriv.privacy.accounting.accountants import delta_of as delta_of
    from fedpriv.privacy.accounting.accountants import epsilon_of as epsilon_of
    from fedpriv.privacy.accounting.accountants import repeat_and_select as repeat_and_select
    from fedpriv.privacy.accounting.accountants import stays_within as stays_within
    from fedpriv.privacy.accounting.calibration import calibrate as calibrate
    from fedpriv.privacy.accounting.calibration import calibrate_all as calibrate_all
    from fedpriv.privacy.accounting.calibration import noise_multiplier_for as noise_multiplier_for
    from fedpriv.privacy.accounting.calibration import rounds_within as rounds_within
    from fedpriv.privacy.accounting.events import EpsilonDelta as EpsilonDelta
    from fedpriv.privacy.accounting.events import Event as Event
    from fedpriv.privacy.accounting.events import PureEpsilon as PureEpsilon
    from fedpriv.privacy.accounting.events import SubsampledGaussian as SubsampledGaussian
    from fedpriv.privacy.accounting.gaussian import SummedGaussian as SummedGaussian
    from fedpriv.privacy.accounting.gaussian import worst_other_holders as worst_other_holders
    from fedpriv.privacy.accounting.many_clients import epsilons as epsilons
    from fedpriv.privacy.accounting.risk import Risk as Risk
    from fedpriv.privacy.accounting.risk import RiskTarget as RiskTarget
    from fedpriv.privacy.accounting.risk import risk_of as risk_of
    from fedpriv.privacy.accounting.sensitivity import clipping_parts as clipping_parts
    from fedpriv.privacy.accounting.sensitivity import num_parts as num_parts
    from fedpriv.privacy.accounting.sensitivity import sensitivity_factor as sensitivity_factor
    from fedpriv.privacy.accounting.trade_off import gaussian_epsilon as gaussian_epsilon
    from fedpriv.privacy.accounting.views import Release as Release
    from fedpriv.privacy.accounting.views import aggregate_objections as aggregate_objections
    from fedpriv.privacy.accounting.views import default_delta as default_delta
    from fedpriv.privacy.accounting.views import rho_bar as rho_bar
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
