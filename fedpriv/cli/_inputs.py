"""`fedpriv data ...` and `fedpriv config ...`: look at a run's data and configuration before it begins."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli._command import EncodingOption, Result, SeparatorOption, command, entries
from fedpriv.errors import InputError
from fedpriv.texts import counted, printable, visible

if TYPE_CHECKING:
    from fedpriv.config import RunConfig
    from fedpriv.learning.data import Finding, Roles, Table


data_app = typer.Typer(no_args_is_help=True, help="Look at data before anything is registered.")
_File = Annotated[str, typer.Argument(help="CSV, JSONL or Parquet (gzip allowed), or a data set on the Hub.")]
config_app = typer.Typer(
    no_args_is_help=True, help="Check a configuration before it runs, and help an editor to write one."
)


@command(data_app, "check")
def check_data(
    file: _File,
    text: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    label: Annotated[str, typer.Option(help="Column with the label; empty for causal models.")] = "label",
    labels: Annotated[str, typer.Option(help="The classes a,b,c, if they are agreed on.")] = "",
    text_pair: Annotated[str, typer.Option(help="Column with a second text.")] = "",
    client: Annotated[str, typer.Option(help="Column that says which client holds the record.")] = "",
    person: Annotated[str, typer.Option(help="Column that says whom the record is about.")] = "",
    holders: Annotated[int, typer.Option(help="At how many clients a person may have records.", min=1)] = 1,
    prompt: Annotated[str, typer.Option(help="Column with prompts, for models that answer.")] = "",
    response: Annotated[str, typer.Option(help="Column with the responses to them.")] = "",
    messages: Annotated[str, typer.Option(help="Or a column with lists of chat messages.")] = "",
    choices: Annotated[
        list[str] | None, typer.Option(help="Column with the choices of which a response names one; repeatable.")
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt before each chat that has none.")] = "",
    template: Annotated[str, typer.Option(help="A text around each prompt, with {} where it goes.")] = "",
    model: Annotated[
        str | None,
        typer.Option(help="Model whose tokens are counted; by default a run's for texts. '' counts words."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a record, special ones included; by default a run's.", min=1)
    ] = None,
    separator: SeparatorOption = "auto",
    encoding: EncodingOption = "utf-8",
    fix: Annotated[Path | None, typer.Option(help="New .csv or .jsonl file for a cleaned copy.")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="A name that the copy keeps as it is; repeatable.")] = None,
) -> Result:
    """Show what a run would see in a file, and what in it is likely a mistake. Nothing leaves this machine.

    Likely mistakes are told with their number and lines: names of clients or labels in two spellings, what is empty or
    repeated, rare classes, columns of ids. A run refuses some of them. With `--fix`, a cleaned copy is written: one
    spelling for each name, no empty records, none twice; every change is listed. It exits with 1 if a run would refuse
    the table, or its copy.

    With a column of persons, also how many have several records, and who is named in two spellings or not at all.

    With prompts and a model, also how many responses are cut, and three records as the model sees them.

    Example: fedpriv data check medquad.csv.gz --text answer --label question_type --client source

    Example: fedpriv data check letters.csv --client hospital --fix clean.csv

    Example: fedpriv data check medquad.csv.gz --prompt question --response answer --model SmolLM2-135M-Instruct
    """
    from fedpriv.learning.data import Roles, read_table

    table = read_table(file, key="file", separator=separator, encoding=encoding)
    if prompt or response or messages:
        asked: dict[str, Any] = {"prompt_column": prompt, "response_column": response, "messages_column": messages}
        asked |= {"data": file, "system_prompt": system, "prompt_template": template}
        asked |= {"choice_columns": choices, "labels": labels} if choices else {}
        asked |= {"max_length": max_length} if max_length else {}
        result = _check_instructions(table, asked, client=client, person=person, model=model or "")
        texts, label = tuple(filter(None, (messages, prompt, "" if choices else response))), ""
    else:
        columns = {"text": text, "label": label, "text_pair": text_pair, "client": client, "person": person}
        result = _check_texts(table, columns, model=model, max_length=max_length)
        texts = tuple(filter(None, (text, text_pair)))
    classes = tuple(filter(None, labels.split(",")))
    roles = Roles(texts, label=label, client=client, person=person, classes=classes, holders=holders)
    return _with_mistakes(result, table, roles, fix, keep or ())


def _check_texts(table: Table, columns: Mapping[str, str], *, model: str | None, max_length: int | None) -> Result:
    from fedpriv.config import RunConfig
    from fedpriv.learning.data import describe, other_language

    values = describe(table, **columns, tokenizer=_tokenizer(model), max_length=max_length or RunConfig.max_length)
    read = {key: values[key] for key in ("subwords_per_word", "unknown_share") if key in values}
    foreign = other_language(**read) if read else ""
    rounded = {key: round(value, 2) for key, value in read.items()}
    lines = [*entries(_visible(values | rounded)), *_about_persons(values)]
    return Result(values, lines + (["", f"warning: {foreign}"] if foreign else []))


def _visible(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with names in quotes where a blank in them would not be seen."""
    return {
        key: {visible(name): number for name, number in value.items()} if isinstance(value, Mapping) else value
        for key, value in values.items()
    }


