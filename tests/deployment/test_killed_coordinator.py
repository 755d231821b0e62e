"""Each process of a coordinator is killed in a round; the next `start` succeeds without any help."""

import time

import pytest

from simulations.sites import wait_until
from tests.deployment.killing import AGAIN_SECONDS, NODES, NOTICED_SECONDS, charge, check_ledgers, kill, wait_until_gone
from tests.deployment.test_faults import num_rounds

pytestmark = pytest.mark.deployment

# What the command line of each process holds.
OF_THE_COORDINATOR = {
    "kit": "-m server.deploy start",
    "SuperLink": "-m server.deploy.guarded_superlink",
    "SuperExec": "superexec()",
    "ServerApp": "flwr_serverapp()",
}


def test_a_coordinator_of_which_any_process_is_killed_says_so_and_its_run_is_resumed(slow_pair, slow_run, tmp_path):
    federation, out = slow_pair, tmp_path / "out"
    values = {**slow_run, "rounds": 10}
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
    assert run.process.wait(3 * AGAIN_SECONDS) == 0, run.text()  # all rounds that are left
    assert num_rounds(out) == values["rounds"]
    check_ledgers(federation, out)
