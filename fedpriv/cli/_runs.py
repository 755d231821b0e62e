"""`fedpriv report`, `status`, `watch`, `predict`, `export`, `card` and `push`: a run's folder, and its models."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli._command import (
    AsJson,
    EncodingOption,
    ModelName,
    Result,
    SavedModel,
    SeparatorOption,
    VariantName,
    check_new_file,
    one_of,
    show,
    table,
)
from fedpriv.errors import InputError, first_line
from fedpriv.texts import counted

if TYPE_CHECKING:
    from fedpriv.models.publishing.saved import LoadedVariant, SavedVariant


License = Annotated[
    str, typer.Option("--license", help="The Hub's identifier of a license, such as apache-2.0; by default none.")
]

# What `push` tells of every holder.
_COSTS = ("client", "epsilon_local", "epsilon_rho", "epsilon_aggregate", "delta")


def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    paper: Annotated[
        Path | None, typer.Option(help="Folder for run.tex, with the sentence and the table, and for plots in PDF.")
    ] = None,
) -> dict[str, Any]:
    """Build a run's report.html again from its tables; with --paper, also what a paper needs of it.

    Example: fedpriv report results/20261121-042553-embedded --paper paper
    """
    from fedpriv.models.variants import stored_in
    from fedpriv.runs.show import write_paper, write_report

    written = {"report": str(write_report(run_dir, stored_in(run_dir)))}
    return written if paper is None else written | {"paper": list(map(str, write_paper(run_dir, paper)))}


def status(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run: under way, interrupted or finished.")],
    as_json: AsJson = False,
) -> None:
    """Show the state of a run from its folder alone: rounds, epsilons, every client, the last events.

    A run is interrupted once its process is gone. Where only another machine could tell, its state is unknown once it
    has written nothing for `round_seconds`. Example:

    fedpriv status results/20261121-042553-embedded
    """
    from rich.console import Console

    from fedpriv.runs import RunFolder, status_of
    from fedpriv.runs.show import show_status

    folder = RunFolder(run_dir)
    if as_json:
        show(status_of(folder).as_dict(), [], as_json)
    else:
        show_status(folder, Console(highlight=False))


def watch(
    folder: Annotated[Path, typer.Argument(help="Folder of a run or a sweep; it may begin later.")],
    as_json: AsJson = False,
) -> None:
    """Show a run or a sweep while it goes on, as `fedpriv status` does, until it has ended.

    It reads the folder and writes nothing; `report.html` there shows the same in a browser. --json prints one object
    at the end. Ctrl-C ends it, not the run. Example:

    fedpriv watch results/20261121-042553-embedded
    """
    from rich.console import Console

    from fedpriv.runs.show import watch as show_until_end

    values = show_until_end(folder, Console(highlight=False, quiet=as_json))
    if as_json:
        show(values, [], as_json)


def export(
    source: SavedModel,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")],
    variant: VariantName = "",
    model: ModelName = "",
    transformers: Annotated[
        bool, typer.Option("--transformers", help="A classifier for the pipeline of transformers, twice as wide.")
    ] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="For llama.cpp and Ollama; language models alone.")] = False,
    only: Annotated[
        str, typer.Option(help="With --gguf: the LoRA adapter, or the whole model, alone.", metavar="[adapter|model]")
    ] = "",
    precision: Annotated[
        Any, one_of("fedpriv.models.publishing.card:Precision", "With --gguf: of the whole model's matrices.")
    ] = "float16",
) -> Result:
    """Write a run's model as a folder that loads without fedpriv and answers as `fedpriv predict` does.

    A classifier of pooled texts becomes a sentence-transformers model, or with --transformers one for its pipeline; any
    other becomes a transformers model, with the adapter merged in float32. With --gguf a language model becomes
    adapter.gguf, a LoRA for the base's GGUF file, model.gguf, the whole model, and a Modelfile. Its README.md shows how
    to use it.

    Example: fedpriv export results/20261121-042553-embedded model-for-everyone

    Example: fedpriv export results/letters letters-gguf --gguf
    """
    from fedpriv.models.publishing import saved
    from fedpriv.models.publishing.export import check_new, form_of
    from fedpriv.models.publishing.export import export as export_to

    check_new(out)
    if transformers and gguf:
        raise InputError("transformers, gguf: are two forms; name one of them")
    found = saved.find(source, variant=variant, model=model)
    if gguf:
        return _export_gguf(found, out, only, precision)
    if only or precision != "float16":
        raise InputError("only, precision: are of --gguf; add it, or leave them out")
    form = "transformers" if transformers else form_of(found)
    export_to(saved.load(found), out, form)
    values = {"out": str(out), "variant": found.name, "library": form}
    return Result(values, [f"{out}: {found.name} as a {form} model; {out / 'README.md'} shows how to use it"])


def _export_gguf(found: SavedVariant, out: Path, only: str, precision: Any) -> Result:
    try:
        from fedpriv.models.publishing import gguf_files
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise InputError("gguf: needs the package gguf; install it with pip install 'fedpriv[llm]'") from None
    from fedpriv.models.publishing import saved

    forms: dict[str, Any] = {"": "gguf", "adapter": "gguf-adapter", "model": "gguf-model"}
    if only not in forms:
        raise InputError(f"only = {only!r}: must be adapter or model")
    if only == "adapter" and precision != "float16":
        raise InputError(f"precision = {precision!r}: a LoRA is in float32 whatever it is; leave it out")
    gguf_files.check(found)
    done = gguf_files.export(saved.load(found), out, form=forms[only], precision=precision)
    values: dict[str, Any] = {"out": str(out), "variant": found.name, "library": "gguf", "files": done.files}
    values |= {"modelfile_has_template": done.has_template}
    lines = [f"{out}: {found.name} as {', '.join(done.files)}; {out / 'README.md'} shows how to use them"]
    if not done.has_template:
        lines.append("The chat template has no equal in Ollama's language, so Ollama takes what it knows of the model.")
    return Result(values, lines)


def card(
    source: SavedModel,
    variant: VariantName = "",
    write: Annotated[bool, typer.Option("--write", help="Write README.md into the variant's folder instead.")] = False,
    license: License = "",
) -> Result:
    """Print the model card of a run's variant, or write it again: its cost and its purpose, in the Hub's format.

    Example: fedpriv card results/20261121-042553-embedded
    """
    from fedpriv.models.publishing import card as cards
    from fedpriv.models.publishing import saved

    found = saved.find(source, variant=variant)
    if write:
        path = str(cards.write_one(found, license=license))
        return Result({"variant": found.name, "card": path}, [path])
    text = cards.text(found, license=license)
    return Result({"variant": found.name, "card": text}, [text.rstrip("\n")])


def push(
    source: SavedModel,
    name: Annotated[str, typer.Argument(metavar="NAME", help="OWNER/NAME of the repository on the Hub.")],
    variant: VariantName = "",
    yes: Annotated[bool, typer.Option("--yes", help="Upload; without it, only show what would be.")] = False,
    public: Annotated[bool, typer.Option("--public", help="A new repository can be read by everybody.")] = False,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Where the run was charged; by default the ledger of its configuration, or else its own."),
    ] = None,
    public_data: Annotated[
        bool, typer.Option("--public-data", help="The records are public, as the run's configuration says too.")
    ] = False,
    license: License = "",
) -> Result:
    """Upload a variant to the Hugging Face Hub. Without --yes it lists the files, and what they cost every holder.

    The global models of a private run may go out. A holder's own variant needs that holder's permission in the ledger,
    see `fedpriv ledger permit`. Neither configuration, ledger nor provenance is uploaded.

    Example: fedpriv push results/20261121-042553-embedded clinic/letters

    Example: fedpriv push results/20261121-042553-embedded clinic/letters --variant client-2 --yes
    """
    from fedpriv.models.publishing import hub, saved

    hub.check_name(name)
    found = saved.find(source, variant=variant)
    reason = hub.why_publishable(found, ledger=ledger, public_data=public_data)
    contents = hub.contents(found, license=license)
    sizes = [{"file": path, "bytes": len(content)} for path, content in contents.items()]
    clients = found.run.summary["clients"] if found.run else ()  # only a finished run's variant is publishable
    holders = [{key: client.get(key) for key in _COSTS} for client in clients]
    address = hub.upload(name, contents, public=public) if yes else None
    values: dict[str, Any] = {"variant": found.name, "name": name, "uploaded": yes, "address": address}
    values |= {"allowed": reason, "files": sizes, "holders": holders}
    lines = [
        f"{found.name} to {name}, {'public' if public else 'private'} if it is new",
        f"allowed: {reason}",
        *("", *table(sizes, ("file", "bytes"))),
        *("", "what the run, and with it this variant, has cost every holder:"),
        *table(holders, _COSTS),
        *("", f"uploaded: {address}" if yes else "nothing was uploaded; add --yes to do it"),
    ]
    return Result(values, lines)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The texts, for a table its columns, {name: values}, and the choices of each text if there are any."""

    texts: list[str]
    pairs: list[str] | None
    columns: dict[str, list[str]] | None = None
    choices: list[tuple[str, ...]] | None = None

    @property
    def given(self) -> list[int]:
        """The rows that have a text, and a second one where pairs are asked."""
        both = zip(self.texts, self.pairs or self.texts, strict=True)
        return [row for row, texts in enumerate(both) if all(text.strip() for text in texts)]

    def in_rows(self, answers: Sequence[Any]) -> list[Any]:
        """The answers of the rows that have a text, and None for each other row."""
        of_rows = dict(zip(self.given, answers, strict=True))
        return [of_rows.get(row) for row in range(len(self.texts))]


