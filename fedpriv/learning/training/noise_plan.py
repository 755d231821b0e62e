"""Noise, learning rates and the choice of LoRA that a run's configuration asks for, from public numbers alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedpriv.config import FederationSection, RunConfig, UpdateSection
from fedpriv.errors import InputError
from fedpriv.learning.adapters import Adapter, leading_block
from fedpriv.learning.aggregation import is_of_head
from fedpriv.learning.training.local_update import planned_event, trained_names
from fedpriv.learning.training.private_evaluation import EvaluationSpec
from fedpriv.learning.training.private_evaluation import planned_event as planned_evaluation
from fedpriv.learning.training.rounds import RunSchedule, grid_of, record_weights
from fedpriv.privacy.accounting import recipe
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.calibration import Schedule, calibrate_all, calibrate_to_risk
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.risk import RiskTarget
from fedpriv.privacy.accounting.trade_off import gaussian_epsilon
from fedpriv.privacy.accounting.views import default_delta, smallest_aggregate_scales


def calibrated(config: RunConfig, sizes: Sequence[int], initial: Adapter) -> RunConfig:
    """The configuration with noise for its start and steps, as one charge, to meet its target; InputError if none does.

    The shares of a target of risk are those of the epsilon of noise without sampling that has this risk.

    A client is assumed to take part in every round, and in the evaluation on its records if there is one; on views
    other than `local`, the worst case over who may drop out counts. A person at several clients meets the target with
    the releases of those that cost most.
    """
    if not config.has_target:
        return _with_start_beside(config)
    scale = view_scale(config, sizes)
    deltas = [config.delta or default_delta(size) for size in sizes]
    risk = RiskTarget.parse(config.target_risk) if config.target_risk else None
    published = config.target_epsilon_published
    target = config.target_epsilon or published or gaussian_epsilon(risk.gaussian_mu if risk else 0.0, min(deltas))
    named = f"target_epsilon{'_published' if published else ''} = {target}"
    named = f"target_risk = {config.target_risk}" if risk else named
    evaluation = EvaluationSpec.of(config)
    holders = config.holders_per_person
    fixed = [planned_evaluation(evaluation)] * holders if evaluation else []
    cost = epsilon_of(fixed, min(deltas)).epsilon
    if cost >= target:
        raise InputError(
            f"evaluation_noise_multiplier = {config.evaluation_noise_multiplier}: the evaluation alone costs epsilon "
            f"{cost:.4g} of {named}; use more noise for it"
        )
    try:
        if config.head_start and config.start_noise_multiplier is None and not config.noise_schedule:
            # Full batches of several holders cost what one with so much less noise would.
            start = math.sqrt(holders) * recipe.start_noise_multiplier(target, min(deltas), fixed=fixed) / scale
            config = replace(config, start_noise_multiplier=start)
        name = "noise_multiplier"
        main, lora = config.main_phase, config.lora_phase
        of_phases = config.lora_noise_multiplier is None and not config.noise_schedule
        if main.num_rounds and lora.num_rounds and of_phases:
            # One phase has its share, and the other one what is left, which costs exactly the rest. Shares of full
            # batches add up exactly, so these have theirs if there are any.
            of_head = config.sampling_probability == 1
            shared, name = (name, "lora_noise_multiplier") if of_head else ("lora_noise_multiplier", name)
            share = 1 - recipe.START_SHARE * config.head_start - config.lora_share if of_head else config.lora_share
            noise = recipe.noise_multiplier_of_share(
                share,
                target,
                min(deltas),
                sampling_probability=1.0 if of_head else config.lora_sampling_probability or 1.0,
                num_steps=holders * (main.num_rounds if of_head else lora.num_rounds),
                fixed=fixed,
            )
            config = _with_value(config, shared, noise / scale)
        clients = dict(enumerate(sizes))
        schedules = [
            (_releases(config, name, clients, client, initial, scale), delta) for client, delta in enumerate(deltas)
        ]
        if holders > 1:
            # Those with the fewest records: where q differs at all, they have the largest, and cost most.
            most = [schedules[k][0] for k in sorted(range(len(sizes)), key=sizes.__getitem__)[:holders]]
            schedules = [(lambda noise: [event for schedule in most for event in schedule(noise)], min(deltas))]
        by_risk = risk and calibrate_to_risk(schedules, risk, fixed=fixed)
        return _with_value(
            config, name, by_risk or calibrate_all(schedules, target, fixed=fixed, allow_unproven=bool(published))
        )
    except ValueError as error:
        raise InputError(f"{named}: {error}") from None


def planned_releases(config: RunConfig, sizes: Mapping[int, int], client: int, initial: Adapter) -> list[Event]:
    """The releases of a client that takes part in every round, without the evaluation on its records.

    Args:
        config: with numbers for noise and learning rates.
        sizes: {client: registered N_k} of all clients.
    """
    events = []
    for spec, num_rounds in RunSchedule.of(config).totals.items():
        grid = grid_of(config, spec, sizes)
        probability = min(1.0, spec.probability(sizes[client]))
        event = planned_event(spec, probability, initial, grid.of(client) if grid else None)
        events.append(event.with_count(num_rounds * event.count))
    return events


def view_scale(config: RunConfig, sizes: Sequence[int]) -> float:
    """The least factor of every client's noise on the run's `privacy_view`, whichever clients drop out.

    On `rho` this is 1 / sqrt(n): rho_bar of n participants is never below that. On `aggregate`, which must hold, it is
    the smallest noise of any client in any sum of `min_clients` uploads, over its own.
    """
    if config.privacy_view == "local":
        return 1.0
    if config.privacy_view == "rho":
        return 1 / math.sqrt(_num_selected(config, sizes))
    clients = dict(enumerate(sizes))
    # No noise changes the clients' shares of a sum.
    start = None if config.noise_schedule else 1.0
    rounds = RunSchedule.of(with_any_rates(replace(config, start_noise_multiplier=start)))
    threshold, colluding = config.min_clients, config.colluding_clients
    weights = [record_weights(config, spec, clients) for spec in rounds.totals]
    return min(
        scale
        for each in weights
        for scale in smallest_aggregate_scales(each, threshold=threshold, colluding=colluding).values()
    )


def with_learning_rates(config: RunConfig, sizes: Sequence[int], initial: Adapter) -> RunConfig:
    """The calibrated configuration with numbers for learning rates that are `auto`; sizes are N_k of all clients."""
    rate = derived_learning_rate(config, sizes, initial)
    if rate is not None:
        config = replace(config, learning_rate=rate.learning_rate)
    lora = config.lora_phase
    if not lora.num_rounds:
        return config
    joint = recipe.joint_rates(
        federation_of(config, sizes),
        noise_stddev=lora.known_noise * config.clip_norm,
        sampling_probability=lora.sampling_probability or _probability(config, sizes),
        num_steps=lora.num_rounds,
        num_values=_num_lora_values(config, initial),
    )
    return replace(
        config,
        lora_head_learning_rate=joint.head if lora.learning_rate == "auto" else lora.learning_rate,
        lora_learning_rate=joint.lora if config.lora_learning_rate == "auto" else config.lora_learning_rate,
    )


def derived_learning_rate(config: RunConfig, sizes: Sequence[int], initial: Adapter) -> recipe.LearningRate | None:
    """The rate for which `learning_rate = auto` stands, given the noise; None if the configuration has a number."""
    if config.learning_rate != "auto":
        return None
    num_steps = max(1, config.main_phase.num_rounds)
    return recipe.learning_rate(
        federation_of(config, sizes),
        noise_stddev=config.main_phase.known_noise * config.clip_norm,
        sampling_probability=config.main_phase.sampling_probability or _probability(config, sizes),
        num_steps=num_steps,
        num_after=config.rounds - config.head_start - num_steps,
        momentum=momentum_of(config),
        centred_classes=_centred_classes(config, initial),
    )


def start_noise(config: RunConfig, sizes: Sequence[int]) -> float:
    """The standard deviation of the noise in each feature's sum over the number of all records, in the head's start.

    Args:
        config: calibrated.
        sizes: N_k of the clients whose releases are summed.
    """
    total = federation_of(config, sizes)
    start = config.start_phase
    return ((start and start.noise_multiplier) or 0.0) * total.weighted_noise / total.weighted_records


def _num_lora_values(config: FederationSection, initial: Adapter) -> int:
    """The number of values of A and B that the rule's rounds train; 1 if there are none."""
    turns = config.rule.turns
    trained = {name for turn in turns for name in trained_names(initial, turn)}
    return max(1, sum(initial[name].numel() for name in trained if ".lora_" in name))


