"""Commands from plain functions: a signature gives a command's options, and its result is what the command prints.

Every command takes --json, which prints one JSON object to stdout and nothing else. Errors become exit codes once, in
`fedpriv.cli.main`.
"""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import click
import typer
from click.shell_completion import CompletionItem

from fedpriv import texts
from fedpriv.errors import InputError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")]
StorePath = Annotated[Path, typer.Argument(help="Folder of the store.")]
SavedModel = Annotated[
    Path, typer.Argument(metavar="RUN|STORE|VARIANT", help="Folder of a run or a store, or a variant in it.")
]
VariantName = Annotated[str, typer.Option("--variant", help="Which of the variants; by default global.")]
ModelName = Annotated[
    str, typer.Option("--model", help="The base model, as a run names it; by default the one that was trained on.")
]


@dataclass(frozen=True)
class Result:
    """The result of a command.

    Attributes:
        values: one JSON object, in which "inf" is an infinity, and null stands for what is not known.
        lines: for a reader; by default a line for each value.
        code: the exit code.
    """

    values: Mapping[str, Any]
    lines: Iterable[str] | None = None
    code: int = 0


_Function = TypeVar("_Function", bound=Callable[..., Result | Mapping[str, Any]])


def command(app: typer.Typer, name: str | None = None) -> Callable[[_Function], _Function]:
    """Register a function as a command, which prints its result; the function itself stays as it is."""

    def register(function: _Function) -> _Function:
        app.command(name)(_printing(function))
        return function

    return register


def _printing(function: Callable[..., Result | Mapping[str, Any]]) -> Callable[..., None]:
    """The function with --json as a last option; it prints what the function returns, and ends with its exit code."""

    @functools.wraps(function)
    def run(*, as_json: bool, **options: Any) -> None:
        found = function(**options)
        result = found if isinstance(found, Result) else Result(found)
        show(result.values, entries(result.values) if result.lines is None else result.lines, as_json)
        if result.code:
            raise typer.Exit(result.code)

    own = inspect.signature(function, eval_str=True)
    of_json = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)
    parameters = [*own.parameters.values(), of_json]
    run.__signature__ = own.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def check_new_file(out: Path | None) -> None:
    """Refuse a path that is taken, or in no folder, before the work for it begins."""
    if out is not None and os.path.lexists(out):
        raise InputError(f"out = {str(out)!r}: exists; name another file")
    if out is not None and not out.parent.is_dir():
        raise InputError(f"out = {str(out)!r}: {out.parent} is no folder; make it first")


def show(values: Mapping[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """Print the values as one JSON object, with "inf" for infinity and null for what is unknown; or print the lines.

    An object with an infinite epsilon or mu says that it is not private, see `texts.judged`.
    """
    typer.echo(texts.strict_json(texts.judged(values)) if as_json else "\n".join(lines))


def entries(values: Mapping[str, Any]) -> list[str]:
    """A line for each entry, with the values aligned; a nested mapping is indented below its name."""
    width = max(map(len, values), default=0)
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = max((len(str(key)) for key in value), default=0)
            lines += [f"{name}:", *(f"  {key!s:<{inner}}  {entry}" for key, entry in value.items())]
        else:
            lines.append(f"{name:<{width}}  {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return lines


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """The columns' names and a line for each row, aligned; a missing value leaves its cell empty."""
    cells = [[row.get(column) for column in columns] for row in rows]
    texts = [["" if c is None else f"{c:.4g}" if isinstance(c, float) else str(c) for c in row] for row in cells]
    lines = [columns, *texts]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


class OneOf(click.types.StringParamType):
    """The type of an option that takes one of the names in a `Literal`, tuple or mapping of the library.

    They are imported only when the option is used or explained, since some of those modules take seconds to load.
    """

    def __init__(self, known: str, *others: str, check: bool = True) -> None:
        """Take the names at MODULE:ATTRIBUTE; unchecked where the library takes aliases, or refuses by itself."""
        self._known, self._others, self._check = known, others, check

    def names(self) -> tuple[str, ...]:
        """The names, imported."""
        module, _, attribute = self._known.partition(":")
        known = getattr(importlib.import_module(module), attribute)
        return (*(get_args(known) or known), *self._others)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The names, as --help shows them."""
        return f"[{'|'.join(self.names())}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The names that begin with the incomplete word."""
        return [CompletionItem(name) for name in self.names() if name.startswith(incomplete)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The value itself; InputError if it is not one of the names."""
        text = super().convert(value, param, ctx)
        if self._check and text not in self.names():
            name = param.name if param else self.name
            raise InputError(f"{name} = {text!r}: must be one of {', '.join(self.names())}")
        return text


def one_of(known: str, text: str, *names: str, check: bool = True) -> Any:
    """An option, called by these names if any, that takes one of the library's; see `OneOf`."""
    return typer.Option(*names, click_type=OneOf(known, check=check), help=text)


# What `OneOf` has checked is a `Literal` of the library.
SeparatorOption = Annotated[Any, one_of("fedpriv.config:Separator", "Of a CSV file; with auto its header decides.")]
EncodingOption = Annotated[Any, one_of("fedpriv.config:Encoding", "Of a CSV or JSONL file.")]


def result_of(option: str, name: str) -> Any:
    """Call the user's MODULE:FUNCTION, which may be in the working directory; InputError if it cannot be called."""
    module, _, function = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{option} = {name!r}: must be MODULE:FUNCTION ({error})") from None
