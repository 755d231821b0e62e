"""`fedpriv status`: what a run is doing or did, from its folder alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer


def status(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run that goes on, was interrupted, or is finished.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """What a run is doing or did, from its folder alone: rounds, epsilons, every client, the last events.

    A run counts as interrupted once it has written nothing for `round_seconds`. Example:

    fedpriv status results/20261121-042553-embedded
    """
    from rich.console import Console

    from fedpriv.reports.status import read_status
    from fedpriv.reports.status_display import show

    found = read_status(run_dir, now=time.time())
    if as_json:
        finite = json.loads(json.dumps(found.as_dict()), parse_constant=lambda _: None)
        typer.echo(json.dumps(finite))
    else:
        show(found, Console(highlight=False))
