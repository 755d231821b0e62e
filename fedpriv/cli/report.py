"""`fedpriv report`: a run's page, from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedpriv.cli._command import AsJson, entries, show


def report(run_dir: Annotated[Path, typer.Argument(help="Folder of a finished run.")], as_json: AsJson = False) -> None:
    """Build a run's report.html again from its tables.

    Example: fedpriv report results/20261121-042553-embedded
    """
    from fedpriv.runs.show.report_page import write_report

    values = {"report": str(write_report(run_dir))}
    show(values, entries(values), as_json)
