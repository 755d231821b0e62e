"""The models that operators have approved, and what runs on them start from."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from fedpriv.learning.training.workbench import load_model
from tests.adversary import models
from tests.adversary.nodes import run_config
from tests.adversary.questions import COUPLED
from tests.tiny import LABELS


@pytest.fixture(scope="module")
def approved(tiny_bert, tmp_path_factory) -> dict[str, Path]:
    """{name: folder} of what the operators have approved: a sound model, and some that they should not have."""
    folder = tmp_path_factory.mktemp("approved")
    return {
        "tiny": models.with_words(tiny_bert, folder / "tiny"),
        "oracle": models.with_oracle(tiny_bert, folder / "oracle", "jane doe"),
        "beyond": models.with_words(tiny_bert, folder / "beyond", jane=9999),
        **{kind: models.with_coupled_records(kind, tiny_bert, folder / kind) for kind in COUPLED},
    }


@pytest.fixture(scope="module", autouse=True)
def _quiet(quick_nodes):
    """What a node's operator reads would drown what failed."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def initial(approved, **changes):
    """What a run starts from."""
    config = run_config(**changes)
    return load_model(replace(config, model=str(approved[config.model])), labels=LABELS)[1].initial


@pytest.fixture(scope="module")
def starts(approved):
    """{model: the adapter that a run on it starts from}."""
    return {name: initial(approved, model=name, **COUPLED.get(name, {})) for name in ("tiny", *COUPLED)}
