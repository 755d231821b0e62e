"""`fedpriv status`: what a run is doing or did, from its folder alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.cli._command import AsJson, show


def status(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run: under way, interrupted or finished.")],
    as_json: AsJson = False,
) -> None:
    """What a run is doing or did, from its folder alone: rounds, epsilons, every client, the last events.

    A run is interrupted once its process is gone. Where only another machine could tell, its state is unknown once it
    has written nothing for `round_seconds`. Example:

    fedpriv status results/20261121-042553-embedded
    """
    from rich.console import Console

    from fedpriv.reports import status_display
    from fedpriv.runs.status import read_status

    found = read_status(run_dir, now=time.time())
    if as_json:
        show(found.as_dict(), [], as_json)
    else:
        status_display.show(found, Console(highlight=False))
