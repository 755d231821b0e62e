"""`fedpriv account`, `calibrate`, `check`, `repeat-and-select` and `communication`: costs, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fedpriv.cli._command import OneOf, Result, entries
from fedpriv.errors import InputError

if TYPE_CHECKING:
    from fedpriv.privacy.accounting.law import Accountant, Unit
    from fedpriv.runs.plan.communication import PaperRow


CLOSED_FORM = "closed-form"

_ADJACENCY = {
    "record": "one record of one client added or removed",
    "person": "one person of one client, with all of their records, added or removed",
    "client": "one client added or removed",
}

Delta = Annotated[float, typer.Option(help="In (0, 1); usually at most 1 / (10 N_k).")]
SamplingProbability = Annotated[float, typer.Option(help="q = B / N_k, in [0, 1].")]
Steps = Annotated[int, typer.Option(help="Noisy steps in all: rounds times local steps, >= 1.")]

AccountantName = Annotated[
    str,
    typer.Option(
        click_type=OneOf("fedpriv.privacy.accounting.law:Accountant", CLOSED_FORM),
        help="pld is tight, rdp fast; closed-form is Theorem 1 of DP-LoRA.",
    ),
]

Clipping = Annotated[
    str,
    typer.Option(
        click_type=OneOf("fedpriv.privacy.accounting.sensitivity:CLIPPING_RULES", check=False),
        help="The clipping rule, which fixes the sensitivity.",
    ),
]

NumTensors = Annotated[int, typer.Option(help="Number of trainable tensors, for per-tensor.")]

Head = Annotated[
    bool, typer.Option("--head", help="A classification head is trained too: a third part for split and batch.")
]

UnitName = Annotated[
    str,
    typer.Option(
        click_type=OneOf("fedpriv.privacy.accounting.law:Unit"), help="What epsilon and risk are of; words alone."
    ),
]

RhoBar = Annotated[float, typer.Option(help="sqrt(sum rho_k^2) in (0, 1], for the rho view.")]
MODEL_HELP = "gpt2, bert-base, llama-7b, chatglm2-6b, a folder with a config.json, or a model on the Hub."

PAPER_NOTES = (
    "All figures are parameters of one client's upload in one round; % are of all parameters.",
    "off: the formula L r 2n against the paper's figure; given: whether they differ by at most 5 %.",
    "> whole: the paper's figure exceeds that of sending the adapted matrices whole.",
    "ratio: whether the paper's overhead over its own origin gives the ratio that it prints.",
    "Adapted matrices assumed:",
)


def account(
    noise_multiplier: Annotated[float, typer.Option(help="z: noise standard deviation over clip norm, >= 0.")],
    sampling_probability: SamplingProbability,
    steps: Steps,
    delta: Delta,
    accountant: AccountantName = "pld",
    clipping: Clipping = "joint",
    num_tensors: NumTensors = 1,
    head: Head = False,
    rho_bar: RhoBar = 1.0,
    unit: UnitName = "record",
) -> Result:
    """The epsilon that a client spends, and what an attacker finds at most.

    Adjacency: one record of one client added or removed, or a person or client as `--unit` says. Example, the
    smallest hospital of the default run:

    fedpriv account --noise-multiplier 1.88 --sampling-probability 0.16 --steps 30 --delta 1e-5
    """
    from fedpriv.privacy.accounting.events import SubsampledGaussian

    event = SubsampledGaussian(
        noise_multiplier=noise_multiplier * _noise_scale(rho_bar, clipping, num_tensors, head),
        sampling_probability=sampling_probability,
        count=steps,
        unit=cast("Unit", unit),
    )
    cost = _cost(event, delta, accountant) | {
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "effective_noise_multiplier": event.noise_multiplier,
        "sampling_probability": sampling_probability,
        "steps": steps,
        "rho_bar": rho_bar,
        "clipping": clipping,
        "accountant": accountant,
        "adjacency": _ADJACENCY[unit],
    }
    return _with_risk(cost, event, delta)


def calibrate(
    delta: Delta,
    sampling_probability: SamplingProbability,
    steps: Steps,
    epsilon: Annotated[float | None, typer.Option(help="Target, > 0; give one of the three targets.")] = None,
    target_mu: Annotated[float | None, typer.Option(help="Target: mu of Gaussian differential privacy, > 0.")] = None,
    target_risk: Annotated[
        str | None,
        typer.Option(help="Target: the share found at a share wrongly accused, such as tpr=0.1@fpr=0.01."),
    ] = None,
    accountant: AccountantName = "pld",
    clipping: Clipping = "joint",
    num_tensors: NumTensors = 1,
    head: Head = False,
    rho_bar: RhoBar = 1.0,
    unit: UnitName = "record",
) -> Result:
    """The smallest noise multiplier that keeps a schedule within (epsilon, delta), or within a risk.

    Example: fedpriv calibrate --epsilon 2 --delta 1e-5 --sampling-probability 0.16 --steps 30

    Example: fedpriv calibrate --target-risk tpr=0.1@fpr=0.01 --delta 1e-5 --sampling-probability 0.16 --steps 30
    """
    from fedpriv.privacy.accounting.calibration import calibrate_to_risk, noise_multiplier_for
    from fedpriv.privacy.accounting.events import SubsampledGaussian
    from fedpriv.privacy.accounting.risk import RiskTarget

    if accountant == CLOSED_FORM:
        raise InputError("accountant = closed-form: it can under-report, so it may not calibrate; use pld or rdp")
    scale = _noise_scale(rho_bar, clipping, num_tensors, head)
    if [epsilon, target_mu, target_risk].count(None) != 2:
        raise InputError("calibrate: give one of --epsilon, --target-mu and --target-risk")

    def steps_with(z: float) -> SubsampledGaussian:
        return SubsampledGaussian(
            noise_multiplier=z * scale, sampling_probability=sampling_probability, count=steps, unit=cast("Unit", unit)
        )

    if epsilon is not None:
        found = noise_multiplier_for(
            epsilon,
            delta,
            sampling_probability=sampling_probability,
            steps=steps,
            scale=scale,
            accountant=cast("Accountant", accountant),
        )
    else:
        target = (
            RiskTarget(mu=target_mu) if target_risk is None else RiskTarget.parse(target_risk, name="--target-risk")
        )
        found = calibrate_to_risk([(lambda z: [steps_with(z)], delta)], target)
    event = steps_with(found)
    values = {
        "noise_multiplier": found,
        "effective_noise_multiplier": event.noise_multiplier,
        "epsilon": _cost(event, delta, accountant)["epsilon"],
        "delta": delta,
        "sampling_probability": sampling_probability,
        "steps": steps,
        "rho_bar": rho_bar,
        "clipping": clipping,
        "accountant": accountant,
    }
    return _with_risk(values, event, delta)


def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Of one app or job, the setting's first.")],
    override: Annotated[
        list[str] | None,
        typer.Option("--set", "-c", metavar="NAME=VALUE", help="What no file says, or what holds in its place."),
    ] = None,
) -> Result:
    """Tell what another platform's privacy setting costs; its files are parsed, and never imported or run.

    Reads privacy filters of NVFLARE jobs (.json, .conf), LocalDpMod and clipping strategies of Flower apps and Opacus'
    make_private in Python, FLIP's run configuration and a row of a paper's table (.toml). `fedpriv config check` is for
    a run of fedpriv's own. Examples:

    fedpriv check config_fed_client.json --set num_rounds=5 --set num_parameters=7033281

    fedpriv check server_app.py pyproject.toml --set target_epsilon=8
    """
    from fedpriv.config import parse_overrides
    from fedpriv.runs.plan.foreign import check_settings

    found = check_settings(files, parse_overrides(override or []))
    return Result({"settings": found}, [line for setting in found for line in _check_page(setting)])


def _check_page(values: Mapping[str, Any]) -> Iterator[str]:
    """A setting's figures, then a sentence for each condition and for what would meet the claim."""
    listed = ("mechanism", "place", "read", "conditions", "instead", "found")
    yield f"{values['place']}: {values['mechanism']}"
    yield f"  read: {', '.join(f'{name} = {_readable(value)}' for name, value in values['read'].items())}"
    shown = {name: value for name, value in values.items() if name not in listed and value is not None}
    yield from (f"  {line}" for line in entries({name: _readable(value) for name, value in shown.items()}))
    yield f"  {_epsilon_and_found(values)}"
    for each in values["conditions"]:
        other = (
            ""
            if each["epsilon"] is None
            else f" ({'else' if each['is_counted_on'] else 'then'} {_epsilon_and_found(each)})"
        )
        yield f"  {'counts on' if each['is_counted_on'] else 'does not count on'}: {each['condition']}{other}"
    if values["instead"]:
        own = ", ".join(f"{name} = {_readable(value)}" for name, value in values["instead"].items())
        yield f"  for an epsilon of {_readable(values['claimed_epsilon'])} over the whole run: {own}"


