"""A coordinator fills the small disk of a vault in a process of its own: that tells nothing of its records."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from clients.deploy.folder import Node
from clients.deploy.supernode import running_vault
from fedpriv.config import parse, to_flower
from fedpriv.files import FLOOR_BYTES
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import REGISTER, TRAIN, Request, Response, ask
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.workbench import workbench
from fedpriv.operate.flower import Log
from simulations.sites import wait_until
from tests.tiny import LABELS, WORDS
from tests.vaults import make_vault, write_records

pytestmark = pytest.mark.deployment

MIB = 2**20
# What the node may take, and what must stay free.
DISK_BYTES = FLOOR_BYTES + 1_900_000
MOST_REQUESTS = 1000

ROWS = [(f"{WORDS[i % 13]} {WORDS[i % 7]} {LABELS[i % 3]}", LABELS[i % 3]) for i in range(15)]
LONG = (" ".join(WORDS * 5), LABELS[0])


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, in memory."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() or (done := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"needs root, and the right to mount: {'not root' if os.geteuid() else done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def build(run_on_nodes, tiny_bert):
    """Builds a request for an update of a run of its own, with texts cut to so many tokens."""
    # Large replies fill the disk with few updates.
    values = {**run_on_nodes, "rank": 32, "local_steps": 1}
    configs = [parse({**values, "max_length": length}) for length in (16, 32)]
    initial = {name: tensor.numpy() for name, tensor in workbench(configs[0]).initial.items()}

    def request(number: int, **changes: object) -> Request:
        config = configs[number % 2]
        fields = {**kinds.pack_instruction(f"run {number:04}", 1, UpdateSpec.of(config)), **changes}
        return Request.of(kind=TRAIN, run_config=to_flower(config), fields=fields, arrays={kinds.ADAPTER: initial})

    return request


def node_on(disk: Path, rows: Sequence[tuple[str, str]], model: Path, records: Path) -> Node:
    data = write_records(records, rows)
    settings = make_vault(disk / "node", data, model, num_records=16, budget_epsilon=1e6, reply_seconds=1e-3)
    return Node(superlink="127.0.0.1:9092", vault=settings)


@contextmanager
def running(node: Node) -> Iterator[VaultSettings]:
    """The vault as `start` runs it, whose log lies beside the ledger."""
    with running_vault(node, Log(None, node.log), variables=os.environ, user=None):
        yield node.vault


def until_refused(settings: VaultSettings, build) -> tuple[int, Response]:
    """How many requests a node answered, and its refusal for want of room."""
    num_requests = 0
    for number in count():
        update, unpaid = build(number), build(number, noise_multiplier=0.0)
        for request in (update, update, Request.of(kind=REGISTER, run_config=update.run_config), *[unpaid] * 3):
            response = ask(settings.socket, request)
            if "disk" in response.reason or "ledger" in response.reason or num_requests > MOST_REQUESTS:
                return num_requests, response
            num_requests += 1
    raise AssertionError("unreachable")


def test_a_disk_that_fills_up_does_so_alike_with_one_record_more_or_less(build, tmp_path, tiny_bert):
    seen = {}
    for name, rows in (("15 records", ROWS), ("16 records", [*ROWS, LONG])):
        with small_disk(tmp_path / name) as disk:
            node = node_on(disk, rows, tiny_bert, tmp_path / "records.csv")
            with running(node) as settings:
                num_requests, response = until_refused(settings, build)
                sizes = {path.name: path.stat().st_size for path in node.folder.iterdir() if path.is_file()}
                free = os.statvfs(disk).f_bfree
                assert response.reason.startswith("refused: disk: this node needs"), response.reason
                assert f"found {len(rows)} records" in settings.log.read_text() or len(rows) == 16
            seen[name] = {"requests": num_requests, **sizes, "free blocks": free}
    assert set(seen["16 records"].items()) ^ set(seen["15 records"].items()) == set()


def test_a_reply_that_is_charged_is_stored_on_a_disk_that_others_fill_meanwhile(build, tmp_path, tiny_bert):
    with small_disk(tmp_path / "disk") as disk:
        node = node_on(disk, ROWS, tiny_bert, tmp_path / "records.csv")
        node.vault.policy.write_text("max_local_steps = 1000\n")
        with running(node) as settings:
            assert not ask(settings.socket, build(0)).code  # reads the records

            def fill() -> None:
                wait_until(lambda: "run 0002" in settings.events.read_text(), "the charge", 120, every=0.01)
                with (disk / "others").open("wb", buffering=0) as file:
                    for size in (MIB, 4096):
                        while _written(file, size):
                            pass

            filling = ThreadPoolExecutor(1).submit(fill)
            response = ask(settings.socket, build(2, local_steps=100))
            filling.result()
            assert os.statvfs(disk).f_bfree * 4096 < 4 * MIB
            assert not response.code, response.reason
            assert ask(settings.socket, build(4)).reason.startswith("refused: disk")


def _written(file, size: int) -> bool:
    try:
        return file.write(b"\0" * size) == size
    except OSError:
        return False
