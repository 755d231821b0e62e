"""What tests of vaults share: benches that no other test has filled, the adapter at its start, and nodes' folders."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from fedpriv.holder.vault.holder import Holder
from fedpriv.learning.training import workbench
from tests.adversary.nodes import run_config
from tests.tiny import LABELS
from tests.vaults import make_vault


@pytest.fixture
def fresh_benches() -> Iterator[None]:
    """Benches are cached by the names of files, which other tests may have given to others."""
    workbench.forget()
    yield
    workbench.forget()


@pytest.fixture(scope="module")
def start(tiny_bert: Path) -> dict[str, Tensor]:
    """The adapter with which a run of the tiny BERT begins."""
    return workbench.load_model(replace(run_config(), model=str(tiny_bert)), labels=LABELS)[1].initial


@pytest.fixture
def holder(tiny_bert: Path, tmp_path: Path, data: Path, fresh_benches: None) -> Callable[..., Holder]:
    """Builds the holder of a node's folder with the data of these tests."""
    return lambda **settings: Holder.of(make_vault(tmp_path / "node", data, tiny_bert, **settings))
