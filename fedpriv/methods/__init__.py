"""Searches, attacks and statistics, none of them on a round's way."""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.methods import audit as audit
    from fedpriv.methods import integral as integral
    from fedpriv.methods import lmo as lmo
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
