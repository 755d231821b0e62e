"""`fedpriv plan`: what a run could learn within a budget, or the memory that a model needs, before anything is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from click.core import ParameterSource

from fedpriv.cli.options import OneOf
from fedpriv.cli.output import AsJson, entries, show, table
from fedpriv.cli.plan_memory import memory_page, memory_values
from fedpriv.errors import InputError

if TYPE_CHECKING:
    from fedpriv.accounting.views import PlannedView
    from fedpriv.planning import Plan
    from fedpriv.training.schedule import Phase

# Of the clients, so many are shown, the largest first; --json has them all.
_MOST_CLIENTS = 10

# Options of either use, as --help groups them.
_OF_A_BUDGET = "A run within a budget: --records and --epsilon"
_OF_MEMORY = "The memory of a step: MODEL"

# What plans are compared by.
_COLUMNS = ("noise_multiplier", "lora_noise_multiplier", "final_noise", "noise_to_signal", "seconds")


def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A causal model's folder, or its name on the Hub: plans memory instead.")
    ] = None,
    records: Annotated[
        list[int] | None,
        typer.Option(help="N_k, the records of a client, >= 1; repeat it for each.", rich_help_panel=_OF_A_BUDGET),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="What each client may spend, > 0.", rich_help_panel=_OF_A_BUDGET)
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="In (0, 1); by default 1 / (10 N_k) for each client, at most 1e-5.", rich_help_panel=_OF_A_BUDGET
        ),
    ] = None,
    view: Annotated[
        str,
        typer.Option(
            click_type=OneOf("fedpriv.accounting.views:PlannedView"),
            help="Who may learn no more: the server, or those who see only sums (secure aggregation).",
            rich_help_panel=_OF_A_BUDGET,
        ),
    ] = "local",
    min_clients: Annotated[
        int | None,
        typer.Option(
            help="No sum of fewer uploads is seen; for --view aggregate all, by default.",
            rich_help_panel=_OF_A_BUDGET,
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="The first starts the head; by default as in a run.", rich_help_panel=_OF_A_BUDGET),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            click_type=OneOf("fedpriv.config_types:Train"),
            help="A, B and head in the last rounds, the head alone, or what pays; by default as in a run.",
            rich_help_panel=_OF_A_BUDGET,
        ),
    ] = None,
    lora_values: Annotated[
        int | None,
        typer.Option(
            help="d, the values in A and B; by default those of the default model.", rich_help_panel=_OF_A_BUDGET
        ),
    ] = None,
    classes: Annotated[
        int,
        typer.Option(help="C >= 2, for the chance that noise misplaces a record.", rich_help_panel=_OF_A_BUDGET),
    ] = 2,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="For the passes of all clients' records; what does not fit is left out.",
            rich_help_panel=_OF_A_BUDGET,
        ),
    ] = None,
    records_per_second: Annotated[
        float | None,
        typer.Option(
            help="That pass through the model; by default timed here, with the default model.",
            rich_help_panel=_OF_A_BUDGET,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write each client's releases, for `python -m clients.deploy register DIR --plan FILE`.",
            rich_help_panel=_OF_A_BUDGET,
        ),
    ] = None,
    bits: Annotated[
        int, typer.Option(help="Of the frozen base: 32, 16 (bfloat16) or 4 (NF4).", rich_help_panel=_OF_MEMORY)
    ] = 16,
    rank: Annotated[int, typer.Option(help="r >= 1 of LoRA.", rich_help_panel=_OF_MEMORY)] = 8,
    target_modules: Annotated[
        str, typer.Option(help="Linear layers, comma-separated; by default peft's.", rich_help_panel=_OF_MEMORY)
    ] = "",
    layers: Annotated[
        str, typer.Option(help="all, last-N, or indices such as 4,5.", rich_help_panel=_OF_MEMORY)
    ] = "all",
    batch: Annotated[int, typer.Option(help="Records that pass at once, >= 1.", rich_help_panel=_OF_MEMORY)] = 8,
    max_length: Annotated[int, typer.Option(help="Tokens of each, >= 2.", rich_help_panel=_OF_MEMORY)] = 512,
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation-checkpointing",
            help="Trained layers run again in the backward pass.",
            rich_help_panel=_OF_MEMORY,
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda; by default cuda for 4 bits or where a GPU is.", rich_help_panel=_OF_MEMORY),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="That there is, such as 80GB; by default this machine's.", rich_help_panel=_OF_MEMORY),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a run with the recipe `fedpriv` could learn: noise, learning rate, epsilons, time, and what would help.

    Nothing is read but these numbers. Examples:

    fedpriv plan --records 1200 --records 1000 --records 800 --epsilon 2 --classes 8 --records-per-second 60

    fedpriv plan --records 300 --records 300 --epsilon 1 --delta 1e-6 --view aggregate --rounds 20 --seconds 600

    With --out, the releases of every client are written for its node, whose operator may commit them.

    With a MODEL, the memory of a step instead, from the model's configuration alone; nothing is loaded:

    fedpriv plan meta-llama/Llama-2-7b-hf --bits 4 --rank 16 --batch 8 --max-length 512 --memory 80GB

    fedpriv plan SmolLM2-135M-Instruct --bits 32 --layers last-2 --max-length 256 --device cpu --memory 8GB
    """
    _check_use(context, has_model=model is not None)
    if model is not None:
        values = memory_values(
            model=model,
            bits=bits,
            rank=rank,
            target_modules=target_modules,
            layers=layers,
            batch=batch,
            max_length=max_length,
            activation_checkpointing=activation_checkpointing,
            device=device,
            memory=memory,
        )
        show(values, memory_page(values), as_json)
        return
    if not records or epsilon is None:
        raise InputError("plan: needs --records and --epsilon, or a MODEL")
    from fedpriv import planning

    if classes < 2:
        raise InputError(f"classes = {classes}: must be >= 2")
    setting = planning.Setting.of(
        tuple(records),
        epsilon=epsilon,
        view=cast("PlannedView", view),
        num_lora_values=planning.LORA_VALUES if lora_values is None else lora_values,
        delta=delta,
        min_clients=min_clients,
        rounds=rounds,
        train=train,
    )
    chosen, reason = planning.lora_choice(setting)
    setting = chosen if setting.config.train == "auto" else setting
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
            "train_auto": reason,
            "helps_most": planning.most_helpful(others) if others else None,
            "left_out": list(left_out),
            "clients": [asdict(cost) for cost in found.costs],
            "alternatives": [{"plan": name} | _row(other, speed) for name, other in others.items()],
        }
    )
    if out is not None:
        committed = _committed(found)
        out.write_text(json.dumps(committed, indent=1) + "\n")
        values["filtered_epsilon"] = max(client["filtered_epsilon"] for client in committed["clients"])
    show(values, _page(values), as_json)