def _epsilon_and_found(values: Mapping[str, Any]) -> str:
    from fedpriv.texts import percent_up

    if values["epsilon"] is None:
        return "epsilon is not known from the file"
    return f"epsilon {values['epsilon']:,.6g}; {percent_up(values['found'])} are found at 1 % false accusations"


def repeat_and_select(
    noise_multiplier: Annotated[float, typer.Option(help="Effective noise multiplier of one run, >= 0.")],
    sampling_probability: SamplingProbability,
    steps: Steps,
    delta: Delta,
    mean_repetitions: Annotated[float, typer.Option(help="Expected number of runs, >= 1.")],
    shape: Annotated[
        float, typer.Option(help="Distribution of that number: 1 geometric, 0 logarithmic, inf Poisson.")
    ] = 1.0,
    number_is_random_and_secret: Annotated[
        bool,
        typer.Option("--number-is-random-and-secret", help="You state that it was drawn at random and stays secret."),
    ] = False,
    losers_are_hidden: Annotated[
        bool, typer.Option("--losers-are-hidden", help="You state that nobody sees anything of the other runs.")
    ] = False,
) -> dict[str, Any]:
    """The epsilon of publishing only the best of several runs, against readers who see nothing of the others.

    A fixed sweep does not qualify: it costs the sum of all its runs, which one ledger for all of them keeps. Example:

    fedpriv repeat-and-select --noise-multiplier 4 --sampling-probability 0.05 --steps 30 --delta 1e-5
    --mean-repetitions 10 --number-is-random-and-secret --losers-are-hidden
    """
    from fedpriv.privacy.accounting import accountants as selection
    from fedpriv.privacy.accounting.events import SubsampledGaussian

    event = SubsampledGaussian(
        noise_multiplier=noise_multiplier, sampling_probability=sampling_probability, count=steps
    )
    epsilon = selection.repeat_and_select(
        [event],
        delta,
        mean_repetitions=mean_repetitions,
        shape=shape,
        number_is_random_and_secret=number_is_random_and_secret,
        losers_are_hidden=losers_are_hidden,
    )
    one_run = _cost(event, delta, "rdp")["epsilon"]
    values = {"epsilon": epsilon, "delta": delta, "epsilon_of_one_run": one_run, "mean_repetitions": mean_repetitions}
    return values | {"is_private": math.isfinite(epsilon)}


