"""`fedpriv data ...`: look at data before anything is registered."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedpriv.cli.output import AsJson, entries, show

app = typer.Typer(no_args_is_help=True, help="Look at data before anything is registered.")


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="CSV, JSONL or Parquet (gzip allowed), or a data set on the Hub.")],
    text: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    label: Annotated[str, typer.Option(help="Column with the label; empty for causal models.")] = "label",
    text_pair: Annotated[str, typer.Option(help="Column with a second text.")] = "",
    client: Annotated[str, typer.Option(help="Column that says which client holds the record.")] = "",
    as_json: AsJson = False,
) -> None:
    """What a run would see in a file: records, labels, clients, lengths, duplicates. Nothing leaves this machine.

    Example: fedpriv data check medquad.csv.gz --text answer --label question_type --client source
    """
    from fedpriv.data.checks import describe

    values = describe(file, text=text, label=label, text_pair=text_pair, client=client)
    show(values, entries(values), as_json)


@app.command()
def lines(
    file: Annotated[str, typer.Argument(help="CSV, JSONL or Parquet (gzip allowed), or a data set on the Hub.")],
    out: Annotated[Path, typer.Argument(help="New JSONL file, which you alone may read.")],
    as_json: AsJson = False,
) -> None:
    """Write a table with one record a line, as a node needs its own records: no field goes on over several lines.

    Example: fedpriv data lines letters.csv letters.jsonl
    """
    from fedpriv.data.own import write_lines

    num_records = write_lines(file, out)
    show({"records": num_records, "file": str(out)}, [f"{num_records} records in {out}"], as_json)
