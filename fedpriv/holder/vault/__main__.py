"""`python -m fedpriv.holder.vault DIR`: the vault of a node, in the foreground until SIGINT or SIGTERM."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.holder.vault._service import serve
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.operate.command_line import run_command_line
from fedpriv.operate.processes import end_with_parent

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    dir_: Annotated[Path, typer.Argument(metavar="DIR", help="The node's folder, with vault.toml.")],
    with_parent: Annotated[bool, typer.Option("--with-parent", help="End when standard input closes.")] = False,
) -> None:
    """Run a node's vault: its records, ledger and model, behind the Unix socket DIR/vault.sock.

    Example: python -m fedpriv.holder.vault ~/node
    """
    os.umask(0o077)  # whoever starts it: what it writes tells when records were worked on, and which could not be read
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    if with_parent:
        end_with_parent()
    serve(VaultSettings.read(dir_), lambda line: print(line, flush=True))


if __name__ == "__main__":
    run_command_line(app, "python -m fedpriv.holder.vault")
