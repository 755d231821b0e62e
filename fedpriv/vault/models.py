"""The models that a node runs: each approved by its operator, by the digest of its weights and its tokenizer.

A model names its tokenizer, and a tokenizer can be written such that it fails on texts of a coordinator's choosing, so
neither may come from a run's configuration. That names an approved model, or nothing is computed.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import tomli_w
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from fedpriv import config as configuration
from fedpriv.adapters.locations import digest_of
from fedpriv.errors import InputError

_HEADER = "# The models that this node runs; `approve-model` adds them. A run names one of them.\n"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ApprovedModel:
    """A model that an operator has approved.

    Attributes:
        name: by which a run's configuration asks for it.
        folder: with its weights, configuration and tokenizer.
        digest: SHA-256 of all files there, from `digest_of`.
    """

    name: str
    folder: str
    digest: str


def read(path: Path) -> tuple[ApprovedModel, ...]:
    """The models that a file approves; none if there is no such file.

    Raises:
        InputError: the file is malformed.
    """
    if not path.is_file():
        return ()
    entries = configuration.read(path).get("model", [])
    try:
        return tuple(ApprovedModel(**entry) for entry in entries)
    except (TypeError, ValidationError):
        raise InputError(f"{path}: each [[model]] needs name, folder and digest, and nothing else") from None


def text_of(models: tuple[ApprovedModel, ...]) -> str:
    """The content of the file that approves these models."""
    return _HEADER + (tomli_w.dumps({"model": [asdict(model) for model in models]}) if models else "")


def approved(name: str, models: tuple[ApprovedModel, ...]) -> ApprovedModel | None:
    """The approved model of this name or digest; None if there is none."""
    return next((model for model in models if name in (model.name, model.digest)), None)


def is_unchanged(model: ApprovedModel) -> bool:
    """Whether the files in an approved model's folder are still those that were approved."""
    try:
        return digest_of(Path(model.folder)) == model.digest
    except (InputError, OSError):
        return False
