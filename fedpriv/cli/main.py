"""`fedpriv ...`: what a user asks of the library from a shell."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import fedpriv
from fedpriv.accounting.accountants import check_delta, closed_form, spent
from fedpriv.accounting.calibration import noise_multiplier_for
from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.accounting.law import Accountant
from fedpriv.accounting.repeat_and_select import repeat_and_select
from fedpriv.accounting.sensitivity import num_parts, sensitivity_factor
from fedpriv.accounting.views import default_delta
from fedpriv.cli import audit as cli_audit
from fedpriv.cli import dedup as cli_dedup
from fedpriv.cli import integral as cli_integral
from fedpriv.cli import lmo as cli_lmo
from fedpriv.cli.communication import communication
from fedpriv.cli.dedup_bench import bench
from fedpriv.cli.status import status
from fedpriv.errors import InputError, LedgerError, StoreError
from fedpriv.ledger import ledger, statement

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
data_app = typer.Typer(no_args_is_help=True, help="Look at data before anything is registered.")
app.add_typer(data_app, name="data")
ledger_app = typer.Typer(no_args_is_help=True, help="What every data set has spent, from its ledger.")
app.add_typer(ledger_app, name="ledger")
app.add_typer(cli_dedup.app, name="dedup")
app.add_typer(cli_lmo.app, name="lmo")
app.add_typer(cli_integral.app, name="integral")
app.add_typer(cli_audit.app, name="audit")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")]


class AccountantName(StrEnum):
    """Accountants that `account` offers."""

    PLD = "pld"
    RDP = "rdp"
    CLOSED_FORM = "closed-form"


class Clipping(StrEnum):
    """Clipping rules, which fix the sensitivity."""

    JOINT = "joint"
    SPLIT = "split"
    PER_TENSOR = "per-tensor"
    BATCH = "batch"


Delta = Annotated[float, typer.Option(help="In (0, 1); usually at most 1 / (10 N_k).")]
SamplingProbability = Annotated[float, typer.Option(help="q = B / N_k, in [0, 1].")]
Steps = Annotated[int, typer.Option(help="Noisy steps in all, rounds times local steps, >= 1.")]
AccountantOption = Annotated[AccountantName, typer.Option(help="pld is tight, rdp fast.")]
ClippingOption = Annotated[Clipping, typer.Option(help="Fixes the sensitivity.")]
NumTensors = Annotated[int, typer.Option(help="Trainable tensors, for per-tensor.")]
Head = Annotated[bool, typer.Option("--head", help="A head is a third part, for split and batch.")]
RhoBar = Annotated[float, typer.Option(help="Below 1 for the paper's rho view: sqrt(sum rho_k^2).")]


@app.callback(invoke_without_command=True)
def fedpriv_command(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    """Federated LoRA fine-tuning under differential privacy, and what it costs every data holder."""
    if version:
        typer.echo(fedpriv.__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def account(
    noise_multiplier: Annotated[float, typer.Option(help="z: noise standard deviation over clip norm, >= 0.")],
    sampling_probability: SamplingProbability,
    steps: Steps,
    delta: Delta,
    accountant: AccountantOption = AccountantName.PLD,
    clipping: ClippingOption = Clipping.JOINT,
    num_tensors: NumTensors = 1,
    head: Head = False,
    rho_bar: RhoBar = 1.0,
    as_json: AsJson = False,
) -> None:
    """The epsilon that a client spends.

    Unit: one record of one client added or removed. Example, the smallest hospital of the default run:

    fedpriv account --noise-multiplier 1.88 --sampling-probability 0.16 --steps 30 --delta 1e-5
    """
    if not 0 < rho_bar <= 1:
        raise InputError(f"rho_bar = {rho_bar}: must lie in (0, 1]")
    local = noise_multiplier / _sensitivity_factor(clipping, num_tensors, head)
    event = SubsampledGaussian(noise_multiplier=rho_bar * local, sampling_probability=sampling_probability, count=steps)
    result: dict[str, Any]
    if accountant is AccountantName.CLOSED_FORM:
        paper = closed_form([event], delta)
        result = {"epsilon": paper.epsilon, "conditions_hold": paper.conditions_hold, "violated": list(paper.violated)}
    else:
        cost = spent([event], delta, "rdp" if accountant is AccountantName.RDP else "pld")
        result = {"epsilon": cost.epsilon, "upper_bound_only": cost.upper_bound_only}
    _show(
        result
        | {
            "delta": delta,
            "noise_multiplier": noise_multiplier,
            "effective_noise_multiplier": event.noise_multiplier,
            "sampling_probability": sampling_probability,
            "steps": steps,
            "rho_bar": rho_bar,
            "clipping": clipping.value,
            "accountant": accountant.value,
            "adjacency": "one record of one client added or removed",
        },
        as_json,
    )


@app.command()
def calibrate(
    epsilon: Annotated[float, typer.Option(help="Target, > 0.")],
    delta: Delta,
    sampling_probability: SamplingProbability,
    steps: Steps,
    accountant: AccountantOption = AccountantName.PLD,
    clipping: ClippingOption = Clipping.JOINT,
    num_tensors: NumTensors = 1,
    head: Head = False,
    rho_bar: RhoBar = 1.0,
    as_json: AsJson = False,
) -> None:
    """The smallest noise multiplier that keeps a schedule within (epsilon, delta).

    Example: fedpriv calibrate --epsilon 2 --delta 1e-5 --sampling-probability 0.16 --steps 30
    """
    if accountant is AccountantName.CLOSED_FORM:
        raise InputError(
            "accountant = closed-form: it can under-report, so nothing is calibrated by it; use pld or rdp"
        )
    if not 0 < rho_bar <= 1:
        raise InputError(f"rho_bar = {rho_bar}: must lie in (0, 1]")
    scale = rho_bar / _sensitivity_factor(clipping, num_tensors, head)
    by: Accountant = "rdp" if accountant is AccountantName.RDP else "pld"
    found = noise_multiplier_for(
        epsilon, delta, sampling_probability=sampling_probability, steps=steps, scale=scale, accountant=by
    )
    event = SubsampledGaussian(noise_multiplier=found * scale, sampling_probability=sampling_probability, count=steps)
    _show(
        {
            "noise_multiplier": found,
            "effective_noise_multiplier": event.noise_multiplier,
            "epsilon": spent([event], delta, by).epsilon,
            "delta": delta,
            "sampling_probability": sampling_probability,
            "steps": steps,
            "rho_bar": rho_bar,
            "clipping": clipping.value,
            "accountant": accountant.value,
        },
        as_json,
    )


@app.command("repeat-and-select")
def select(
    noise_multiplier: Annotated[float, typer.Option(help="Effective noise multiplier of one run, >= 0.")],
    sampling_probability: SamplingProbability,
    steps: Steps,
    delta: Delta,
    mean_repetitions: Annotated[float, typer.Option(help="Expected number of runs, >= 1.")],
    shape: Annotated[float, typer.Option(help="Of their number: 1 geometric, 0 logarithmic, inf Poisson.")] = 1.0,
    number_is_random_and_secret: Annotated[
        bool, typer.Option("--number-is-random-and-secret", help="You state that it was drawn and nobody learns it.")
    ] = False,
    losers_are_hidden: Annotated[
        bool, typer.Option("--losers-are-hidden", help="You state that nobody sees anything of the other runs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The epsilon of publishing only the best of several runs, for who sees nothing but the chosen one.

    A fixed sweep does not qualify: there the sum of all runs counts, which one ledger for all of them keeps. Example:

    fedpriv repeat-and-select --noise-multiplier 4 --sampling-probability 0.05 --steps 30 --delta 1e-5
    --mean-repetitions 10 --number-is-random-and-secret --losers-are-hidden
    """
    event = SubsampledGaussian(
        noise_multiplier=noise_multiplier, sampling_probability=sampling_probability, count=steps
    )
    epsilon = repeat_and_select(
        [event],
        delta,
        mean_repetitions=mean_repetitions,
        shape=shape,
        number_is_random_and_secret=number_is_random_and_secret,
        losers_are_hidden=losers_are_hidden,
    )
    one_run = spent([event], delta, "rdp").epsilon
    _show(
        {"epsilon": epsilon, "delta": delta, "epsilon_of_one_run": one_run, "mean_repetitions": mean_repetitions},
        as_json,
    )


