"""Canaries: records inserted only to be detected, each in a client's data with probability 1/2.

The attacker chooses and knows them; only the coins are secret. If a client's registered number N_k counts all
canaries, included or not, then q, delta and the weights do not depend on the coins, as required in both neighbouring
worlds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.data.chat import RESPONSE_MASK
from fedpriv.data.records import Records, usable
from fedpriv.errors import InputError
from fedpriv.mechanisms.sources import RandomSource, uniform_from_words

Flags = npt.NDArray[np.bool_]


def inclusions(num: int, source: RandomSource) -> Flags:
    """Which canaries are included, bool [num], each with probability 1/2.

    Args:
        num: number of canaries, >= 2.
        source: of the coins; must be secret in an audit of real data.

    Raises:
        InputError: there are fewer than two.
    """
    if num < 2:
        raise InputError(f"num_canaries = {num}: must be >= 2")
    return np.asarray(source.bernoulli(num, 0.5).numpy())


def random_token_canaries(
    like: Records, num: int, *, num_labels: int, vocabulary: int, num_tokens: int, source: RandomSource
) -> Records:
    """Records of random tokens with random labels, in the format of tokenized records.

    The first and last token are those of the client's first record, since they are special in most vocabularies.

    Args:
        like: records of the client, at least one, whose feature names and padding the canaries share.
        num: number of canaries.
        num_labels: number of classes, or 0 for causal models.
        vocabulary: its size; tokens are drawn from the upper nine tenths, since special tokens have small ids.
        num_tokens: length of a canary, >= 3.
        source: of tokens and labels.

    Raises:
        InputError: a value is out of range, or the client has no record.
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
    if RESPONSE_MASK in features:
        features[RESPONSE_MASK] = tuple(map(torch.ones_like, tokens))
    features["input_ids"] = tuple(tokens)
    labels = _below(num_labels, num, source) if num_labels else torch.tensor([], dtype=torch.int64)
    return Records(features, labels, like.pad_token_id)


def mislabelled_canaries(records: Records, *, num_labels: int, source: RandomSource) -> Records:
    """The records, each with a random wrong label.

    Args:
        records: with labels; they must not be in the client's data in any other form.
        num_labels: number of classes, >= 2.
        source: of the labels.

    Raises:
        InputError: the records have no labels, or there is only one class.
    """
    if not len(records.labels) or num_labels < 2:
        raise InputError(f"num_labels = {num_labels}: mislabelled canaries need labels and two classes")
    wrong = (records.labels + 1 + _below(num_labels - 1, len(records), source)) % num_labels
    return Records(records.features, wrong, records.pad_token_id, records.unusable)


def inserted(records: Records, canaries: Records, included: Flags) -> Records:
    """The records, followed by the included canaries.

    Raises:
        InputError: the number of coins is not that of the canaries.
    """
    if len(included) != len(canaries):
        raise InputError(f"included: {len(included)} coins for {len(canaries)} canaries")
    chosen = canaries.part(np.flatnonzero(included).tolist())
    features = {name: records.features[name] + chosen.features[name] for name in records.features}
    unusable = torch.tensor([not usable(item) for item in [*records.items(), *chosen.items()]], dtype=torch.bool)
    return Records(features, torch.cat([records.labels, chosen.labels]), records.pad_token_id, unusable)


def _below(end: int, num: int, source: RandomSource) -> Tensor:
    """Integers in 0..end - 1, uniform up to about 2^-40, int64 [num]."""
    drawn = (uniform_from_words(source.words(num)) * end).astype(np.int64)
    return torch.from_numpy(np.minimum(drawn, end - 1))
