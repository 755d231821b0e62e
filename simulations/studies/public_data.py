"""The public tables of the studies, listed in public_data.toml: where they come from, and how they become what is read.

Each is one gzip CSV with a header. Raw files lie anywhere in a folder, under the names that they are distributed with.
"""

from __future__ import annotations

import json
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd

from simulations.studies.harness import table

_TABLES: Sequence[Mapping[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["tables"]


def listed() -> str:
    """All tables, as Markdown."""
    keys = ("name", "address", "columns", "records", "licence", "file")
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
            other = f"; the studies had {each['records']}" * (len(made) != each["records"])
            yield f"{each['name']}: {len(made)} records in {each['file']}{other}"


def _joined(paths: Any, told: Mapping[str, Any]) -> pd.DataFrame:
    """Raw files under each other, or side by side with `axis = 1`, with the columns' names of the studies."""
    joined: pd.DataFrame = pd.concat([_frame(path, told) for path in paths], axis=told.get("axis", 0))
    return joined.rename(columns=told.get("rename", {})).replace(told.get("replace", {}), regex=True)


def _frame(path: Path, told: Mapping[str, Any]) -> pd.DataFrame:
    if path.suffix == ".jsonl":
        return pd.DataFrame(pd.read_json(path, lines=True, dtype=False))
    if path.suffix == ".xml":
        return pd.DataFrame(_pairs(ET.parse(path), **told["pairs"]), columns=["question", "answer"])
    if path.suffix == ".json":  # FiQA: scores from -1 to 1
        known = json.loads(path.read_text(encoding="utf-8")).values()
        scored = [(each["sentence"], mean(float(info["sentiment_score"]) for info in each["info"])) for each in known]
        labels = [(text, "positive" if it > 0.1 else "negative" if it < -0.1 else "neutral") for text, it in scored]
        return pd.DataFrame(labels, columns=["text", "label"])
    how: dict[str, Any] = {"skipinitialspace": True, "dtype": str, "keep_default_na": False} | told.get("read", {})
    return pd.DataFrame(pd.read_csv(path, **how))


def _pairs(document: Any, record: str, question: Sequence[str], answer: str) -> Iterator[tuple[str, str]]:
    """Each record's first question that is not empty, with each of its answers' first 600 characters."""
    for each in document.iter(record):
        asked = next(filter(None, (" ".join((each.findtext(f".//{tag}") or "").split()) for tag in question)), "")
        told = (" ".join((found.text or "").split()) for found in each.iter(answer))
        yield from ((asked, text[:600]) for text in told if asked and text)


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
