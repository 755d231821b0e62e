"""Admission of peers and models: a node's operator approves each by name, and the node knows it by key or digest.

Another holder, with which the node adds up, is known by its vault's public key; a model by the digest of its files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from fedpriv.apps import FLOWER_APP
from fedpriv.config import Scalar
from fedpriv.errors import InputError
from fedpriv.files import owner_for, replace_file, software
from fedpriv.holder.vault.settings import (
    PEER_SUFFIX,
    ApprovedModel,
    VaultSettings,
    agreed_runs,
    approved_peers,
    differences,
    keys_of_supernodes,
    models_text,
    read_models,
)
from fedpriv.learning import adapters  # by its name: what loads models takes seconds to import
from fedpriv.operate import approvals
from fedpriv.operate.joining import Invitation, Member, Roster
from fedpriv.privacy.accounting.views import num_readers
from fedpriv.privacy.ledger import keys

_AGREED_HEADER = "# The runs that this node takes part in, as the invitation or `approve-run` had them.\n"


def unknown_peers(vault: VaultSettings, roster: Roster, *, replace_old: bool = False) -> list[Member]:
    """The others in a roster whose keys are not approved yet.

    Args:
        vault: of the node.
        roster: that the coordinator sent, which may list what it likes.
        replace_old: another key may have been approved for a partition id.

    Raises:
        InputError: the roster lists another key for this node, or not this node, or a key that is approved for another
            partition id or has taken the place of one that is approved.
    """
    own, known = keys.public_line(vault.key), approved_peers(vault.peers)
    listed = {member.partition_id: member for member in roster.members}
    mine = listed.pop(vault.partition_id, None)
    if mine is None or mine.vault_key != own:
        raise InputError(
            f"roster: has {mine.fingerprint if mine else 'no key'} for partition {vault.partition_id}, this node, "
            f"whose vault.key has {keys.fingerprint(own)}; tell the coordinator"
        )
    for client, member in listed.items():
        if others := [peer for peer, line in known.items() if line == member.vault_key and peer != client]:
            raise InputError(f"roster: the key of partition {client} is approved as that of partition {others[0]}")
        if known.get(client, member.vault_key) != member.vault_key and not replace_old:
            raise InputError(
                f"roster: partition {client} ({member.name}) has another key than is approved; ask that institution "
                "whether it exchanged its key, then give --replace"
            )
    return [member for client, member in listed.items() if known.get(client) != member.vault_key]


def approve_peers(vault: VaultSettings, members: Sequence[Member]) -> None:
    """Let the node add up with these holders, whose keys its operator has compared."""
    vault.peers.mkdir(mode=0o700, exist_ok=True)
    for member in members:
        replace_file(vault.peers / f"{member.partition_id}{PEER_SUFFIX}", f"{member.vault_key}\n".encode())


def agreed_text(runs: Sequence[Mapping[str, Scalar]]) -> str:
    """The content of the file with these terms, the last agreement first."""
    return _AGREED_HEADER + (tomli_w.dumps({"run": [dict(run) for run in reversed(runs)]}) if runs else "")


def waiting_run(vault: VaultSettings) -> tuple[dict[str, Scalar], list[str]]:
    """The terms of the run that waits for its operator, and how they differ from those that were agreed to.

    Raises:
        InputError: none waits, or the file is damaged.
    """
    if not vault.waiting.is_file():
        raise InputError(f"{vault.waiting}: no such file; no run waits")
    try:
        asked = json.loads(vault.waiting.read_bytes())
        return asked, differences(asked, agreed_runs(vault.agreed))
    except (ValueError, AttributeError):
        raise InputError(f"{vault.waiting}: is damaged; delete it, and let the run be started again") from None


def approve_run(vault: VaultSettings, asked: Mapping[str, Scalar]) -> None:
    """Agree to a run with these terms, beside those before; the next request of it is taken."""
    agreed = [dict(asked), *agreed_runs(vault.agreed)]
    replace_file(vault.agreed, agreed_text(agreed).encode(), mode=0o600, owner=owner_for(vault.folder))
    vault.waiting.unlink(missing_ok=True)


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
    if others := keys_of_supernodes(vault.peers):
        raise InputError(
            f"{others[0]}: is the key of that node's SuperNode, which signs no sums; get a roster from the "
            "coordinator, and run `approve-peers` with that"
        )
    least, colluding = vault.min_survivors, vault.colluding_clients
    check_survivors(vault)
    if len(set(known.values())) < len(known):
        raise InputError(f"{vault.peers}: one key stands for two partitions; remove what is wrong")
    needed = least - 1 if vault.budget_view == "aggregate" else 0
    if len(known) < needed:
        raise InputError(
            f"{vault.peers}: {len(known)} approved, min_survivors = {least} needs {needed} or more; run `approve-peers`"
        )
    if not known:
        return "none: takes part in no secure sum"
    named = ", ".join(f"{client} ({keys.fingerprint(line)})" for client, line in known.items())
    return f"adds up with partitions {named}, in sums of {least} or more, {colluding} may collude"


def check_asked(invitation: Invitation) -> None:
    """Refuse an invitation to code or a model that this machine has in another form than the coordinator.

    Raises:
        InputError: says which, or the planned run cannot be read, or the model brings code.
        FlowerError: this checkout cannot be bundled.
    """
    if invitation.software not in ("", here := software()):
        raise InputError(f"software = {invitation.software}: here is {here}; install the coordinator's fedpriv")
    own = approvals.bundle_digest(FLOWER_APP)
    if invitation.bundle not in ("", own):
        raise InputError(
            f"bundle = {invitation.bundle[:16]}...: this checkout's is {own[:16]}...; install the coordinator's version"
        )
    if invitation.plan is None:
        return
    name = invitation.plan.model
    folder = adapters.model_folder(name)
    _refuse_code(folder)
    if (found := adapters.model_digest(folder)) != invitation.model:
        raise InputError(
            f"model = {name!r}: the coordinator's files have digest {invitation.model[:16]}..., those here "
            f"{found[:16]}...; get the same ones"
        )


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


def approve_model(
    vault: VaultSettings, source: str, *, name: str | None = None, replace_old: bool = False, digest: str = ""
) -> Approval:
    """Let the node run a model.

    Args:
        vault: whose file of models to add to.
        source: a folder, a GGUF file, a bundled model, or a name on the Hugging Face Hub.
        name: what runs call it; None stands for the source, where a folder or file is its absolute path.
        replace_old: the name may have stood for other files before.
        digest: that the files must have; empty for any.

    Raises:
        InputError: there is no such model, it has no safetensors or brings code, the name stands for other files, or
            these have another digest.
    """
    folder = adapters.model_folder(source)
    _refuse_code(folder)
    name = name or (str(Path(source).expanduser().absolute()) if Path(source).expanduser().exists() else source)
    model = ApprovedModel(name=name, folder=str(folder), digest=adapters.model_digest(folder))
    if digest not in ("", model.digest):
        raise InputError(f"model = {source!r}: has changed since it was compared, digest {model.digest[:16]}...")
    known = read_models(vault.models)
    old = next((other for other in known if other.name == name), None)
    if old is not None and old.digest != model.digest and not replace_old:
        raise InputError(
            f"model = {name!r}: is approved with other files, of digest {old.digest[:16]}...; give --replace, or --name"
        )
    others = tuple(other for other in known if other.name != name)
    replace_file(vault.models, models_text((*others, model)).encode(), mode=0o600, owner=owner_for(vault.folder))
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Approval(model=model, num_bytes=num_bytes, is_new=old is None or old.digest != model.digest)


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
