"""`fedpriv init`: a commented configuration for a table of records, from a question for each column, or flags."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
import typer

from fedpriv import config as configuration
from fedpriv.config import DataSection
from fedpriv.errors import InputError
from fedpriv.files import replace_file
from fedpriv.texts import printable

if TYPE_CHECKING:
    from fedpriv.config import RunConfig
    from fedpriv.learning.data import Finding, Table

# Names that people give to such columns, in English, German, French and Spanish, without accents; without one of them,
# what a column holds decides.
_TEXT_NAMES = (
    "text message sentence letter note report review question content body befund brief nachricht notiz bericht "
    "beschreibung inhalt freitext frage anamnese texte lettre rapport commentaire description contenu compte_rendu "
    "texto mensaje carta nota informe comentario descripcion contenido pregunta"
)
_LABEL_NAMES = (
    "label class category department diagnosis target type sentiment topic klasse kategorie abteilung diagnose ziel "
    "fachabteilung thema classe categorie departement diagnostic cible etiquette sujet clase categoria departamento "
    "diagnostico objetivo etiqueta tema"
)
_HOLDER_NAMES = (
    "client hospital holder site institution clinic bank centre center source krankenhaus klinik haus praxis standort "
    "einrichtung filiale hopital clinique etablissement cabinet banque clinica centro banco sucursal institucion"
)

# Of each likely mistake, so many places are named.
_PLACES = 20

# Of each column, so many values are shown, and so much of each.
_SAMPLES, _SAMPLE_WIDTH = 3, 32

# A column of classes repeats its values: so many records of each on average, and at most so many classes.
_RECORDS_PER_LABEL = 5
_MOST_LABELS = 100

# A holder has so many records on average, and a column with no other values than these is one of answers.
_RECORDS_PER_HOLDER = 20
_ANSWERS = frozenset(("m", "f", "w", "d", "x", "y", "n", "yes", "no", "ja", "nein", "true", "false", "male", "female"))

_DEFAULT_EPSILON = 2.3
_ABOUT_PRIVACY = "An epsilon for this run, per holder; or `budget 4` for all runs together."


@dataclass(frozen=True, kw_only=True)
class _Answers:
    """The answers that a configuration is written from.

    Attributes:
        data: the table of records.
        layout: whose keys say how the table is read.
        text, label: columns.
        client: column that says who holds a record; empty deals the records out to five simulated holders.
        person: column that says whom a record is about; empty protects records.
        holders: at how many clients a person may have records.
        partition: how records are dealt out where no column says who holds them.
        num_clients: to how many.
        epsilon: that this run may cost each holder; None for the default, within the budget.
        budget: epsilon that all runs together may cost each holder; None for none.
        test_data: the server's own records; empty for none.
        public: whether nobody's privacy depends on the data.
    """

    data: Path
    layout: DataSection
    text: str = ""
    label: str = ""
    client: str = ""
    person: str = ""
    holders: int = 1
    partition: str = "iid"
    num_clients: int = 5
    epsilon: float | None = None
    budget: float | None = None
    test_data: Path | None = None
    public: bool = False


def init(
    file: Annotated[Path | None, typer.Argument(help="CSV, TSV, JSONL or Parquet file with the records.")] = None,
    text: Annotated[str, typer.Option(help="Column with the text.")] = "",
    label: Annotated[str, typer.Option(help="Column with the class to be predicted.")] = "",
    client: Annotated[str | None, typer.Option(help="Column that says who holds a record; '' for none.")] = None,
    person: Annotated[str | None, typer.Option(help="Column that says whom a record is about; '' for none.")] = None,
    holders: Annotated[int, typer.Option(help="At how many clients a person may have records.", min=1)] = 1,
    clients: Annotated[int | None, typer.Option(help="Deal records out to so many simulated holders.", min=1)] = None,
    partition: Annotated[str | None, typer.Option(help="How: iid, or dirichlet by label.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="What this run may cost each holder.")] = None,
    budget: Annotated[float | None, typer.Option(help="What all runs together may cost each holder.")] = None,
    test_data: Annotated[Path | None, typer.Option(help="File with the server's own test records.")] = None,
    separator: Annotated[str, typer.Option(help="Of a CSV file, if its header does not tell it.")] = "auto",
    encoding: Annotated[str, typer.Option(help="Of the file, if it is not UTF-8, such as latin-1.")] = "utf-8",
    public_data: Annotated[bool, typer.Option("--public-data", help="Nobody's privacy depends on the data.")] = False,
    out: Annotated[Path | None, typer.Option(help="TOML file to write; by default named after the data.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a commented configuration for a table of records: asks for the file, its columns, and how much privacy.

    Whatever an option says is not asked for; where nobody can answer, what the file suggests is taken. Then `--label`
    is required, unless a column has a usual name, and `--client`, unless one column alone can say who holds a record.
    The file is looked at on this machine alone, and none of its records are written anywhere. If a run would refuse the
    table, the file says in comments what is to be mended, and the command exits with 1.

    Examples:

        fedpriv init letters.csv

        fedpriv init letters.csv --text text --label department --client hospital --person patient --epsilon 4
    """
    try:
        asks = sys.stdin.isatty()
        data = file or (Path(_ask("Which file holds the records?", "")) if asks else None)
        if data is None:
            raise InputError("file: name the file with the records, such as letters.csv")
        place = out or Path(f"{data.name.split('.')[0]}.toml")
        if place.exists() and not force:
            raise InputError(f"out = {str(place)!r}: exists; name another file, or replace it with --force")
        layout = configuration.parse({"separator": separator, "encoding": encoding})
        table = _table(data, layout)
        answers = _Answers(
            data=data, layout=layout, epsilon=epsilon, budget=budget, test_data=test_data, public=public_data
        )
        if clients is not None or partition is not None:
            if client:
                raise InputError(f"clients, partition: deal records out, but client = {client!r} says who holds them")
            client, answers = "", replace(answers, partition=partition or "iid", num_clients=clients or 5)
        if asks:
            _show(table)
        answers = _with_columns(answers, table, text, label, client, asks=asks)
        answers = replace(_with_person(answers, table, person, asks=asks), holders=holders)
        if epsilon is None and budget is None and asks:
            typer.echo(_ABOUT_PRIVACY)
            answers = _with_privacy(answers, _ask("How much privacy?", str(_DEFAULT_EPSILON)))
        written = _to_toml(answers, folder=place.absolute().parent)
        warnings, refusal = _checked(written, table, answers.text)
        _write(place, _to_be_mended(written, table) + written if refusal else written)
    except InputError as error:
        typer.echo(f"error: {printable(error)}", err=True)
        raise typer.Exit(2) from None
    for line in warnings:
        typer.echo(f"warning: {printable(line)}", err=True)
    held = repr(answers.client) if answers.client else "none: records are dealt out"
    protected = f", each person of {answers.person!r} protected" if answers.person else ""
    typer.echo(f"{place}: text {answers.text!r}, label {answers.label!r}, client {held}{protected}")
    if refusal:
        typer.echo(f"error: a run refuses the table: {printable(refusal)}", err=True)
        raise typer.Exit(1)
    typer.echo(f"next: fedpriv run {shlex.quote(str(place))}")


