"""Mistique: only blocks that MinHash finds similar to their substitutes, validated as in Dedup."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InputError
from fedpriv.models.dedup._in_order import (
    Accept,
    BlockSearchResult,
    Positions,
    Trials,
    batches,
    check_number,
    check_whole,
    run_search,
)

Blocks = npt.NDArray[np.floating]
Words = npt.NDArray[np.uint64]


def mistique(
    num_blocks: int,
    accept: Accept,
    *,
    similarity: Sequence[float] | npt.NDArray[np.float64] | None = None,
    threshold: float = 0.5,
    batch: int = 20,
) -> BlockSearchResult:
    """Replace similar blocks in batches in saliency order; the first batch that fails ends the search.

    Args:
        num_blocks: positions in saliency order, 0 the least salient; >= 0.
        accept: whether the model with exactly these positions replaced passes validation.
        similarity: [num_blocks], in [0, 1]: of each position's block to its substitute, from `minhash_similarity`;
            None treats every block as similar, which gives `dedup`.
        threshold: in [0, 1]; blocks that are less similar are left as they are.
        batch: N, blocks for each validation, >= 1.

    Raises:
        InputError: a number is out of range, or the number of similarities is not that of the blocks.

    Source: Vartak et al. 2018, with the saliency order and the validation that Guan et al. 2025 add in section 5.1.2.
    """
    check_whole("num_blocks", num_blocks, 0)
    check_whole("batch", batch, 1)
    check_number("threshold", threshold, 0, 1)
    similar = _similar(num_blocks, similarity, threshold)

    def walk(trials: Trials) -> None:
        for part in batches(len(similar), batch):
            if not trials.extend(Positions(similar[part.start : part.stop])):
                return

    return run_search(accept, walk)


def _similar(
    num_blocks: int, similarity: Sequence[float] | npt.NDArray[np.float64] | None, threshold: float
) -> list[int]:
    """The positions of blocks that are similar enough, in saliency order."""
    if similarity is None:
        return list(range(num_blocks))
    values = np.asarray(similarity, dtype=np.float64)
    if values.shape != (num_blocks,):
        raise InputError(f"similarity of shape {values.shape}: must be one number for each of {num_blocks} blocks")
    if not ((values >= 0) & (values <= 1)).all():
        raise InputError("similarity: every number must lie in [0, 1]")
    return [int(position) for position in np.flatnonzero(values >= threshold)]


def minhash_similarity(
    blocks: Blocks, substitutes: Blocks, *, step: float, num_hashes: int = 128, seed: int = 0
) -> npt.NDArray[np.float64]:
    """MinHash estimates of each block's Jaccard similarity to its substitute, float64 [blocks], in [0, 1].

    A block is treated as the set of its pairs (index, value rounded to a multiple of `step`). If a share s of the
    indices has equal rounded values, the similarity is s / (2 - s), estimated with a standard deviation of at most
    0.5 / sqrt(num_hashes).

    Args:
        blocks: [blocks, values], finite.
        substitutes: [blocks, values], finite; row i is the substitute of block i.
        step: > 0, units of the weights, at least the largest weight times 2^-62; the resolution of equal values.
        num_hashes: hash functions, >= 1.
        seed: of the hash functions, >= 0.

    Raises:
        InputError: a number is out of range, or the shapes differ.

    Source: Broder 1997.
    """
    check_number("step", step, 0)
    check_whole("num_hashes", num_hashes, 1)
    check_whole("seed", seed, 0)
    if step == 0:
        raise InputError("step = 0: must be > 0")
    if blocks.shape != substitutes.shape or blocks.ndim != 2:
        raise InputError(f"blocks of shape {blocks.shape} and {substitutes.shape}: must be two equal [blocks, values]")
    generator = np.random.default_rng(seed)
    factors, shifts = generator.integers(0, 2**64, size=(2, num_hashes), dtype=np.uint64)
    hashes = factors | np.uint64(1), shifts
    same = [
        np.mean(_signature(block, step, hashes) == _signature(other, step, hashes))
        for block, other in zip(blocks, substitutes, strict=True)
    ]
    return np.array(same, dtype=np.float64)


def _signature(block: npt.NDArray[np.floating], step: float, hashes: tuple[Words, Words]) -> Words:
    """The minimum of each hash function over the block's set, [hashes]."""
    cells = np.rint(block.astype(np.float64) / step).astype(np.int64).view(np.uint64)
    indices = np.arange(len(block), dtype=np.uint64)
    elements = _mixed(cells ^ _mixed(indices))
    return np.array([(elements * factor + shift).min(initial=2**64 - 1) for factor, shift in zip(*hashes, strict=True)])


def _mixed(words: Words) -> Words:
    """SplitMix64's finaliser: every bit of a word affects every bit of the result (Steele et al. 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
