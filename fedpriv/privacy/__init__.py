"""The cost of a release, the noise on it, and the ledger in which it is written."""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.privacy import accounting as accounting
    from fedpriv.privacy import ledger as ledger
    from fedpriv.privacy import mechanisms as mechanisms
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