def _committed(found: Plan) -> dict[str, Any]:
    """Each client's releases as `fedpriv.vault.budget.read_plan` reads them, and what a filter would need for them."""
    from fedpriv.accounting import events
    from fedpriv.accounting.filters import filtered_epsilon

    setting = found.setting
    clients = []
    for client, (size, delta) in enumerate(zip(setting.sizes, setting.deltas, strict=True)):
        releases = found.releases(client)
        listed = {"events": [json.loads(events.to_json(event)) for event in releases]}
        cost = {"delta": delta, "filtered_epsilon": filtered_epsilon(releases, delta)}
        clients.append({"client": client, "num_records": size} | cost | listed)
    return {"view": setting.config.privacy_view, "clients": clients}


def _check_use(context: typer.Context, *, has_model: bool) -> None:
    """Refuse an option of the other use."""
    other = _OF_A_BUDGET if has_model else _OF_MEMORY
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT
        if given and getattr(option, "rich_help_panel", None) == other:
            reason = "a MODEL plans memory alone" if has_model else "plans memory, and there is no MODEL"
            raise InputError(f"{option.opts[0]}: {reason}")


def _timed() -> float:
    from fedpriv.training.workbench import records_per_second

    return records_per_second()


def _values(found: Plan) -> dict[str, Any]:
    setting, config = found.setting, found.setting.config
    return {
        "num_clients": len(setting.sizes),
        "num_records": sum(setting.sizes),
        "epsilon": config.target_epsilon,
        "delta": min(setting.deltas),
        "view": config.privacy_view,
        "min_clients": config.min_clients,
        "num_rounds": config.rounds,
        "lora_rounds": setting.num_lora_rounds,
        "phases": [_phase(found, phase) for phase in found.phases],
        "noise_per_step_length": found.noise_per_step_length,
        "total_step": found.total_step,
        "affordable_step": found.affordable_step,
        "record_passes": setting.record_passes,
        "epsilon_local_max": max(cost.epsilon_local for cost in found.costs),
        "epsilon_rho_max": max(cost.epsilon_rho for cost in found.costs),
        "epsilon_aggregate_max": max(cost.epsilon_aggregate for cost in found.costs),
    }


