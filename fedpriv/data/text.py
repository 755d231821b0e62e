"""Labelled texts of a federation: one set for each client, and the server's test set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextData:
    """Texts of one holder.

    Attributes:
        texts: one for each record; in instruction data, what was said before the response.
        labels: the name of each record's label; empty for causal models.
        pairs: the second text of each record for tasks on text pairs, or its response in instruction data; else None.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    pairs: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where a node's records are. Only the node's own configuration decides this, never that of a run.

    Attributes:
        data: a file; `fedpriv.data.own` says what is a record of it.
        text_column: column with the text.
        text_pair_column: column with the second text; empty for tasks on single texts.
        label_column: column with the label; empty for causal models.
        prompt_column, response_column: columns of instruction data; with them, or with messages_column, the three
            above do not matter.
        messages_column: column with lists of chat messages.
    """

    data: str
    text_column: str = "text"
    text_pair_column: str = ""
    label_column: str = "label"
    prompt_column: str = ""
    response_column: str = ""
    messages_column: str = ""

    @property
    def instructs(self) -> bool:
        """Whether records are prompts with responses."""
        return bool(self.prompt_column or self.messages_column)


@dataclass(frozen=True)
class FederatedData:
    """The part of a federation's data that this process has.

    Attributes:
        clients: the training records of each client, by partition id. With `data = on-nodes` a node has its own
            records only, and the server none.
        client_names: for display, in the same order.
        test: the server's own test set; empty on a node with its own records.
        label_names: the classes, in the order of their indices; empty for causal models.
    """

    clients: tuple[TextData, ...]
    client_names: tuple[str, ...]
    test: TextData
    label_names: tuple[str, ...]
