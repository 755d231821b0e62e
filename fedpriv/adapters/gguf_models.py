"""Models in one GGUF file: converted once into an ordinary folder, which everything else then reads.

transformers takes 6 to 20 seconds to read such a file. The folder is kept in the cache of `shared_pages`, named by the
SHA-256 of the file and the version of transformers. It holds the dequantised weights in float32, to the bit.

A folder there is used if it belongs to this user, nobody else may enter it, and its files have the digest that was
noted when it was made. So neither damage nor another user who can write the cache goes unseen; who can act as this
user, or as root, could change this program as well.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedpriv.adapters.shared_pages import cache_folder
from fedpriv.errors import InputError
from fedpriv.files import new_folder
from fedpriv.vault.models import digest_of

log = logging.getLogger(__name__)

# Hidden files are no part of a model's folder.
_DIGEST_FILE = ".sha256"
_MAGIC = b"GGUF"
_TOKENS = "tokenizer.ggml.tokens"


def folder_of(file: Path, name: str) -> Path:
    """The folder with the model of a GGUF file, which is made when it is first asked for.

    Args:
        file: with weights and tokenizer.
        name: as the user gave it, for messages.

    Raises:
        InputError: the file is no GGUF, is of an architecture that transformers does not read, or has no tokenizer; the
            package gguf is missing; or the folder cannot be written, or is not what it was.
    """
    with file.open("rb") as content:
        if content.read(len(_MAGIC)) != _MAGIC:
            raise InputError(f"model = {name!r}: is not a GGUF file")
        content.seek(0)
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    folder = cache_folder() / "gguf" / f"{digest}-{transformers.__version__}"
    if not folder.is_dir():
        _make(folder, file, name)
    _verify(folder)
    return folder


def _make(folder: Path, file: Path, name: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"model = {name!r}: needs the package gguf, which is missing; run `make llm`")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with new_folder(folder) as temporary:
            model, tokenizer = _read(file, temporary, name)
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            (temporary / _DIGEST_FILE).write_text(digest_of(temporary))
    except OSError as error:
        if not folder.is_dir():  # else another process was faster
            raise InputError(
                f"model = {name!r}: cannot be converted in {folder.parent} ({error.strerror or error}); set "
                "FEDPRIV_CACHE to a folder with room"
            ) from None


def _read(file: Path, beside: Path, name: str) -> tuple[Any, Any]:
    """The model, in float32, and its tokenizer, from this file alone."""
    log.info("%s is converted once, into %s", name, beside.parent)
    # transformers' progress bars of this know no switch.
    with _alone(file, beside) as place, redirect_stderr(StringIO()):
        _check_metadata(file, name)
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                place,
                gguf_file=file.name,
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file.name, trust_remote_code=False)
        except Exception as error:  # a foreign file may cause any error in transformers
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"model = {name!r}: transformers cannot read this GGUF file ({reason})") from None
    if info["missing_keys"]:
        raise InputError(f"model = {name!r}: lacks weights, {min(info['missing_keys'])} among them")
    # From now on it is a model as any other.
    del model.config.quantization_config
    model.hf_quantizer = None
    return model, tokenizer


@contextmanager
def _alone(file: Path, beside: Path) -> Iterator[Path]:
    """A folder where transformers finds nothing but this file: its neighbours must not decide what a model is."""
    place = beside / ".alone"
    place.mkdir()
    link = place / file.name
    link.symlink_to(file.resolve())
    try:
        yield place
    finally:
        link.unlink()
        place.rmdir()


def _check_metadata(file: Path, name: str) -> None:
    from gguf import GGUFReader

    try:
        fields = GGUFReader(file).fields
    except Exception as error:  # a damaged file causes errors of many types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"model = {name!r}: is a damaged GGUF file ({reason})") from None
    if _TOKENS not in fields:
        raise InputError(f"model = {name!r}: this GGUF file has no tokenizer; use one that has, or a model's folder")


def _verify(folder: Path) -> None:
    state = folder.stat()
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise InputError(f"{folder}: must belong to you alone (chmod 700), since a model is read from it; or delete it")
    try:
        is_unchanged = (folder / _DIGEST_FILE).read_text() == digest_of(folder)
    except OSError:
        is_unchanged = False
    if not is_unchanged:
        raise InputError(f"{folder}: its files are not those that were converted from the GGUF file; delete it")
