"""A node's own records, read once when the node is made: how many there are, and what labels they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedpriv.accounting.filters import Rule
from fedpriv.errors import InputError
from fedpriv.ledger.entries import DataSet
from fedpriv.ledger.ledger import Ledger
from fedpriv.vault.settings import VaultSettings


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a file of records holds.

    Attributes:
        num_records: N_k, of the whole file, whatever label a record has.
        counts: number of records of each agreed label, in the agreed order.
        num_other_labels: records with a label that was not agreed on; nothing trains on them.
        num_without_label: records that have none.
        num_empty: records whose text is empty, or whose response is.
    """

    num_records: int
    counts: Mapping[str, int]
    num_other_labels: int
    num_without_label: int
    num_empty: int

    def lines(self) -> list[str]:
        """What to tell the operator."""
        found = [f"found {self.num_records} records, {self.num_empty} of them empty"]
        if self.counts:
            found.append("labels: " + ", ".join(f"{label} {number}" for label, number in self.counts.items()))
            others = f"{self.num_other_labels} records have another label and {self.num_without_label} have none"
            found.append(f"{others}: they count in N_k, and nothing trains on them")
        return found


def check_terms(vault: VaultSettings) -> None:
    """Refuse settings that leave to a coordinator what the operator of a node with records of its own must decide.

    Raises:
        InputError: one line that names the setting.
    """
    if vault.data is None:
        return
    check_budget(vault)
    check_columns(vault)
    check_labels(vault)


def check_columns(vault: VaultSettings) -> None:
    """Refuse columns that make no record together.

    Raises:
        InputError: one line that names the setting.
    """
    source = vault.source
    if source.messages_column and (source.prompt_column or source.response_column):
        raise InputError(
            f"messages_column = {source.messages_column!r}: holds prompts and responses; leave out prompt_column and "
            "response_column"
        )
    if not source.messages_column and bool(source.prompt_column) != bool(source.response_column):
        missing = "response_column" if source.prompt_column else "prompt_column"
        raise InputError(f"{missing}: required, since prompts are learned with their responses; give both columns")
    if source.text_pair_column and not source.instructs and not vault.label_column:
        raise InputError(
            f"text_pair_column = {source.text_pair_column!r}: a causal model would join the two texts; give "
            "--prompt-column and --response-column"
        )


def check_budget(vault: VaultSettings) -> None:
    """Refuse a node that spends without end.

    Raises:
        InputError: it has records of its own, and no budget.
    """
    if vault.data is not None and vault.budget_epsilon is None:
        raise InputError("budget_epsilon: required for records of the node's own; give --budget-epsilon, such as 4")


def check_labels(vault: VaultSettings) -> None:
    """Refuse labels that are not two or more classes, each named once; or labels without a column.

    Raises:
        InputError: one line that says which.
    """
    if vault.data is None or (vault.source.instructs and not vault.labels):
        return
    if not vault.label_column and not vault.source.instructs:
        if vault.labels:
            raise InputError("labels: given without a label_column; causal models have neither")
        return
    if not vault.labels:
        raise InputError(
            "labels: required, the classes in the order that all holders agreed on; give --labels a,b,c, or "
            '--label-column "" for causal models'
        )
    if len(vault.labels) < 2 or len(set(vault.labels)) < len(vault.labels) or "" in vault.labels:
        raise InputError(f"labels = {','.join(vault.labels)}: must be two or more names, each once")


def find(vault: VaultSettings) -> Found:
    """What the node's file holds; every record of it must be readable.

    Raises:
        InputError: the file, a column or a record cannot be used.
    """
    from fedpriv.data import own  # slow to import

    records = own.read_strictly(vault.source)
    instructs = vault.source.instructs
    labels = Counter(record.label for record in records) if vault.labels else Counter()
    num_without_label = labels.pop(None, 0)
    counts = {label: labels[label] for label in vault.labels}
    return Found(
        num_records=len(records),
        counts=counts,
        num_other_labels=labels.total() - sum(counts.values()),
        num_without_label=num_without_label,
        num_empty=sum(not (record.pair if instructs else record.text).strip() for record in records),
    )


def register(vault: VaultSettings, ledger: Path, num_records: int) -> DataSet:
    """The node's data set in its ledger, registered now if it was not before; N_k is that of its first registration.

    Raises:
        LedgerError: the ledger cannot be used.
    """
    from fedpriv.vault import guard  # slow to import

    is_new = not ledger.exists()
    policy = guard.NodePolicy(ledger=ledger, budget_epsilon=vault.budget_epsilon, delta=vault.delta)
    data_set = guard.registered_data_set(policy, str(vault.partition_id), num_records)
    assert data_set is not None, "a node with a ledger registers its data"
    if is_new:
        ledger.chmod(0o600)
    return data_set


def bound(vault: VaultSettings, *, plan: Path | None, filter_: str | None, delta: float | None) -> Rule:
    """Note in the node's ledger how the budget is enforced, and return all that holds then.

    Args:
        vault: of a node with records of its own, which are registered.
        plan: a file of `fedpriv plan --out`; None if a filter is given.
        filter_: `renyi:ORDER` or `gaussian`; None if a plan is given.
        delta: of the plan; None takes the file's.

    Raises:
        InputError: nothing is registered; the plan or filter cannot be used, or comes too late.
        LedgerError: the ledger cannot be used.
    """
    from fedpriv.vault import budget

    if (plan is None) == (filter_ is None):
        raise InputError("register: give either --plan FILE or --filter renyi:ORDER or gaussian")
    check_budget(vault)
    if vault.budget_epsilon is None or not vault.ledger.is_file():
        raise InputError(f"{vault.ledger}: no data set is registered; make the node with `init --data`")
    with Ledger(vault.ledger) as ledger:
        if (data_set := ledger.data_set()) is None:
            raise InputError(f"{vault.ledger}: no data set is registered; make the node with `init --data`")
        if plan is None:
            return budget.choose(ledger, data_set, budget.read_rule(str(filter_)), vault.budget_epsilon)
        found = budget.read_plan(plan, vault.partition_id, data_set.num_records, vault.budget_view, delta)
        return budget.choose(ledger, data_set, found, vault.budget_epsilon)
