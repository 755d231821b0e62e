"""`fedpriv ledger ...`: what every data set has spent, from its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedpriv.cli.output import AsJson, entries, show, table
from fedpriv.errors import InputError

app = typer.Typer(no_args_is_help=True, help="What every data set has spent, from its ledger.")

LedgerPath = Annotated[Path, typer.Argument(help="ledger.sqlite of a run, or a node's own ledger.")]

COLUMNS = ("client", "data_set", "num_records", "runs", "rounds", "epsilon_local", "epsilon_rho", "delta")


@app.command("show")
def show_ledger(
    path: LedgerPath,
    budget_epsilon: Annotated[
        float | None, typer.Option(help="Also show how many rounds this budget leaves, in the local view.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What each client and data set has spent, by pld; with a budget, also the rounds that remain.

    Example: fedpriv ledger show results/ledger.sqlite --budget-epsilon 4
    """
    from fedpriv.ledger import reader, statement

    with reader.reading(path) as db:
        reader.verify_with_head(db, path)
        rows = statement.spending(db, budget_epsilon=budget_epsilon)
    columns = [*COLUMNS, "noise_source", *(["remaining_rounds"] if budget_epsilon is not None else [])]
    short = [{**row, "data_set": row["data_set"][:12]} for row in rows]
    show({"ledger": str(path), "data_sets": rows}, table(short, columns), as_json)


@app.command()
def verify(path: LedgerPath, as_json: AsJson = False) -> None:
    """Check the hash chain from the first entry to the last. Exit code 1 if it is broken, naming the entry.

    Example: fedpriv ledger verify results/ledger.sqlite
    """
    from fedpriv.ledger import reader

    with reader.reading(path) as db:
        last = reader.verify_with_head(db, path)
    values = {"entries": last.number if last else 0, "head": last.digest if last else None, "intact": True}
    show(values, entries(values), as_json)


@app.command()
def statement(
    path: LedgerPath,
    client: Annotated[str, typer.Option(help="Id of the client, as `ledger show` lists it.")],
    as_json: AsJson = False,
) -> None:
    """One page for a privacy officer: what a client's data have spent, what that covers and what it does not.

    Example: fedpriv ledger statement results/ledger.sqlite --client 2
    """
    from fedpriv.ledger import reader
    from fedpriv.ledger import statement as statements

    with reader.reading(path) as db:
        pages = statements.statement(db, path, client)
    text = "\n\n".join(map(statements.render, pages))
    show({"client": client, "statements": pages}, [text], as_json)


@app.command()
def register(
    path: LedgerPath,
    client: Annotated[str, typer.Option(help="Id of the client that holds the data.")],
    num_records: Annotated[int, typer.Option(help="N_k, which never changes afterwards.")],
    disjoint: Annotated[
        str | None, typer.Option(help="Your statement why no record is in an earlier data set of this ledger.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="By default 1 / (10 N_k), at most 1e-5.")] = None,
    as_json: AsJson = False,
) -> None:
    """Register a data set in a node's ledger: it gets a random id and starts with nothing spent.

    A node registers its first data set by itself. Any further one needs your statement that it shares no record with
    the earlier ones: otherwise records that have already paid would start again at zero.

    Example: fedpriv ledger register node.sqlite --client 2 --num-records 5000 --disjoint "admissions of 2027 only"
    """
    from fedpriv.accounting.accountants import check_delta
    from fedpriv.accounting.views import default_delta
    from fedpriv.ledger.ledger import Ledger

    if num_records < 1:
        raise InputError(f"--num-records {num_records}: must be >= 1")
    delta = default_delta(num_records) if delta is None else delta
    check_delta(delta)
    with Ledger(path) as opened:
        if opened.data_set() is not None and not (disjoint or "").strip():
            raise InputError("--disjoint: this ledger holds a data set; say why the new one shares no record with it")
        made = opened.register(client, num_records, delta, note=disjoint)
    values = {"data_set": made.id, "client": client, "num_records": num_records, "delta": delta}
    show(values, entries(values), as_json)
