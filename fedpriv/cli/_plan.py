"""`fedpriv plan`: what a run could learn within a budget, or the memory that a model needs, before anything is read."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from click.core import ParameterSource

from fedpriv.cli._command import OneOf, Result, check_new_file, entries, table
from fedpriv.errors import InputError
from fedpriv.files import write_new
from fedpriv.texts import what_is_counted

if TYPE_CHECKING:
    from fedpriv.learning.training.rounds import PhaseRounds
    from fedpriv.privacy.accounting.views import PlannedView
    from fedpriv.runs.plan.budget import Plan

# Of the clients, so many are shown, the largest first; --json has them all.
_MOST_CLIENTS = 10

# The columns in which plans are compared.
_COLUMNS = ("noise_multiplier", "lora_noise_multiplier", "final_noise", "noise_to_signal", "seconds")


def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A causal model's folder, or its name on the Hub: plans memory instead.")
    ] = None,
    **options: Any,
) -> Result:
    """Tell what a run with the recipe `fedpriv` could learn: noise, learning rate, epsilons, time, and what would help.

    Nothing is read but these numbers. Examples:

    fedpriv plan --records 1200 --records 1000 --records 800 --epsilon 2 --classes 8 --records-per-second 60

    fedpriv plan --records 300 --records 300 --epsilon 1 --delta 1e-6 --view aggregate --rounds 20 --seconds 600

    With --out, the releases of every client are written for its node, whose operator may commit them.

    With a MODEL, the memory of a step instead, from the model's configuration alone; nothing is loaded:

    fedpriv plan meta-llama/Llama-2-7b-hf --bits 4 --rank 16 --batch 8 --max-length 512 --memory 80GB

    fedpriv plan SmolLM2-135M-Instruct --bits 32 --layers last-2 --max-length 256 --device cpu --memory 8GB
    """
    use = _plan_budget if model is None else partial(_plan_memory, model)
    own = {name: options[name] for name in inspect.signature(use).parameters}
    for option in context.command.params:
        name = option.name or ""
        if name in options.keys() - own.keys() and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            reason = "plans memory, and there is no MODEL" if model is None else "a MODEL plans memory alone"
            raise InputError(f"{option.opts[0]}: {reason}")
    return use(**own)


def _plan_budget(
    records: Annotated[
        list[int] | None, typer.Option(help="N_k, the records of a client, or persons, >= 1; repeat it for each.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="What each client may spend, > 0.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="In (0, 1); by default 1 / (10 N_k) for each client, at most 1e-5.")
    ] = None,
    view: Annotated[
        str,
        typer.Option(
            click_type=OneOf("fedpriv.privacy.accounting.views:PlannedView"),
            help="Who may learn no more: the server, or those who see only sums (secure aggregation).",
        ),
    ] = "local",
    min_clients: Annotated[
        int | None, typer.Option(help="No sum of fewer uploads is seen; for --view aggregate all, by default.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="The first starts the head; by default as in a run.")] = None,
    train: Annotated[
        str | None,
        typer.Option(
            click_type=OneOf("fedpriv.config:Train"),
            help="A, B and head in the last rounds, the head alone, or what pays; by default as in a run.",
        ),
    ] = None,
    lora_values: Annotated[
        int | None, typer.Option(help="d, the values in A and B, or in R of rank 16; by default the default model's.")
    ] = None,
    classes: Annotated[
        int, typer.Option(help="C >= 2: for the head's rate, and for the chance that noise misplaces a record.")
    ] = 2,
    noise_schedule: Annotated[
        str, typer.Option(help="z of every round, as 3,2,1, or [z, q] of each as JSON; scaled to --epsilon.")
    ] = "",
    seconds: Annotated[
        float | None, typer.Option(help="For the passes of all clients' records; what does not fit is left out.")
    ] = None,
    records_per_second: Annotated[
        float | None, typer.Option(help="That pass through the model; by default timed here, with the default model.")
    ] = None,
    max_records_per_person: Annotated[
        int | None, typer.Option(help="m >= 1: an N_k counts persons, of whom so many records count; none by default.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write each client's releases, for `fedpriv node register DIR --plan FILE`."),
    ] = None,
) -> Result:
    """A run within a budget: its values, and a page of them."""
    from fedpriv.runs.plan import budget

    if not records or epsilon is None:
        raise InputError("plan: needs --records and --epsilon, or a MODEL")
    check_new_file(out)
    setting = budget.Setting.of(
        tuple(records),
        epsilon=epsilon,
        view=cast("PlannedView", view),
        num_lora_values=lora_values,
        num_classes=classes,
        delta=delta,
        min_clients=min_clients,
        rounds=rounds,
        train=train,
        unit=None if max_records_per_person is None else "person",
        max_records_per_person=max_records_per_person,
        noise_schedule=noise_schedule or None,
    )
    chosen, reason = (setting, "") if noise_schedule else budget.lora_choice(setting)
    setting = chosen if setting.config.train == "auto" else setting
    speed = _timed() if records_per_second is None else records_per_second
    left_out: tuple[str, ...] = ()
    if seconds is not None:
        setting, left_out = budget.fitted(setting, seconds=seconds, records_per_second=speed)
    found, others = budget.plan(setting), {} if noise_schedule else budget.alternatives(setting)
    values = _values(found) | _row(found, speed)
    values |= {
        "records_per_second": speed,
        "misplaced": min(1 - 1 / classes, (classes - 1) * found.misplaced),
        "needed_records": found.needed_records,
        "is_hopeless": found.is_hopeless,
        "train_auto": reason,
        "helps_most": budget.most_helpful(others) if others else None,
        "left_out": list(left_out),
        "clients": [asdict(cost) for cost in found.costs],
        "alternatives": [{"plan": name} | _row(other, speed) for name, other in others.items()],
    }
    if out is not None:
        committed = _committed(found)
        write_new(out, f"{json.dumps(committed, indent=1)}\n".encode(), mode=None)
        values["filtered_epsilon"] = max(client["filtered_epsilon"] for client in committed["clients"])
    if noise_schedule:
        values["noise_schedule"] = [list(each) for each in found.setting.config.scheduled]
    return Result(values, _page(values))


def _plan_memory(
    model: str,
    bits: Annotated[int, typer.Option(help="Of the frozen base: 32, 16 (bfloat16) or 4 (NF4).")] = 16,
    rank: Annotated[int, typer.Option(help="r >= 1 of LoRA.")] = 8,
    target_modules: Annotated[str, typer.Option(help="Linear layers, comma-separated; by default peft's.")] = "",
    layers: Annotated[str, typer.Option(help="all, last-N, or indices such as 4,5.")] = "all",
    batch: Annotated[int, typer.Option(help="Records that pass at once, >= 1.")] = 8,
    max_length: Annotated[int, typer.Option(help="Tokens of each, >= 2.")] = 512,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Trained layers run again in the backward pass.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default cuda for 4 bits or where a GPU is.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="That there is, such as 80GB; by default this machine's.")] = None,
) -> Result:
    """The memory of a step: its values in bytes, and a page of them."""
    import torch

    from fedpriv.runs.plan.memory import PROCESS_BYTES, MemorySetting, largest_batch, memory_plan
    from fedpriv.texts import parse_bytes

    setting = MemorySetting(
        model=model,
        bits=bits,
        rank=rank,
        target_modules=tuple(name.strip() for name in target_modules.split(",") if name.strip()),
        layers=layers,
        batch=batch,
        max_length=max_length,
        activation_checkpointing=activation_checkpointing,
        device=device or ("cuda" if bits == 4 or torch.cuda.is_available() else "cpu"),
    )
    available = _memory_of_machine(setting.device) if memory is None else parse_bytes(memory)
    found = memory_plan(setting)
    values = asdict(setting) | {
        "parameters": found.num_parameters,
        "trained_parameters": found.num_trained,
        "base_bytes": found.base,
        "adapter_bytes": found.adapter,
        "activation_bytes": found.activations,
        "activation_bytes_kept": found.activations_of(False),
        "activation_bytes_recomputed": found.activations_of(True),
        "logits_bytes": found.logits,
        "gradient_bytes": found.gradients,
        "total_bytes": found.total,
        "process_bytes": PROCESS_BYTES,
        "cache_bytes_per_1000_records": found.cache_per_1000_records,
        "available_bytes": available,
        "fits": found.total + PROCESS_BYTES <= available,
        "largest_batch": largest_batch(setting, available) if available else None,
    }
    return Result(values, _memory_page(values))


def _joined_signature() -> inspect.Signature:
    """The options of both uses, each use's in a panel of its own in --help."""
    uses: Mapping[str, Callable[..., Result]] = {
        "A run within a budget: --records and --epsilon": _plan_budget,
        "The memory of a step: MODEL": _plan_memory,
    }
    context, model, _ = inspect.signature(plan, eval_str=True).parameters.values()
    parameters = [context, model]
    for panel, use in uses.items():
        for parameter in inspect.signature(use, eval_str=True).parameters.values():
            if parameter.name != model.name:
                kind, option = get_args(parameter.annotation)
                option = copy(option)
                option.rich_help_panel = panel
                parameters.append(parameter.replace(annotation=Annotated[kind, option]))
    return inspect.Signature(parameters)


