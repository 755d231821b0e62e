"""The kits with real processes: a node is let in once it is registered, and both sides stop when asked."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpriv.privacy.ledger import keys
from simulations.sites import CLIENT, SERVER, Service, free_port, kit

pytestmark = pytest.mark.deployment


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[tuple[Path, int, Service]]:
    folder, port = tmp_path / "coordinator", free_port()
    kit(SERVER, "init", folder, "--address", "127.0.0.1", "--port", port)
    superlink = Service(tmp_path / "superlink.log", SERVER, "start", folder)
    yield folder, port, superlink
    superlink.stop()


def test_a_node_is_let_in_once_it_is_registered_and_both_stop_when_asked(coordinator, tmp_path):
    folder, port, superlink = coordinator
    superlink.wait_for(f"SuperLink answers at https://127.0.0.1:{port}, certificate valid until")
    heard = kit(SERVER, "invite", folder, "St. Anna").split()[-1]
    invitation = ("--invite", folder / "invitations" / "0.toml", "--fingerprint", heard)
    kit(CLIENT, "init", tmp_path / "node 0", *invitation, "--approve")
    node = Service(tmp_path / "node.log", CLIENT, "start", tmp_path / "node 0")
    node.wait_for("vault: vault listens on")
    node.wait_for("s: waiting until the coordinator registers")

    application = tmp_path / "node 0" / "application.toml"
    told = keys.fingerprint(keys.public_line(tmp_path / "node 0" / "vault.key"))
    assert "St. Anna is admitted" in kit(SERVER, "admit", folder, application, "--fingerprint", told)
    assert "St. Anna was admitted before" in kit(SERVER, "admit", folder, application)
    try:
        superlink.wait_for("nodes online: 1 of 1 registered")
        assert "1 online of 1 registered" in kit(SERVER, "doctor", folder)
    finally:
        assert node.stop() == 0
    assert superlink.stop() == 0
    assert " SuperLink ended with exit code 0" in superlink.text().splitlines()[-1]
