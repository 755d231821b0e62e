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


@dataclass(frozen=True)
class FederatedData:
    """What a federation trains and tests on.

    Attributes:
        clients: the training records of each client, by partition id.
        client_names: for display, by partition id.
        test: the server's own test set.
        label_names: the classes in the order of their indices; empty for causal models.
    """

    clients: tuple[TextData, ...]
    client_names: tuple[str, ...]
    test: TextData
    label_names: tuple[str, ...]