# A text without a blank that is like a path, or standard input.
_FILE_NAME = re.compile(r"-|\S*[/\\]\S*|\S+\.[A-Za-z]\w{0,6}")


def predict(
    source: SavedModel,
    asked: Annotated[str, typer.Argument(metavar="TEXT|FILE", help="A text, or a .csv, .jsonl or .parquet file.")],
    text: Annotated[str, typer.Option(help="Column of a file with the texts.")] = "text",
    pair: Annotated[
        str, typer.Option(help="For a model of text pairs: the second text, or a file's column with it.")
    ] = "",
    choices: Annotated[
        list[str] | None, typer.Option(help="A choice, of which the likeliest is told, or a file's column; repeatable.")
    ] = None,
    variant: VariantName = "",
    model: ModelName = "",
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer of a language model; by default the run's.", min=1)
    ] = None,
    separator: SeparatorOption = "auto",
    encoding: EncodingOption = "utf-8",
    out: Annotated[Path | None, typer.Option(help="CSV to write instead of printing; must not exist.")] = None,
) -> Result:
    """Ask a run's model: classes with their probabilities, or a language model's answers, or its likeliest choice.

    A file gives a CSV: its columns, and what was predicted. Answers are computed in float32, and other texts change
    one by no more than rounding. A row without a text gets none, and is counted.

    Example: fedpriv predict results/20261121-042553-embedded 'a rash on the left knee'

    Example: fedpriv predict results/20261121-042553-embedded letters.csv --text letter --out answers.csv
    """
    from fedpriv.learning.adapters import use_the_faster
    from fedpriv.models.publishing import saved

    check_new_file(out)
    found = saved.find(source, variant=variant, model=model)
    asking = _asked(asked, text, pair, choices or [], separator=separator, encoding=encoding)
    if out is not None and asking.columns is None:
        raise InputError(f"out = {str(out)!r}: is for the answers to a file; a single text's are printed")
    loaded = saved.load(found)
    use_the_faster(loaded.peft_model)
    new = _predicted(loaded, asking, max_new_tokens)
    if num_empty := len(asking.texts) - len(asking.given):
        typer.echo(f"{num_empty} of {counted(len(asking.texts), 'row')} without a text: they have no answer", err=True)
    rows = [dict(zip(new, values, strict=True)) for values in zip(*new.values(), strict=True)]
    values: dict[str, Any] = {"variant": found.name, "task": found.task, "labels": list(found.labels)}
    if asking.columns is None:
        return Result(values | _as_object(rows[0], found.labels), _lines(rows[0], found.labels))
    table = _csv({**asking.columns, **new})
    if out is not None:
        from fedpriv.files import write_new

        write_new(out, table.encode())
        values |= {"out": str(out), "num_texts": len(rows)}
        return Result(values, [f"{out}: {len(rows)} texts answered by {found.name}"])
    return Result(values | {"predictions": [_as_object(row, found.labels) for row in rows]}, [table.rstrip("\n")])


