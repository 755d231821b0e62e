"""`fedpriv status`: what a run is doing or did, from its folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedpriv.cli._command import AsJson, show


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

    from fedpriv.runs.folder import RunFolder
    from fedpriv.runs.show import terminal
    from fedpriv.runs.status import status_of

    folder = RunFolder(run_dir)
    if as_json:
        show(status_of(folder).as_dict(), [], as_json)
    else:
        terminal.show(folder, Console(highlight=False))
