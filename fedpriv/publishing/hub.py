"""A variant on the Hugging Face Hub: which files, and one commit with all of them or none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from fedpriv.adapters.lora import CONVENTION_FILE
from fedpriv.dedup import variants
from fedpriv.errors import InputError
from fedpriv.publishing import card
from fedpriv.publishing.saved import ADAPTER_CONFIG, SavedVariant
from fedpriv.runs import files

TENSORS = "adapter_model.safetensors"
_KEPT = ("version", "base_model", "base_weights", "pooling", "labels", "reading")


def check_name(name: str) -> None:
    """Refuse a name that no repository of the Hub can have.

    Raises:
        InputError: it is not OWNER/NAME.
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        name_is_valid = False
    else:
        name_is_valid = name.count("/") == 1
    if not name_is_valid:
        raise InputError(f"NAME = {name!r}: must be OWNER/NAME, as on the Hub")


def contents(saved: SavedVariant, *, license: str = "") -> dict[str, bytes]:
    """{file: content} of what is uploaded: adapter, how to use it, and its card; nothing else of the run.

    Its provenance, the ledger and the configuration stay here. Files of older versions name a folder of the machine as
    their base; what is uploaded does not.

    Args:
        saved: the variant.
        license: of the Hub's identifiers; empty states none.

    Raises:
        InputError: its tensors were changed, or a file is damaged.
    """
    variants.read_tensors(saved.folder)
    convention = {key: saved.convention[key] for key in _KEPT if key in saved.convention} | {"base_model": saved.base}
    settings = files.read_values(saved.folder / ADAPTER_CONFIG) | {"base_model_name_or_path": saved.base}
    return {
        card.FILE: card.text(saved, license=license).encode(),
        ADAPTER_CONFIG: _json(settings),
        TENSORS: (saved.folder / TENSORS).read_bytes(),
        CONVENTION_FILE: _json(convention),
    }


def upload(name: str, found: Mapping[str, bytes], *, public: bool) -> str:
    """Make the repository if it is not there, and commit the files, all or none; returns the commit's address.

    Args:
        name: OWNER/NAME.
        found: {file: content}.
        public: whether a new repository can be read by everybody.

    Raises:
        ConnectionError: the Hub refuses, or cannot be reached; one line.
    """
    api = HfApi()
    operations = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=content) for path, content in found.items()]
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        done = api.create_commit(name, operations, commit_message="Upload an adapter with fedpriv")
    except Exception as error:  # of the Hub's client, or of what it is built on
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConnectionError(f"push {name}: nothing was uploaded ({reason})") from None
    return str(done.commit_url)


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
