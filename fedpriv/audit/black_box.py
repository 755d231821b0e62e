"""Audit of a whole simulated run through its final model: a lower bound on epsilon from text canaries.

Canaries are records inserted only to be detected, each in a client's data with probability 1/2, and scored by their
drop in loss. The attacker chooses and knows them; only the coins are secret. If a client's registered number N_k counts
all canaries, included or not, then q, delta and the weights do not depend on the coins, as required in both
neighbouring worlds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.accounting.composition.law import Array
from fedpriv.adapters import Adapter, lora
from fedpriv.audit._bounds import OneRunAudit, one_run_audit
from fedpriv.audit._membership import calibrated_scores
from fedpriv.config import RunConfig
from fedpriv.data.chat import RESPONSE_MASK
from fedpriv.data.records import Records, num_tokens, usable
from fedpriv.errors import InputError
from fedpriv.mechanisms.sources import RandomSource, SeededSource, uniform_from_words
from fedpriv.training.model import TrainingModel
from fedpriv.training.workbench import Workbench

Flags = npt.NDArray[np.bool_]

# The name of the person that a canary is about, where persons are the unit.
_CANARY = "fedpriv: canary"


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
    """The records, followed by the included canaries; where persons are the unit, each is the one record of a person.

    Raises:
        InputError: the number of coins is not that of the canaries.
    """
    if len(included) != len(canaries):
        raise InputError(f"included: {len(included)} coins for {len(canaries)} canaries")
    chosen = canaries.part(np.flatnonzero(included).tolist())
    features = {name: records.features[name] + chosen.features[name] for name in records.features}
    unusable = torch.tensor([not usable(item) for item in [*records.items(), *chosen.items()]], dtype=torch.bool)
    persons = records.persons
    if persons is not None:
        persons += tuple(f"{_CANARY} {index}" for index in range(len(chosen)))
    return Records(features, torch.cat([records.labels, chosen.labels]), records.pad_token_id, unusable, persons)


def _below(end: int, num: int, source: RandomSource) -> Tensor:
    """Integers in 0..end - 1, uniform up to about 2^-40, int64 [num]."""
    drawn = (uniform_from_words(source.words(num)) * end).astype(np.int64)
    return torch.from_numpy(np.minimum(drawn, end - 1))


_Kind = Literal["tokens", "mislabelled"]
_KINDS: tuple[_Kind, ...] = get_args(_Kind)

_RECORDS_PER_PASS = 64


@dataclass(frozen=True, kw_only=True)
class CanaryPlan:
    """The canaries of a client.

    Attributes:
        kind: `tokens`, records of random tokens with random labels; or `mislabelled`, the client's own last records,
            taken out of its data, each with a wrong label.
        num: number of canaries, >= 2; each is included with probability 1/2.
        num_tokens: length of a canary of random tokens, >= 3.

    Raises:
        InputError: a value is out of range.
    """

    kind: _Kind = "tokens"
    num: int = 100
    num_tokens: int = 16

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InputError(f"kind = {self.kind!r}: must be one of {', '.join(_KINDS)}")
        if self.num < 2 or self.num_tokens < 3:
            raise InputError(f"num = {self.num}, num_tokens = {self.num_tokens}: must be >= 2 and >= 3")


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditedClient:
    """A client whose data contain canaries.

    Attributes:
        records: its training data: its own records and the included canaries.
        canaries: all of them, included or not.
        included: bool [canaries]; known to the auditor only.
        num_registered: N_k, own records, or persons, and all canaries, included or not, so that it does not depend on
            the coins. Sampling probability, delta and weights derive from it.
    """

    records: Records
    canaries: Records
    included: Flags
    num_registered: int


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
        records: the client's own.
        plan: of the canaries.
        num_labels: number of classes, 0 for causal models.
        vocabulary: size of the tokenizer's vocabulary.
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
    return AuditedClient(
        records=inserted(own, canaries, included),
        canaries=canaries,
        included=included,
        num_registered=own.num_units + plan.num,
    )


def audit_run(
    model: TrainingModel,
    initial: Adapter,
    final: Adapter,
    clients: Sequence[AuditedClient],
    *,
    num_guesses: int,
    delta: float,
    confidence: float = 0.95,
) -> OneRunAudit:
    """A lower bound on the largest client epsilon, from only the initial and final global adapter of a run.

    A canary's score is its drop in loss. The guarantee of each client covers its own canaries, and the largest epsilon
    at the largest delta covers all of them together.

    Args:
        model: of the run; its adapter is changed.
        initial: the adapter before the first round.
        final: the one after the last round.
        clients: with canaries.
        num_guesses: fixed before the run.
        delta: the largest delta of the clients.
        confidence: of the bound.
    """
    before, after = (
        np.concatenate([record_losses(model, adapter, client.canaries) for client in clients])
        for adapter in (initial, final)
    )
    return one_run_audit(
        calibrated_scores(after, before),
        np.concatenate([client.included for client in clients]),
        num_guesses=num_guesses,
        delta=delta,
        confidence=confidence,
    )


@torch.no_grad()
def record_losses(model: TrainingModel, adapter: Adapter, records: Records) -> Array:
    """[records] Loss of each record under the model with the adapter, which stays in the model."""
    lora.write_parameters(model.parameters, adapter)
    losses = np.empty(len(records))
    order = sorted(range(len(records)), key=lambda index: num_tokens((records, index)))
    for begin in range(0, len(order), _RECORDS_PER_PASS):
        indices = order[begin : begin + _RECORDS_PER_PASS]
        losses[indices] = model.predictions(records.items(indices), cached=True).losses.double().cpu().numpy()
    return losses


_CONFIDENCE = 0.95


def audited(config: RunConfig, bench: Workbench, index: int) -> AuditedClient | None:
    """A client with its canaries; None in a run without an audit.

    The coins use the run's seed, since the auditor has to know them: they protect only canaries, which belong to
    nobody.

    Args:
        config: of the run.
        bench: with the client's records.
        index: of the client among the bench's clients.

    Raises:
        InputError: there are too few records.
    """
    if not config.audit:
        return None
    return _audited(bench, index, config.audit, config.audit_canaries, config.seed)


@lru_cache(maxsize=4096)
def _audited(bench: Workbench, index: int, kind: str, num: int, seed: int) -> AuditedClient:
    """Always the same object for a client, because caches of its records use object identity."""
    return audited_client(
        bench.client(index),
        CanaryPlan(kind=cast(_Kind, kind), num=num),
        num_labels=len(bench.data.label_names),
        vocabulary=bench.base.model.config.vocab_size,
        canary_source=SeededSource(seed, index, "canaries"),
        coins=SeededSource(seed, index, "coins"),
    )


def audit_of(
    config: RunConfig, bench: Workbench, final: Adapter, *, delta: float, claimed_epsilon: float
) -> dict[str, Any] | None:
    """The audit of the run's epsilon by its canaries, for the summary; None in a run without an audit.

    The number of guesses, half of the canaries (or one less, to be even), is fixed beforehand.

    Args:
        config: of the run.
        bench: with all clients' records; the adapter of its model is changed.
        final: the global adapter after the last round.
        delta: the largest of the clients.
        claimed_epsilon: the largest of the clients, on the local view; infinite without noise.
    """
    maybe_clients = [audited(config, bench, index) for index in range(len(bench.data.clients))]
    clients = [client for client in maybe_clients if client is not None]
    if not clients:
        return None
    bench.model.merge({})
    # Even, since half of the guesses are that a canary is in.
    num_guesses = 2 * max(1, sum(len(client.canaries) for client in clients) // 4)
    result = audit_run(
        bench.model, bench.initial, final, clients, num_guesses=num_guesses, delta=delta, confidence=_CONFIDENCE
    )
    refuted = result.epsilon_lower > claimed_epsilon
    return {"kind": config.audit, **asdict(result), "claimed_epsilon": claimed_epsilon, "refuted": refuted}
