"""The reference of the command lines, from the commands themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module

import click
import typer

# {program: the module with its typer app}; the page of `fedpriv coordinator` is server-deploy.md.
PROGRAMS = {
    "fedpriv": "fedpriv.cli.main",
    "python -m simulations": "simulations.__main__",
    "fedpriv coordinator": "server.deploy.__main__",
    "fedpriv node": "clients.deploy.__main__",
}


def pages() -> dict[str, str]:
    """{file name: page in Markdown}, one for each program."""
    return {
        f"{program.removeprefix('python -m ').replace('.', '-')}.md": _page(program, import_module(module).app)
        for program, module in PROGRAMS.items()
    }


def commands(command: click.Command, *names: str) -> Iterator[tuple[str, click.Command]]:
    """(name, command) of all commands that are not groups; names are joined by spaces."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, *names, name)
    else:
        yield " ".join(names), command


def _page(program: str, app: typer.Typer) -> str:
    root = typer.main.get_command(app)
    parts = [f"# `{program}`", _prose(root.help or "", program)]
    for name, command in commands(root):
        if not command.hidden:
            parts += [f"## `{program} {name}`", _usage(program, name, command), _prose(command.help or "", program)]
            parts += [_table(command)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _usage(program: str, name: str, command: click.Command) -> str:
    words = command.collect_usage_pieces(click.Context(command))
    return f"```\n{' '.join([program, name, *words])}\n```"


def _prose(text: str, program: str) -> str:
    """A command's help: sentences, and its examples as code."""
    text = re.sub(rf"^(Examples?):\s+(?={program} )", r"\1:\n\n", inspect.cleandoc(text.replace("\b", "")), flags=re.M)
    blocks = (inspect.cleandoc(block) for block in re.split(r"\n\s*\n", text))
    return "\n\n".join(f"```sh\n{block}\n```" if block.startswith(f"{program} ") else block for block in blocks)


def _table(command: click.Command) -> str:
    """Arguments and options; none where a command has none."""
    context = click.Context(command)
    rows = [_row(parameter, context) for parameter in command.params if not getattr(parameter, "hidden", False)]
    if not rows:
        return ""
    return "\n".join(["| | default | meaning |", "| --- | --- | --- |", *rows])


def _row(parameter: click.Parameter, context: click.Context) -> str:
    kind = parameter.make_metavar(context)
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    is_flag = bool(getattr(parameter, "is_flag", False))
    shown = kind if isinstance(parameter, click.Argument) else names if is_flag else f"{names} {kind}"
    value = parameter.default() if callable(parameter.default) else parameter.default
    given = not (is_flag or parameter.required or value is None or value == ())
    default = "required" if parameter.required else f"`{value}`" if given else ""
    help_ = " ".join((getattr(parameter, "help", None) or "").split())
    return f"| `{shown}` | {_escaped(default)} | {_escaped(help_)} |"


def _escaped(text: str) -> str:
    """Text that may stand in a cell of a table."""
    return text.replace("|", "\\|")
