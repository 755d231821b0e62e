"""100 random queries over the models of a scenario under a limit of memory: Figures 5 and 8."""

from __future__ import annotations

from collections.abc import Sequence

from simulations.studies.dedup.report.markdown import number, section, table, yes
from simulations.studies.dedup.report.paper import SPEEDUPS, SPEEDUPS_OF_CLUSTERS
from simulations.studies.dedup.report.results import DedupResults, Line

STORE = "store"
# What loading and inference must be of the store's, cold, at least.
WANTED = {"safetensors": 10, "straight": 3}


def serving(results: DedupResults) -> str:
    """Loading and inference, apart, of the store and of plain files; what the disk and its cache did."""
    if not results.serving:
        return ""
    rows = [_row(line, arm) for line in results.serving for arm in line["arms"]]
    headers = (
        "", "arm", "", "loading s", "least to most", "inference s", "read from the disk, MB",
        "in the page cache afterwards, MB", "loads",
    )  # fmt: skip
    ratios = [row for line in results.serving for row in _ratios(line)]
    return section(
        "Serving 100 queries under a limit of memory (Figures 5 and 8)",
        "\n".join(_setting(line) for line in results.serving),
        "Each query asks a random model one question. Medians of the repeats. Cold: nothing of the files is in the "
        "page cache at first.",
        table(headers, rows),
        "Time over that of the store; targets are for the cold start:" if ratios else "",
        table(("", "", "", "loading", "with inference", "target", "met by loading", "with inference"), ratios)
        if ratios
        else "",
        f"The paper's, for loading and inference: {SPEEDUPS_OF_CLUSTERS} (Figure 5).",
    )


def _setting(line: Line) -> str:
    papers = SPEEDUPS.get(line["scenario"])
    return (
        f"- {line['scenario']}: {line['num_models']} models, {_mb(line['bytes_of_models'])} MB; limit of the whole "
        f"process {_mb(line['limit_bytes'])} MB ({line['limit']}), {line['num_queries']} queries, disk "
        f"{line['disk_mb_per_second']:.0f} MB/s"
        + (f". The paper's speed-up: {papers}" if papers else "")
        + "".join(f". `{arm}` {why}" for arm, why in line["failures"].items())
        + ("" if line["page_cache_dropped"] else ". **Not cold**: the page cache kept files that it was told to drop")
    )


def _row(line: Line, arm: Line) -> Sequence[str]:
    return (
        line["scenario"],
        arm["arm"],
        arm["temperature"],
        f"{arm['load_seconds']:.2f}",
        " to ".join(f"{value:.2f}" for value in arm["load_seconds_range"]),
        f"{arm['infer_seconds']:.2f}",
        _mb(arm["disk_bytes"]),
        _mb(arm["cached_bytes"]),
        number(arm["misses"], 0),
    )


def _mb(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.0f}"


def _ratios(line: Line) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for store in (arm for arm in line["arms"] if arm["arm"] == STORE and arm["load_seconds"] > 0):
        for arm in line["arms"]:
            if arm["arm"] != STORE and arm["temperature"] == store["temperature"]:
                load, total = arm["load_seconds"] / store["load_seconds"], _total(arm) / _total(store)
                least = WANTED.get(arm["arm"]) if arm["temperature"] == "cold" else None
                verdicts = (f"{least}", yes(load >= least), yes(total >= least)) if least else ("", "", "")
                rows.append(
                    (line["scenario"], arm["arm"], arm["temperature"], f"{load:.1f}", f"{total:.1f}", *verdicts)
                )
    return rows


def _total(arm: Line) -> float:
    return float(arm["load_seconds"] + arm["infer_seconds"])