def federation_of(config: RunConfig, sizes: Sequence[int]) -> recipe.WeightedClients:
    """The public numbers of a run's rounds, with the clients' weights."""
    weights = [recipe.client_weight(size, config.weighting) for size in sizes]
    return recipe.WeightedClients(
        sizes=sizes,
        weights=weights,
        participation=_num_selected(config, sizes) / len(sizes),
        records_of_unit=max(1, config.most_of_a_person),
    )


def momentum_of(config: FederationSection) -> float:
    """The server's momentum, m in [0, 1): the share of earlier steps that stays in its next one."""
    return config.server_momentum if config.server_optimizer == "momentum" else 0.0


def _probability(config: UpdateSection, sizes: Sequence[int]) -> float:
    """q, or the average one of clients with different ones."""
    return config.sampling_probability or config.batch_size * len(sizes) / math.fsum(sizes)


def _centred_classes(config: RunConfig, initial: Adapter) -> int | None:
    """Classes of the head if rounds of it follow its start, and it has a bias, without which it is not centred."""
    biases = [len(tensor) for name, tensor in initial.items() if is_of_head(name) and tensor.dim() == 1]
    has_rounds = config.head_start and any(phase.name == "head" for phase in config.phases)
    return biases[0] if has_rounds and biases else None


def _with_value(config: RunConfig, name: str, value: float) -> RunConfig:
    values: dict[str, Any] = {name: value}
    return replace(config, **values)


