"""Mechanisms: they add noise, drawn from a source of randomness, and state the event that pays for it.

Comparisons with a threshold by the Sparse Vector Technique. The seed makes this example reproducible; a release that
leaves the data holder must draw from a `SecureSource()`.

>>> from fedpriv.privacy.mechanisms import SeededSource, SparseVector
>>> vector = SparseVector(epsilon=1.0, cutoff=1, sensitivity=1, source=SeededSource("example"))
>>> [vector.reaches(count, threshold=100) for count in (10, 20, 190)]
[False, False, True]
>>> vector.event
PureEpsilon(epsilon=1.0, count=1, unit='record')
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.privacy.mechanisms.registry import MECHANISMS as MECHANISMS
    from fedpriv.privacy.mechanisms.registry import Mechanism as Mechanism
    from fedpriv.privacy.mechanisms.registry import NoiseRequest as NoiseRequest
    from fedpriv.privacy.mechanisms.sources import RandomSource as RandomSource
    from fedpriv.privacy.mechanisms.sources import SecureSource as SecureSource
    from fedpriv.privacy.mechanisms.sources import SeededSource as SeededSource
    from fedpriv.privacy.mechanisms.svt import CutoffReached as CutoffReached
    from fedpriv.privacy.mechanisms.svt import SparseVector as SparseVector
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
