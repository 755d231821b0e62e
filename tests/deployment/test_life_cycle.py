"""A federation over the years: a coordinator that is lost, new keys, a node that leaves, two on one machine."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulations.sites import CLIENT, SERVER, DeployedFederation, free_port, kit, wait_until
from tests.deployment.conftest import NUM_NODES, QUICK, deployed, holdings
from tests.deployment.test_evidence import confirmed
from tests.deployment.test_faults import num_rounds

pytestmark = pytest.mark.deployment

NODES = range(3)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, table: Path, tiny_bert: Path) -> Iterator[DeployedFederation]:
    with deployed(tmp_path_factory.mktemp("years"), table, tiny_bert) as site:
        yield site


def follow(site: DeployedFederation, *, with_new_keys: tuple[int, ...] = ()) -> None:
    """Invite everyone again, and let the nodes follow."""
    site.invite(len(NODES))
    for client in NODES:
        site.services[f"node-{client}"].kill()
        kit(CLIENT, "move", site.node(client), *site.invitation(client))
        if client in with_new_keys:
            kit(CLIENT, "new-key", site.node(client), "--node")
            kit(CLIENT, "new-key", site.node(client))
            site.admit(client, "--replace")
        site.start_node(client)
    site.wait_for_nodes(len(NODES))


def charged_rounds(site: DeployedFederation) -> list[int]:
    """The number of charges in each node's ledger, whose chain is whole."""
    return [len(site.charges(client)) for client in NODES]


def test_nothing_is_lost_but_who_left_and_all_evidence_stands(site, holders_run, table, tiny_bert, tmp_path):
    one_round = {**holders_run, "num_clients": len(NODES), "rounds": 1}
    del one_round["ledger"]  # so they share the coordinator's
    site.run({**one_round, "out": str(tmp_path / "first")})
    assert charged_rounds(site) == [1, 1, 1]

    # The coordinator's machine is lost; another one gets its folder from the backup, and has another port.
    kit(SERVER, "backup", site.coordinator, "--out", tmp_path / "backup")
    site.services["superlink"].kill()
    shutil.rmtree(site.coordinator)
    shutil.copytree(tmp_path / "backup", site.coordinator)
    settings = site.coordinator / "coordinator.toml"
    settings.write_text(re.sub("port = .*", f"port = {free_port()}", settings.read_text()))
    site.start_superlink()
    follow(site)
    site.run({**one_round, "out": str(tmp_path / "moved")})
    assert charged_rounds(site) == [2, 2, 2]

    # The authority's key was lost: nodes trust both, then the server's certificate is the new one's. So were both keys
    # of a node, whose ledger goes on.
    told = kit(SERVER, "new-authority", site.coordinator)
    (tmp_path / "passphrase").write_text(re.search("shown this once: (.*)", told)[1])
    follow(site, with_new_keys=(0,))
    kit(SERVER, "renew", site.coordinator, "--ca-passphrase-file", tmp_path / "passphrase")
    site.services["superlink"].kill()
    site.start_superlink()
    site.wait_for_nodes(len(NODES))

    # Another one joins, and the run in which it begins is stopped and resumed.
    site.invite(len(NODES) + 1)
    site.make_node(3, *holdings(tmp_path, table, num_nodes=4)[3])
    with (site.node(3) / "vault.toml").open("a") as file:
        file.write(QUICK)
    site.approve_model(3, tiny_bert)
    site.admit(3)
    site.start_node(3)
    site.wait_for_nodes(len(NODES) + 1)
    stopped = site.start_run("stopped", {**one_round, "num_clients": 4, "rounds": 8, "out": str(tmp_path / "resumed")})
    wait_until(lambda: num_rounds(tmp_path / "resumed") > 0, "a round", 400)
    stopped.stop()
    assert not (tmp_path / "resumed" / "summary.json").exists(), stopped.text()
    site.run({"resume": str(tmp_path / "resumed")})
    charged = charged_rounds(site)

    # A node leaves. The others go on, and nobody waits for it.
    kit(SERVER, "unregister", site.coordinator, "Clinic 1")
    # Its SuperNode ends with the reason or, where it was just starting, waits to be admitted and says so.
    site.services["node-1"].wait_for("does not know node.key; send application.toml|not admitted yet", 180)
    assert "FAIL  admitted" in kit(CLIENT, "doctor", site.node(1), code=1)
    assert "ok    admitted" in kit(CLIENT, "doctor", site.node(0), code=1), "its records are not closed"
    values = {key: value for key, value in one_round.items() if key != "num_clients"}
    site.run({**values, "registration_seconds": 300, "out": str(tmp_path / "last")})
    assert charged_rounds(site) == [charged[0] + 1, charged[1], charged[2] + 1]
    summary = json.loads((tmp_path / "last" / "summary.json").read_text())
    assert [client["name"] for client in summary["clients"]] == ["Clinic 0", "Clinic 2", "Clinic 3"]

    # Whoever came and went, and with whichever keys: all that was printed is confirmed, of each run and each node.
    runs = {name: tmp_path / name for name in ("first", "moved", "resumed", "last")}
    for name, path in (runs | {f"node-{client}": site.node(client) for client in range(4)}).items():
        lines, _ = confirmed(path, tmp_path / f"{name}.zip")
        assert any("receipts of data set" in line for line in lines), lines


@pytest.mark.nightly  # others share it too while the tests run, each in a worker of its own
def test_two_federations_share_a_machine(site, tmp_path_factory, table, tiny_bert, holders_run, tmp_path):
    """Each node chose a port of loopback when it was made; nothing else of the machine is shared."""
    with deployed(tmp_path_factory.mktemp("second"), table, tiny_bert, num_nodes=NUM_NODES) as other:
        before = charged_rounds(site)
        other.run({**holders_run, "rounds": 1, "out": str(tmp_path / "other")})
        assert [len(other.charges(client)) for client in range(NUM_NODES)] == [1] * NUM_NODES
        assert charged_rounds(site) == before
