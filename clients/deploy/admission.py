"""Admission of peers and models: a node's operator approves each by name, and the node knows it by key or digest.

Another holder, with which the node adds up, is known by its vault's public key; a model by the digest of its files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fedpriv.accounting.views import num_readers
from fedpriv.adapters import model_digest
from fedpriv.deployment import keys
from fedpriv.errors import InputError
from fedpriv.files import replace_file
from fedpriv.vault.settings import (
    PEER_SUFFIX,
    ApprovedModel,
    VaultSettings,
    approved_peers,
    models_text,
    peers_of_earlier_versions,
    read_models,
)

# Configuration, weights and tokenizer; no code, and no pickled weights.
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")


def approve_peer(vault: VaultSettings, client: int, key: Path, *, replace_old: bool = False) -> bool:
    """Let the node add up with another holder's, and return whether that is new.

    Args:
        vault: of the node.
        client: partition id of the other holder.
        key: its vault.key.pub, as its operator handed it over.
        replace_old: another key may have been approved for this partition id.

    Raises:
        InputError: the file is no public key of a vault; partition id or key are this node's own or another peer's; or
            another key was approved for this partition id.
    """
    line = keys.read_public_line(key)
    known = approved_peers(vault.peers)
    file = vault.peers / f"{client}{PEER_SUFFIX}"
    if client == vault.partition_id:
        raise InputError(f"PARTITION-ID = {client}: is this node's own; approve the others")
    if line == keys.public_line(vault.key):
        raise InputError(f"public key = {key}: is this node's own; give that of partition {client}")
    for peer, approved in known.items():
        if peer != client and approved == line:
            raise InputError(f"public key = {key}: is approved as that of partition {peer}; each holder has its own")
    if client in known and known[client] == line:
        return False
    if client in known and not replace_old:
        raise InputError(f"{file}: exists; ask that holder whether its key was exchanged, then give --replace")
    vault.peers.mkdir(mode=0o700, exist_ok=True)
    replace_file(file, f"{line}\n".encode())  # what an earlier version approved is none
    return True


def check_survivors(vault: VaultSettings) -> None:
    """Refuse sums in which nobody else's noise need count.

    Raises:
        InputError: `min_survivors` leaves no honest node but this one and those that read the sum.
    """
    least, colluding = vault.min_survivors, vault.colluding_clients
    needed = num_readers(colluding) + 2
    if least < needed:
        raise InputError(
            f"min_survivors = {least}: must be at least {needed} with colluding_clients = {colluding}, so that every "
            "sum has another node's noise, of which none of those who read it knows"
        )


def peers_summary(vault: VaultSettings) -> str:
    """The peers with which the node adds up, for its operator.

    Raises:
        InputError: fewer are approved than a sum needs besides this node, the threshold leaves no honest peer, a
            file is no public key of a vault, or one key stands for two holders.
    """
    known = approved_peers(vault.peers)
    if old := peers_of_earlier_versions(vault.peers):
        raise InputError(
            f"{old[0]}: is the key of that node's SuperNode, which signs no sums; get its vault.key.pub from its "
            "operator, and run `approve-peer` with that"
        )
    least, colluding = vault.min_survivors, vault.colluding_clients
    check_survivors(vault)
    if len(set(known.values())) < len(known):
        raise InputError(f"{vault.peers}: one key stands for two partitions; remove what is wrong")
    needed = least - 1 if vault.budget_view == "aggregate" else 0
    if len(known) < needed:
        raise InputError(
            f"{vault.peers}: {len(known)} approved, min_survivors = {least} needs at least {needed}; run `approve-peer`"
        )
    if not known:
        return "none: takes part in no secure sum"
    return f"adds up with partitions {', '.join(map(str, known))}, in sums of {least} or more, {colluding} may collude"


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


def approve_model(vault: VaultSettings, source: str, *, name: str | None = None, replace_old: bool = False) -> Approval:
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
    model = ApprovedModel(name=name, folder=str(folder), digest=model_digest(folder))
    known = read_models(vault.models)
    old = next((other for other in known if other.name == name), None)
    if old is not None and old.digest != model.digest and not replace_old:
        raise InputError(
            f"model = {name!r}: is approved with other files, of digest {old.digest[:16]}...; give --replace, or --name"
        )
    others = tuple(other for other in known if other.name != name)
    replace_file(vault.models, models_text((*others, model)).encode())
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Approval(model=model, num_bytes=num_bytes, is_new=old is None or old.digest != model.digest)


def _folder(source: str) -> Path:
    """The folder with the model's files, fetched from the Hub if there is none on this machine."""
    from fedpriv.adapters import resolve  # slow to import

    place = resolve(source)
    return Path(resolve(place if Path(place).is_dir() else _fetched(source)))


def _fetched(name: str) -> str:
    import huggingface_hub

    from fedpriv.adapters import quiet_hub

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
