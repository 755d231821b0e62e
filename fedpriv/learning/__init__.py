"""From records to a noised update, and the rule that makes one model of many."""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.learning import adapters as adapters
    from fedpriv.learning import aggregation as aggregation
    from fedpriv.learning import data as data
    from fedpriv.learning import training as training
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
