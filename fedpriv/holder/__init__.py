"""All that answers for a data holder: the vault, the frames that reach it, sums among nodes, mods for Flower."""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.holder import sums as sums
    from fedpriv.holder import vault as vault
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