def _phase(found: Plan, phase: Phase) -> dict[str, Any]:
    """What its rounds ask for, with the name of what they train."""
    config, spec = found.setting.config, phase.spec
    is_joint = spec.trains != "head"
    by_adam = config.lora_server_optimizer == "adam"
    of_lora = config.lora_server_learning_rate if by_adam else spec.lora_learning_rate
    return {
        "phase": {"start": "start of the head", "head": "head"}.get(phase.name, "A, B and head"),
        "rounds": phase.num_rounds,
        "sampling_probability": spec.sampling_probability,
        "noise_multiplier": spec.noise_multiplier,
        "learning_rate": None if phase.name == "start" else spec.learning_rate,
        "lora_learning_rate": of_lora if is_joint else None,
        "lora_optimizer": ("adam" if by_adam else config.server_optimizer) if is_joint else None,
    }


def _row(found: Plan, speed: float) -> dict[str, Any]:
    """The values of `_COLUMNS`."""
    return {
        "noise_multiplier": found.steps[0].spec.noise_multiplier,
        "lora_noise_multiplier": found.steps[-1].spec.noise_multiplier if found.setting.num_lora_rounds else None,
        "final_noise": found.final_noise,
        "noise_to_signal": found.noise_to_signal,
        "seconds": found.setting.seconds(speed),
    }


def _page(values: Mapping[str, Any]) -> Iterable[str]:
    """Lines for a reader."""
    elsewhere = ("phases", "clients", "alternatives", "left_out", "is_hopeless", "helps_most", "needed_records")
    of_phases = ("lora_rounds", "noise_multiplier", "lora_noise_multiplier", "train_auto")
    shown = {name: _rounded(value) for name, value in values.items() if name not in elsewhere + of_phases}
    yield from (f"note: {text}" for text in values["left_out"])
    yield from entries(shown)
    yield from ("", *table(values["phases"], list(values["phases"][0])), values["train_auto"])
    clients = sorted(values["clients"], key=lambda client: -client["num_records"])
    yield from ("", "What it costs a client if all take part in every round:")
    yield from table(clients[:_MOST_CLIENTS], list(clients[0]))
    if len(clients) > _MOST_CLIENTS:
        yield f"and {len(clients) - _MOST_CLIENTS} smaller ones"
    plans = [{"plan": "this one"} | dict(values), *values["alternatives"]]
    yield from ("", *table(plans, ["plan", *_COLUMNS]))
    yield from ("", *_meaning(values))


def _rounded(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else value


def _meaning(values: Mapping[str, Any]) -> Iterable[str]:
    """What the ratio says, what is proven of it, and what would help."""
    from fedpriv.planning import GOOD_RATIO, HOPELESS_STEP, NEEDED_STEP

    nu, ratio = values["noise_per_step_length"], values["noise_to_signal"]
    yield (
        f"Size: the noise of all steps moves a record's logits by a standard deviation of about "
        f"{values['final_noise']:.2g}."
    )
    yield (
        f"A rule of thumb: noise to signal = {ratio:.2g}. It is {NEEDED_STEP:g}, the total step that separates classes "
        "(120 to 194 on three corpora), times that noise, over the step that has arrived when the run ends."
    )
    yield f"By it, noise alone misplaces {values['misplaced']:.2g} of the records that lie at their class's mean."
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
