"""Many variants of one model, answered over HTTP in shared passes of its frozen base.

A token may use some of the variants; of the others it does not learn that they exist:

>>> from fedpriv.models.serving.http.tokens import Token
>>> clinic = Token(name="clinic", sha256="9f" * 32, variants=("global", "round-*"))
>>> [clinic.allows(name) for name in ("global", "round-20", "client-3")]
[True, True, False]
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.models.serving.scheduler import Scheduler as Scheduler
    from fedpriv.models.serving.scheduler import open_serving as open_serving
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
