"""The models that come out of a run: stored variants, their deduplication, serving and publishing."""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.models import dedup as dedup
    from fedpriv.models import publishing as publishing
    from fedpriv.models import serving as serving
    from fedpriv.models import variants as variants
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
