"""What protects a data holder: its own rules, budget and ledger, whatever the coordinator says."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedpriv.accounting.accountants import check_delta, stays_within
from fedpriv.accounting.events import Event
from fedpriv.accounting.filters import CommittedPlans
from fedpriv.accounting.sensitivity import CLIPPING_RULES, NOISE_TARGETS
from fedpriv.accounting.views import PlannedView, Release, default_delta
from fedpriv.adapters.codecs import CODECS
from fedpriv.errors import InputError, LedgerError
from fedpriv.ledger.entries import CHARGED, RELEASED, Charge, DataSet, Key
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.reader import reading
from fedpriv.ledger.receipts import chain_of
from fedpriv.mechanisms.registry import MECHANISMS
from fedpriv.protocol import Broadcast
from fedpriv.training.local_update import OBJECTIVES, OPTIMIZERS, QUANTIZATIONS, TRAINED_PARTS, UpdateSpec
from fedpriv.training.private_evaluation import EvaluationSpec
from fedpriv.vault import budget
from fedpriv.vault.rollback import Watch
from fedpriv.vault.settings import Limits

log = logging.getLogger(__name__)

# Accountants take a larger one for this, and near the largest float an upload would overflow after its charge.
_LARGEST_NOISE_MULTIPLIER = 1e6

# Of a gradient's part before it is clipped. A larger one would only let this part crowd out the others.
_LARGEST_BIAS_SCALE = 100.0


class RefusedError(Exception):
    """The guard refused before anything was computed; the message holds public values only, so it may be sent."""


class RetiredError(RefusedError):
    """The guard refused because the data's budget is spent; it will refuse every later request too."""