def _with_mistakes(result: Result, table: Table, roles: Roles, fix: Path | None, keep: Sequence[str]) -> Result:
    """The result with how the file was read, its likely mistakes and, if a copy is written, what changed in it."""
    from fedpriv.learning.data import CheckedColumns, mistakes, write_mended

    read = {"separator": table.separator, "decimal_commas": table.decimal_commas} if table.separator else {}
    found = mistakes(CheckedColumns.of(table, roles))
    values = {**read, **result.values, "mistakes": list(map(_as_object, found))}
    lines = [*entries({key: value for key, value in read.items() if value}), *(result.lines or [])]
    lines += ["", *map(_as_line, found)] if found else []
    if fix is None:
        return Result(values, lines, code=int(any(finding.refuses for finding in found)))
    mended = write_mended(table, roles, fix, keep=keep)
    values |= {"fixed": {"file": str(fix), "records": mended.num_records, "changes": mended.changes}}
    values |= {"mistakes_left": list(map(_as_object, mended.left))}
    lines += ["", f"{fix}: {counted(mended.num_records, 'record')}", *mended.changes]
    lines += [f"left: {_as_line(finding)}" for finding in mended.left]
    return Result(values, lines, code=int(any(finding.refuses for finding in mended.left)))


def _as_object(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "refused": finding.refuses,
        "message": finding.message,
        "places": list(finding.places),
    }


def _as_line(finding: Finding) -> str:
    return f"{'a run refuses' if finding.refuses else 'warning'}: {printable(finding.message)}"


def _tokenizer(model: str | None) -> Any:
    """The tokenizer of the model, or of a run's own if none is named and it is there; None counts words."""
    from fedpriv.config import RunConfig
    from fedpriv.errors import InputError
    from fedpriv.learning.adapters import check_model

    if model == "":
        return None
    try:
        check_model(model or RunConfig.model)
    except InputError as error:
        if model is not None:
            raise
        typer.echo(f"words are counted, not tokens: {error}", err=True)
        return None
    from fedpriv.learning.adapters import load_tokenizer

    return load_tokenizer(model or RunConfig.model)


def _about_persons(values: Mapping[str, Any]) -> list[str]:
    """Lines that say how a person with several records is protected."""
    most = values.get("most_records_of_a_person", 0)
    if most < 2:
        return []
    return [
        "",
        f"With this person_column an epsilon is that of one person with all records at one client. Without it, it is "
        f"that of one record, and the person with most, {most}, counts as a group of {most} (`fedpriv docs privacy`).",
    ]


def _check_instructions(table: Table, asked: Mapping[str, Any], *, client: str, person: str, model: str) -> Result:
    """The same of prompts and responses."""
    from fedpriv.config import parse
    from fedpriv.learning.data import describe_instructions

    config, tokenizer = parse(asked), None
    if model:
        from fedpriv.learning.adapters import load_tokenizer
        from fedpriv.learning.data.records import chat_format_of

        tokenizer = load_tokenizer(model)
        chat_format_of(config).check(tokenizer, model=model, max_length=config.max_length)
    values, shown = describe_instructions(config, table=table, client=client, person=person, tokenizer=tokenizer)
    lines = [*entries(_visible(values)), *_about_persons(values)]
    for number, parts in enumerate(shown, 1):
        lines += ["", f"record {number}, with what is learned in brackets:", "".join(map(_marked, parts))]
    samples = [[{"text": text, "learned": learned} for text, learned in parts] for parts in shown]
    return Result(values | ({"samples": samples} if model else {}), lines)


def _marked(part: tuple[str, bool]) -> str:
    """The part as text, in brackets where it is learned; the rest is dim in a terminal."""
    text, learned = part
    return f"[[{text}]]" if learned else typer.style(text, dim=True)


