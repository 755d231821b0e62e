"""Each process of a node is killed in a round; the next `start` succeeds, and a node that died on records is closed."""

import time

import pytest

from simulations.sites import CLIENT, kit, wait_until
from tests.deployment.killing import AGAIN_SECONDS, HIT, NOTICED_SECONDS, charge, check_ledgers, kill, wait_until_gone
from tests.deployment.test_faults import start_again

pytestmark = pytest.mark.deployment

# What the command line of each process holds; of several the youngest is meant, but for the forkserver: its child, the
# process of one task, is called as it is.
OF_A_NODE = {
    "kit": f"-m {CLIENT} start",
    "vault": "-m fedpriv.holder.vault",
    "worker": "spawn_main",
    "SuperNode": "-m clients.deploy.approved_supernode",
    "SuperExec": "superexec()",
    "ClientApp": "forkserver",
    "forkserver": "forkserver",
    "tracker": "resource_tracker",
}


def test_a_node_of_which_any_process_is_killed_takes_part_again_by_itself_or_by_one_start(
    slow_pair, slow_run, tmp_path
):
    federation, out = slow_pair, tmp_path / "out"
    run = federation.start_run("node", {**slow_run, "rounds": 500, "out": str(out)})
    charge(federation, run)
    for name, held in OF_A_NODE.items():
        service = federation.services[f"node-{HIT}"]
        begin = time.monotonic()
        before = kill(service, name, held)
        if name in ("kit", "SuperNode"):
            service.process.wait(NOTICED_SECONDS)
            start_again(federation, HIT)
        if name in ("vault", "worker"):
            closed = federation.node(HIT) / "closed"
            wait_until(closed.is_file, "the node closes", AGAIN_SECONDS)
            assert "killed while it worked on records" in kit(CLIENT, "reopen", federation.node(HIT))
        wait_until_gone(before, federation.services[f"node-{HIT}"])
        charge(federation, run)  # so the next one is killed while the node works on records
        print(f"{name}: {time.monotonic() - begin:.0f} s until the next charge")
    assert run.process.poll() is None, run.text()
    run.stop()
    check_ledgers(federation, out)
