"""`fedpriv data ...`: look at data before anything is registered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.cli._command import Result, command, entries

app = typer.Typer(no_args_is_help=True, help="Look at data before anything is registered.")


@command(app)
def check(
    file: Annotated[str, typer.Argument(help="CSV, JSONL or Parquet (gzip allowed), or a data set on the Hub.")],
    text: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    label: Annotated[str, typer.Option(help="Column with the label; empty for causal models.")] = "label",
    text_pair: Annotated[str, typer.Option(help="Column with a second text.")] = "",
    client: Annotated[str, typer.Option(help="Column that says which client holds the record.")] = "",
    person: Annotated[str, typer.Option(help="Column that says whom the record is about.")] = "",
    prompt: Annotated[str, typer.Option(help="Column with prompts, for models that answer.")] = "",
    response: Annotated[str, typer.Option(help="Column with the responses to them.")] = "",
    messages: Annotated[str, typer.Option(help="Or a column with lists of chat messages.")] = "",
    system: Annotated[str, typer.Option(help="System prompt before each chat that has none.")] = "",
    template: Annotated[str, typer.Option(help="A text around each prompt, with {} where it goes.")] = "",
    model: Annotated[
        str | None,
        typer.Option(help="Model whose tokens are counted; by default a run's for texts. '' counts words."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a record, special ones included; by default a run's.", min=1)
    ] = None,
) -> Result:
    """Show what a run would see in a file: records, labels, clients, lengths, duplicates. Nothing leaves this machine.

    With a column of persons, also how many have several records: epsilon is that of one record.

    With prompts and a model, also how many responses are cut, and three records as the model sees them.

    Example: fedpriv data check medquad.csv.gz --text answer --label question_type --client source

    Example: fedpriv data check medquad.csv.gz --prompt question --response answer --model SmolLM2-135M-Instruct
    """
    if prompt or response or messages:
        asked: dict[str, Any] = {"prompt_column": prompt, "response_column": response, "messages_column": messages}
        asked |= {"data": file, "system_prompt": system, "prompt_template": template}
        asked |= {"max_length": max_length} if max_length else {}
        return _check_instructions(asked, client=client, person=person, model=model or "")
    from fedpriv.config import RunConfig
    from fedpriv.data import describe

    columns = {"text": text, "label": label, "text_pair": text_pair, "client": client, "person": person}
    tokenizer = _tokenizer(model)
    values = describe(file, **columns, tokenizer=tokenizer, max_length=max_length or RunConfig.max_length)
    return Result(values, [*entries(values), *_about_persons(values)])


def _tokenizer(model: str | None) -> Any:
    """The tokenizer of the model, or of a run's own if none is named and it is there; None counts words."""
    from fedpriv.adapters import check_model
    from fedpriv.config import RunConfig
    from fedpriv.errors import InputError

    if model == "":
        return None
    try:
        check_model(model or RunConfig.model)
    except InputError as error:
        if model is not None:
            raise
        typer.echo(f"words are counted, not tokens: {error}", err=True)
        return None
    from fedpriv.adapters import load_tokenizer

    return load_tokenizer(model or RunConfig.model)


def _about_persons(values: Mapping[str, Any]) -> list[str]:
    """Lines that say how a person with several records is protected."""
    most = values.get("most_records_of_a_person", 0)
    if most < 2:
        return []
    return [
        "",
        f"An epsilon is that of one record. The person with most has {most}, and is protected as a group of {most} "
        "(docs/privacy.md).",
    ]


def _check_instructions(asked: Mapping[str, Any], *, client: str, person: str, model: str) -> Result:
    """The same of prompts and responses."""
    from fedpriv.config import parse
    from fedpriv.data import describe_instructions

    config, tokenizer = parse(asked), None
    if model:
        from fedpriv.adapters import load_tokenizer
        from fedpriv.data.records import chat_format_of

        tokenizer = load_tokenizer(model)
        chat_format_of(config).check(tokenizer, model=model, max_length=config.max_length)
    values, shown = describe_instructions(config, client=client, person=person, tokenizer=tokenizer)
    lines = [*entries(values), *_about_persons(values)]
    for number, parts in enumerate(shown, 1):
        lines += ["", f"record {number}, with what is learned in brackets:", "".join(map(_marked, parts))]
    samples = [[{"text": text, "learned": learned} for text, learned in parts] for parts in shown]
    return Result(values | ({"samples": samples} if model else {}), lines)


def _marked(part: tuple[str, bool]) -> str:
    """The part as text, in brackets where it is learned; the rest is dim in a terminal."""
    text, learned = part
    return f"[[{text}]]" if learned else typer.style(text, dim=True)


@command(app)
def lines(
    file: Annotated[str, typer.Argument(help="CSV, JSONL or Parquet (gzip allowed), or a data set on the Hub.")],
    out: Annotated[Path, typer.Argument(help="New JSONL file, which you alone may read.")],
) -> Result:
    """Write a table with one record a line, as a node needs its own records: no field goes on over several lines.

    Example: fedpriv data lines letters.csv letters.jsonl
    """
    from fedpriv.data import write_lines

    num_records = write_lines(file, out)
    return Result({"records": num_records, "file": str(out)}, [f"{num_records} records in {out}"])