plan.__signature__ = _joined_signature()  # type: ignore[attr-defined]


def _committed(found: Plan) -> dict[str, Any]:
    """Each client's releases as a node's `register --plan` reads them, and the epsilon that a filter needs for them."""
    from fedpriv.privacy.accounting import events
    from fedpriv.privacy.accounting.filters import filtered_epsilon

    setting = found.setting
    clients = []
    for client, (size, delta) in enumerate(zip(setting.sizes, setting.deltas, strict=True)):
        releases = found.releases(client)
        listed = {"events": [json.loads(events.to_json(event)) for event in releases]}
        cost = {"delta": delta, "filtered_epsilon": filtered_epsilon(releases, delta)}
        clients.append({"client": client, "num_records": size} | cost | listed)
    return {"view": setting.config.privacy_view, "clients": clients}


def _timed() -> float:
    from fedpriv.learning.training.workbench import records_per_second

    return records_per_second()


def _values(found: Plan) -> dict[str, Any]:
    setting, config = found.setting, found.setting.config
    return {
        "num_clients": len(setting.sizes),
        "unit": config.unit,
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


def _phase(found: Plan, phase: PhaseRounds) -> dict[str, Any]:
    """The values that its rounds ask for, and the name of the part that they train."""
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
    return {
        "noise_multiplier": found.steps[0].spec.noise_multiplier,
        "lora_noise_multiplier": found.steps[-1].spec.noise_multiplier if found.setting.num_lora_rounds else None,
        "final_noise": found.final_noise,
        "noise_to_signal": found.noise_to_signal,
        "seconds": found.setting.seconds(speed),
    }


def _page(values: Mapping[str, Any]) -> Iterable[str]:
    counted = {"num_records": f"num_{what_is_counted(values['unit'])}"}
    elsewhere = ("phases", "clients", "alternatives", "left_out", "is_hopeless", "helps_most", "needed_records")
    of_phases = ("lora_rounds", "noise_multiplier", "lora_noise_multiplier", "train_auto")
    shown = {name: _rounded(value) for name, value in values.items() if name not in elsewhere + of_phases}
    yield from (f"note: {text}" for text in values["left_out"])
    yield from entries(_renamed(shown, counted))
    yield from ("", *table(values["phases"], list(values["phases"][0])), values["train_auto"])
    largest = sorted(values["clients"], key=lambda client: -client["num_records"])
    clients = [_renamed(client, counted) for client in largest]
    yield from ("", "What it costs a client if all take part in every round:")
    yield from table(clients[:_MOST_CLIENTS], list(clients[0]))
    if len(clients) > _MOST_CLIENTS:
        yield f"and {len(clients) - _MOST_CLIENTS} smaller ones"
    plans = [{"plan": "this one"} | dict(values), *values["alternatives"]]
    yield from ("", *table(plans, ["plan", *_COLUMNS]))
    yield from ("", *_meaning(values))


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values, some of them by another name."""
    return {names.get(name, name): value for name, value in values.items()}


def _rounded(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else value


def _meaning(values: Mapping[str, Any]) -> Iterable[str]:
    """Lines that explain the ratio, say how far it is proven, and name what would help."""
    from fedpriv.runs.plan.budget import GOOD_RATIO, HOPELESS_STEP, NEEDED_STEP

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
    """A sentence that names what would lower the ratio most."""
    counted = what_is_counted(values["unit"])
    needed = f"{values['needed_records']:,} {counted} in the same proportions would bring it to {good:g}."
    plans = {row["plan"]: row["noise_to_signal"] for row in values["alternatives"]}
    best = values["helps_most"]
    if best is None or plans[best] > 0.9 * values["noise_to_signal"]:
        return f"More {counted} or a larger epsilon help, nothing else in the table does: {needed}"
    return f"Of the table, {best} helps most (noise to signal {plans[best]:.2g}); {needed}"


def _memory_of_machine(device: str) -> int:
    """The memory of this machine, or of its first GPU, in bytes; 0 without a GPU."""
    import torch

    if device == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


def _memory_page(values: Mapping[str, Any]) -> Iterable[str]:
    size = {name: f"{value / 1e9:.2f} GB" for name, value in values.items() if "bytes" in name}
    kind = {4: "4-bit NF4", 16: "bfloat16", 32: "float32"}[values["bits"]]
    kept, again = size["activation_bytes_kept"], size["activation_bytes_recomputed"]
    recomputes = values["activation_checkpointing"]
    shown = {
        "parameters": f"{values['parameters']:,}, and {values['trained_parameters']:,} trained",
        f"base, {kind}": size["base_bytes"],
        "adapter": f"{size['adapter_bytes']}: values, sums, noise, optimizer",
        "activations": (
            f"{again} with layers that run again ({kept} without)"
            if recomputes
            else f"{kept} ({again} with --activation-checkpointing)"
        ),
        "logits": f"{size['logits_bytes']} more",
        "total": f"{size['total_bytes']} at the peak of a step on {values['batch']} records of "
        f"{values['max_length']} tokens",
    }
    yield from entries(shown)
    cache = values["cache_bytes_per_1000_records"]
    yield (
        f"prefix cache: {size['cache_bytes_per_1000_records']} for each 1,000 records, in memory or in a file"
        if cache
        else "prefix cache: none, since the first layer is trained"
    )
    if not values["available_bytes"]:
        yield "This machine has no GPU; --memory 80GB says what fits one."
        return
    verdict = "fits" if values["fits"] else "does not fit"
    yield (
        f"It {verdict} in {size['available_bytes']} ({values['device']}), of which process and libraries take up to "
        f"{size['process_bytes']}; the largest batch that does at once is {values['largest_batch']}."
    )
    yield "A larger batch passes in parts, to the same sum: memory_limit_mb bounds a part."
