"""A coordinator's certificate, nodes that know it, and what their operators type and are told."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from clients.deploy import doctor, folder
from clients.deploy.__main__ import app
from clients.deploy.folder import Made, Node
from fedpriv.errors import InputError
from fedpriv.holder.vault import _charging
from fedpriv.holder.vault.holder import Holder
from fedpriv.operate import joining
from fedpriv.operate.checks import Check
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.entries import Key
from server.deploy import certificates
from simulations.sites import free_port, run_in_process
from tests.bundles import bundled_once
from tests.tiny import LABELS


@pytest.fixture(autouse=True)
def _bundled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bundled_once(monkeypatch)


@pytest.fixture(scope="session")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The coordinator's ca.crt, beside its key."""
    made = tmp_path_factory.mktemp("coordinator")
    certificates.make_ca(made, 100)
    keys.make_key_pair(made / "coordinator.key")
    return made / "ca.crt"


@pytest.fixture(scope="session")
def server(ca: Path) -> Path:
    """The folder of the coordinator's certificate and key for this machine."""
    certificates.make_server_certificate(ca.parent, ["127.0.0.1"], 30)
    return ca.parent


@pytest.fixture
def invite(ca: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes an invitation; what is not given asks a clinic to be partition 1, and nothing else."""
    path = tmp_path_factory.mktemp("invited") / "invitation.toml"

    def invite(**values: object) -> Path:
        asked = {"name": "clinic", "partition_id": 1, "superlink": "127.0.0.1:9093", "ca": ca.read_text()}
        asked |= {"key": keys.public_line(ca.with_name("coordinator.key"))} | values
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


def kit(*arguments: object, code: int = 0) -> str:
    """What a command of the kit says, if it ends with this code; of anything but 0, the one line that says why."""
    done = run_in_process(app, "fedpriv node", *arguments)
    assert (done.returncode, code == 0 or done.stderr.count("\n")) == (code, True), done.stderr
    return done.stdout + done.stderr


def charge(node: Node, round_: int, event: SubsampledGaussian | None = None) -> None:
    """Charge a node's ledger for a release as its vault does, the receipt included."""
    policy = Holder.of(node.vault).policy
    key = Key(run="run", client="1", round=round_, request=f"{round_}")
    paid = Release(event=event or SubsampledGaussian(noise_multiplier=8.0, sampling_probability=0.1), rho_bar=1.0)
    _charging.charge(policy, key, paid, _charging.registered_data_set(policy, "1", None), noise_source="secure")


def check(node: Node, name: str) -> Check:
    """Of the doctor's, the one of this name, by what the node's files say now."""
    (found,) = [each for each in doctor.checks(Node.read(node.folder)) if each.name == name]
    return found


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
def node(make_node: Callable[..., Node]) -> Node:
    """Partition 1 of the corpus, which has approved nobody."""
    return make_node()


@pytest.fixture
def own(table: Path) -> dict[str, object]:
    """What a node with records of its own must say."""
    return {"data": table, "labels": LABELS, "budget_epsilon": 4.0}
