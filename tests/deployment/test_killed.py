"""Each process of a node and of the coordinator is killed in a round; the next `start` succeeds without any help."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from simulations.sites import CLIENT, DeployedFederation, Service, kit, read_ledger, wait_until
from tests.deployment.conftest import SLOW, holdings
from tests.deployment.test_faults import num_charges, num_rounds

pytestmark = pytest.mark.deployment

NODES = range(2)
HIT = 1

# What the command line of each process holds; of several the youngest is meant, but for the forkserver: its child, the
# process of one task, is called as it is.
OF_A_NODE = {
    "kit": f"-m {CLIENT} start",
    "vault": "-m fedpriv.vault",
    "worker": "spawn_main",
    "SuperNode": "-m clients.deploy.approved_supernode",
    "SuperExec": "superexec()",
    "ClientApp": "forkserver",
    "forkserver": "forkserver",
    "tracker": "resource_tracker",
}
OF_THE_COORDINATOR = {
    "kit": "-m server.deploy start",
    "SuperLink": "-m server.deploy.guarded_superlink",
    "SuperExec": "superexec()",
    "ServerApp": "flwr_serverapp()",
}

NOTICED_SECONDS = 30.0
AGAIN_SECONDS = 180.0


@pytest.fixture(scope="module")
def federation(tmp_path_factory, table, tiny_bert) -> Iterator[DeployedFederation]:
    folder = tmp_path_factory.mktemp("killed")
    own = holdings(folder, table, num_nodes=len(NODES))
    made = DeployedFederation(folder / "federation", num_nodes=len(NODES), holdings=own, model=tiny_bert, settings=SLOW)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def values(holders_run) -> dict[str, object]:
    """A run whose rounds end without a node that was killed; its steps take longer than it takes to kill a process."""
    return {**holders_run, "num_clients": len(NODES), "min_clients": 1, "local_steps": 60, "round_seconds": 40}


def family(service: Service) -> dict[psutil.Process, str]:
    """{process: command line} of a kit and all that it started."""
    found = {}
    first = psutil.Process(service.process.pid)
    for process in (first, *first.children(recursive=True)):
        try:
            found[process] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


def kill(service: Service, name: str, held: str) -> dict[psutil.Process, str]:
    """Kill one of a kit's processes; returns them all."""
    before = family(service)
    found = sorted((each for each, line in before.items() if held in line), key=psutil.Process.create_time)
    found[0 if name == "forkserver" else -1].kill()
    return before


def wait_until_gone(before: dict[psutil.Process, str], service: Service) -> None:
    """Nothing outlives its kit: what the kit does not hold is over."""

    def orphans() -> list[str]:
        kept = family(service) if service.process.poll() is None else {}
        return [line for each, line in before.items() if each not in kept and lives(each)]

    deadline = time.monotonic() + NOTICED_SECONDS
    while left := orphans():
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def charge(federation: DeployedFederation, run: Service) -> None:
    """Wait until the node is charged once more: it then works on its records."""
    before = num_charges(federation, HIT)
    more = lambda: num_charges(federation, HIT) > before  # noqa: E731
    wait_until(lambda: more() or run.process.poll() is not None, f"charge {before + 1}", AGAIN_SECONDS, every=0.01)
    assert more(), run.text()


def check_ledgers(federation: DeployedFederation, out: Path) -> None:
    """Each node was charged at most once a round, and for no round that the server does not know of."""
    server = read_ledger(out / "ledger.sqlite")
    run = next(entry.run for entry in server if entry.run)
    for client in NODES:
        own = [entry.round for entry in federation.charges(client) if entry.run == run]
        known = {entry.round for entry in server if entry.phase == "charged" and entry.client == str(client)}
        assert own == sorted(set(own))
        assert {round_ for round_ in own if round_ <= num_rounds(out)} <= known


def test_a_node_of_which_any_process_is_killed_takes_part_again_by_itself_or_by_one_start(federation, values, tmp_path):
    out = tmp_path / "out"
    run = federation.start_run("node", {**values, "rounds": 500, "out": str(out)})
    for name, held in OF_A_NODE.items():
        service = federation.services[f"node-{HIT}"]
        charge(federation, run)
        begin = time.monotonic()
        before = kill(service, name, held)
        if name in ("kit", "SuperNode"):
            service.process.wait(NOTICED_SECONDS)
            federation.start_node(HIT)
        if name == "worker":
            closed = federation.node(HIT) / "closed"
            wait_until(closed.is_file, "the node closes", AGAIN_SECONDS)
            assert "killed while it worked on records" in kit(CLIENT, "reopen", federation.node(HIT))
        charge(federation, run)
        wait_until_gone(before, federation.services[f"node-{HIT}"])
        print(f"{name}: {time.monotonic() - begin:.0f} s until the next charge")
    assert run.process.poll() is None, run.text()
    run.stop()
    check_ledgers(federation, out)


def test_a_coordinator_of_which_any_process_is_killed_says_so_and_its_run_is_resumed(federation, values, tmp_path):
    out = tmp_path / "out"
    values = {**values, "rounds": 12}
    run = federation.start_run("coordinator", {**values, "out": str(out)})
    for name, held in OF_THE_COORDINATOR.items():
        service = federation.services["superlink"]
        rounds = num_rounds(out)
        wait_until(lambda rounds=rounds: num_rounds(out) > rounds, "a round", AGAIN_SECONDS)
        charge(federation, run)
        begin, told = time.monotonic(), service.text()
        before = kill(service, name, held)
        if name in ("kit", "SuperLink"):
            service.process.wait(NOTICED_SECONDS)
            run.kill()
            federation.start_superlink()
            federation.wait_for_nodes(len(NODES), AGAIN_SECONDS)
        else:
            said = {"SuperExec": "the SuperExec ended with exit code -9", "ServerApp": "was ended by signal 9"}[name]
            wait_until(lambda: said in service.text()[len(told) :], said, NOTICED_SECONDS)  # noqa: B023
            assert run.process.wait(NOTICED_SECONDS) == 1, run.text()
        wait_until_gone(before, federation.services["superlink"])
        print(f"{name}: {time.monotonic() - begin:.0f} s until the run can be resumed")
        run = federation.start_run(f"after-{name}", {"resume": str(out)})
    assert run.process.wait(AGAIN_SECONDS) == 0, run.text()
    assert num_rounds(out) == values["rounds"]
    check_ledgers(federation, out)
