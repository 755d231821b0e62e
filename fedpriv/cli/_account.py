"""`fedpriv account`, `calibrate` and `repeat-and-select`: what noise costs, and how much of it a budget needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fedpriv.cli._command import OneOf
from fedpriv.errors import InputError

if TYPE_CHECKING:
    from fedpriv.accounting.composition.law import Accountant

CLOSED_FORM = "closed-form"

Delta = Annotated[float, typer.Option(help="In (0, 1); usually at most 1 / (10 N_k).")]
SamplingProbability = Annotated[float, typer.Option(help="q = B / N_k, in [0, 1].")]
Steps = Annotated[int, typer.Option(help="Noisy steps in all: rounds times local steps, >= 1.")]
AccountantName = Annotated[
    str,
    typer.Option(
        click_type=OneOf("fedpriv.accounting.composition.law:Accountant", CLOSED_FORM),
        help="pld is tight, rdp fast; closed-form is the DP-LoRA paper's figure.",
    ),
]
Clipping = Annotated[
    str,
    typer.Option(
        click_type=OneOf("fedpriv.accounting.sensitivity:CLIPPING_RULES", check=False),
        help="The clipping rule, which fixes the sensitivity.",
    ),
]
NumTensors = Annotated[int, typer.Option(help="Number of trainable tensors, for per-tensor.")]
Head = Annotated[
    bool, typer.Option("--head", help="A classification head is trained too: a third part for split and batch.")
]
RhoBar = Annotated[float, typer.Option(help="sqrt(sum rho_k^2) in (0, 1], for the paper's rho view.")]


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
) -> dict[str, Any]:
    """The epsilon that a client spends.

    Adjacency: one record of one client added or removed. Example, the smallest hospital of the default run:

    fedpriv account --noise-multiplier 1.88 --sampling-probability 0.16 --steps 30 --delta 1e-5
    """
    from fedpriv.accounting.events import SubsampledGaussian

    _check_rho_bar(rho_bar)
    local = noise_multiplier / _sensitivity_factor(clipping, num_tensors, head)
    event = SubsampledGaussian(noise_multiplier=rho_bar * local, sampling_probability=sampling_probability, count=steps)
    return _cost(event, delta, accountant) | {
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "effective_noise_multiplier": event.noise_multiplier,
        "sampling_probability": sampling_probability,
        "steps": steps,
        "rho_bar": rho_bar,
        "clipping": clipping,
        "accountant": accountant,
        "adjacency": "one record of one client added or removed",
    }


def calibrate(
    epsilon: Annotated[float, typer.Option(help="Target, > 0.")],
    delta: Delta,
    sampling_probability: SamplingProbability,
    steps: Steps,
    accountant: AccountantName = "pld",
    clipping: Clipping = "joint",
    num_tensors: NumTensors = 1,
    head: Head = False,
    rho_bar: RhoBar = 1.0,
) -> dict[str, Any]:
    """The smallest noise multiplier that keeps a schedule within (epsilon, delta).

    Example: fedpriv calibrate --epsilon 2 --delta 1e-5 --sampling-probability 0.16 --steps 30
    """
    from fedpriv.accounting.calibration import noise_multiplier_for
    from fedpriv.accounting.events import SubsampledGaussian

    if accountant == CLOSED_FORM:
        raise InputError("accountant = closed-form: it can under-report, so it may not calibrate; use pld or rdp")
    _check_rho_bar(rho_bar)
    scale = rho_bar / _sensitivity_factor(clipping, num_tensors, head)
    found = noise_multiplier_for(
        epsilon,
        delta,
        sampling_probability=sampling_probability,
        steps=steps,
        scale=scale,
        accountant=cast("Accountant", accountant),
    )
    event = SubsampledGaussian(noise_multiplier=found * scale, sampling_probability=sampling_probability, count=steps)
    return {
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
    from fedpriv.accounting import accountants as selection
    from fedpriv.accounting.events import SubsampledGaussian

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
    return {"epsilon": epsilon, "delta": delta, "epsilon_of_one_run": one_run, "mean_repetitions": mean_repetitions}


def _cost(event: Any, delta: float, accountant: str) -> dict[str, Any]:
    """The epsilon of an event, and how far it can be relied on."""
    if accountant == CLOSED_FORM:
        from fedpriv.accounting.accountants import closed_form

        paper = closed_form([event], delta)
        return {"epsilon": paper.epsilon, "conditions_hold": paper.conditions_hold, "violated": list(paper.violated)}
    from fedpriv.accounting.accountants import epsilon_of

    cost = epsilon_of([event], delta, cast("Accountant", accountant))
    return {"epsilon": cost.epsilon, "upper_bound_only": cost.upper_bound_only}


def _check_rho_bar(rho_bar: float) -> None:
    if not 0 < rho_bar <= 1:
        raise InputError(f"rho_bar = {rho_bar}: must lie in (0, 1]")


def _sensitivity_factor(clipping: str, num_tensors: int, head: bool) -> float:
    """The L2 sensitivity that a clipping rule gives, in units of the clip norm."""
    from fedpriv.accounting.sensitivity import clipping_rule, num_parts, sensitivity_factor

    rule = clipping_rule(clipping)
    return sensitivity_factor(rule, num_parts(rule, num_tensors=num_tensors, head=head))