@dataclass(frozen=True)
class _Proposed:
    """The columns that seem to hold text, label and client; empty where none does.

    Attributes:
        text, label, client: columns.
        is_named: whether the label has a usual name, or is given; else its values alone suggest it.
        rivals: {column: number of its values} of those that could hold clients, where none is proposed.
    """

    text: str
    label: str
    client: str
    is_named: bool
    rivals: Mapping[str, int]


def _proposed(table: Table, text: str, label: str) -> _Proposed:
    """The columns that seem to hold what is not given.

    A column's name decides if it is a usual one; otherwise the longest texts are taken for the text, and the column
    with the fewest repeated values for the label. A column of clients has a usual name; or, where the label is given or
    has one, it is the only other column with a few names, each with many records, that are no answers such as m and f.
    """
    columns = {name: Counter(value for value in table.names_of(name) if value is not None) for name in table.columns}
    lengths = {name: sum(len(v) * n for v, n in c.items()) / max(1, c.total()) for name, c in columns.items()}
    classes = [
        name
        for name, counts in columns.items()
        if 2 <= len(counts) <= min(_MOST_LABELS, counts.total() // _RECORDS_PER_LABEL)
    ]
    free = [name for name in columns if name not in classes] or list(columns)
    text = text or _named(free, _TEXT_NAMES) or max(free, key=lengths.__getitem__, default="")
    rest = [name for name in classes if name not in (text, label)]
    named = _named(rest, _HOLDER_NAMES)
    label = label or _named([name for name in rest if name != named], _LABEL_NAMES)
    guessed = label or min((n for n in rest if n != named), key=lambda name: len(columns[name]), default="")
    alike = {name: len(columns[name]) for name in rest if name != guessed and _are_holders(columns[name])}
    client = named or (next(iter(alike)) if label and len(alike) == 1 else "")
    return _Proposed(text, guessed, client, bool(label), {} if client else alike)


def _are_holders(counts: Counter[str]) -> bool:
    """Whether values could be names of data holders: words, each with many records, and not yes and no, or m and f."""
    folded = {value.strip().casefold() for value in counts}
    words = sum(number for value, number in counts.items() if any(map(str.isalpha, value)) and len(value) > 1)
    return not folded <= _ANSWERS and 2 * words > counts.total() and counts.total() >= _RECORDS_PER_HOLDER * len(folded)


def _to_toml(answers: _Answers, *, folder: Path) -> str:
    """The configuration as commented TOML.

    Args:
        answers: what it says.
        folder: where it will lie, with the ledger of a budget.
    """
    within = answers.budget if answers.budget is not None else float("inf")
    epsilon = answers.epsilon if answers.epsilon is not None else min(_DEFAULT_EPSILON, within)
    parts = [
        "# Written by `fedpriv init`. `fedpriv config keys` explains every key, and",
        "# `fedpriv config check` says what is wrong with this file after a change.",
        "",
        "# The records, which stay where they are, and their columns.",
        _line(data=str(answers.data.expanduser().absolute())),
        _line(text_column=answers.text),
        "# The classes are those that occur; `labels` would fix them, and leave out records with others.",
        _line(label_column=answers.label),
        *_layout(answers.layout),
        *_holders(answers),
        *_persons(answers),
        "",
        *_test_set(answers),
        "",
        "# What this run may cost each holder, against the server itself: the noise follows from it.",
        _line(target_epsilon=epsilon),
        *_budget(answers, folder),
        "",
        "# What is changed most often, with its default; `--recipe` changes what belongs together.",
        '# model = "all-MiniLM-L6-v2"',
        "# max_length = 64              # tokens of a record; `fedpriv data check` says how many are cut",
        "# rounds = 40",
        "# seed = 0",
    ]
    return "\n".join(parts) + "\n"


def _named(columns: Sequence[str], usual: str) -> str:
    """The column whose name is the first of the usual ones, with or without accents; empty if none is."""
    plain = {_plain(name): name for name in reversed(columns)}
    return next((plain[name] for name in usual.split() if name in plain), "")


def _plain(name: str) -> str:
    """The name in small letters without accents."""
    return "".join(char for char in unicodedata.normalize("NFKD", name.casefold()) if not unicodedata.combining(char))


def _line(**value: Any) -> str:
    return tomli_w.dumps(value).strip()


def _layout(layout: DataSection) -> list[str]:
    """The lines that say how the table is read, where that is not as usual."""
    given = {"separator": layout.separator, "encoding": layout.encoding}
    return [_line(**{key: value}) for key, value in given.items() if value != getattr(DataSection, key)]


def _holders(answers: _Answers) -> list[str]:
    if answers.client:
        return ["# Each value of this column is a data holder.", _line(client_column=answers.client)]
    return [
        "# No column says who holds a record, so they are dealt out to simulated holders.",
        _line(partition=answers.partition),
        _line(num_clients=answers.num_clients),
    ]


def _persons(answers: _Answers) -> list[str]:
    if answers.person:
        several = answers.holders > 1
        return [
            "# Each value of this column is a person, whom an epsilon protects with all records at "
            + (f"up to {answers.holders} holders." if several else "one holder."),
            _line(person_column=answers.person),
            *([_line(holders_per_person=answers.holders)] if several else []),
        ]
    return [
        "# An epsilon protects one record; with this key, one person with all records at one holder:",
        '# person_column = "mrn"',
    ]


def _test_set(answers: _Answers) -> list[str]:
    if answers.test_data is not None:
        place = str(answers.test_data.expanduser().absolute())
        return [
            "# The server's own records, with the same columns: accuracy is measured on them.",
            _line(test_data=place),
        ]
    if answers.public:
        return [
            "# Nobody's privacy depends on the records: a share of them is held out for tests.",
            _line(public_data=True),
        ]
    return [
        "# The records are private, so no accuracy is measured on them. One of these changes that:",
        '# test_data = "test.csv"       # records of the server\'s own, with the same columns',
        "# evaluation_noise_multiplier = 4.0   # an estimate by the holders, which epsilon includes",
        "# public_data = true           # if nobody's privacy depends on the records",
    ]


def _budget(answers: _Answers, folder: Path) -> list[str]:
    if answers.budget is None:
        return [
            "# What all runs on the same records may cost, if a ledger keeps account of them:",
            "# budget_epsilon = 4.0",
            '# ledger = "ledger.sqlite"',
        ]
    return [
        "# What all runs on the same records may cost each holder; the ledger keeps account of them.",
        _line(budget_epsilon=answers.budget),
        _line(ledger=str(folder / f"{answers.data.name.split('.')[0]}-ledger.sqlite")),
    ]


def _table(data: Path, layout: DataSection) -> Table:
    from fedpriv.learning.data import read_table

    if not data.expanduser().is_file():  # a name on the Hub is not a table that somebody holds
        raise InputError(f"file = {str(data)!r}: no such file")
    return read_table(str(data), key="file", separator=layout.separator, encoding=layout.encoding)


def _with_columns(
    answers: _Answers, table: Table, text: str, label: str, client: str | None, *, asks: bool
) -> _Answers:
    """The answers with the columns that are given, or else confirmed or proposed."""
    found = _proposed(table, text, label)
    if asks:
        text = text or _ask("Which column holds the text?", found.text, is_guess=True)
        label = label or _ask(f"Which holds the class to be predicted?{_hint(found.label)}", "")
        if client is None:
            client = _ask(
                "Which says who holds a record (- for none)?", found.client or "-", is_guess=bool(found.client)
            )
            client = "" if client == "-" else client
    chosen = (text or found.text, label or found.label, found.client if client is None else client)
    for option, name in zip(("text", "label", "client"), chosen, strict=True):
        if name and name not in table.columns:
            raise InputError(f"{option} = {name!r}: no such column; there are {', '.join(table.columns)}")
    for option, name in zip(("text", "label"), chosen, strict=False):
        if not name:
            raise InputError(f"{option}: no column seems to hold it; name it with --{option}")
    if not asks and not (label or found.is_named):
        raise InputError(f"label: {chosen[1]!r} may hold the class to be predicted; say so with --label")
    if not chosen[2] and client is None and not asks:
        raise InputError(
            f"client: {_undecided(found.rivals)}; give --client COLUMN, or --client '' to deal records out at random"
        )
    if len(set(filter(None, chosen))) < len([name for name in chosen if name]):
        raise InputError(f"columns = {', '.join(chosen)!r}: must be different ones")
    return replace(answers, text=chosen[0], label=chosen[1], client=chosen[2])


def _with_person(answers: _Answers, table: Table, person: str | None, *, asks: bool) -> _Answers:
    """The answers with the column of persons that is given, or asked for where one looks like it.

    Where nobody answers, none is taken: only who holds the table knows whom an id is about.
    """
    if person is None and asks and (alike := _like_persons(answers, table)):
        answer = _ask("Which says whom a record is about (- for none)?", alike[0], is_guess=True)
        person = "" if answer == "-" else answer
    if person and person not in table.columns:
        raise InputError(f"person = {person!r}: no such column; there are {', '.join(table.columns)}")
    return replace(answers, person=person or "")


def _like_persons(answers: _Answers, table: Table) -> list[str]:
    """The columns without another role that look like persons."""
    from fedpriv.learning.data import looks_like_persons

    free = [name for name in table.columns if name not in (answers.text, answers.label, answers.client)]
    return [name for name in free if looks_like_persons(name, table.names_of(name))]


def _undecided(rivals: Mapping[str, int]) -> str:
    """The reason why no column of clients is proposed."""
    listed = ", ".join(f"{name!r} ({number} values)" for name, number in rivals.items())
    return f"{listed} could say who holds a record" if rivals else "no column seems to say who holds a record"


def _with_privacy(answers: _Answers, answer: str) -> _Answers:
    """The answers with an epsilon or a budget, as somebody typed it."""
    words = answer.split()
    try:
        number = float(words[-1])
    except (ValueError, IndexError):
        raise InputError(f"privacy = {answer!r}: must be a number, such as 2.3, or `budget` and a number") from None
    if words[:-1] not in ([], ["budget"]):
        raise InputError(f"privacy = {answer!r}: must be a number, such as 2.3, or `budget` and a number")
    return replace(answers, budget=number) if words[:-1] else replace(answers, epsilon=number)


def _ask(question: str, default: str, *, is_guess: bool = False) -> str:
    guess = f" A guess: {printable(default)}" if is_guess and default else ""
    answer: str = typer.prompt(f"{question}{guess}", default=default or None, prompt_suffix=" ", show_default=not guess)
    return answer.strip()


def _hint(label: str) -> str:
    """A guess that nobody takes by the enter key alone: what a model learns is said and not supposed."""
    return f" A guess: {printable(label)}; type its name" if label else ""


def _show(table: Table) -> None:
    """The columns of the table, with the first values of each that differ."""
    width = max(len(printable(name)) for name in table.columns)
    typer.echo("Its columns, with values of each:")
    for name in table.columns:
        values = dict.fromkeys(value for value in table.names_of(name) if value is not None and value.strip())
        shown = (
            textwrap.shorten(printable(value), _SAMPLE_WIDTH, placeholder=" ...") for value in list(values)[:_SAMPLES]
        )
        typer.echo(f"  {printable(name):<{width}}  {' | '.join(shown)}")


def _checked(written: str, table: Table, column: str) -> tuple[tuple[str, ...], str]:
    """The warnings about the data, and why a run refuses them; empty if it does not.

    Raises:
        InputError: not the table, but what was said of it is refused.
    """
    import tomllib

    from fedpriv.learning.adapters import load_tokenizer, locate
    from fedpriv.learning.data import federated, other_language, subwords

    config = configuration.parse(tomllib.loads(written))
    try:
        warnings = federated.load(config).warnings
    except InputError as error:
        if not _refusals(config, table):
            raise
        return (), str(error)
    if locate(config.model) is None:  # nothing is fetched
        return warnings, ""
    texts = [text or "" for text in table.names_of(column)]
    foreign = other_language(**subwords(load_tokenizer(config.model), texts))
    return (*warnings, foreign) if foreign else warnings, ""


def _refusals(config: RunConfig, table: Table) -> list[Finding]:
    """The likely mistakes of the table that a run refuses."""
    from fedpriv.learning.data import CheckedColumns, Roles, mistakes

    return [found for found in mistakes(CheckedColumns.of(table, Roles.of(config))) if found.refuses]


def _to_be_mended(written: str, table: Table) -> str:
    """Comments on what a run refuses of the table: kinds, columns and places, and no value of a cell."""
    import tomllib

    config = configuration.parse(tomllib.loads(written))
    columns = {"person": config.person_column, "client": config.client_column, "label": config.label_column}
    unit = "lines" if table.lines else "records"
    lines = ["# To be mended before a run; `fedpriv data check` tells more, and its --fix mends a copy:"]
    for found in _refusals(config, table):
        column = next((name for role, name in columns.items() if role in found.kind), config.text_column)
        places = ", ".join(map(str, found.places[:_PLACES]))
        more = f" and {len(found.places) - _PLACES} more" if len(found.places) > _PLACES else ""
        where = f", {unit} {places}{more}" if places else ""
        lines.append(f"# - {found.kind.replace('_', ' ')}: column {json.dumps(column)}{where}")
    return "\n".join([*lines, "", ""])


def _write(place: Path, text: str) -> None:
    """Write the file at once, so that none is left half-written."""
    try:
        replace_file(place, text.encode(), mode=None)
    except OSError as error:
        raise InputError(f"out = {str(place)!r}: cannot be written ({error.strerror})") from None
