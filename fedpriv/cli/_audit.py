"""`fedpriv audit ...`: lower bounds of epsilon from what an attacker finds, to compare with the claim."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli._command import Result, command, result_of
from fedpriv.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from fedpriv.privacy.accounting.law import Array

app = typer.Typer(no_args_is_help=True, help="Lower bounds of epsilon and membership inference, from scores.")

Confidence = Annotated[float, typer.Option(help="Of bounds and intervals, in (0, 1).")]
Delta = Annotated[float, typer.Option(help="Of the claim, in [0, 1).")]
GroupSize = Annotated[int, typer.Option(help="Records that a canary consists of; bounds are of one.", min=1)]

NOTE = "Computed from who is a member: publishing it for real data is a release that no epsilon covers."


@command(app)
def power(
    canaries: Annotated[int, typer.Option(help="Of all clients, included or not, >= 2.")],
    epsilon: Annotated[float, typer.Option(help="Of the claim, > 0.")],
    delta: Annotated[float, typer.Option(help="Of the claim, in (0, 1).")] = 1e-5,
    steps: Annotated[int, typer.Option(help="Releases in all: rounds times local steps, >= 1.")] = 1,
    sampling_probability: Annotated[float, typer.Option(help="q of each, in (0, 1].")] = 1.0,
    group_size: GroupSize = 1,
    confidence: Confidence = 0.95,
) -> Result:
    """Tell, before a run, what its audit could find: if every guess is right, and by an ideal attacker on the claim.

    Example: fedpriv audit power --canaries 1000 --epsilon 4 --steps 30 --sampling-probability 0.15
    """
    from fedpriv.methods.audit import audit_power
    from fedpriv.privacy.accounting import SubsampledGaussian, noise_multiplier_for

    noise_multiplier = noise_multiplier_for(epsilon, delta, sampling_probability=sampling_probability, steps=steps)
    event = SubsampledGaussian(
        noise_multiplier=noise_multiplier, sampling_probability=sampling_probability, count=steps
    )
    found = audit_power([event], delta, canaries, confidence=confidence, group_size=group_size)
    lines = [
        f"{canaries} canaries, {found.num_guesses} guesses, fixed beforehand; epsilon {epsilon:g} at delta {delta:g}, "
        f"noise multiplier {noise_multiplier:.4g}",
        f"every guess right, as without noise: epsilon >= {found.largest:.2f}, >= {found.largest_f_dp:.2f} by f-DP",
        f"an ideal attacker on the claim, {found.num_correct} right in the median: epsilon >= {found.ideal:.2f}, "
        f">= {found.ideal_f_dp:.2f} by f-DP",
    ]
    return Result(asdict(found) | {"noise_multiplier": noise_multiplier}, lines)


@command(app, "one-run")
def one_run(
    scores: Annotated[
        list[Path],
        typer.Option(
            help="CSV: score, included (0 or 1); a higher score means more likely included. Repeat it for independent "
            "runs, which count together."
        ),
    ],
    delta: Delta = 0.0,
    confidence: Confidence = 0.95,
    guesses: Annotated[
        int,
        typer.Option(help="Even, and fixed before the inclusions were seen; 0 tries several and pays for each.", min=0),
    ] = 0,
    claimed_epsilon: Annotated[float | None, typer.Option(help="Exit code 1 if the lower bound exceeds it.")] = None,
    gaussian: Annotated[
        bool, typer.Option("--gaussian", help="Also test the stronger claim of Gaussian DP; needs --guesses.")
    ] = False,
    group_size: GroupSize = 1,
) -> Result:
    """A lower bound of epsilon from one run with canaries, each included with probability 1/2.

    Example: fedpriv audit one-run --scores scores.csv --delta 1e-5 --guesses 200 --claimed-epsilon 4
    """
    from fedpriv.methods.audit import combined_audit, gaussian_mu, one_run_audit
    from fedpriv.privacy.accounting import gaussian_epsilon

    if gaussian and not (guesses and delta > 0):
        raise InputError("gaussian: needs --guesses, fixed beforehand, and --delta > 0")
    if claimed_epsilon is not None and not claimed_epsilon >= 0:
        raise InputError(f"claimed_epsilon = {claimed_epsilon}: must be >= 0")
    if len(scores) > 1 and not guesses:
        raise InputError("scores: several runs count together with --guesses alone, fixed for each of them")
    tables = [_read_scores(path, ["score", "included"]) for path in scores]
    seen = {table["score"].tobytes() + table["included"].tobytes() for table in tables}
    if len(seen) < len(tables):
        raise InputError("scores: two files hold the same run, whose canaries would count twice")
    audits = [
        one_run_audit(
            table["score"],
            _flags(table["included"], "included"),
            num_guesses=guesses or None,
            delta=delta,
            confidence=confidence,
            group_size=group_size,
        )
        for table in tables
    ]
    found = combined_audit(audits) if len(audits) > 1 else audits[0]
    values = asdict(found)
    share = f"{found.num_correct} of {found.num_guesses} guesses right, {found.num_canaries} canaries"
    tried = f", best of {found.num_tried} numbers of guesses, all paid for" if found.num_tried > 1 else ""
    lines = [f"epsilon >= {found.epsilon_lower:.4f} at delta {delta:g}, confidence {confidence:g} ({share}{tried})"]
    if gaussian:
        counts = {"num_canaries": found.num_canaries, "num_guesses": found.num_guesses}
        mu = gaussian_mu(**counts, num_correct=found.num_correct, confidence=confidence) / group_size
        values |= {"gaussian_mu_lower": mu, "gaussian_epsilon_lower": gaussian_epsilon(mu, delta)}
        lines.append(
            f"as Gaussian DP: mu >= {mu:.4f}, epsilon >= {values['gaussian_epsilon_lower']:.4f} (only valid for "
            "Gaussian noise without sampling)"
        )
    refuted = claimed_epsilon is not None and found.epsilon_lower > claimed_epsilon
    if claimed_epsilon is not None:
        values |= {"claimed_epsilon": claimed_epsilon, "claim_refuted": refuted}
        lines.append(f"the claim of epsilon {claimed_epsilon:g} is {'refuted' if refuted else 'not refuted'}")
    return Result(values, lines, code=int(refuted))


@command(app)
def membership(
    scores: Annotated[
        Path,
        typer.Option(
            help="CSV: member (0 or 1) and score; or loss, with reference_loss, or with shadow_loss_I and "
            "shadow_member_I of shadow models I."
        ),
    ],
    confidence: Confidence = 0.95,
    roc_plot: Annotated[Path | None, typer.Option(help="PNG or SVG to write.")] = None,
) -> Result:
    """How well losses tell members from others: AUC, and members found at 0.1 % and 1 % false alarms.

    Runs every attack that the columns allow: loss threshold, calibrated by a reference model, LiRA, RMIA.

    Example: fedpriv audit membership --scores losses.csv --roc-plot roc.png
    """

    table = _read_scores(scores, ["member"], ["score", "loss", "reference_loss", "shadow_loss_*", "shadow_member_*"])
    members = _flags(table["member"], "member")
    return _report(_attacks(table), members, confidence, roc_plot)


@command(app)
def model(
    weights: Annotated[
        Path, typer.Argument(help="A safetensors file, such as a mean of `integral select` or a restored variant.")
    ],
    losses: Annotated[
        str, typer.Option(help="MODULE:FUNCTION that returns a function from tensors to (losses, members).")
    ],
    confidence: Confidence = 0.95,
    roc_plot: Annotated[Path | None, typer.Option(help="PNG or SVG to write.")] = None,
) -> Result:
    """Black-box membership inference on any published model, by the loss threshold.

    The function is given {name: tensor} and returns each record's loss and whether the model was trained on it.

    Example: fedpriv audit model mean-1.safetensors --losses study:judge
    """
    import numpy as np
    import safetensors.torch

    from fedpriv.methods.audit import loss_scores

    judge = result_of("losses", losses)
    try:
        tensors = safetensors.torch.load_file(weights)
    except FileNotFoundError:
        raise InputError(f"weights = {str(weights)!r}: no such file") from None
    except safetensors.SafetensorError as error:
        raise InputError(f"weights = {str(weights)!r}: not a safetensors file ({error})") from None
    of_records, members = judge(tensors)
    return _report({"loss": loss_scores(of_records)}, np.asarray(members), confidence, roc_plot)


def _attacks(table: dict[str, Any]) -> dict[str, Any]:
    """{attack: scores} of every attack that the columns allow."""
    import numpy as np

    from fedpriv.methods.audit import calibrated_scores, lira_scores, loss_scores, rmia_scores

    found = {"score": table["score"]} if "score" in table else {}
    if "loss" in table:
        found["loss"] = loss_scores(table["loss"])
        if "reference_loss" in table:
            found["calibrated"] = calibrated_scores(table["loss"], table["reference_loss"])
        models = [name.removeprefix("shadow_loss_") for name in table if name.startswith("shadow_loss_")]
        if lacking := [model for model in models if f"shadow_member_{model}" not in table]:
            raise InputError(f"column 'shadow_member_{lacking[0]}': is missing, unlike shadow_loss_{lacking[0]}")
        if models:
            names = [f"shadow_member_{model}" for model in models]
            members = np.stack([_flags(table[name], name) for name in names])
            losses = np.stack([table[f"shadow_loss_{model}"] for model in models])
            found["lira"] = lira_scores(table["loss"], losses, members)
            found["rmia"] = rmia_scores(table["loss"], losses)
    if not found:
        raise InputError("column 'loss': is missing; needs loss or score")
    return found


def _report(attacks: dict[str, Any], members: Any, confidence: float, plot: Path | None) -> Result:
    """Print how well each attack does, and draw its ROC curve if asked to."""
    from fedpriv.methods.audit import membership as judged

    results = {name: judged(scores, members, confidence=confidence) for name, scores in attacks.items()}
    first = next(iter(results.values()))
    lines = [f"{first.num_members} members, {first.num_others} others, confidence {confidence:g}"]
    for name, result in results.items():
        rates = "; ".join(
            f"{100 * rate.true_positive_rate:.2f} % [{100 * rate.low:.2f}, {100 * rate.high:.2f}] of members at "
            f"{100 * rate.false_positive_rate:g} % false alarms"
            for rate in result.rates
        )
        lines.append(f"{name}: AUC {result.auc:.4f} [{result.auc_low:.4f}, {result.auc_high:.4f}]; {rates}")
    if plot:
        from fedpriv.methods.audit import plot_roc

        plot_roc(attacks, members, plot)
        lines.append(f"written: {plot}")
    lines.append(NOTE)
    return Result({"attacks": {name: asdict(result) for name, result in results.items()}, "note": NOTE}, lines)


def _read_scores(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Array]:
    """{column: finite float64 values}, for the required columns and the optional ones that the file has.

    An optional name such as `shadow_*` stands for all columns that begin with `shadow_`.
    """
    import numpy as np

    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except FileNotFoundError:
        raise InputError(f"scores = {str(path)!r}: no such file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"scores = {str(path)!r}: not a CSV file ({error})") from None
    if len(rows) < 2:
        raise InputError(f"scores = {str(path)!r}: has no rows; needs a header and one row for each canary or record")
    header = [name.strip() for name in rows[0]]
    if missing := [name for name in required if name not in header]:
        raise InputError(f"column {missing[0]!r}: {path} has {', '.join(header)}")
    stems = [name[:-1] for name in optional if name.endswith("*")]
    wanted = [n for n in header if n in required or n in optional or any(n.startswith(stem) for stem in stems)]
    for line, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise InputError(f"{path}, line {line}: {len(row)} values for {len(header)} columns")
    positions = {name: header.index(name) for name in wanted}
    return {
        name: np.array([_number(row[position], name, path, line) for line, row in enumerate(rows[1:], start=2)])
        for name, position in positions.items()
    }


def _flags(values: Array, name: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    import numpy as np

    if not np.isin(values, (0, 1)).all():
        raise InputError(f"{name} = {values[~np.isin(values, (0, 1))][0]:g}: must be 0 or 1")
    return np.asarray(values.astype(bool))


def _number(text: str, name: str, path: Path, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{name} = {text.strip()[:40]!r} in {path}, line {line}: must be a finite number")
    return value
