"""Folders of nodes with records of their own, as an operator makes them."""

import csv
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from fedpriv.holder.vault.settings import FILE, ApprovedModel, VaultSettings, models_text
from fedpriv.learning.adapters._locations import model_digest
from fedpriv.privacy.accounting.views import default_delta
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.ledger import Ledger
from tests.tiny import LABELS, write_rows

# Deriving when a reply leaves takes most of a short test, and where the vault is a process, its replies leave late.
UNTIMED = {"reply_seconds": 1e-3}


def write_records(path: Path, rows: Sequence[tuple[str, ...]]) -> Path:
    """A CSV with the columns note, department and, where rows say whom they are about, patient."""
    return write_rows(path, [("note", "department", "patient")[: max(map(len, rows), default=2)], *rows])


def make_vault(
    folder: Path, data: Path, model: Path, *, num_records: int | None = None, policy: str = "", **settings: object
) -> VaultSettings:
    """A node's folder, its data registered and the model approved.

    Args:
        folder: created.
        data: CSV with the columns note and department.
        model: folder of the model.
        num_records: N_k to register; None counts the rows.
        policy: content of policy.toml.
        settings: that differ from the ones below; None leaves a setting out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, object] = {
        "partition_id": 1,
        "name": "St. Anna",
        "data": str(data),
        "text_column": "note",
        "label_column": "department",
        "labels": list(LABELS),
        "budget_epsilon": 1000.0,
        "device": "cpu",
        **UNTIMED,
    } | settings
    (folder / FILE).write_text(tomli_w.dumps({key: value for key, value in values.items() if value is not None}))
    made = VaultSettings.read(folder)
    made.policy.write_text(policy)
    made.models.write_text(
        models_text((ApprovedModel(name=str(model), folder=str(model), digest=model_digest(model)),))
    )
    if not made.key.exists():
        keys.make_key_pair(made.key)
        keys.make_key_pair(folder / "node.key", keys.NODE)
    if num_records is None:
        with data.open(newline="") as file:
            num_records = len(list(csv.reader(file))) - 1
    with Ledger(made.ledger) as ledger:
        if ledger.data_set() is None:
            ledger.register(str(made.partition_id), num_records, made.delta or default_delta(num_records))
    return made
