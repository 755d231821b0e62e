"""A sum under masks over SuperNodes outlives the death of one between any two exchanges, or ends by name."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import psutil
import pytest

from fedpriv.operate.approvals import bundle_digest
from fedpriv.privacy.ledger.entries import Entry
from simulations.sites import CLIENT, DeployedFederation, Service, kit, read_ledger, wait_until
from tests.deployment.conftest import QUICK, copied_checkout, holdings

pytestmark = pytest.mark.deployment


class Summing(DeployedFederation):
    """Nodes with records of their own that have approved each other, and a coordinator that halts when asked."""

    def __init__(self, folder: Path, table: Path, model: Path, num_nodes: int) -> None:
        own = holdings(folder, table, "--budget-view", "aggregate", num_nodes=num_nodes)
        super().__init__(folder / "federation", num_nodes=num_nodes, holdings=own, model=model, settings=QUICK)
        self.nodes = range(num_nodes)
        self.halts, self.checkout = folder / "halts", folder / "checkout"
        self.halts.mkdir()
        honest = copied_checkout(self.checkout) / "server" / "app.py"
        honest.rename(honest.with_name("honest_app.py"))
        text = Path(__file__).with_name("halting_server.py").read_text()
        honest.write_text(text.replace("FOLDER", str(self.halts)))
        digest = bundle_digest(self.checkout)
        for client in self.nodes:
            self.approve(client, digest)
            self.approve_peers(client)

    @contextmanager
    def halted(self, run: Service, round_: int, kind: str) -> Iterator[None]:
        """While the coordinator waits before an exchange of a round; all nodes have answered the one before."""
        reached = self.halts / f"{round_}-{kind}.reached"
        wait_until(lambda: reached.exists() or run.process.poll() is not None, reached.name, 240, every=0.05)
        assert run.process.poll() is None, run.text()
        yield
        reached.unlink()

    def halt_before(self, round_: int, kind: str) -> None:
        (self.halts / f"{round_}-{kind}").touch()

    def kill_vault(self, client: int) -> None:
        """Kill -9 the vault; its child, which holds the sessions, ends with it, and the kit starts another."""
        for process in psutil.Process(self.services[f"node-{client}"].process.pid).children():
            if "fedpriv.holder.vault" in process.cmdline():
                process.kill()

    def kill_worker(self, client: int) -> None:
        """Kill -9 the process that works on records and holds the sessions."""
        for process in psutil.Process(self.services[f"node-{client}"].process.pid).children(recursive=True):
            if any("spawn_main" in part for part in process.cmdline()):
                process.kill()


@pytest.fixture(scope="module", params=[3])
def site(request, tmp_path_factory, table, tiny_bert) -> Iterator[Summing]:
    federation = Summing(tmp_path_factory.mktemp("summing"), table, tiny_bert, num_nodes=request.param)
    yield federation
    federation.stop()


@pytest.fixture(scope="module")
def summed_run(site, holders_run) -> dict[str, object]:
    sums = {"secure_aggregation": True, "local_steps": 1, "optimizer": "sgd", "learning_rate": 0.1}
    return {**holders_run, **sums, "noise_multiplier": 4.0, "round_seconds": 60, "num_clients": len(site.nodes)}


def charges(entries: list[Entry], client: int, run: str) -> list[tuple[object, ...]]:
    """What a ledger says that a run cost a client, round for round."""
    charged = [e for e in entries if e.phase == "charged" and (e.client, e.run) == (str(client), run)]
    return [(e.round, e.event, e.aggregate_scale) for e in charged]


def run_id(out: Path) -> str:
    return next(entry.run for entry in read_ledger(out / "ledger.sqlite") if entry.run)


def scales(site: Summing, threshold: int) -> dict[int, float]:
    """sqrt(sum v_j^2) / v_k over the client and the t - 2 others with the least noise, v_j in proportion to N_j."""
    sizes = {client: site.entries(client)[0].num_records for client in site.nodes}
    others = {k: sorted(n for j, n in sizes.items() if j != k)[: threshold - 2] for k in sizes}
    return {client: math.hypot(size, *others[client]) / size for client, size in sizes.items()}


def statuses(out: Path, round_: int) -> dict[int, str]:
    rows = pd.read_csv(out / "clients.csv").query("round == @round_")
    return dict(zip(rows.client, rows.status, strict=True))


def test_a_peer_that_is_not_approved_ends_the_run_by_name_without_a_charge(site, summed_run, tmp_path):
    (site.node(0) / "peers" / "1.pub").unlink()
    values = {**summed_run, "rounds": 1, "min_clients": len(site.nodes), "out": str(tmp_path / "out")}
    output = site.run(values, code=1, checkout=site.checkout)
    assert re.search(r"came from 2 clients, must come from at least 3; client 0: refused: client 1: this", output)
    assert not [entry for entry in read_ledger(tmp_path / "out" / "ledger.sqlite") if entry.phase == "charged"]
    assert [site.charges(client) for client in site.nodes] == [[]] * len(site.nodes)
    site.approve_peers(0)  # without a restart


def test_with_all_needed_a_death_ends_the_run_by_name_and_the_resumed_run_pays_for_an_attempt_of_its_own(
    site, summed_run, tmp_path
):
    out = tmp_path / "out"
    site.halt_before(1, "confirm")
    run = site.start_run(
        "all-needed", {**summed_run, "rounds": 2, "min_clients": len(site.nodes), "out": str(out)}, site.checkout
    )
    with site.halted(run, 1, "confirm"):
        site.kill_worker(2)
    assert run.process.wait(timeout=240) == 1
    assert re.search(
        r"signatures: came from 2 clients, must come from at least 3; client 2: refused: .*; resume", run.text()
    )
    name = run_id(out)
    before = {client: charges(site.entries(client), client, name) for client in site.nodes}
    assert [[charge[0] for charge in each] for each in before.values()] == [[1]] * len(site.nodes), (
        "what was sent is charged"
    )

    kit(CLIENT, "reopen", site.node(2))  # its process died with records in memory
    site.run({"resume": str(out)}, checkout=site.checkout)
    server = read_ledger(out / "ledger.sqlite")
    for client, scale in scales(site, len(site.nodes)).items():
        own = charges(site.entries(client), client, name)
        assert own == charges(server, client, name)
        assert [charge[0] for charge in own] == [1, 2]
        assert [charge[2] for charge in own] == pytest.approx([scale] * 2, rel=1e-9)
    assert statuses(out, 2) == dict.fromkeys(site.nodes, "ok")


# tests/holder/vault/test_summed.py and tests/server/test_sums.py lose nodes at each exchange; the test above ends
# a process.
@pytest.mark.nightly
@pytest.mark.parametrize("site", [4], indirect=True)
def test_with_three_survivors_needed_each_round_goes_on_without_the_dead(site, summed_run, tmp_path):
    """Round 1 is untouched; in rounds 2 to 5 node 2 dies after it advertised, shared, uploaded, and confirmed."""
    out = tmp_path / "out"
    deaths = {(2, "share"): site.kill_vault, (3, "train"): site.kill_worker, (4, "confirm"): site.kill_vault}
    deaths[5, "reveal"] = lambda client: site.services[f"node-{client}"].kill()
    for death in deaths:
        site.halt_before(*death)
    run = site.start_run("three-needed", {**summed_run, "rounds": 5, "min_clients": 3, "out": str(out)}, site.checkout)
    for (round_, kind), kill in deaths.items():
        with site.halted(run, round_, kind):
            kill(2)
        if kill == site.kill_worker:  # which had records in memory
            wait_until((site.node(2) / "closed").is_file, "the node closes", 120)
            kit(CLIENT, "reopen", site.node(2))
    assert run.process.wait(timeout=240) == 0, run.text()

    everybody = dict.fromkeys(site.nodes, "ok")
    assert [statuses(out, round_) for round_ in (1, 4, 5)] == [everybody] * 3, "the vector had arrived"
    assert statuses(out, 2) == {**everybody, 2: "left out"}
    assert statuses(out, 3) == {**everybody, 2: "refused"}
    rounds = pd.read_csv(out / "rounds.csv")
    assert list(rounds.num_replies[1:]) == [4, 3, 3, 4, 4]
    assert rounds.test_loss.map(math.isfinite).all()
    assert rounds.test_loss.nunique() == 6, "every round made a model"
    assert "Round 2 without Clinic 2; Round 3 without Clinic 2." in (out / "report.html").read_text()

    name, server = run_id(out), read_ledger(out / "ledger.sqlite")
    asked = {client: charges(server, client, name) for client in site.nodes}
    own = {client: charges(site.entries(client), client, name) for client in site.nodes}
    # A server pays before it asks, so for the node that refused, too.
    assert own == {**asked, 2: [charge for charge in asked[2] if charge[0] != 3]}
    assert [[charge[0] for charge in asked[client]] for client in (0, 1, 3)] == [[*range(1, 6)]] * 3
    assert [charge[0] for charge in asked[2]] == [1, 3, 4, 5]
    for client, scale in scales(site, 3).items():  # for exactly three survivors
        assert [charge[2] for charge in own[client]] == pytest.approx([scale] * len(own[client]), rel=1e-9)
