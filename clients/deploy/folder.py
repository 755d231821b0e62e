"""A node's folder: its key, its policy, its ledger, and what it knows about the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass

from fedpriv.deployment import certificates, keys
from fedpriv.deployment.files import new_folder
from fedpriv.deployment.settings import read_settings, split_address, validated
from fedpriv.vault.policy import Limits

DEFAULT_PORT = 9094

_POLICY_HEADER = "# What a coordinator may request from this node; it refuses anything beyond.\n"
_POLICY_COMMENTS: Mapping[str, str] = {
    "min_effective_noise_multiplier": "Minimum noise multiplier, divided by the clipping rule's sensitivity factor.",
    "max_sampling_probability": "Maximum expected batch size, divided by the registered number of records.",
    "max_local_steps": "Maximum number of noisy steps in a round.",
    "max_rounds": "Maximum number of rounds in a run.",
    "max_clip_norm": "Maximum clip norm; with a larger one, clipping would have little effect.",
}
_APPROVED_HEADER = "# SHA-256 of each bundle that may run here, one per line; `approve` adds them.\n"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Node:
    """A node's settings and the paths of its files.

    Attributes:
        folder: absolute path.
        superlink: HOST:PORT of the coordinator.
        partition_id: which client of a run the node is.
        name: for display, visible to the coordinator.
        port: on this machine, for Flower's own processes; it need not be reachable from outside.
        data: file with the records; None stands for a hospital of the embedded synthetic corpus.
        text_column, label_column, text_pair_column: of the file; empty if there is none.
        ledger_file: None stands for ledger.sqlite in the folder.
        budget_epsilon: that all runs together may spend; None sets no limit.
        delta: for the budget; None stands for 1 / (10 N_k), at most 1e-5.
    """

    folder: Path
    superlink: str
    partition_id: Annotated[int, Field(ge=0)]
    name: Annotated[str, Field(min_length=1, max_length=100)]
    port: Annotated[int, Field(ge=1, le=65535)] = DEFAULT_PORT
    data: Path | None = None
    text_column: str = "text"
    label_column: str = "label"
    text_pair_column: str = ""
    ledger_file: Path | None = None
    budget_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None

    @field_validator("superlink")
    @classmethod
    def _is_address(cls, value: str) -> str:
        split_address(value, name="superlink")
        return value

    @staticmethod
    def read(folder: Path) -> Node:
        """The settings in a folder that `make` created.

        Raises:
            InputError: there are no settings, or invalid ones.
        """
        return read_settings(Node, folder / "node.toml", folder=folder.absolute())

    @property
    def superlink_host(self) -> str:
        """The host name or address of the coordinator's machine."""
        return split_address(self.superlink)[0]

    @property
    def superlink_port(self) -> int:
        """The port that the SuperLink listens on."""
        return split_address(self.superlink)[1]

    @property
    def ca_certificate(self) -> Path:
        """The certificate of the authority that vouches for the coordinator."""
        return self.folder / certificates.CA_CERTIFICATE

    @property
    def key(self) -> Path:
        """The node's private key."""
        return self.folder / "node.key"

    @property
    def public_key(self) -> Path:
        """The node's public key, which the coordinator registers."""
        return keys.public_path(self.key)

    @property
    def ledger(self) -> Path:
        """The node's own ledger."""
        return self.ledger_file or self.folder / "ledger.sqlite"

    @property
    def policy(self) -> Path:
        """The file with the limits on what a coordinator may request."""
        return self.folder / "policy.toml"

    @property
    def approved(self) -> Path:
        """The file with the digests of the bundles that may run here."""
        return self.folder / "approved-fabs"

    @property
    def events(self) -> Path:
        """The log of what the node did, one event per line."""
        return self.folder / "events.jsonl"

    @property
    def flower_home(self) -> Path:
        """Flower's own folder."""
        return self.folder / "flower"

    @property
    def node_config_file(self) -> Path:
        """The file that passes `node_config` to Flower."""
        return self.flower_home / "node-config.toml"

    @property
    def node_config(self) -> dict[str, int | float | str]:
        """The node's own settings, as its ClientApp receives them."""
        values: dict[str, int | float | str] = {"partition-id": self.partition_id, "name": self.name}
        if self.data is not None:
            values |= {"data": str(self.data), "text-column": self.text_column, "label-column": self.label_column}
            values |= {"text-pair-column": self.text_pair_column}
        values |= {"ledger": str(self.ledger), "policy": str(self.policy)}
        values |= {"identity-key": str(self.key), "events": str(self.events)}
        if self.budget_epsilon is not None:
            values["budget-epsilon"] = self.budget_epsilon
        if self.delta is not None:
            values["delta"] = self.delta
        return values


def make(folder: Path, *, ca: Path, **settings: Any) -> Node:
    """Create a node's folder, with a key pair, the coordinator's certificate and a policy to review.

    Args:
        folder: does not exist or is empty.
        ca: the coordinator's ca.crt.
        settings: fields of `Node`; None stands for a field's default.

    Raises:
        InputError: a setting, the certificate or the data cannot be used; nothing was written.
    """
    values = {key: value for key, value in settings.items() if value is not None}
    node = validated(Node, values, folder=folder.absolute())
    certificates.valid_until(ca)
    if node.data is not None:
        _check_data(node, node.data)
    with new_folder(node.folder) as new:
        keys.make_key_pair(new / node.key.name)
        (new / node.ca_certificate.name).write_bytes(ca.read_bytes())
        (new / "node.toml").write_text(tomli_w.dumps(_plain(values)))
        (new / node.policy.name).write_text(policy_text())
        (new / node.approved.name).write_text(_APPROVED_HEADER)
        (new / node.flower_home.name).mkdir()
    return node


def policy_text() -> str:
    """The text of a policy file with every limit at its default, and its meaning."""
    defaults = Limits()
    parts = [f"# {_POLICY_COMMENTS[f.name]}\n{f.name} = {getattr(defaults, f.name)}\n" for f in fields(Limits)]
    return "\n".join([_POLICY_HEADER, *parts])


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def _check_data(node: Node, data: Path) -> None:
    from fedpriv.data.checks import describe  # slow to import

    describe(str(data), text=node.text_column, label=node.label_column, text_pair=node.text_pair_column)
