"""The files that a tracker gets of a finished run: copies without the paths of the machine that made them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import tomli_w

from fedpriv.tracking import logged

# Of the global model's folder; beside these, it holds the releases that the server deduplicates by.
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json", "fedpriv.json", "README.md")
GLOBAL = "global"


def stage_run(run_folder: Path, into: Path) -> None:
    """Write configuration, report and global adapter of a finished run into an empty folder.

    Raises:
        InputError: a file of the run is missing or damaged.
    """
    from fedpriv.runs import files
    from fedpriv.runs.reader import read_run
    from fedpriv.runs.show import page  # deferred: matplotlib

    run = read_run(run_folder)
    told = logged.configuration(run.config)
    (into / files.CONFIG).write_text(tomli_w.dumps(told), encoding="utf-8")
    report = page.render(replace(run, config=told, environment=logged.versions(run.environment)))
    (into / files.REPORT).write_text(report, encoding="utf-8")
    adapter = run_folder / files.VARIANTS / GLOBAL
    if not adapter.is_dir():
        return
    (into / "adapter").mkdir()
    named = logged.paths(run.config)
    for source in (adapter / name for name in ADAPTER_FILES):
        if source.is_file():
            _copy(source, into / "adapter" / source.name, named)


def stage_sweep(sweep_folder: Path, into: Path) -> None:
    """Copy a sweep's plots into an empty folder."""
    for plot in sorted(sweep_folder.glob("*.png")):
        shutil.copyfile(plot, into / plot.name)


def _copy(source: Path, target: Path, named: Mapping[str, str]) -> None:
    if source.suffix == ".safetensors":
        shutil.copyfile(source, target)
        return
    text = source.read_text(encoding="utf-8")
    for path, name in named.items():
        text = text.replace(path, name)
    target.write_text(text, encoding="utf-8")
