"""A summary of a table, before anything is registered: what a run would see."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from fedpriv.data.tables import labels_of, load_table, require_columns


def describe(source: str, *, text: str, label: str = "", text_pair: str = "", client: str = "") -> dict[str, Any]:
    """The numbers of records, labels and clients, the lengths of the texts, and how many are empty or duplicates.

    Args:
        source: a file, or a data set on the Hub.
        text: column with the text.
        label: column with the label, or empty.
        text_pair: column with the second text, or empty.
        client: column with the holder of each record, or empty.

    Raises:
        InputError: the file or a column is missing.
    """
    table = load_table(source, key="file")
    columns = [("--text", text), ("--text-pair", text_pair), ("--label", label), ("--client", client)]
    require_columns(table, columns, source)
    texts = ["" if value is None else str(value) for value in table[text]]
    words = np.array([len(value.split()) for value in texts])
    result: dict[str, Any] = {
        "records": len(table),
        "empty_texts": int((words == 0).sum()),
        "duplicate_texts": len(texts) - len(set(texts)),
        "words": {f"p{p}": float(np.percentile(words, p)) for p in (0, 50, 95, 100)},
    }
    if label:
        values = labels_of(table, label)
        result["records_without_label"] = sum(value is None for value in values)
        result["labels"] = counts(values)
    if client:
        result["clients"] = counts(table[client])
    return result


def counts(values: Any) -> dict[str, int]:
    """How often each value occurs, most frequent first."""
    return dict(Counter(str(value) for value in values if value is not None).most_common())
