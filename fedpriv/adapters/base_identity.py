"""What a saved adapter calls its base, and the digests of the weights that it was trained on.

The name is that of the Hugging Face Hub, or the last part of a path: never a path of the machine that trained, which
means nothing elsewhere and tells who worked there. A name alone says little, so the digests stand beside it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from huggingface_hub import snapshot_download

from fedpriv.adapters import locations
from fedpriv.errors import InputError
from fedpriv.hub import quiet_hub


def public_name(name: str) -> str:
    """What others call a base: its name on the Hub, else the last part of the path of its folder or file.

    Args:
        name: as the user gave it, see `load_base`; or, in an older adapter, the path of its folder.
    """
    path = Path(name)
    if path.is_dir() or path.is_absolute() or name.startswith((".", "~")) or name.endswith(".gguf"):
        return path.name or path.resolve().name
    if name.removeprefix("sentence-transformers/") == locations.BUNDLED_ENCODER:
        return f"sentence-transformers/{locations.BUNDLED_ENCODER}"
    return locations.LANGUAGE_MODEL_ON_HUB if name == locations.BUNDLED_LANGUAGE_MODEL else name


def weights_digests(name: str) -> dict[str, str]:
    """{file: SHA-256 in hex} of a base's weights as they are on this machine; empty where there are none.

    For a model of the Hub these are the digests that the Hub shows beside its files.

    Args:
        name: as for `load_base`.
    """
    return {file.name: _digest(file, file.stat().st_mtime_ns, file.stat().st_size) for file in _weights(name)}


def check_weights(name: str, expected: dict[str, str]) -> None:
    """Refuse a base with other weights than those that an adapter was trained on.

    Args:
        name: as for `load_base`.
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
    try:
        location = locations.locate(name)
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
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
