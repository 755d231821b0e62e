"""`fedpriv report`, `status` and `watch`: a run as its folder shows it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.cli._command import AsJson, entries, show
from fedpriv.errors import InputError


def report(run_dir: Annotated[Path, typer.Argument(help="Folder of a finished run.")], as_json: AsJson = False) -> None:
    """Build a run's report.html again from its tables.

    Example: fedpriv report results/20261121-042553-embedded
    """
    from fedpriv.runs.show import write_report

    values = {"report": str(write_report(run_dir))}
    show(values, entries(values), as_json)


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
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8001,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine, to anyone who asks.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a page that shows a run or a sweep while it goes on: rounds, epsilons against budgets, clients, events.

    It reads the folder and writes nothing. --json prints one object with the page's address once it is there.
    SIGTERM or Ctrl-C ends it. Example:

    fedpriv watch results/20261121-042553-embedded --port 8001
    """
    try:
        from fedpriv.runs.show import serve_folder
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn", "h11"):
            raise
        raise InputError(f"watch: needs {error.name}; install it with pip install 'fedpriv[serve]'") from None
    logging.getLogger("uvicorn").setLevel(logging.ERROR)

    def tell(url: str) -> None:
        waits = "" if folder.is_dir() else ", which does not exist yet"
        show({"url": url, "folder": str(folder)}, [f"{url} shows {folder}{waits}; Ctrl-C ends it"], as_json)
        sys.stdout.flush()

    serve_folder(folder, (host, port), insecure=insecure, on_ready=tell)
