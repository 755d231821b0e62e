"""A coordinator's certificate, and nodes that know it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from clients.deploy import folder
from clients.deploy.folder import Made, Node
from fedpriv.errors import InputError
from fedpriv.operate import joining
from fedpriv.privacy.ledger import keys
from server.deploy import certificates
from simulations.sites import free_port
from tests.bundles import bundled_once
from tests.tiny import LABELS


@pytest.fixture(autouse=True)
def _bundled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bundled_once(monkeypatch)


@pytest.fixture
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The coordinator's ca.crt, beside its key."""
    made = tmp_path_factory.mktemp("coordinator")
    certificates.make_ca(made, 100)
    keys.make_key_pair(made / "coordinator.key")
    return made / "ca.crt"


@pytest.fixture
def invite(ca: Path) -> Callable[..., Path]:
    """Writes an invitation; what is not given asks a clinic to be partition 1, and nothing else."""

    def invite(**values: object) -> Path:
        asked = {"name": "clinic", "partition_id": 1, "superlink": "127.0.0.1:9093", "ca": ca.read_text()}
        asked |= {"key": keys.public_line(ca.with_name("coordinator.key"))} | values
        path = ca.with_name("invitation.toml")
        path.write_text(tomli_w.dumps(asked))
        return path

    return invite


def heard(invitation: Path) -> list[object]:
    """The options by which an operator takes an invitation, having heard its fingerprint, if it has any."""
    try:
        told = [joining.read(joining.Invitation, invitation).fingerprint]
    except InputError:
        told = []
    return ["--invite", invitation, *(part for each in told for part in ("--fingerprint", each))]


@pytest.fixture
def make(tmp_path: Path, invite: Callable[..., Path]) -> Callable[..., Made]:
    """Makes a node's folder; settings that are not given are those of a node of the corpus."""

    def make(name: str = "node", *, superlink: str = "127.0.0.1:9093", **settings: object) -> Made:
        asked = joining.read(joining.Invitation, invite(superlink=superlink))
        return folder.make(tmp_path / name, asked, **({"port": free_port()} | settings))

    return make


@pytest.fixture
def make_node(make: Callable[..., Made]) -> Callable[..., Node]:
    """The same, but returns the node alone."""
    return lambda name="node", **settings: make(name, **settings).node


@pytest.fixture
def own(table: Path) -> dict[str, object]:
    """What a node with records of its own must say."""
    return {"data": table, "labels": LABELS, "budget_epsilon": 4.0}