def _cost(event: Any, delta: float, accountant: str) -> dict[str, Any]:
    """The epsilon of an event, and how far it can be relied on."""
    if accountant == CLOSED_FORM:
        from fedpriv.privacy.accounting.accountants import closed_form

        paper = closed_form([event], delta)
        return {"epsilon": paper.epsilon, "conditions_hold": paper.conditions_hold, "violated": list(paper.violated)}
    from fedpriv.privacy.accounting.accountants import epsilon_of

    cost = epsilon_of([event], delta, cast("Accountant", accountant))
    return {"epsilon": cost.epsilon, "upper_bound_only": cost.upper_bound_only}


def _with_risk(values: dict[str, Any], event: Any, delta: float) -> Result:
    """The values, and what they mean for people."""
    from fedpriv.privacy.accounting.accountants import epsilon_of
    from fedpriv.privacy.accounting.risk import risk_of
    from fedpriv.texts import risk_in_words

    proven = epsilon_of([event], delta, "rdp").epsilon
    found = values | {"is_private": math.isfinite(proven)} | risk_of([event], delta).values
    return Result(found, [*entries(found), *risk_in_words(found, delta)])


def _noise_scale(rho_bar: float, clipping: str, num_tensors: int, head: bool) -> float:
    """The effective noise multiplier over z: rho_bar over the sensitivity of the clipping rule, in units of C."""
    from fedpriv.privacy.accounting.sensitivity import clipping_rule, num_parts, sensitivity_factor

    if not 0 < rho_bar <= 1:
        raise InputError(f"rho_bar = {rho_bar}: must lie in (0, 1]")
    rule = clipping_rule(clipping)
    return rho_bar / sensitivity_factor(rule, num_parts(rule, num_tensors=num_tensors, head=head))


