"""Sources of randomness: a cryptographic stream for releases, a seeded one for simulations.

Release noise and Poisson sampling use `SecureSource`. Anyone who can predict which records are sampled defeats the
amplification by sampling, and anyone who can predict the noise defeats everything, so no seed determines that stream.
`SeededSource` exists for runs marked `simulate`, which are reported as not private.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

if TYPE_CHECKING:
    from torch import Tensor


Words = npt.NDArray[np.uint64]


class RandomSource(ABC):
    """A stream of uniform words, from which a mechanism or a sampler draws."""

    name: str
    """`secure` or `seeded`, as shown in the record of a run."""

    @abstractmethod
    def words(self, num: int) -> Words:
        """The next `num` words, independent and uniform."""

    def normal(self, num: int) -> Tensor:
        """`num` independent standard normal values, float64 [num]; see `normal_from_words`."""
        return normal_from_words(self.words(num))

    def bernoulli(self, num: int, probability: float) -> Tensor:
        """`num` independent coins, bool [num]; see `_bernoulli_from_words`."""
        return _bernoulli_from_words(self.words(num), probability)


def normal_from_words(words: Words) -> Tensor:
    """Standard normal values by inverting the distribution function, float64, one for each 64-bit word.

    A word selects one of 2^64 equal cells of (0, 1), and the value is the quantile at the middle of the cell. The lower
    half is inverted and the upper half mirrored: a float64 resolves every cell near 0, but could not near 1. Every
    value is finite (at most 9.2 in size), and the two tails mirror each other.
    """
    import torch  # deferred: a configuration is checked without it

    # In torch, whose operations use all cores. A word's top bit, as the sign of an int64, tells which half it is in:
    # the shift makes 0 or -1 of it. In the upper half, the word's complement is the mirrored cell.
    signed = torch.from_numpy(words.view(np.int64))
    upper = signed >> 63
    cells = (signed ^ upper).double()
    values: Tensor = torch.special.ndtri(cells.add_(0.5).mul_(2.0**-64))
    return values.mul_(upper.mul_(2).add_(1))


def uniform_from_words(words: Words) -> npt.NDArray[np.float64]:
    """Uniform values in (0, 1], float64, one for each 64-bit word: the middle of the word's cell of width 2^-64.

    A float64 resolves every cell near 0; near 1 it rounds, within the last 2^-54 to 1.
    """
    # By halves, lower ones first, which are exact: the cast of a whole word branches on its top bit, a coin.
    halves = words.astype("<u8", copy=False).view("<u4")
    return np.asarray((halves[1::2] * 2.0**32 + halves[::2] + 0.5) * 2.0**-64)


def laplace_from_words(words: Words) -> npt.NDArray[np.float64]:
    """Laplace values of scale 1 by inverting the distribution function, float64, one for each 64-bit word.

    The top bit is the sign; the other 63 select a cell of (0, 1] whose middle is inverted. Sizes reach 44, where the
    remaining probability is the width of a single cell, and have a resolution of 2^-53 near 0.
    """
    # As an int64, a word with its top bit set is negative.
    return np.copysign(np.log(uniform_from_words(words << np.uint64(1))), words.view(np.int64))


def _bernoulli_from_words(words: Words, probability: float) -> Tensor:
    """Coins, bool, one for each 64-bit word; true with floor(probability * 2^64) / 2^64.

    Rounding the probability down is safe for privacy: less sampling never costs more.

    Args:
        probability: in [0, 1].
    """
    import torch  # deferred: a configuration is checked without it

    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"probability = {probability}: must lie in [0, 1]")
    if probability == 1.0:
        return torch.ones(len(words), dtype=torch.bool)
    return torch.from_numpy(words < np.uint64(math.floor(math.ldexp(probability, 64))))


class SecureSource(RandomSource):
    """A stream of AES-256 in counter mode, keyed by the operating system.

    Key and counter belong to one process: every fork gives the child's copy a new key before any code of the child
    runs, and the object cannot be pickled or copied, so no two processes ever draw the same noise.
    """

    name = "secure"

    def __init__(self) -> None:
        self._rekey()
        _secure_sources.add(self)

    def _rekey(self) -> None:
        # A lock that another thread held during the fork would stay locked in the child, so the child makes a new one.
        self._lock = threading.Lock()
        self._stream = Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(bytes(16))).encryptor()

    def words(self, num: int) -> Words:
        """The next `num` words of the stream; no other draw, in any thread or process, gets any of them."""
        with self._lock:
            return np.frombuffer(self._stream.update(bytes(8 * num)), dtype="<u8")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecureSource belongs to its process: it cannot be pickled or copied")


_secure_sources: weakref.WeakSet[SecureSource] = weakref.WeakSet()


def _rekey_all() -> None:
    """New keys for all secure sources of a forked child."""
    for source in list(_secure_sources):
        source._rekey()


# Not a comparison of process ids: the system gives those of dead processes to new ones.
os.register_at_fork(after_in_child=_rekey_all)


class SeededSource(RandomSource):
    """A reproducible stream for runs marked `simulate`. It protects nobody's privacy.

    Args:
        labels: what the stream is for, such as (seed, client, round, "noise"); different labels give independent
            streams.
    """

    name = "seeded"

    def __init__(self, *labels: int | str) -> None:
        digest = hashlib.sha256(repr(labels).encode()).digest()
        self._bits = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8"))

    def words(self, num: int) -> Words:
        """The next `num` words of the stream."""
        return np.asarray(self._bits.random_raw(num))


def on_grid(values: Tensor, scale: float) -> Tensor:
    """The values, rounded in place to multiples of a power of two, some 2^-18 of the size of the noise.

    Which floats a noised sum can take depends on the sum, and can reveal it (Mironov 2012). After rounding, which is
    post-processing, all sums reach the same points, each from some 2^46 words in the middle of the distribution.

    Args:
        values: of any shape, changed in place.
        scale: standard deviation, or another typical size, of the noise; > 0.
    """
    step = 2.0 ** (math.floor(math.log2(scale)) - 18)
    # The step is a power of two, so dividing and multiplying by it are exact.
    return values.div_(step).round_().mul_(step)