class AlreadyReleasedError(Exception):
    """The request was answered before: the stored reply is sent again, and nothing is computed.

    Args:
        content: the stored reply.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__("already answered; the stored reply is sent again")
        self.content = content


@dataclass(frozen=True, kw_only=True)
class NodePolicy:
    """The data holder's own rules.

    Attributes:
        allow_not_private: the holder agrees to releases that no epsilon covers, because its data are public or
            the whole federation is its own simulation.
        ledger: the node's own ledger; None is allowed only with `allow_unrecorded`.
        allow_unrecorded: the holder agrees to releases that only the coordinator's ledger records.
        budget_epsilon: the most that all runs on the data may cost together, on `budget_view`; None sets no bound.
        delta: of the budget, in (0, 1); None means 1/(10 N_k), at most 1e-5.
        limits: what an instruction may ask for; None allows every valid instruction.
        budget_view: `local`, or `aggregate`, where an upload under secure aggregation costs what the sum shows.
        min_survivors: t; terms under which fewer uploads make a sum are refused.
        colluding_clients: c, how many others may reveal their noise to the server; terms that count on fewer are
            refused.
        watch: notices that the ledger is an old copy; None without a ledger, or a key that signs.
        data_set: that was registered when this process read where the records are, so that no other one pays for
            them; empty if none was. None where a run brings the records.
        fixed_schedule: the holder starts the runs itself, so no release is chosen by what earlier ones showed, and
            losses may be composed by pld.

    Raises:
        InputError, ValueError: the budget or delta is out of range.
    """

    allow_not_private: bool = False
    ledger: Path | None = None
    allow_unrecorded: bool = False
    budget_epsilon: float | None = None
    delta: float | None = None
    limits: Limits | None = field(default_factory=Limits)
    budget_view: PlannedView = "local"
    min_survivors: int = 3
    colluding_clients: int = 0
    watch: Watch | None = None
    data_set: str | None = None
    fixed_schedule: bool = False

    def __post_init__(self) -> None:
        if self.budget_epsilon is not None and not 0 < self.budget_epsilon < math.inf:
            raise InputError(f"budget-epsilon = {self.budget_epsilon}: must be finite and > 0")
        if self.delta is not None:
            check_delta(self.delta)


def check_instruction(
    spec: UpdateSpec, policy: NodePolicy, *, noise_source: str, num_registered: int, has_labels: bool = True
) -> None:
    """Refuse an instruction that would not protect the holder's records, or that they do not suit.

    Raises:
        RefusedError: one line with the name, the value and what would be right.
    """
    if spec.clipping not in CLIPPING_RULES:
        raise RefusedError(f"clipping = {spec.clipping!r}: must be one of {', '.join(CLIPPING_RULES)}")
    if spec.noise_on not in NOISE_TARGETS:
        raise RefusedError(f"noise_on = {spec.noise_on!r}: must be one of {', '.join(NOISE_TARGETS)}")
    if not (math.isfinite(spec.clip_norm) and spec.clip_norm > 0):
        raise RefusedError(f"clip_norm = {spec.clip_norm}: must be finite and > 0")
    if not 0 <= spec.noise_multiplier <= _LARGEST_NOISE_MULTIPLIER:
        raise RefusedError(
            f"noise_multiplier = {spec.noise_multiplier}: must lie in [0, {_LARGEST_NOISE_MULTIPLIER:g}]"
        )
    _check_mechanism(spec)
    if spec.local_steps < 1:
        raise RefusedError(f"local_steps = {spec.local_steps}: must be >= 1")
    if not 0 <= spec.sampling_probability <= 1:
        raise RefusedError(f"sampling_probability = {spec.sampling_probability}: must lie in [0, 1]")
    if not spec.sampling_probability and not 1 <= spec.batch_size <= num_registered:
        raise RefusedError(f"batch_size = {spec.batch_size}: must lie in 1..{num_registered}")
    for name, known in (("trains", TRAINED_PARTS), ("objective", OBJECTIVES)):
        if (named := getattr(spec, name)) not in known:
            raise RefusedError(f"{name} = {named!r}: must be one of {', '.join(known)}")
    if spec.objective == "class-sums" and not has_labels:
        raise RefusedError("objective = 'class-sums': needs records with labels; this node's have none")
    if not 0 < spec.bias_scale <= _LARGEST_BIAS_SCALE:
        raise RefusedError(f"bias_scale = {spec.bias_scale}: must be > 0 and at most {_LARGEST_BIAS_SCALE:g}")
    for name in ("learning_rate", "weight_decay"):
        value = getattr(spec, name)
        if not (math.isfinite(value) and value >= 0):
            raise RefusedError(f"{name} = {value}: must be finite and >= 0")
    if not 0 <= spec.lora_learning_rate < math.inf:
        raise RefusedError(f"lora_learning_rate = {spec.lora_learning_rate}: must be finite and >= 0")
    if spec.learning_rate == 0:
        raise RefusedError("learning_rate = 0: must be > 0")
    if spec.optimizer not in OPTIMIZERS:
        raise RefusedError(f"optimizer = {spec.optimizer!r}: must be one of {', '.join(OPTIMIZERS)}")
    if spec.codec not in CODECS:
        raise RefusedError(f"codec = {spec.codec!r}: must be one of {', '.join(CODECS)}")
    if spec.quantization not in QUANTIZATIONS:
        raise RefusedError(f"quantization = {spec.quantization!r}: must be one of {', '.join(QUANTIZATIONS)}")
    if not 0 <= spec.relevance_threshold <= 1:
        raise RefusedError(f"relevance_threshold = {spec.relevance_threshold}: must lie in [0, 1]")
    if policy.ledger is None and not policy.allow_unrecorded:
        raise RefusedError("ledger: this node has none, and releases nothing that it cannot record")
    if policy.allow_not_private:
        return
    if spec.noise_multiplier == 0:
        raise RefusedError("noise_multiplier = 0: this node releases nothing without noise")
    if caveat := MECHANISMS[spec.mechanism].caveat(spec.mechanism_parameters):
        raise RefusedError(f"mechanism_parameters: their cost is no privacy guarantee ({caveat}); this node needs one")
    if noise_source != "secure":
        raise RefusedError(f"noise source = {noise_source}: this node releases nothing with seeded noise")


def _check_mechanism(spec: UpdateSpec) -> None:
    try:
        MECHANISMS.checked_parameters(spec.mechanism, spec.mechanism_parameters, spec.noise_multiplier)
    except InputError as error:
        raise RefusedError(str(error)) from None


def check_limits(spec: UpdateSpec, event: Event, round_: int, limits: Limits | None) -> None:
    """Refuse an instruction that is less private than the data holder agreed to.

    Args:
        spec: the update that the coordinator asks for.
        event: what it would cost, on the view of the node's budget.
        round_: the run's round, from 1.
        limits: of the node; None checks the round alone.

    Raises:
        RefusedError: one line with the name, the value and the limit.
    """
    if not 1 <= round_ <= spec.num_rounds:
        raise RefusedError(f"round = {round_}: must lie in 1..{spec.num_rounds}, the run's rounds")
    if limits is None:
        return
    noise, probability = event.effective_noise_multiplier, event.sampling_probability
    if noise < limits.min_effective_noise_multiplier:
        minimum = limits.min_effective_noise_multiplier
        raise RefusedError(f"noise_multiplier: its effective value {noise:g} is below this node's minimum {minimum:g}")
    if noise > limits.max_effective_noise_multiplier:
        maximum = limits.max_effective_noise_multiplier
        raise RefusedError(f"noise_multiplier: its effective value {noise:g} is above this node's maximum {maximum:g}")
    if event.unit == "record" and probability > limits.max_sampling_probability:
        maximum = limits.max_sampling_probability
        raise RefusedError(f"sampling_probability: its value {probability:g} is above this node's maximum {maximum:g}")
    if spec.clip_norm < limits.min_clip_norm:
        raise RefusedError(f"clip_norm = {spec.clip_norm:g}: below this node's minimum {limits.min_clip_norm:g}")
    for name, value, maximum in (
        ("local_steps", spec.local_steps, limits.max_local_steps),
        ("num_rounds", spec.num_rounds, limits.max_rounds),
        ("clip_norm", spec.clip_norm, limits.max_clip_norm),
        ("learning_rate", spec.learning_rate, limits.max_learning_rate),
        ("lora_learning_rate", spec.lora_learning_rate, limits.max_learning_rate),
        ("weight_decay", spec.weight_decay, limits.max_learning_rate),
    ):
        if value > maximum:
            raise RefusedError(f"{name} = {value:g}: above this node's maximum {maximum:g}")


def check_evaluation(spec: EvaluationSpec, round_: int, policy: NodePolicy, *, noise_source: str) -> None:
    """Refuse an evaluation that would not protect the holder's records as its policy says.

    Records are not sampled for it, so `max_sampling_probability` does not apply.

    Args:
        spec: the evaluation that the coordinator asks for.
        round_: that it names, from 1.
        policy: of the node.
        noise_source: `secure` or `seeded`.

    Raises:
        RefusedError: one line with the name, the value and what would be right.
    """
    noise, limits = spec.noise_multiplier, policy.limits
    if not 0 < noise <= _LARGEST_NOISE_MULTIPLIER:
        raise RefusedError(
            f"evaluation_noise_multiplier = {noise}: must be > 0 and at most {_LARGEST_NOISE_MULTIPLIER:g}"
        )
    if round_ < 1:
        raise RefusedError(f"round = {round_}: must be >= 1")
    if policy.ledger is None and not policy.allow_unrecorded:
        raise RefusedError("ledger: this node has none, and releases nothing that it cannot record")
    if limits is not None and noise < limits.min_effective_noise_multiplier:
        minimum = limits.min_effective_noise_multiplier
        raise RefusedError(f"evaluation_noise_multiplier = {noise:g}: below this node's minimum {minimum:g}")
    if limits is not None and noise > limits.max_effective_noise_multiplier:
        maximum = limits.max_effective_noise_multiplier
        raise RefusedError(f"evaluation_noise_multiplier = {noise:g}: above this node's maximum {maximum:g}")
    if not policy.allow_not_private and noise_source != "secure":
        raise RefusedError(f"noise source = {noise_source}: this node releases nothing with seeded noise")


def check_broadcast(broadcast: Broadcast, limits: Limits | None) -> None:
    """Refuse tensors of the server that are not finite, or larger than the data holder agreed to.

    Args:
        broadcast: what the server sent.
        limits: of the node; None checks nothing.

    Raises:
        RefusedError: one line with the part, and the limit.
    """
    if limits is None:
        return
    if any(tensor.dtype != torch.float32 for tensor in broadcast.adapter.values()):
        raise RefusedError("adapter: must be float32")
    for part, tensors in broadcast.tensors().items():
        for tensor in tensors.values():
            if not torch.isfinite(tensor).all():
                raise RefusedError(f"{part}: holds NaN or infinity")
            if tensor.numel() and float(tensor.abs().max()) > limits.max_broadcast_value:
                raise RefusedError(f"{part}: holds a value above this node's maximum {limits.max_broadcast_value:g}")


def registered_data_set(policy: NodePolicy, client: str, num_records: int | None) -> DataSet | None:
    """The client's data set in the node's own ledger; None if the node keeps no ledger.

    With `num_records`, a first one is registered. N_k stays as it was registered, however many records there are now.

    Raises:
        RefusedError: no data set is registered, and none may be registered here; or it was registered since the start.
        LedgerError: the ledger cannot be used.
    """
    if policy.ledger is None:
        return None
    with Ledger(policy.ledger) as ledger:
        if (data_set := ledger.data_set()) is not None:
            if policy.data_set not in (None, data_set.id):
                raise RefusedError(
                    "data: were registered since this node's vault started; its operator must restart it"
                )
            return data_set
        if num_records is None:
            raise RefusedError("data: this node's operator has registered none")
        return ledger.register(client, num_records, policy.delta or default_delta(num_records))


def log_content(policy: NodePolicy, data_set: DataSet, content: bytes, num_records: int) -> None:
    """Note in the node's own ledger and in its log that the records changed; this resets no spending.

    Content is what all records are together, so nothing that happens here may decide about a release: a note that
    cannot be written is lost, and the node's log says so.
    """
    if policy.ledger is None:
        return
    try:
        with Ledger(policy.ledger) as ledger:
            if ledger.log_content(data_set, content):
                log.warning("the records of %s changed; what was spent on them remains spent", data_set.id)
    except LedgerError as error:
        log.error("whether the records of %s changed is not noted: %s", data_set.id, error)
    if num_records != data_set.num_records:
        log.warning("found %s records; the registered number, %s, stays in force", num_records, data_set.num_records)


def coin_key(policy: NodePolicy, data_set: DataSet) -> bytes:
    """The secret that decides which of a data set's records are set aside: no run, and no round, changes it.

    Raises:
        LedgerError: the ledger cannot be used.
    """
    assert policy.ledger is not None, "a node with records of its own keeps a ledger"
    with Ledger(policy.ledger) as ledger:
        return ledger.coin_key(data_set)


def charge(
    policy: NodePolicy, key: Key, release: Release, data_set: DataSet | None, *, noise_source: str, shown: str = ""
) -> bool:
    """Charge a release to the node's own ledger, if it keeps one, durably and before anything is computed.

    Returns whether the charge is new. If it is not, an earlier attempt ended before it stored a reply, perhaps because
    of a record: noise alone may be released for it, and the records must not be touched again.

    A release without noise, which `check_instruction` allows only on public data and in simulations, is not recorded,
    since no ledger can bound its cost.

    Raises:
        AlreadyReleasedError: the same request was answered before.
        RetiredError: the budget, or the number of releases, does not allow another one.
        RefusedError: the node has signed a receipt, `shown` by the coordinator or kept elsewhere, that its ledger
            lacks; the event protects nobody, on a node that releases nothing of that kind; its operator's plan or
            filter has no place for it; the same request was answered before, but the reply is no longer kept; it was
            charged to another data set; or earlier releases of these data have another unit.
        LedgerError: the ledger cannot be used.
    """
    event = release.event
    if not policy.allow_not_private:
        _check_event(event)
    if policy.ledger is None or data_set is None or not event.is_noised:
        return True
    new_charge = Charge(key=key, data_set=data_set.id, release=release, noise_source=noise_source)
    with Ledger(policy.ledger) as ledger:
        current = ledger.data_set()
        if current is None or current.id != data_set.id:
            raise RefusedError("data: another data set was registered meanwhile; ask again")
        _check_newest(policy, ledger, shown)
        phase = ledger.phase(key)
        if phase == RELEASED:
            if (content := ledger.stored(key)) is None:
                raise RefusedError(f"round {key.round}: already answered, and the reply is no longer kept")
            raise AlreadyReleasedError(content)
        if phase == CHARGED:
            if ledger.charged_data_set(key) != data_set.id:
                raise RefusedError(f"round {key.round}: was charged to another data set of this node")
            _sign_newest(policy, ledger, data_set)
            return False
        if not ledger.is_known_in_full(data_set.id):
            raise RetiredError("ledger: was restored, and what was spent before is not known in full")
        if policy.limits is not None and ledger.chain(data_set.id).newest.counter >= policy.limits.max_releases:
            raise RetiredError(f"max_releases = {policy.limits.max_releases}: these data have had so many releases")
        _check_budget(policy, ledger, release, data_set)
        ledger.charge([new_charge])
        _sign_newest(policy, ledger, data_set)
        return True


def _check_newest(policy: NodePolicy, ledger: Ledger, shown: str) -> None:
    """Refuse to go on from an old copy of the ledger: what it lacks would be spent a second time."""
    if policy.watch is None:
        return
    try:
        lost = policy.watch.lost(ledger.chains(), shown)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    if lost is None:
        return
    log.error(
        "%s was restored from an old copy: this node has signed charge %s of data set %s, which it lacks; "
        "see `fedpriv ledger recover`",
        ledger.path,
        lost.counter,
        lost.data_set,
    )
    with suppress(OSError):  # so that it is also noticed when nobody shows it
        policy.watch.keep(lost)
    raise RefusedError("ledger: is older than a release that this node has signed; its operator must recover it")


def _sign_newest(policy: NodePolicy, ledger: Ledger, data_set: DataSet) -> None:
    """Sign and keep the receipt of the last charge, before anything is computed for it."""
    if policy.watch is not None:
        policy.watch.sign(ledger.chain(data_set.id))


def signed_receipt(policy: NodePolicy, data_set: DataSet | None) -> str:
    """The receipt of the last charge on the node's data, as text, signed and kept; empty if it keeps no receipts.

    Raises:
        LedgerError: the ledger cannot be used.
    """
    if policy.ledger is None or policy.watch is None or data_set is None:
        return ""
    with reading(policy.ledger) as db:
        return policy.watch.sign(chain_of(db, data_set.id)).text()


def _check_budget(policy: NodePolicy, ledger: Ledger, release: Release, data_set: DataSet) -> None:
    """Refuse a release that the budget does not allow beside all earlier ones, however a coordinator chose them.

    Raises:
        RefusedError, RetiredError: see `charge`.
    """
    view, epsilon = policy.budget_view, policy.budget_epsilon
    history = [earlier.charged_on(view) for earlier in ledger.releases(data_set.id)]
    event = release.charged_on(view)
    if any(earlier.unit != event.unit for earlier in history):
        raise RefusedError(
            f"noise_on: its unit is the {event.unit}; earlier releases of these data have another, "
            "and the two do not compose"
        )
    if epsilon is None:
        return
    if policy.fixed_schedule:
        fits = stays_within([*history, event], data_set.delta, epsilon)
    else:
        rule = budget.settled_rule(ledger, data_set, epsilon)
        if not rule.covers(event):
            raise RefusedError(f"mechanism: {rule} allows no such release, of {_described(event)}")
        if isinstance(rule, CommittedPlans):  # which slots are left depends on the order of what took them
            history = [earlier.charged_on(view) for earlier in ledger.releases_in_order(data_set.id)]
        fits = rule.remaining(history, event, epsilon=epsilon, delta=data_set.delta_for_releases) >= 1
    if not fits:
        log.warning("data set %s: another such release would exceed the budget of epsilon %g", data_set.id, epsilon)
        raise RetiredError("budget_epsilon: another round would exceed this node's budget")


def _described(event: Event) -> str:
    """The numbers of an event that a coordinator can change."""
    return f"q = {event.sampling_probability:g} and effective noise {event.effective_noise_multiplier:g}"


def _check_event(event: Event) -> None:
    """Refuse an event that protects nobody, whatever its mechanism says of itself."""
    if not event.is_noised:
        raise RefusedError("noise_multiplier: its effective value is 0; this node releases nothing without noise")
    if not event.is_guarantee:
        raise RefusedError(f"mechanism: its cost is no privacy guarantee ({event.caveat}); this node needs one")


def store_reply(policy: NodePolicy, key: Key, event: Event, content: bytes) -> bytes:
    """Store a reply before it is sent, and return the reply to send: an earlier one if one was stored.

    Raises:
        LedgerError: it cannot be stored, so it must not be sent.
    """
    if policy.ledger is None or not event.is_noised:
        return content
    with Ledger(policy.ledger) as ledger:
        return ledger.store(key, content)
