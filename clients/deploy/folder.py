"""A node's folder: its key, its rules, its ledger, and what it knows of the coordinator."""

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

_POLICY_HEADER = "# What this node lets a coordinator ask for; it refuses whatever goes beyond.\n"
_POLICY_COMMENTS: Mapping[str, str] = {
    "min_effective_noise_multiplier": "Least noise, over the sensitivity that the clipping rule gives.",
    "max_sampling_probability": "Largest expected batch, over the registered number of records.",
    "max_local_steps": "Most noisy steps in a round.",
    "max_rounds": "Most rounds in a run.",
    "max_clip_norm": "Largest clip norm; beyond it nothing is clipped in earnest.",
}
_APPROVED_HEADER = "# SHA-256 of each bundle that may run here, one a line; `approve` adds them.\n"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Node:
    """A node's settings and where its files lie.

    Attributes:
        folder: absolute.
        superlink: HOST:PORT of the coordinator.
        partition_id: which client of a run the node is.
        name: for display, seen by the coordinator.
        port: of this machine, for Flower's own processes; nothing from outside needs to reach it.
        data: file with the records; None plays a hospital of the embedded synthetic corpus.
        text_column, label_column, text_pair_column: of the file; an empty one is not there.
        ledger_file: None is ledger.sqlite in the folder.
        budget_epsilon: what all runs may cost together; None sets no bound.
        delta: for the budget; None is 1 / (10 N_k), at most 1e-5.
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
        """The settings of a folder that `make` made.

        Raises:
            InputError: it holds none, or wrong ones.
        """
        return read_settings(Node, folder / "node.toml", folder=folder.absolute())

    @property
    def superlink_host(self) -> str:
        """The coordinator's machine."""
        return split_address(self.superlink)[0]

    @property
    def superlink_port(self) -> int:
        """The port that it listens on."""
        return split_address(self.superlink)[1]

    @property
    def ca_certificate(self) -> Path:
        """By which the node knows the coordinator."""
        return self.folder / certificates.CA_CERTIFICATE

    @property
    def key(self) -> Path:
        """The node's private key."""
        return self.folder / "node.key"

    @property
    def public_key(self) -> Path:
        """What the coordinator registers."""
        return keys.public_path(self.key)

    @property
    def ledger(self) -> Path:
        """The node's own account."""
        return self.ledger_file or self.folder / "ledger.sqlite"

    @property
    def policy(self) -> Path:
        """What the node lets a coordinator ask for."""
        return self.folder / "policy.toml"

    @property
    def approved(self) -> Path:
        """Digests of the bundles that may run here."""
        return self.folder / "approved-fabs"

    @property
    def events(self) -> Path:
        """What the node did, a line each."""
        return self.folder / "events.jsonl"

    @property
    def flower_home(self) -> Path:
        """Flower's own folder."""
        return self.folder / "flower"

    @property
    def node_config_file(self) -> Path:
        """What `node_config` is handed to Flower in."""
        return self.flower_home / "node-config.toml"

    @property
    def node_config(self) -> dict[str, int | float | str]:
        """What the node states about itself to its own ClientApp."""
        stated: dict[str, int | float | str] = {"partition-id": self.partition_id, "name": self.name}
        if self.data is not None:
            stated |= {"data": str(self.data), "text-column": self.text_column, "label-column": self.label_column}
            stated |= {"text-pair-column": self.text_pair_column}
        stated |= {"ledger": str(self.ledger), "policy": str(self.policy)}
        stated |= {"identity-key": str(self.key), "events": str(self.events)}
        if self.budget_epsilon is not None:
            stated["budget-epsilon"] = self.budget_epsilon
        if self.delta is not None:
            stated["delta"] = self.delta
        return stated


def make(folder: Path, *, ca: Path, **settings: Any) -> Node:
    """A new node's folder, with a key pair, the coordinator's certificate and a policy to look through.

    Args:
        folder: does not exist or is empty.
        ca: the coordinator's ca.crt.
        settings: fields of `Node`; None leaves one out.

    Raises:
        InputError: something is wrong; then nothing was written.
    """
    values = {key: value for key, value in settings.items() if value is not None}
    node = validated(Node, values, folder=folder.absolute())
    certificates.valid_until(ca)
    if node.data is not None:
        _check_data(node, node.data)
    with new_folder(node.folder) as made:
        keys.make_key_pair(made / node.key.name)
        (made / node.ca_certificate.name).write_bytes(ca.read_bytes())
        (made / "node.toml").write_text(tomli_w.dumps(_plain(values)))
        (made / node.policy.name).write_text(policy_text())
        (made / node.approved.name).write_text(_APPROVED_HEADER)
        (made / node.flower_home.name).mkdir()
    return node


def policy_text() -> str:
    """A policy file with every limit at its default and what it means."""
    defaults = Limits()
    parts = [f"# {_POLICY_COMMENTS[f.name]}\n{f.name} = {getattr(defaults, f.name)}\n" for f in fields(Limits)]
    return "\n".join([_POLICY_HEADER, *parts])


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def _check_data(node: Node, data: Path) -> None:
    from fedpriv.data.checks import describe  # takes seconds to import

    describe(str(data), text=node.text_column, label=node.label_column, text_pair=node.text_pair_column)