def communication(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    rank: Annotated[int, typer.Option(help="r of LoRA, >= 1.")] = 8,
    targets: Annotated[
        list[str] | None, typer.Option(help="A linear layer to adapt; may be repeated. By default those of peft.")
    ] = None,
    clients: Annotated[int, typer.Option(help="K, all of which take part in every round, >= 1.")] = 5,
    rounds: Annotated[int, typer.Option(help="T, >= 1.")] = 50,
    bytes_per_value: Annotated[int, typer.Option(help="4 for float32, 2 for float16.")] = 4,
    compare_paper: Annotated[
        bool, typer.Option("--compare-paper", help="Also every line of the DP-LoRA paper's Tables 5, 18 and 19.")
    ] = False,
) -> Result:
    """Count what a federation with LoRA sends: exact parameters and bytes, and the paper's formula. Needs no weights.

    Counts A and B only: a classification head, which SEQ_CLS runs send too, and file formats come on top. Example:

    fedpriv communication --model llama-7b --rank 512 --targets q_proj --targets k_proj --targets v_proj
    """
    if model is None and not compare_paper:
        raise InputError("--model: name one, or give --compare-paper")
    from fedpriv.runs.plan import communication as counting

    result: dict[str, Any] = {}
    if model is not None:
        shape = counting.model_shape(model)
        counted = counting.count(
            shape,
            rank=rank,
            targets=targets or (),
            num_clients=clients,
            num_rounds=rounds,
            bytes_per_value=bytes_per_value,
        )
        result = asdict(counted)
    lines = entries({name: _readable(value) for name, value in result.items()})
    if compare_paper:
        rows = counting.compare_paper()
        result |= {"paper_finding": counting.finding(rows), "paper_rows": [asdict(row) for row in rows]}
        lines += [*([""] if lines else []), result["paper_finding"], "", *_paper_table(rows)]
    return Result(result, lines)


def _readable(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _paper_table(rows: Sequence[PaperRow]) -> list[str]:
    """Lines of at most 120 columns."""
    head = ["table", "model", "method", "rank", "paper", "paper %", "exact", "exact %", "formula", "off", "given"]
    cells = [[*head, "> whole", "ratio"], *map(_paper_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join(map(str.rjust, line, widths)).rstrip() for line in cells]
    targets = {row.model: ", ".join(row.targets) for row in rows if row.targets}
    assumed = [f"  {model:<{max(map(len, targets))}}  {names}" for model, names in targets.items()]
    return [*table, "", *PAPER_NOTES, *assumed]


def _paper_cells(row: PaperRow) -> list[str]:
    def million(value: float | None) -> str:
        return "" if value is None else f"{value / 1e6:,.1f}M"

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    def word(value: bool | None, words: tuple[str, str]) -> str:
        return "" if value is None else words[value]

    return [
        str(row.table),
        row.model,
        row.method,
        str(row.rank or ""),
        million(row.paper_parameters),
        percent(row.paper_reduction_percent),
        million(row.exact_parameters),
        percent(row.exact_reduction_percent),
        million(row.formula_parameters),
        "" if row.relative_deviation is None else f"{row.relative_deviation:+.1%}",
        word(row.given_by_formula, ("no", "yes")),
        word(row.exceeds_adapted_matrices, ("", "yes")),
        word(row.ratio_contradicts_overhead, ("yes", "NO")),
    ]
