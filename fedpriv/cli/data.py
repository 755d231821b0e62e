"""`fedpriv data ...`: look at data before anything is registered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

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
    prompt: Annotated[str, typer.Option(help="Column with prompts, for models that answer.")] = "",
    response: Annotated[str, typer.Option(help="Column with the responses to them.")] = "",
    messages: Annotated[str, typer.Option(help="Or a column with lists of chat messages.")] = "",
    system: Annotated[str, typer.Option(help="System prompt before each chat that has none.")] = "",
    template: Annotated[str, typer.Option(help="A text around each prompt, with {} where it goes.")] = "",
    model: Annotated[str, typer.Option(help="Model whose tokens are counted, to see records as it does.")] = "",
    max_length: Annotated[int, typer.Option(help="Tokens of a record, the chat template's included.")] = 256,
    as_json: AsJson = False,
) -> None:
    """What a run would see in a file: records, labels, clients, lengths, duplicates. Nothing leaves this machine.

    With prompts and a model, also how many responses are cut, and three records as the model sees them.

    Example: fedpriv data check medquad.csv.gz --text answer --label question_type --client source

    Example: fedpriv data check medquad.csv.gz --prompt question --response answer --model SmolLM2-135M-Instruct
    """
    if prompt or response or messages:
        asked = {"prompt_column": prompt, "response_column": response, "messages_column": messages}
        asked |= {"data": file, "system_prompt": system, "prompt_template": template}
        _check_instructions({**asked, "max_length": max_length}, client=client, model=model, as_json=as_json)
        return
    from fedpriv.data.checks import describe

    values = describe(file, text=text, label=label, text_pair=text_pair, client=client)
    show(values, entries(values), as_json)


def _check_instructions(asked: Mapping[str, Any], *, client: str, model: str, as_json: bool) -> None:
    """The same of prompts and responses."""
    from fedpriv.config import parse
    from fedpriv.data.instruction_checks import describe_instructions

    config, tokenizer = parse(asked), None
    if model:
        from fedpriv.adapters.base_models import load_tokenizer
        from fedpriv.data.encoding import chat_format_of

        tokenizer = load_tokenizer(model)
        chat_format_of(config).check(tokenizer, model=model, max_length=config.max_length)
    values, shown = describe_instructions(config, client=client, tokenizer=tokenizer)
    lines = entries(values)
    for number, parts in enumerate(shown, 1):
        lines += ["", f"record {number}, with what is learned in brackets:", "".join(map(_marked, parts))]
    samples = [[{"text": text, "learned": learned} for text, learned in parts] for parts in shown]
    show(values | ({"samples": samples} if model else {}), lines, as_json)


def _marked(part: tuple[str, bool]) -> str:
    """What is learned in brackets; the rest is dim in a terminal."""
    text, learned = part
    return f"[[{text}]]" if learned else typer.style(text, dim=True)


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
