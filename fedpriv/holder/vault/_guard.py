"""The guard refuses instructions that would not protect a data holder as its own policy says."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import lru_cache

import torch

from fedpriv.config import RunConfig
from fedpriv.errors import InputError, LedgerError
from fedpriv.holder.vault._charging import NodePolicy, RefusedError
from fedpriv.holder.vault.holder import NodeHolder
from fedpriv.holder.vault.settings import NodeLimits
from fedpriv.holder.wire.kinds import Broadcast
from fedpriv.learning.adapters.codecs import CODECS
from fedpriv.learning.training.local_update import (
    COUNTS,
    OBJECTIVES,
    OPTIMIZERS,
    QUANTIZATIONS,
    TRAINED_PARTS,
    UpdateSpec,
)
from fedpriv.learning.training.noise_plan import calibrated, with_any_rates
from fedpriv.learning.training.rounds import RunSchedule, client_masses
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.sensitivity import CLIPPING_RULES, NOISE_TARGETS
from fedpriv.privacy.ledger import inclusion, keys
from fedpriv.privacy.ledger.entries import Key
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.ledger.receipts import append_line
from fedpriv.privacy.mechanisms.registry import MECHANISMS

log = logging.getLogger(__name__)

# Accountants take a larger one for this, and near the largest float an upload would overflow after its charge.
_LARGEST_NOISE_MULTIPLIER = 1e6

# Of a gradient's part before it is clipped. A larger one would only let this part crowd out the others.
_LARGEST_BIAS_SCALE = 100.0


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


def check_limits(spec: UpdateSpec, event: Event, round_: int, limits: NodeLimits | None) -> None:
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
    if event.unit != "client" and probability > limits.max_sampling_probability:
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


def check_agreed(spec: UpdateSpec, round_: int, config: RunConfig) -> None:
    """Refuse an update or evaluation that is not that of the round in the run whose configuration was agreed to.

    Args:
        spec: that the coordinator asks for.
        round_: for which it asks: another round's noise or sampling may cost more than this one's.
        config: of the run. Noise that follows from a target is held to that when it is charged.

    Raises:
        RefusedError: one line with the name and both values.
    """
    if spec.objective == COUNTS:
        agreed = config.evaluation_noise_multiplier
        if agreed is None or spec.noise_multiplier < agreed:
            raise RefusedError(
                f"evaluation_noise_multiplier = {spec.noise_multiplier:g}: the run agreed to has {agreed}"
            )
        return
    if round_ > config.rounds:
        raise RefusedError(f"round = {round_}: the run agreed to has rounds = {config.rounds}")
    if config.train == "auto":  # which decides what is asked when the run begins
        return
    asked, agreed_to = _asked(spec, config), _asked(_schedule(config).spec(round_), config)
    if name := next((key for key in asked if asked[key] != agreed_to[key]), None):
        raise RefusedError(f"{name} = {asked[name]}: round {round_} of the run agreed to asks for {agreed_to[name]}")


def _asked(spec: UpdateSpec, config: RunConfig) -> dict[str, object]:
    """The numbers that an update asks for, but for rates and codecs, and noise that follows from a target."""
    free = ["learning_rate", "lora_learning_rate", "codec", "quantization", "relevance_threshold"]
    free += ["noise_multiplier"] if config.has_target else []
    return {key: value for key, value in vars(spec).items() if key not in free}


@lru_cache(maxsize=4)
def _schedule(config: RunConfig) -> RunSchedule:
    """The schedule of a run, with any rates; where noise follows from a target, with any noise that is not set."""
    start = None if config.noise_schedule else 1.0
    noised = replace(config, start_noise_multiplier=start) if config.has_target else calibrated(config, (), {})
    return RunSchedule.of(with_any_rates(noised))


def check_evaluation(spec: UpdateSpec, round_: int, policy: NodePolicy, *, noise_source: str) -> None:
    """Refuse an evaluation that would not protect the holder's records as its policy says.

    Records are not sampled for it, so `max_sampling_probability` does not apply.

    Args:
        spec: of the evaluation that the coordinator asks for.
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


def check_unit(spec: UpdateSpec, *, most: int) -> None:
    """Refuse an update or evaluation of another unit than the holder's, or of more records of a person.

    Args:
        spec: that the coordinator asks for.
        most: records of a person that may count; 0 where the unit is the record.

    Raises:
        RefusedError: one line with the value and what would be right.
    """
    asked = spec.max_records_per_person
    if bool(asked) != bool(most):
        unit = "person" if most else "record"
        raise RefusedError(f"max_records_per_person = {asked}: does not suit this node, whose unit is the {unit}")
    if not 0 <= asked <= most:
        raise RefusedError(
            f"max_records_per_person = {asked}: must lie in 1..{most}, which this node keeps of a person"
        )
    if asked and spec.objective != COUNTS and (spec.noise_on != "gradients" or spec.clipping == "batch"):
        raise RefusedError(
            f"noise_on = {spec.noise_on!r}, clipping = {spec.clipping!r}: protect no person; use gradients, and a rule "
            "other than batch"
        )


def check_broadcast(broadcast: Broadcast, limits: NodeLimits | None) -> None:
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


def check_included(shown: str, key: Key, num_registered: int, config: RunConfig, holder: NodeHolder) -> None:
    """Refuse to go on where a run does not show that this node's earlier uploads are in its sums, or why they are not.

    A node without the coordinator's key checks nothing. What is shown is kept for the node's operator. The rounds that
    the coordinator owes are those of the charges, which are public, and no reply of another has this node's digest: so
    the answer tells nothing of records. Once a round is repeated, as after a crash, only those before it are owed.

    Args:
        shown: proofs, one a line.
        key: of the release that is asked for.
        num_registered: N_k.
        config: of the run, whose `client_weights` decides the upload's weight.

    Raises:
        RefusedError: one line with the round and what is wrong.
        LedgerError: what is shown cannot be kept.
    """
    settings = holder.settings
    if not settings.coordinator.is_file():
        return
    with reading(settings.ledger) as db:
        paid = db.replies_of(key.run)
    client, kept = int(key.client), inclusion.kept_in(settings.inclusions, inclusion.InclusionProof, key.run)
    known = {proof.record.round for proof in kept}
    owed = {round_ for round_ in paid if round_ < key.round or key.round not in paid} - known - {key.round}
    try:
        proofs = [p for p in inclusion.proofs_in(shown) if p.record.run == key.run and p.record.round in owed]
        for proof in proofs:
            proof.check(keys.read_public_line(settings.coordinator))
        inclusion.check_owed(
            proofs,
            {round_: paid[round_] for round_ in owed},
            position=client,
            positions=config.num_clients,
            weight=client_masses(config, {client: num_registered})[client],
        )
    except ValueError as error:
        raise RefusedError(f"included: {error}") from None
    for proof in proofs:
        try:
            append_line(settings.inclusions, proof.text())
        except OSError as error:
            raise LedgerError(f"{settings.inclusions}: {error.strerror}; nothing is released") from None
        if proof.leaf.reason:
            holder.journal.write("left_out", run=key.run, round=proof.record.round, reason=proof.leaf.reason)
            log.warning("round %s: this node's upload is not in the sum: %s", proof.record.round, proof.leaf.reason)
