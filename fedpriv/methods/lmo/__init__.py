"""LMO noise, Laplace noise of random scale: its search, what it may cost, and comparisons with other noise.

The least Laplace noise that meets a budget, and its cost:

>>> from fedpriv.methods.lmo import Budget, cost, laplace
>>> budget = Budget(epsilon=1.0, delta=1e-5)
>>> noise = laplace(budget)
>>> print(f"scale {1 / noise.uniform.low:.3f} clip norms, epsilon {cost(noise, budget):.3f}")
scale 1.000 clip norms, epsilon 1.000
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.methods.lmo.comparison import compare as compare
    from fedpriv.methods.lmo.search import Budget as Budget
    from fedpriv.methods.lmo.search import FoundNoise as FoundNoise
    from fedpriv.methods.lmo.search import SearchSpace as SearchSpace
    from fedpriv.methods.lmo.search import cost as cost
    from fedpriv.methods.lmo.search import fitted as fitted
    from fedpriv.methods.lmo.search import laplace as laplace
    from fedpriv.privacy.accounting.lmo_parameters import ExponentialPart as ExponentialPart
    from fedpriv.privacy.accounting.lmo_parameters import GammaPart as GammaPart
    from fedpriv.privacy.accounting.lmo_parameters import LmoParameters as LmoParameters
    from fedpriv.privacy.accounting.lmo_parameters import UniformPart as UniformPart
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