def with_any_rates(config: RunConfig) -> RunConfig:
    """The configuration with some number for each rate: none changes what a release costs."""
    return replace(config, learning_rate=1.0, lora_head_learning_rate=1.0, lora_learning_rate=1.0)


def _num_selected(config: FederationSection, sizes: Sequence[int]) -> int:
    return min(config.clients_per_round or len(sizes), len(sizes))


def _with_start_beside(config: RunConfig) -> RunConfig:
    """The configuration with noise for the start of the head, given the noise of the steps."""
    if not config.head_start or config.start_noise_multiplier is not None or config.noise_schedule:
        return config
    noise = recipe.start_noise_for_steps(config.noise_multiplier, max(1, config.main_phase.num_rounds))
    return replace(config, start_noise_multiplier=noise)


def _releases(
    config: RunConfig, name: str, sizes: Mapping[int, int], client: int, initial: Adapter, scale: float
) -> Schedule:
    """All releases of a client in every round, with the noise that the view counts, by the noise of this name."""
    planned = with_any_rates(config)

    def releases(noise_multiplier: float) -> list[Event]:
        events = planned_releases(_with_value(planned, name, noise_multiplier), sizes, client, initial)
        return [event.with_noise(scale) for event in events]

    return releases


def decided(config: RunConfig, sizes: Sequence[int], initial: Adapter) -> tuple[RunConfig, str]:
    """The configuration with the rounds that `train = auto` stands for, and why; as it is, and "", with any other.

    Where noise leaves LoRA enough signal, most rounds train A, B and head with most of the budget; elsewhere all rounds
    train the head alone. Of R between frozen factors the leading block is trained, in fewer rounds, unless noise is
    very small. docs/appendices/recipe_trials.md says how the bounds were found.

    Args:
        config: of the run; its noise may be still to be calibrated. No more than its rank and its rounds is chosen.
        sizes: N_k of all clients.
        initial: the adapter, with all of R.

    Raises:
        InputError: no noise meets the target.
    """
    if config.train != "auto":
        return config, ""
    if config.rule.trains != "lora-r" or config.factors == "answers":
        with_lora, noise = _with_lora(config, sizes, initial)
        head, named, what = config, "A and B", "A, B and head"
    else:
        rank = min(config.rank, recipe.NARROW_RANK)
        narrow = replace(config, trained_rank=rank, rounds=min(config.rounds, recipe.NARROW_ROUNDS))
        with_lora, noise = _with_lora(narrow, sizes, leading_block(initial, rank))
        if noise <= recipe.WIDE_PAYS and config.rank > rank and config.rounds > narrow.rounds:
            with_lora, _ = _with_lora(replace(config, trained_rank=config.rank), sizes, initial)
        head = replace(narrow, rounds=min(narrow.rounds, RunConfig().rounds))
        named, what = f"R of rank {rank}", f"R of rank {with_lora.trained_rank} and head"
    pays = noise <= recipe.LORA_PAYS
    reason = (
        f"train = auto: {what if pays else 'the head alone'}, since nu^2 d, the noise in {named}, would be "
        f"{noise:.2g} with {sum(sizes)} records of {len(sizes)} clients; LoRA pays up to {recipe.LORA_PAYS:g}"
    )
    return (with_lora if pays else replace(head, lora_rounds=0)), reason


def _with_lora(config: RunConfig, sizes: Sequence[int], initial: Adapter) -> tuple[RunConfig, float]:
    """The configuration with rounds that train LoRA, and nu^2 d, the noise that they would leave in it."""
    num_rounds = round(recipe.LORA_ROUNDS * (config.rounds - config.head_start))
    probability = min(recipe.LORA_PROBABILITY, recipe.LORA_PASSES / max(1, num_rounds))
    with_lora = replace(
        config,
        lora_rounds=num_rounds,
        lora_share=recipe.LORA_SHARE,
        lora_sampling_probability=probability,
        lora_server_optimizer="adam",
    )
    found = calibrated(with_lora, sizes, initial)
    num_values = _num_lora_values(config, initial)
    # In units of the clip norm, whatever it is: the bound was found so.
    noise = recipe.lora_noise(
        federation_of(config, sizes),
        noise_stddev=found.lora_phase.known_noise,
        sampling_probability=probability,
        num_steps=num_rounds,
        num_values=num_values,
    )
    # Adam steps by its rate whatever the gradient's size is, so the rate follows the noise of a round.
    of_round = math.sqrt(noise / num_values * num_rounds)
    # Its steps add up like a walk's, so more of them are shorter.
    rates = [config.lora_server_learning_rate, recipe.LORA_ADAM_WALK / math.sqrt(max(1, num_rounds))]
    of_r = config.rule.trains == "lora-r"
    rates += [(recipe.R_ADAM_NOISE if of_r else recipe.LORA_ADAM_NOISE) / (of_round * num_values)] if noise else []
    return replace(with_lora, lora_server_learning_rate=min(rates)), noise
