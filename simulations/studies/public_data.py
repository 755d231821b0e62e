"""The public tables of the studies, listed in public_data.toml: where they come from, and how they become what is read.

Each is one gzip CSV with a header. Raw files lie anywhere in a folder, under the names that they are distributed with.
"""

from __future__ import annotations

import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from simulations.studies.harness import table

_TABLES: Sequence[Mapping[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["tables"]


def listed() -> str:
    """All tables, as Markdown."""
    keys = ("name", "address", "columns", "licence", "file")
    return table((*keys, "raw files"), ([*(each[key] for key in keys), ", ".join(each["raw"])] for each in _TABLES))


def prepare(folder: Path) -> Iterator[str]:
    """Make every table that a folder lacks and has the raw files of; a line for each says what there is."""
    for each in _TABLES:
        raw = {name: next(folder.rglob(name), None) for name in each["raw"]}
        missing = [name for name, path in raw.items() if path is None]
        if (folder / each["file"]).is_file():
            yield f"{each['name']}: {each['file']} is there"
        elif missing:
            yield f"{each['name']}: {missing[0]} is missing; {each['address']}"
        else:
            made = _medquad(folder) if each["name"] == "MedQuAD" else _joined(raw.values(), each)
            made.to_csv(folder / each["file"], index=False, compression={"method": "gzip", "mtime": 0})
            yield f"{each['name']}: {len(made)} records in {each['file']}"


def _joined(paths: Any, told: Mapping[str, Any]) -> pd.DataFrame:
    """Raw files under each other, with the columns' names of the studies."""
    how: dict[str, Any] = {"skipinitialspace": True, "dtype": str, "keep_default_na": False} | told.get("read", {})
    joined: pd.DataFrame = pd.concat([pd.read_csv(path, **how) for path in paths])
    return joined.rename(columns=told.get("rename", {}))


def _medquad(folder: Path) -> pd.DataFrame:
    """The questions with answers of all XML documents, with the first 600 characters of each answer."""
    rows = []
    for path in sorted(folder.rglob("*.xml")):
        document = ET.parse(path).getroot()
        source, focus = document.get("source", ""), document.findtext("Focus", "")
        for pair in document.iter("QAPair"):
            question, answer = pair.find("Question"), " ".join((pair.findtext("Answer") or "").split())
            if question is not None and answer:
                kind = question.get("qtype", "")
                rows.append((answer[:600], kind, source, " ".join((question.text or "").split()), focus))
    return pd.DataFrame(rows, columns=["answer", "question_type", "source", "question", "focus"])