def _asked(asked: str, text: str, pair: str, choices: list[str], *, separator: Any, encoding: Any) -> _Asked:
    """The texts of the command line, or of the file that it names."""
    from fedpriv.learning.data import FORMATS, read_table, suffix_of

    if not asked.strip():
        raise InputError(f"TEXT = {asked!r}: is empty; give a text, or a file")
    kind = "" if "\n" in asked else _kind_of_file(asked)
    if "\n" in asked or not (kind == "file" or suffix_of(Path(asked)) in FORMATS):
        if kind or _FILE_NAME.fullmatch(asked):
            raise InputError(
                f"FILE = {asked!r}: {kind or 'no such file'}; name a {', '.join(FORMATS)} file, or give a text that "
                "looks like a name with a blank at its end"
            )
        return _Asked(texts=[asked], pairs=[pair] if pair else None, choices=[_choices(choices)] if choices else None)
    table = read_table(asked, key="FILE", separator=separator, encoding=encoding)
    named = [("--text", text), *([("--pair", pair)] if pair else []), *(("--choices", name) for name in choices)]
    for option, name in named:
        if name not in table.columns:
            raise InputError(f"{option} {name}: {asked} has the columns {', '.join(table.columns)}")
    columns = {name: [value or "" for value in table.names_of(name)] for name in table.columns}
    found = zip(*(table.columns[name] for name in choices), strict=True)
    own = [_choices(values, f"FILE: record {number} ") for number, values in enumerate(found, start=1)]
    return _Asked(texts=columns[text], pairs=columns[pair] if pair else None, columns=columns, choices=own or None)


