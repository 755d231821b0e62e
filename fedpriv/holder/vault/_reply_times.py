"""When a reply leaves: at a time that public numbers alone decide, so that a clock tells nothing of the records.

A reply that a charge has paid for leaves when T seconds have passed since the charge or, if its work is not done by
then, when 2 T have, or 4 T, and so on. T bounds the work on any records: it is measured on synthetic ones, for the most
that an update may draw. A draw beyond that is computed as a whole and may leave later; its probability is off delta.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import random
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from fedpriv.config import RunConfig
from fedpriv.holder.vault.holder import NodeHolder
from fedpriv.holder.wire.kinds import Broadcast
from fedpriv.learning.data import TextData, federated
from fedpriv.learning.data.text import packed_choices
from fedpriv.learning.training import PoissonSampler, private_evaluation
from fedpriv.learning.training.local_update import COUNTS, UpdateSpec
from fedpriv.learning.training.rehearsal import num_measured, rehearse, synthetic_records
from fedpriv.learning.training.stacked import caching_pays_off
from fedpriv.learning.training.workbench import Workbench
from fedpriv.privacy.ledger.entries import DataSet
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.ledger.receipts import chain_of

# Over what was measured: the machine may be busier by then.
_MARGIN = 1.5
# T is rounded up to a power of this, so that it hardly depends on what else the machine did while it was measured.
_GRID = 2**0.25

# For what precedes and follows the update, for each byte of what it stores and sends, and for each that is handed on to
# the process with the records.
_SETTLING_SECONDS = 0.1
_SETTLING_SECONDS_A_BYTE = 1e-7
_HANDING_SECONDS_A_BYTE = 5e-9

# A step forks workers from a process that holds the records' texts and tokens, whose pages are listed each time. It is
# rehearsed in one that never has them.
_FORK_SECONDS_A_RECORD = 5e-8

# Times that the ledger is opened after a charge: for the coins and the note on the content, and for the reply. It then
# verifies its chain, which takes longer with each charge.
_OPENINGS = 2
# That take about as long as an empty ledger.
_CHARGES_OF_AN_OPENING = 100

# Of a record's text, on average: reading and tokenising is measured on texts of this length.
_CHARACTERS = 4096
_NUM_TEXTS = 8

# Fractions that are set aside are rounded up to powers of this.
_FRACTIONS = 1.05

# Measured once for each bench: the seconds of one such text, and of one record's evaluation.
_text_seconds: WeakKeyDictionary[Workbench, float] = WeakKeyDictionary()
_evaluation_seconds: WeakKeyDictionary[Workbench, float] = WeakKeyDictionary()
# For each bench, after how many charges opening its ledger was timed last, and the seconds.
_opening: WeakKeyDictionary[Workbench, tuple[int, float]] = WeakKeyDictionary()
# What the last update of a bench has left in memory, its records and their states, unless they could not be used. An
# evaluation leaves nothing.
_kept: WeakKeyDictionary[Workbench, Hashable] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class ReplyTime:
    """When the reply to a release leaves.

    Attributes:
        seconds: T.
        is_first: whether T suffices to read the records and to fill the caches.
        keeps: what an update leaves in memory, so that the next one like it has less to do; None for an evaluation.
    """

    seconds: float
    is_first: bool = True
    keeps: Hashable = None


@dataclass(frozen=True, kw_only=True)
class _Ledger:
    """The facts of the ledger on which a reply's time depends.

    Attributes:
        num_charges: of the data set so far.
        seconds: for opening it after the charge.
    """

    num_charges: int
    seconds: float

    @staticmethod
    def of(bench: Workbench, holder: NodeHolder, data_set: DataSet) -> _Ledger:
        """As it is now; opening it is timed again when there are twice as many charges."""
        path = holder.policy.ledger
        assert path is not None, "a node with records of its own keeps one"
        with reading(path) as db:
            number = chain_of(db, data_set.id).newest.counter
        size = _CHARGES_OF_AN_OPENING + number
        timed, seconds = _opening.get(bench, (0, 0.0))
        if size >= 2 * timed or size < timed:
            begin = time.perf_counter()
            with Ledger(path):
                pass
            timed, seconds = _opening[bench] = size, time.perf_counter() - begin
        return _Ledger(num_charges=number, seconds=_OPENINGS * seconds * size / timed)


def of_release(
    spec: UpdateSpec,
    broadcast: Broadcast,
    sampler: PoissonSampler,
    config: RunConfig,
    bench: Workbench,
    holder: NodeHolder,
    data_set: DataSet,
) -> ReplyTime:
    """T of an update or evaluation, which is rehearsed.

    All arguments are public, or the operator's.

    Raises:
        Exception: the rehearsal fails, as the release would; or the ledger cannot be used.
    """
    if spec.objective == COUNTS:
        return _of_evaluation(spec, broadcast, config, bench, holder, data_set)
    return _of_update(spec, broadcast, sampler, config, bench, holder, data_set)


def _of_update(
    spec: UpdateSpec,
    broadcast: Broadcast,
    sampler: PoissonSampler,
    config: RunConfig,
    bench: Workbench,
    holder: NodeHolder,
    data_set: DataSet,
) -> ReplyTime:
    """T of an update; it is more where there are records to read, and caches to fill.

    Whether there are depends on what was charged before: records that an update was to read and did not, are not read
    before T allows for it again.
    """
    number = _most_records(holder, data_set, spec.max_records_per_person)
    pace = rehearse(
        bench.model,
        adapter=broadcast.adapter,
        merged=broadcast.merged,
        spec=spec,
        num_registered=sampler.num_registered,
        max_length=config.max_length,
        num_labels=len(bench.label_names),
        features=bench.features,
        num_cached=number,
    )
    cached = caching_pays_off(spec, sampler)
    # What is measured anew is measured in a process without records, and its kernels are found there.
    keeps = data_set.id, number, cached, num_measured(bench.model), _body(bench, spec, broadcast)
    is_first = _kept.get(bench) != keeps
    fills = cached and (bench.model.cache is not None or bench.model.features is not None)
    work = 0.0
    if _is_derived(holder):
        ledger = _Ledger.of(bench, holder, data_set)
        odds = log_odds(ledger.num_charges + 1, data_set)
        most = max(1, spec.max_records_per_person)
        num_units = _most_drawn(_most_units(holder, data_set) - 1, spec.local_steps, sampler.sampling_probability, odds)
        work = ledger.seconds + pace.seconds(
            num_steps=spec.local_steps,
            num_drawn=num_units,
            num_new=number if is_first and fills else 0,
            records_each=most,
        )
        work += spec.local_steps * bench.model.num_workers * number * _FORK_SECONDS_A_RECORD
        if is_first:
            work += number * _seconds_of_text(bench, config) + pace.fork
    seconds = _public(work, broadcast, holder)
    return ReplyTime(seconds=seconds, is_first=is_first, keeps=keeps)


def _of_evaluation(
    spec: UpdateSpec,
    broadcast: Broadcast,
    config: RunConfig,
    bench: Workbench,
    holder: NodeHolder,
    data_set: DataSet,
) -> ReplyTime:
    """T of an evaluation, which may have to read the records first; the first measurement on a bench counts."""
    synthetic = synthetic_records(
        bench.model, max_length=config.max_length, num_labels=len(bench.label_names), features=bench.features
    )
    passes = config.max_choices if config.choice_columns else 1  # whatever a record has
    synthetic = replace(synthetic, are_choices=bool(config.choice_columns))
    one_record = passes * private_evaluation.rehearse(bench.model, broadcast.adapter, broadcast.merged, synthetic)
    work = 0.0
    if _is_derived(holder):
        one_record, text = _evaluation_seconds.setdefault(bench, one_record), _seconds_of_text(bench, config)
        number, num_units = _most_records(holder, data_set, spec.max_records_per_person), _most_units(holder, data_set)
        num_aside = _most_aside(num_units - 1, config.test_fraction, data_set)
        kept, counted = number // num_units, max(1, spec.max_records_per_person)
        work = number * text + num_aside * (counted * one_record + kept * text)
        work += _Ledger.of(bench, holder, data_set).seconds
    return ReplyTime(seconds=_public(work, broadcast, holder))


def charged(reply: ReplyTime, bench: Workbench) -> None:
    """Take note of a new charge: from now on what it keeps is in memory, or the records are not used."""
    _kept[bench] = reply.keeps


def most_drawn(num_coins: int, probability: float, log_odds: float) -> int:
    """A number of records that Poisson samples exceed with probability at most exp(-log_odds).

    Args:
        num_coins: one for each record and step, n >= 1.
        probability: of each, q in (0, 1].
        log_odds: >= 0.

    Chernoff's bound is P(X >= a n) <= exp(-n KL(a || q)) for a >= q.
    """

    def is_likely(number: int) -> bool:
        """Whether the bound lets more than this be drawn."""
        share = (number + 1) / num_coins
        if share <= probability:
            return True
        rest = (1 - share) * math.log((1 - share) / (1 - probability)) if share < 1 else 0.0
        return num_coins * (share * math.log(share / probability) + rest) < log_odds

    return bisect.bisect_left(range(num_coins), True, key=lambda number: not is_likely(number))


def _most_drawn(num_others: int, num_steps: int, probability: float, odds: float) -> int:
    """The most records that T allows for in all steps together, with one record in question in each of them.

    Given the coins of all other records, a step is a Gaussian mechanism on this record's coin, whatever they are. So
    what is charged holds given that few enough of them are drawn; and if a reply after any other draws told everything,
    it would add the probability of such draws to delta.
    """
    return num_steps + most_drawn(num_others * num_steps, probability, odds)


def _most_aside(num_others: int, fraction: float, data_set: DataSet) -> int:
    """The most records that an evaluation's T allows for, with one record in question.

    The coins are tossed once, and counts of earlier evaluations may have chosen the fraction. So the bound is that of
    the next larger power of `_FRACTIONS`, and holds for all of these at once.
    """
    steps = math.floor(-math.log(fraction) / math.log(_FRACTIONS))
    return 1 + most_drawn(num_others, min(1.0, _FRACTIONS**-steps), log_odds(steps + 1, data_set))


def log_odds(number: int, data_set: DataSet) -> float:
    """Minus the logarithm of the probability of a single bound, so that `delta_of_clocks` pays for all of them.

    The i-th charge of a data set gets 1 / (i (i + 1)) of one half of it, and the i-th power of `_FRACTIONS` that of the
    other. Since 1 / (i (i + 1)) = 1 / i - 1 / (i + 1), all of these shares add up to less than 1, however many charges
    or fractions there are, and whatever the node's policy says of their number, now or later.

    Args:
        number: i >= 1.
        data_set: of the bound.
    """
    return math.log(2 * number * (number + 1)) - math.log(data_set.delta_of_clocks)


def _most_units(holder: NodeHolder, data_set: DataSet) -> int:
    """The most records, or persons, that T allows for: one more than N_k, or than the operator says."""
    return max(data_set.num_records, holder.settings.max_records or 0) + 1


def _most_records(holder: NodeHolder, data_set: DataSet, of_a_person: int) -> int:
    """The most records that T allows for: of so many persons, those that the node keeps of each.

    Args:
        holder, data_set: of the node.
        of_a_person: m; 0 where the unit is the record.
    """
    return _most_units(holder, data_set) * (holder.settings.max_records_per_person if of_a_person else 1)


def _body(bench: Workbench, spec: UpdateSpec, broadcast: Broadcast) -> str:
    """Digest of what the features that a head reads depend on; empty where they are not kept."""
    fixed = {name: tensor for name, tensor in broadcast.adapter.items() if name not in bench.model.head_tensors}
    if bench.model.features is None or (fixed and spec.trains != "head"):
        return ""
    digest = hashlib.sha256()
    for part, tensors in Broadcast(adapter=fixed, merged=broadcast.merged).tensors().items():
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{part} {name} ".encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _seconds_of_text(bench: Workbench, config: RunConfig) -> float:
    """The seconds that it takes to read, split and tokenise a text of `_CHARACTERS` random letters, measured once."""
    if bench not in _text_seconds:
        letters = random.Random(0)

        def text() -> str:
            return "".join(letters.choices("abcdefghijklmnopqrstuvwxyz    ", k=_CHARACTERS))

        texts = tuple(text() for _ in range(_NUM_TEXTS))
        has_pairs, pairs = bool(config.text_pair_column) or config.instructs, texts
        if config.choice_columns:
            pairs = tuple(packed_choices(0, [text] * config.max_choices) for text in texts)
        data = TextData(texts, ("",) * len(texts) if bench.label_names else (), pairs if has_pairs else None)
        bench.tokenize_tested(data)  # a tokenizer's first texts take longer
        begin = time.perf_counter()
        bench.tokenize_tested(data)
        federated.held_out(data, fraction=0.5, key=b"rehearsal")
        _text_seconds[bench] = 2 * (time.perf_counter() - begin) / _NUM_TEXTS
    return _text_seconds[bench]


def _is_derived(holder: NodeHolder) -> bool:
    """Whether T follows from measurements, since the operator has not set it."""
    return holder.settings.reply_seconds is None


def _public(work: float, broadcast: Broadcast, holder: NodeHolder) -> float:
    """T for so many seconds of work, unless the operator has set it."""
    sent = sum(tensor.nbytes for tensor in broadcast.adapter.values())
    received = sum(tensor.nbytes for part in broadcast.tensors().values() for tensor in part.values())
    settling = _SETTLING_SECONDS + _SETTLING_SECONDS_A_BYTE * sent + _HANDING_SECONDS_A_BYTE * received
    return holder.settings.reply_seconds or _GRID ** math.ceil(math.log(_MARGIN * (work + settling), _GRID))
