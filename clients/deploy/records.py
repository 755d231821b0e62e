"""The node's data set: its number of records, and its registration in the node's own ledger."""

from __future__ import annotations

from clients.deploy.folder import Node
from fedpriv.errors import InputError
from fedpriv.ledger.entries import DataSet


def num_records(node: Node) -> int:
    """N_k: all records of the node's file, or of its hospital in the embedded corpus.

    Raises:
        InputError: the file or a column is missing, or the corpus has no hospital for this partition id.
    """
    if node.data is not None:
        from fedpriv.data.checks import describe  # slow to import

        columns = {"text": node.text_column, "label": node.label_column, "text_pair": node.text_pair_column}
        return int(describe(str(node.data), **columns)["records"])
    from fedpriv.data.hospital import HOSPITAL_SIZES

    if node.partition_id >= len(HOSPITAL_SIZES):
        last = len(HOSPITAL_SIZES) - 1
        raise InputError(f"partition_id = {node.partition_id}: the embedded corpus has hospitals 0..{last}; set data")
    return HOSPITAL_SIZES[node.partition_id]


def register(node: Node) -> DataSet:
    """The node's data set in its ledger, registered now if it was not before; N_k is that of its first registration.

    Raises:
        InputError: the data cannot be read.
        LedgerError: the ledger cannot be used.
    """
    from fedpriv.vault import guard  # slow to import

    policy = guard.NodePolicy(ledger=node.ledger, budget_epsilon=node.budget_epsilon, delta=node.delta)
    data_set = guard.registered_data_set(policy, str(node.partition_id), num_records(node))
    assert data_set is not None, "a node with a ledger registers its data"
    return data_set
