"""The privacy cost of LMO noise: its parameters, the distribution that they describe, its curves and its event."""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.accounting.lmo._renyi import divergences as divergences
    from fedpriv.accounting.lmo._renyi import sampled_curve as sampled_curve
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
