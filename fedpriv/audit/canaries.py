"""Canaries: records whose only purpose is to be looked for, each in a client's data with probability 1/2.

The attacker chooses them and knows them; only the coins are hidden. Where a client's registered number N_k counts all
canaries, in or out, q, delta and the weights do not depend on the coins, as both neighbouring worlds require.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from scipy import linalg
from torch import Tensor

from fedpriv.data.records import Records
from fedpriv.errors import InputError
from fedpriv.mechanisms.sources import RandomSource, uniform_from_words

Flags = npt.NDArray[np.bool_]


def inclusions(num: int, source: RandomSource) -> Flags:
    """Which canaries are in, bool [num], each with probability 1/2.

    Args:
        num: of canaries, >= 2.
        source: of the coins; a secret one in an audit of real data.

    Raises:
        InputError: there are fewer than two.
    """
    if num < 2:
        raise InputError(f"num_canaries = {num}: must be >= 2")
    return np.asarray(source.bernoulli(num, 0.5).numpy())


def coordinate_directions(num: int, places: Sequence[int] | range, dimension: int) -> Tensor:
    """Unit vectors [num, dimension] along the given places in turn; orthogonal while the places last.

    Args:
        num: of canaries.
        places: coordinates, each in 0..dimension - 1.
        dimension: of a gradient.
    """
    directions = torch.zeros(num, dimension)
    directions[torch.arange(num), torch.tensor([places[i % len(places)] for i in range(num)])] = 1.0
    return directions


def random_directions(num: int, dimension: int, source: RandomSource) -> Tensor:
    """Random unit vectors [num, dimension], uniform on the sphere."""
    values = source.normal(num * dimension).view(num, dimension)
    directions: Tensor = values / values.square().sum(dim=1, keepdim=True).sqrt()
    return directions.float()


def dense_directions(num: int, dimension: int, source: RandomSource) -> Tensor:
    """Orthogonal unit vectors [num, dimension] with all coordinates +-dimension^-1/2: rows of a Hadamard matrix whose
    columns have random signs.

    Noise that is right for one number and wrong for a vector shows along these, and along no coordinate.

    Args:
        num: of canaries, 1..dimension.
        dimension: of a gradient, a power of two.
        source: of the signs.

    Raises:
        InputError: dimension is no power of two, or there are more canaries than orthogonal directions.
    """
    if dimension < 1 or dimension & (dimension - 1):
        raise InputError(f"dimension = {dimension}: must be a power of two")
    if not 1 <= num <= dimension:
        raise InputError(f"num_canaries = {num}: must lie in 1..{dimension}, the orthogonal directions")
    rows = torch.from_numpy(linalg.hadamard(dimension, dtype=np.int8)[:num]).float()
    signs = 1 - 2 * source.bernoulli(dimension, 0.5).float()
    return rows * signs / math.sqrt(dimension)


def random_token_canaries(
    like: Records, num: int, *, num_labels: int, vocabulary: int, num_tokens: int, source: RandomSource
) -> Records:
    """Records of random tokens with random labels, for a tokenizer's records.

    The first and last token of the client's first record, which are special in most vocabularies, stay in place.

    Args:
        like: records of the client, at least one, whose features and padding the canaries have.
        num: of canaries.
        num_labels: classes, or 0 for causal models.
        vocabulary: of the tokenizer; tokens are drawn from its upper nine tenths, below which special ones stand.
        num_tokens: length of a canary, >= 3.
        source: of tokens and labels.

    Raises:
        InputError: a value is out of range, or there is no record to be like.
    """
    if num_tokens < 3 or vocabulary < 10 or not len(like):
        raise InputError(
            f"num_tokens = {num_tokens}, vocabulary = {vocabulary}: must be >= 3 and >= 10, and the client must have "
            "a record"
        )
    lowest = vocabulary // 10
    tokens = _below(vocabulary - lowest, num * num_tokens, source).view(num, num_tokens) + lowest
    sample = like.features["input_ids"][0]
    tokens[:, 0], tokens[:, -1] = sample[0], sample[-1]
    features = {name: tuple(torch.zeros_like(row) for row in tokens) for name in like.features}
    features["input_ids"] = tuple(tokens)
    labels = _below(num_labels, num, source) if num_labels else torch.tensor([], dtype=torch.int64)
    return Records(features, labels, like.pad_token_id)


def mislabelled_canaries(records: Records, *, num_labels: int, source: RandomSource) -> Records:
    """The records, each with a label drawn from the wrong ones.

    Args:
        records: with labels; they must be in the client's data in no other form.
        num_labels: classes, >= 2.
        source: of the labels.

    Raises:
        InputError: the records have no labels, or there is one class.
    """
    if not len(records.labels) or num_labels < 2:
        raise InputError(f"num_labels = {num_labels}: mislabelled canaries need labels and two classes")
    wrong = (records.labels + 1 + _below(num_labels - 1, len(records), source)) % num_labels
    return Records(records.features, wrong, records.pad_token_id)


def inserted(records: Records, canaries: Records, included: Flags) -> Records:
    """The records followed by the canaries that are in.

    Raises:
        InputError: there is not one coin for each canary.
    """
    if len(included) != len(canaries):
        raise InputError(f"included: {len(included)} coins for {len(canaries)} canaries")
    chosen = canaries.part(np.flatnonzero(included).tolist())
    features = {name: records.features[name] + chosen.features[name] for name in records.features}
    return Records(features, torch.cat([records.labels, chosen.labels]), records.pad_token_id)


def _below(end: int, num: int, source: RandomSource) -> Tensor:
    """Whole numbers in 0..end - 1, uniform to 2^-40 or so, int64 [num]."""
    drawn = (uniform_from_words(source.words(num)) * end).astype(np.int64)
    return torch.from_numpy(np.minimum(drawn, end - 1))
