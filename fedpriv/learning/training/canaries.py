"""Canaries: records that are inserted only to be detected, each in a client's data with probability 1/2.

The attacker chooses and knows them; only the coins are secret. If a client's registered number N_k counts all canaries,
included or not, then q, delta and the weights do not depend on the coins, as required in both neighbouring worlds.

A causal model's canary is a context of random tokens and, as its response, one random token that no other canary of
the client has. Such contexts have nothing in common, so that few gradients of other records point along a canary's.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.learning.data.chat import RESPONSE_MASK
from fedpriv.learning.data.records import Records, usable
from fedpriv.learning.training.workbench import Workbench
from fedpriv.privacy.mechanisms.sources import RandomSource, SeededSource, uniform_from_words

Flags = npt.NDArray[np.bool_]

_Kind = Literal["tokens", "mislabelled"]
_KINDS: tuple[_Kind, ...] = get_args(_Kind)

# The name of the person that a canary is about, where persons are the unit.
_CANARY = "fedpriv: canary"


@dataclass(frozen=True, kw_only=True)
class CanaryPlan:
    """The canaries of a client.

    Attributes:
        kind: `tokens`, records of random tokens; or `mislabelled`, the client's own last records, taken out of its
            data, each with a wrong label.
        num: number of canaries, >= 2; each is included with probability 1/2.
        num_tokens: length of a canary of random tokens, >= 3.
        repeats: records that an included canary consists of, >= 1; of one person, where persons are the unit.

    Raises:
        InputError: a value is out of range.
    """

    kind: _Kind = "tokens"
    num: int = 100
    num_tokens: int = 24
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InputError(f"kind = {self.kind!r}: must be one of {', '.join(_KINDS)}")
        if self.num < 2 or self.num_tokens < 3 or self.repeats < 1:
            raise InputError(
                f"num = {self.num}, num_tokens = {self.num_tokens}, repeats = {self.repeats}: must be >= 2, 3 and 1"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditedClient:
    """A client whose data contain canaries.

    Attributes:
        records: its training data: its own records and the included canaries.
        canaries: all of them once, included or not.
        included: bool [canaries]; known to the auditor only.
        num_registered: N_k, own records, or persons, and all canaries, included or not, so that it does not depend on
            the coins. Sampling probability, delta and weights derive from it.
    """

    records: Records
    canaries: Records
    included: Flags
    num_registered: int


def inclusions(num: int, source: RandomSource) -> Flags:
    """Which of num >= 2 canaries are included, bool [num], by fair coins; the source must be secret with real data."""
    if num < 2:
        raise InputError(f"num_canaries = {num}: must be >= 2")
    return np.asarray(source.bernoulli(num, 0.5).numpy())


def random_token_canaries(
    like: Records, num: int, *, num_labels: int, vocabulary: int, num_tokens: int, source: RandomSource
) -> Records:
    """Records of random tokens in the format of the client's: with random labels, or a last token of their own.

    Texts of a classifier begin and end like the client's first record, since these tokens are special in most
    vocabularies. In a chat the last token alone is the response; in a plain text every token is learned.

    Args:
        like: records of the client, at least one, whose feature names and padding the canaries share.
        num_labels: number of classes, or 0 for causal models.
        vocabulary: its size; tokens are drawn from the upper nine tenths, since special and common ones have small ids.
        num_tokens: length of a canary, >= 3.

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
    features = {name: tuple(torch.zeros_like(row) for row in tokens) for name in like.features}
    if num_labels:
        sample = like.features["input_ids"][0]
        tokens[:, 0], tokens[:, -1] = sample[0], sample[-1]
    else:
        order = np.argsort(uniform_from_words(source.words(vocabulary - lowest)), kind="stable")
        tokens[:, -1] = torch.from_numpy(np.resize(order, num)) + lowest
    if RESPONSE_MASK in features:
        is_response = torch.zeros(num_tokens, dtype=torch.int64)
        is_response[-1] = 1
        features[RESPONSE_MASK] = (is_response,) * num
    features["input_ids"] = tuple(tokens)
    labels = _below(num_labels, num, source) if num_labels else torch.tensor([], dtype=torch.int64)
    return Records(features, labels, like.pad_token_id)


