"""Which models the node runs: each is approved by its operator, and from then on known by the digest of its files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fedpriv.adapters.locations import digest_of
from fedpriv.deployment.files import replace
from fedpriv.errors import InputError
from fedpriv.vault import models
from fedpriv.vault.models import ApprovedModel
from fedpriv.vault.settings import VaultSettings

# Configuration, weights and tokenizer; no code, and no pickled weights.
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")


@dataclass(frozen=True, kw_only=True)
class Approval:
    """A model as approved.

    Attributes:
        model: name, folder and digest.
        num_bytes: of its files.
        is_new: whether it was not approved before.
    """

    model: ApprovedModel
    num_bytes: int
    is_new: bool


def approve(vault: VaultSettings, source: str, *, name: str | None = None, replace_old: bool = False) -> Approval:
    """Let the node run a model.

    Args:
        vault: whose file of models to add to.
        source: a folder, a GGUF file, a bundled model, or a name on the Hugging Face Hub.
        name: what runs call it; None stands for the source, where a folder or file is its absolute path.
        replace_old: the name may have stood for other files before.

    Raises:
        InputError: there is no such model, it has no safetensors or brings code, or the name stands for other files.
    """
    folder = _folder(source)
    _refuse_code(folder)
    name = name or (str(Path(source).expanduser().absolute()) if Path(source).expanduser().exists() else source)
    model = ApprovedModel(name=name, folder=str(folder), digest=digest_of(folder))
    known = models.read(vault.models)
    old = next((other for other in known if other.name == name), None)
    if old is not None and old.digest != model.digest and not replace_old:
        raise InputError(
            f"model = {name!r}: is approved with other files, of digest {old.digest[:16]}...; give --replace, or --name"
        )
    others = tuple(other for other in known if other.name != name)
    replace(vault.models, models.text_of((*others, model)).encode())
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Approval(model=model, num_bytes=num_bytes, is_new=old is None or old.digest != model.digest)


def _folder(source: str) -> Path:
    """The folder with the model's files, fetched from the Hub if there is none on this machine."""
    from fedpriv.adapters.base_models import resolve  # slow to import

    place = resolve(source)
    return Path(resolve(place if Path(place).is_dir() else _fetched(source)))


def _fetched(name: str) -> str:
    import huggingface_hub

    from fedpriv.hub import quiet_hub

    try:
        with quiet_hub():
            return huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES))
    except Exception as error:  # the library raises errors of many types
        reason = str(error).splitlines()[0]
        raise InputError(f"model = {name!r}: neither a folder nor a model that the Hub gives ({reason})") from None


def _refuse_code(folder: Path) -> None:
    """Refuse a model that brings Python code, or whose configuration asks for some."""
    if code := sorted(folder.rglob("*.py")):
        raise InputError(
            f"model = {str(folder)!r}: brings code, {code[0].name}; only weights and tokenizers may run here"
        )
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_bytes())
        except ValueError:
            raise InputError(f"model = {str(folder)!r}: {file.name} is not JSON") from None
        if isinstance(content, dict) and "auto_map" in content:
            raise InputError(f"model = {str(folder)!r}: {file.name} asks for code of its own (auto_map)")
