"""Masks: vectors that look uniform modulo 2^m and cancel in the sum of all who added them.

Source: Bonawitz et al. 2017, Figure 4, round 2 (MaskedInputCollection).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedpriv.secure_aggregation.agreement import agree, context, derive
from fedpriv.secure_aggregation.terms import Terms

Words = NDArray[Any]
"""uint32 or uint64 [d]: integers modulo 2^m, m = 32 or 64"""

_DTYPES: dict[int, np.dtype[Any]] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}


def word_dtype(terms: Terms) -> np.dtype[Any]:
    """uint32 or uint64, little-endian, as masked vectors travel."""
    return _DTYPES[terms.modulus_bits]


def to_words(values: NDArray[np.int64], terms: Terms) -> Words:
    """Signed values modulo 2^m: int64 [d] to words [d]."""
    # From int64 to an unsigned type numpy keeps the low bits, which is the value modulo 2^m.
    return values.astype(word_dtype(terms))


def to_centred(words: Words) -> NDArray[np.int64]:
    """Words [d] as the integers in [-2^(m-1), 2^(m-1)) with the same remainder, int64 [d]."""
    signed = words.view(f"<i{words.dtype.itemsize}")
    return signed.astype(np.int64)


def self_mask(seed: bytes, client: int, terms: Terms) -> Words:
    """PRG(b_k), words [d].

    Args:
        seed: b_k, 16 bytes.
        client: k.
        terms: of the attempt.
    """
    return _expand(derive(seed, context("self mask", terms.digest(), client)), terms)


def pairwise_mask(private: bytes, client: int, public: bytes, peer: int, terms: Terms) -> Words:
    """What client k adds for peer j: PRG(s_kj) if k < j, and its negative if k > j, words [d]; the two cancel.

    Args:
        private: k's mask key, 32 bytes.
        client: k.
        public: j's public mask key, 32 bytes.
        peer: j, another client.
        terms: of the attempt.

    Raises:
        ProtocolError: the public key agrees on zero with everyone.
    """
    # The terms' digest covers run, round, attempt and every identity.
    pair = (min(client, peer), max(client, peer))
    mask = _expand(derive(agree(private, public, peer), context("pairwise mask", terms.digest(), *pair)), terms)
    return mask if client < peer else np.negative(mask)


def _expand(key: bytes, terms: Terms) -> Words:
    """The AES-256-CTR key stream as words [d]; the counter starts at zero, since a key makes one stream."""
    dtype = word_dtype(terms)
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(dtype.itemsize * terms.dimension)), dtype=dtype)