def mislabelled_canaries(records: Records, *, num_labels: int, source: RandomSource) -> Records:
    """The records, each with a random wrong label.

    Args:
        records: with labels; they must not be in the client's data in any other form.
        num_labels: number of classes, >= 2.

    Raises:
        InputError: the records have no labels, or there is only one class.
    """
    if not len(records.labels) or num_labels < 2:
        raise InputError(f"num_labels = {num_labels}: mislabelled canaries need labels and two classes")
    wrong = (records.labels + 1 + _below(num_labels - 1, len(records), source)) % num_labels
    return Records(records.features, wrong, records.pad_token_id, records.unusable)


def inserted(records: Records, canaries: Records, included: Flags, repeats: int = 1) -> Records:
    """The records, followed by the included canaries; where persons are the unit, each is a person of its own.

    Args:
        included: bool [canaries].
        repeats: how often the data have an included canary, >= 1.

    Raises:
        InputError: the number of coins is not that of the canaries.
    """
    if len(included) != len(canaries):
        raise InputError(f"included: {len(included)} coins for {len(canaries)} canaries")
    indices = np.repeat(np.flatnonzero(included), repeats).tolist()
    chosen = canaries.part(indices)
    features = {name: records.features[name] + chosen.features[name] for name in records.features}
    unusable = torch.tensor([not usable(item) for item in [*records.items(), *chosen.items()]], dtype=torch.bool)
    persons = records.persons
    if persons is not None:
        persons += tuple(f"{_CANARY} {index}" for index in indices)
    return Records(features, torch.cat([records.labels, chosen.labels]), records.pad_token_id, unusable, persons)


def _below(end: int, num: int, source: RandomSource) -> Tensor:
    """Integers in 0..end - 1, uniform up to about 2^-40, int64 [num]."""
    drawn = (uniform_from_words(source.words(num)) * end).astype(np.int64)
    return torch.from_numpy(np.minimum(drawn, end - 1))


def audited_client(
    records: Records,
    plan: CanaryPlan,
    *,
    num_labels: int,
    vocabulary: int,
    canary_source: RandomSource,
    coins: RandomSource,
) -> AuditedClient:
    """The client with canaries in its data.

    Args:
        canary_source: of tokens and labels, which the attacker knows.
        coins: source of the inclusions, which only the auditor may know.

    Raises:
        InputError: there are too few records, or the plan does not fit them.
    """
    own = records
    if plan.kind == "tokens":
        canaries = random_token_canaries(
            records,
            plan.num,
            num_labels=num_labels,
            vocabulary=vocabulary,
            num_tokens=plan.num_tokens,
            source=canary_source,
        )
    else:
        if len(records) <= plan.num:
            raise InputError(f"num = {plan.num}: the client has only {len(records)} records to mislabel")
        indices = range(len(records))
        own = records.part(indices[: -plan.num])
        canaries = mislabelled_canaries(records.part(indices[-plan.num :]), num_labels=num_labels, source=canary_source)
    included = inclusions(plan.num, coins)
    of_a_canary = plan.repeats if own.persons is None else 1
    return AuditedClient(
        records=inserted(own, canaries, included, plan.repeats),
        canaries=canaries,
        included=included,
        num_registered=own.num_units + plan.num * of_a_canary,
    )


def audited(config: RunConfig, bench: Workbench, index: int) -> AuditedClient:
    """A client of a run with an audit, with its canaries.

    The coins use the run's seed, since the auditor has to know them: they protect only canaries. InputError if there
    are too few records.
    """
    assert config.audit, "a run without an audit has no canaries"
    plan = CanaryPlan(
        kind=config.audit,
        num=config.audit_canaries,
        num_tokens=max(3, min(CanaryPlan.num_tokens, config.max_length)),
        repeats=config.audit_repeats,
    )
    return _audited(bench, index, plan, config.seed)


@lru_cache(maxsize=4096)
def _audited(bench: Workbench, index: int, plan: CanaryPlan, seed: int) -> AuditedClient:
    """Always the same object for a client, because caches of its records use object identity."""
    return audited_client(
        bench.client(index),
        plan,
        num_labels=len(bench.data.label_names),
        vocabulary=bench.base.model.config.vocab_size,
        canary_source=SeededSource(seed, index, "canaries"),
        coins=SeededSource(seed, index, "coins"),
    )


def digest(clients: Iterable[AuditedClient]) -> str:
    """SHA-256 of all canaries' tokens and labels and of the coins, in order, as hexadecimal digits."""
    found = hashlib.sha256()
    for client in clients:
        for column in (*client.canaries.features.values(), client.canaries.labels):
            for row in column:
                found.update(row.numpy().tobytes() + b"\n")
        found.update(np.packbits(client.included).tobytes() + b"\n\n")
    return found.hexdigest()
