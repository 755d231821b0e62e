"""Options and arguments that several command groups share."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import click
import typer
from click.shell_completion import CompletionItem

from fedpriv.errors import InputError

StorePath = Annotated[Path, typer.Argument(help="Folder of the store.")]
SavedModel = Annotated[Path, typer.Argument(metavar="RUN|VARIANT", help="Folder of a run, or of one of its variants.")]
VariantName = Annotated[str, typer.Option("--variant", help="Which of the run's variants; by default global.")]
ModelName = Annotated[
    str, typer.Option("--model", help="The base model, as a run names it; by default the one that was trained on.")
]


class OneOf(click.types.StringParamType):
    """The type of an option that takes one of the names in a `Literal`, tuple or mapping of the library.

    They are imported only when the option is used or explained, since some of those modules take seconds to load.
    """

    def __init__(self, known: str, *others: str, check: bool = True) -> None:
        """Take the names that the library knows.

        Args:
            known: MODULE:ATTRIBUTE with the names.
            others: further names that the command knows.
            check: False where the library accepts aliases too, or refuses an unknown name in its own words.
        """
        self._known, self._others, self._check = known, others, check

    def names(self) -> tuple[str, ...]:
        """The names, imported."""
        module, _, attribute = self._known.partition(":")
        known = getattr(importlib.import_module(module), attribute)
        return (*(get_args(known) or known), *self._others)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """What --help shows."""
        return f"[{'|'.join(self.names())}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The names that begin so."""
        return [CompletionItem(name) for name in self.names() if name.startswith(incomplete)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The value itself, if it is one of the names.

        Raises:
            InputError: it is not.
        """
        text = super().convert(value, param, ctx)
        if self._check and text not in self.names():
            name = param.name if param else self.name
            raise InputError(f"{name} = {text!r}: must be one of {', '.join(self.names())}")
        return text


def result_of(option: str, name: str) -> Any:
    """What the user's MODULE:FUNCTION returns; the working directory is searched for the module first.

    Args:
        option: that names the function, for the error.
        name: MODULE:FUNCTION; the function takes no arguments.

    Raises:
        InputError: there is no such function, or it raises one of ImportError, AttributeError and ValueError.
    """
    module, _, function = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{option} = {name!r}: must be MODULE:FUNCTION ({error})") from None