@command(data_app)
def lines(
    file: _File,
    out: Annotated[Path, typer.Argument(help="New JSONL file, which you alone may read.")],
    separator: SeparatorOption = "auto",
    encoding: EncodingOption = "utf-8",
) -> Result:
    """Write a table with one record a line, as runs and nodes read it: no field goes on over several lines.

    Example: fedpriv data lines letters.csv letters.jsonl
    """
    from fedpriv.learning.data import write_lines

    num_records = write_lines(file, out, separator=separator, encoding=encoding)
    return Result({"records": num_records, "file": str(out)}, [f"{num_records} records in {out}"])


@command(config_app, "check")
def check_config(
    file: Annotated[Path, typer.Argument(help="TOML file of a run, or of a sweep.")],
    files: Annotated[
        bool, typer.Option("--files/--no-files", help="Also look for the data, the model and the folder that it names.")
    ] = True,
) -> Result:
    """Say everything that is wrong with a configuration, a line for each problem; exit with 2 if there is any.

    Paths are looked for from here, as a run from here would. If nothing else is wrong, the model is loaded and the
    noise calibrated, as when a run begins; not from the Hub, nor with more than 2 GB of weights.

    Example: fedpriv config check simulations/configs/embedded.toml
    """
    from fedpriv.runs.plan.preflight import objections_to_run

    kind, configs, problems, notes = _checked(file)
    problems += (objection for config in configs for objection in objections_to_run(config))
    if files and configs:
        from fedpriv.runs.plan import preflight  # deferred: it may load tables

        problems += preflight.problems(configs, begins=not problems)
    problems = list(dict.fromkeys(problems))
    values = {"file": str(file), "kind": kind, "num_runs": len(configs), "problems": problems, "notes": notes}
    runs = f"a sweep of {len(configs)} runs" if kind == "sweep" else "a run"
    return Result(values, problems or [*notes, f"{file}: {runs}, nothing wrong"], code=2 if problems else 0)


def _checked(file: Path) -> tuple[str, list[RunConfig], list[str], list[str]]:
    """Whether it is a run or a sweep, the configurations without problems, what is wrong with the others, and notes."""
    from fedpriv import config as configuration

    kind, configs, problems, notes = "run", [], [], []
    try:
        values = configuration.read(file)
        listed = [values]
        if configuration.is_sweep(values):
            kind = "sweep"
            listed = [
                dict(point.values) for point in configuration.sweep_points(values, source=str(file), title=file.stem)[2]
            ]
        for each in listed:
            config, found = configuration.checked(each)
            configs += [config] if config else []
            problems += found
            notes += configuration.why_recipe(each).splitlines()
    except InputError as error:
        problems.append(str(error))
    return kind, list(dict.fromkeys(configs)), list(dict.fromkeys(problems)), list(dict.fromkeys(notes))


@command(config_app)
def keys(
    word: Annotated[str, typer.Argument(metavar="[WORD]", help="In a key's name, or in what it means.")] = "",
) -> Result:
    """List the keys of a run's configuration, with their defaults and what they mean; or those that a word is about.

    Example: fedpriv config keys noise
    """
    from fedpriv import config

    known = config.schema()["properties"]
    asked = {key: about for key, about in known.items() if word.lower() in f"{key} {about['description']}".lower()}
    if not asked:
        raise InputError(f"WORD = {word!r}: no key is about it; `fedpriv config keys` lists all")
    values = {
        key: {name: about[name] for name in ("default", "description", "x-group")} for key, about in asked.items()
    }
    lines = []
    for key in sorted(asked, key=lambda key: word.lower() not in key):
        lines += [f"{key} = {json.dumps(known[key]['default'])}", *textwrap.wrap(known[key]["description"], 100), ""]
    return Result({"keys": values}, lines[:-1])


@command(config_app)
def schema(
    sweep: Annotated[bool, typer.Option("--sweep", help="Of a sweep's file instead of a run's.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables of all keys, as in the documentation.")] = False,
) -> Result:
    """Print the JSON Schema (draft 2020-12) of a configuration, with which editors check and complete TOML files.

    Example: fedpriv config schema > fedpriv.schema.json
    """
    from fedpriv import config

    if markdown:
        tables = dict(config.schema_tables())
        parts = [f"## {group}\n\n{table}\n" for group, table in tables.items()]
        return Result({"tables": tables}, parts)
    found: dict[str, Any] = config.schema(sweep=sweep)
    return Result(found, [json.dumps(found, indent=2)])
