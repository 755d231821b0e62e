"""Labelled texts as a federation sees them: one set for each client, and the server's test set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextData:
    """Texts of one holder.

    Attributes:
        texts: one for each record.
        labels: the label's name for each record; empty for causal models.
        pairs: the second text of each record, for tasks on text pairs, else None.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    pairs: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Where a node has its records, by its own configuration; no run's configuration says otherwise.

    Attributes:
        data: a file, or a data set on the Hub.
        text_column: of its table.
        text_pair_column: of its table; empty for tasks on single texts.
        label_column: of its table.
    """

    data: str
    text_column: str = "text"
    text_pair_column: str = ""
    label_column: str = "label"


@dataclass(frozen=True)
class FederatedData:
    """What a federation trains and tests on, as far as this process has it.

    Attributes:
        clients: the training records of each client, by partition id; on a node with records of its own these alone,
            and none on its server.
        client_names: for display, in the same order.
        test: the server's own test set; empty on such a node.
        label_names: the classes in the order of their indices; empty for causal models.
    """

    clients: tuple[TextData, ...]
    client_names: tuple[str, ...]
    test: TextData
    label_names: tuple[str, ...]