def _choices(values: Sequence[object], where: str = "--choices: ") -> tuple[str, ...]:
    from fedpriv.learning.data.text import named_choices

    try:
        return named_choices(values)[1]
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}{first_line(error)}") from None


def _kind_of_file(text: str) -> str:
    """Whether a path is a `file`, or why it cannot be read as one; empty if nothing has that name."""
    try:
        path = Path(text)
        return "file" if path.is_file() else "is no regular file" if path.exists() else ""
    except (OSError, ValueError):  # too long for a name, or no name at all
        return ""


def _predicted(loaded: LoadedVariant, asking: _Asked, max_new_tokens: int | None) -> dict[str, list[Any]]:
    """{column: values} of what the model says; refuses columns that the table has already."""
    from fedpriv.models.publishing import saved

    labels = loaded.saved.labels
    names = ["predicted_label", *(f"probability_{label}" for label in labels)] if labels else ["answer"]
    if asking.choices is not None:
        if labels:
            raise InputError(f"--choices: {loaded.saved.name} is a classifier, with labels of its own")
        names = ["predicted_choice", "predicted_number", "log_likelihoods"]
    if taken := sorted(set(names) & set(asking.columns or {})):
        raise InputError(f"FILE: has a column {taken[0]} already; rename it, since the answers are written there")
    texts = [asking.texts[row] for row in asking.given]
    if not labels:
        if asking.pairs is not None:
            raise InputError(f"--pair: {loaded.saved.name} is a language model, which takes one prompt")
        if asking.choices is not None:
            own = [asking.choices[row] for row in asking.given]
            scores = saved.choose(loaded, texts, own)
            places = [max(range(len(row)), key=row.__getitem__) for row in scores]
            chosen = [choices[place] for choices, place in zip(own, places, strict=True)]
            told: tuple[list[Any], ...] = chosen, places, list(map(list, scores))
            return {name: asking.in_rows(column) for name, column in zip(names, told, strict=True)}
        return {"answer": asking.in_rows(saved.generate(loaded, texts, max_new_tokens=max_new_tokens))}
    found = saved.classify(loaded, texts, asking.pairs and [asking.pairs[row] for row in asking.given])
    best = [labels[max(range(len(labels)), key=row.__getitem__)] for row in found]
    columns: tuple[list[Any], ...] = (best, *([row[label] for row in found] for label in range(len(labels))))
    return {name: asking.in_rows(column) for name, column in zip(names, columns, strict=True)}


def _as_object(row: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    if not labels:
        return row
    return {"label": row["predicted_label"], "probabilities": {label: row[f"probability_{label}"] for label in labels}}


def _lines(row: dict[str, Any], labels: Sequence[str]) -> list[str]:
    if not labels:
        return [_printable(row["answer" if "answer" in row else "predicted_choice"])]
    width = max(map(len, labels))
    ordered = sorted(labels, key=lambda label: -row[f"probability_{label}"])
    return [f"{_printable(label):<{width}}  {row[f'probability_{label}']:.4f}" for label in ordered]


def _printable(text: str) -> str:
    """The text without characters that a terminal would obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def _csv(columns: dict[str, list[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return file.getvalue()