@data_app.command()
def check(
    file: Annotated[str, typer.Argument(help="CSV, JSONL or Parquet (gzip allowed), or a data set on the Hub.")],
    text: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    label: Annotated[str, typer.Option(help="Column with the label; empty for causal models.")] = "label",
    text_pair: Annotated[str, typer.Option(help="Column with a second text.")] = "",
    client: Annotated[str, typer.Option(help="Column that says who holds a record.")] = "",
    as_json: AsJson = False,
) -> None:
    """What a run would see in a file: records, labels, clients, lengths, duplicates. Nothing leaves this machine.

    Example: fedpriv data check medquad.csv.gz --text answer --label question_type --client source
    """
    from fedpriv.data.checks import describe

    _show(describe(file, text=text, label=label, text_pair=text_pair, client=client), as_json)


LedgerPath = Annotated[Path, typer.Argument(help="ledger.sqlite of a run, or a node's own ledger.")]


@ledger_app.command("show")
def show_ledger(
    path: LedgerPath,
    budget_epsilon: Annotated[float | None, typer.Option(help="Show how many rounds this leaves, local view.")] = None,
    as_json: AsJson = False,
) -> None:
    """Spending per client and data set, by pld, and with a budget the rounds that remain.

    Example: fedpriv ledger show results/ledger.sqlite --budget-epsilon 4
    """
    with ledger.reading(path) as db:
        ledger.verify_with_head(db, path)
        rows = statement.spending(db, budget_epsilon=budget_epsilon)
    if as_json:
        _show({"ledger": str(path), "data_sets": rows}, as_json)
        return
    columns = ["client", "data_set", "num_records", "runs", "rounds", "epsilon_local", "epsilon_rho", "delta"]
    columns += ["noise_source"] + ["remaining_rounds"] * (budget_epsilon is not None)
    lines = [columns, *([_cell(column, row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@ledger_app.command("verify")
def verify_ledger(path: LedgerPath, as_json: AsJson = False) -> None:
    """Check the hash chain from the first entry to the last; a broken one is named by its entry, with exit code 1.

    Example: fedpriv ledger verify results/ledger.sqlite
    """
    with ledger.reading(path) as db:
        last = ledger.verify_with_head(db, path)
    _show({"entries": last.number if last else 0, "head": last.digest if last else None, "intact": True}, as_json)


@ledger_app.command("statement")
def show_statement(
    path: LedgerPath,
    client: Annotated[str, typer.Option(help="Id of the client, as `ledger show` lists it.")],
    as_json: AsJson = False,
) -> None:
    """One page for a privacy officer: what a client's data have spent, what that covers and what not.

    Example: fedpriv ledger statement results/ledger.sqlite --client 2
    """
    with ledger.reading(path) as db:
        pages = statement.statement(db, path, client)
    if as_json:
        _show({"client": client, "statements": pages}, as_json)
    else:
        typer.echo("\n\n".join(map(statement.render, pages)))


@ledger_app.command("register")
def register_data_set(
    path: LedgerPath,
    client: Annotated[str, typer.Option(help="Id of the client that holds the data.")],
    num_records: Annotated[int, typer.Option(help="N_k, which stays what it is here.")],
    disjoint: Annotated[
        str | None, typer.Option(help="Your statement why no record is in an earlier data set of this ledger.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="By default 1 / (10 N_k), at most 1e-5.")] = None,
    as_json: AsJson = False,
) -> None:
    """Register a data set in a node's ledger: it gets a random id and starts with nothing spent.

    A node registers its first data set by itself. Another one needs your statement that it shares no record with those
    before: otherwise its spending would start at zero for records that have already paid.

    Example: fedpriv ledger register node.sqlite --client 2 --num-records 5000 --disjoint "admissions of 2027 only"
    """
    if num_records < 1:
        raise InputError(f"--num-records {num_records}: must be >= 1")
    delta = default_delta(num_records) if delta is None else delta
    check_delta(delta)
    with ledger.Ledger(path) as opened:
        if opened.data_set() is not None and not (disjoint or "").strip():
            raise InputError("--disjoint: this ledger holds a data set; say why the new one shares no record with it")
        made = opened.register(client, num_records, delta, note=disjoint)
    _show({"data_set": made.id, "client": client, "num_records": num_records, "delta": delta}, as_json)


def _cell(column: str, value: Any) -> str:
    if column == "data_set":
        return str(value)[:12]
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Folder of a finished run.")], as_json: AsJson = False) -> None:
    """Build a run's report.html again from its tables."""
    from fedpriv.reports.page import write_report

    _show({"report": str(write_report(run_dir))}, as_json)


app.command()(communication)
app.command()(status)
cli_dedup.app.command()(bench)


def _sensitivity_factor(clipping: Clipping, num_tensors: int, head: bool) -> float:
    return sensitivity_factor(clipping.value, num_parts(clipping.value, num_tensors=num_tensors, head=head))


def _show(result: Mapping[str, Any], as_json: bool) -> None:
    """Print a result: one JSON object, where infinity is null, or one aligned line for each entry."""
    if as_json:
        plain = json.loads(json.dumps(result), parse_constant=lambda _: None)
        typer.echo(json.dumps(plain))
        return
    width = max(map(len, result))
    for name, value in result.items():
        if isinstance(value, Mapping):
            typer.echo(f"{name}:")
            inner = max((len(str(key)) for key in value), default=0)
            for key, entry in value.items():
                typer.echo(f"  {key!s:<{inner}}  {entry}")
        else:
            typer.echo(f"{name:<{width}}  {', '.join(map(str, value)) if isinstance(value, list) else value}")


def main() -> None:
    """The console script: a user's mistake is one line on stderr and exit code 2."""
    try:
        app()
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except (LedgerError, StoreError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
