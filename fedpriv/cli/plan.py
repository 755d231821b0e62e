"""`fedpriv plan`: what a run could learn within a budget, before anything is registered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fedpriv.cli.options import OneOf
from fedpriv.cli.output import AsJson, entries, show, table

if TYPE_CHECKING:
    from fedpriv.planning import Plan, View

# Of the clients, so many are shown, the largest first; --json has them all.
_MOST_CLIENTS = 10


def plan(
    records: Annotated[list[int], typer.Option(help="N_k, the records of a client, >= 1; repeat it for each.")],
    epsilon: Annotated[float, typer.Option(help="What each client may spend, > 0.")],
    delta: Annotated[
        float | None, typer.Option(help="In (0, 1); by default 1 / (10 N_k) for each client, at most 1e-5.")
    ] = None,
    view: Annotated[
        str,
        typer.Option(
            click_type=OneOf("fedpriv.planning:View"),
            help="Who may learn no more: the server, or those who see only sums (secure aggregation).",
        ),
    ] = "local",
    rounds: Annotated[int | None, typer.Option(help="The first starts the head; by default as in a run.")] = None,
    classes: Annotated[int, typer.Option(help="C >= 2, for the chance that noise misplaces a record.")] = 2,
    seconds: Annotated[
        float | None, typer.Option(help="For the passes of all clients' records; what does not fit is left out.")
    ] = None,
    records_per_second: Annotated[
        float | None, typer.Option(help="That pass through the model; by default timed here, with the default model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a run with the recipe `fedpriv` could learn: noise, learning rate, epsilons, time, and what would help.

    Nothing is read but these numbers. Examples:

    fedpriv plan --records 1200 --records 1000 --records 800 --epsilon 2 --classes 8 --records-per-second 60

    fedpriv plan --records 300 --records 300 --epsilon 1 --delta 1e-6 --view aggregate --rounds 20 --seconds 600
    """
    from fedpriv import planning
    from fedpriv.errors import InputError

    if classes < 2:
        raise InputError(f"classes = {classes}: must be >= 2")
    setting = planning.Setting(sizes=tuple(records), epsilon=epsilon, delta=delta, view=cast("View", view))
    if rounds is not None:
        setting = replace(setting, rounds=rounds)
    speed = _timed() if records_per_second is None else records_per_second
    left_out: tuple[str, ...] = ()
    if seconds is not None:
        setting, left_out = planning.fitted(setting, seconds=seconds, records_per_second=speed)
    found, others = planning.plan(setting), planning.alternatives(setting)
    values = (
        _values(found)
        | _row(found, speed)
        | {
            "records_per_second": speed,
            "misplaced": min(1 - 1 / classes, (classes - 1) * found.misplaced),
            "needed_records": found.needed_records,
            "is_hopeless": found.is_hopeless,
            "helps_most": planning.most_helpful(others) if others else None,
            "left_out": list(left_out),
            "clients": [asdict(cost) for cost in found.costs],
            "alternatives": [{"plan": name} | _row(other, speed) for name, other in others.items()],
        }
    )
    show(values, _page(values), as_json)


def _timed() -> float:
    from fedpriv.training.speed import records_per_second

    return records_per_second()


def _values(found: Plan) -> dict[str, Any]:
    setting, rate = found.setting, found.rate
    return {
        "num_clients": len(setting.sizes),
        "num_records": sum(setting.sizes),
        "epsilon": setting.epsilon,
        "delta": min(setting.deltas),
        "view": setting.view,
        "num_rounds": setting.rounds,
        "num_steps": setting.num_steps,
        "sampling_probability": setting.sampling_probability,
        "lora_rounds": setting.num_lora_steps,
        "lora_sampling_probability": setting.lora_sampling_probability,
        "start_noise_multiplier": found.start_noise_multiplier,
        "learning_rate": rate.learning_rate,
        "noise_per_step_length": rate.noise_per_step_length,
        "total_step": rate.total_step,
        "affordable_step": found.affordable_step,
        "record_passes": setting.record_passes,
        "epsilon_local_max": max(cost.epsilon_local for cost in found.costs),
        "epsilon_rho_max": max(cost.epsilon_rho for cost in found.costs),
        "epsilon_aggregate_max": max(cost.epsilon_aggregate for cost in found.costs),
    }


def _row(found: Plan, speed: float) -> dict[str, Any]:
    """What plans are compared by."""
    return {
        "noise_multiplier": found.noise_multiplier,
        "final_noise": found.final_noise,
        "noise_to_signal": found.noise_to_signal,
        "seconds": found.setting.seconds(speed),
    }


def _page(values: Mapping[str, Any]) -> Iterable[str]:
    """Lines for a reader."""
    tables = ("clients", "alternatives", "left_out", "is_hopeless", "helps_most", "needed_records")
    shown = {name: _rounded(value) for name, value in values.items() if name not in tables}
    yield from (f"note: {text}" for text in values["left_out"])
    yield from entries(shown)
    clients = sorted(values["clients"], key=lambda client: -client["num_records"])
    yield from ("", *table(clients[:_MOST_CLIENTS], list(clients[0])))
    if len(clients) > _MOST_CLIENTS:
        yield f"and {len(clients) - _MOST_CLIENTS} smaller ones"
    plans = [{"plan": "this one"} | dict(values), *values["alternatives"]]
    yield from ("", *table(plans, ["plan", "noise_multiplier", "final_noise", "noise_to_signal", "seconds"]))
    yield from ("", *_meaning(values))


def _rounded(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else value


def _meaning(values: Mapping[str, Any]) -> Iterable[str]:
    """What the ratio says, what is proven of it, and what would help."""
    from fedpriv.planning import GOOD_RATIO, HOPELESS_STEP, NEEDED_STEP

    nu, ratio = values["noise_per_step_length"], values["noise_to_signal"]
    yield (
        f"A bound: noise alone moves every logit of every record by a standard deviation of at most "
        f"{values['final_noise']:.2g}."
    )
    yield (
        f"A rule of thumb: noise to signal = {ratio:.2g}, from nu * {NEEDED_STEP:g} and what the server's momentum and "
        "LoRA's smaller batches hold back of the step."
    )
    yield (
        f"{NEEDED_STEP:g} is the total step that separates classes: 120 to 194 on three corpora. By it, noise alone "
        f"misplaces {values['misplaced']:.2g} of the records that lie at their class's mean."
    )
    if values["is_hopeless"]:
        yield (
            f"Hopeless: nu = {nu:.2g} allows a total step of {values['affordable_step']:.3g}, less than "
            f"{HOPELESS_STEP:g}; the model would be mostly noise."
        )
    if ratio > GOOD_RATIO:
        yield _help(values, GOOD_RATIO)


def _help(values: Mapping[str, Any], good: float) -> str:
    """What would lower the ratio most."""
    records = f"{values['needed_records']:,} records in the same proportions would bring it to {good:g}."
    plans = {row["plan"]: row["noise_to_signal"] for row in values["alternatives"]}
    best = values["helps_most"]
    if best is None or plans[best] > 0.9 * values["noise_to_signal"]:
        return f"More records or a larger epsilon help, nothing else in the table does: {records}"
    return f"Of the table, {best} helps most (noise to signal {plans[best]:.2g}); {records}"
