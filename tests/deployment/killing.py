"""What tests of killed processes have in common: two slow nodes, whose processes are found, killed and looked for."""

import time
from pathlib import Path

import psutil

from simulations.sites import DeployedFederation, Service, read_ledger, wait_until
from tests.deployment.test_faults import num_charges, num_rounds
from tests.deployment.test_processes import lives

NODES = range(2)
HIT = 1

NOTICED_SECONDS = 30.0
AGAIN_SECONDS = 180.0


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


def charge(federation: DeployedFederation, run: Service) -> None:
    """Wait until the node is charged once more: it then works on its records."""
    before = num_charges(federation, HIT)
    more = lambda: num_charges(federation, HIT) > before  # noqa: E731
    wait_until(lambda: more() or run.process.poll() is not None, f"charge {before + 1}", AGAIN_SECONDS, every=0.05)
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
