"""The vault as a process: what reaches it through its socket, and what it survives."""

import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.holder.vault._service import _listener
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import Request, ask, receive
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.ledger.reader import reading
from simulations.sites import wait_until
from tests.adversary.nodes import registering, training
from tests.holder.vault.running import AS_NOBODY, Running, other_python, passable_folder
from tests.tiny import LABELS, WORDS
from tests.vaults import make_vault, write_records


@pytest.fixture(scope="module")
def settings(tiny_bert) -> Iterator[VaultSettings]:
    rows = [(f"{WORDS[i % 13]} {WORDS[i % 7]} {LABELS[i % 3]}", LABELS[i % 3]) for i in range(60)]
    more = {"policy": "max_local_steps = 1000\n", "budget_epsilon": 1e6, "reply_seconds": 0.1}
    with passable_folder() as folder:
        yield make_vault(folder / "node", write_records(folder / "own.csv", rows), tiny_bert, **more)


@pytest.fixture(scope="module")
def vault(settings) -> Iterator[Running]:
    running = Running(settings)
    yield running
    assert (running.stop(), settings.socket.exists()) == (0, False), "it ends on a signal and leaves no socket"


@pytest.fixture(scope="module")
def register(run_on_nodes) -> Request:
    return registering(parse(run_on_nodes)).request


@pytest.fixture(scope="module")
def train(run_on_nodes):
    """Builds a request for an update."""
    config = parse(run_on_nodes)
    initial = workbench(config).initial
    return lambda **asked: training(config, initial, **asked).request


def test_it_registers_and_trains_and_one_charge_buys_one_upload(vault, settings, register, train):
    registered = ask(settings.socket, register)
    assert kinds.unpack(kinds.Registration, registered.fields).num_records == 60
    first, second, third = (ask(settings.socket, train(round_=round_)) for round_ in (1, 1, 2))
    assert not first.code, first.reason
    assert first.frame == second.frame != third.frame
    assert set(first.arrays[kinds.ADAPTER]) == set(train().arrays[kinds.ADAPTER])
    # It tells when the work on records ended; whoever starts a vault may have any umask.
    assert settings.events.stat().st_mode & 0o777 == 0o600


def test_what_is_no_frame_is_refused_or_dropped_and_the_vault_lives(vault, settings, register):
    texts = b"\0\0\0\2\0\0\0\0[]", b"\0\0\0\2\0\0\0\0{", b"GET / HTTP/1.1\r\n\r\n"
    for sent in (b"", b"\0" * 8, b"\xff" * 8, os.urandom(5000), *texts):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(settings.socket))
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            receive(connection)
    assert not ask(settings.socket, register).code


def test_only_the_nodes_user_may_open_the_socket(vault, settings, register):
    assert settings.socket.stat().st_mode & 0o777 == 0o600
    if (python := other_python()) is None:
        pytest.skip("one user: cannot become another")
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print('open', flush=True)\n"
        "s.sendall(sys.stdin.buffer.read()); sys.stdout.buffer.write(s.recv(100))"
    )
    modes = {path: path.stat().st_mode & 0o777 for path in (settings.folder, settings.socket)}
    for path in modes:
        path.chmod(0o777)  # what remains is the kernel's word on who asks
    command = [python, "-c", code, str(settings.socket)]
    done = subprocess.run(command, input=register.packed(), capture_output=True, check=False, **AS_NOBODY)
    assert done.stdout == b"open\n", done.stderr
    for path, mode in modes.items():
        path.chmod(mode)


def test_another_vault_a_file_or_a_link_in_the_place_of_a_socket_is_refused_and_stays(vault, settings, tmp_path):
    with pytest.raises(InputError, match="another vault listens there"):
        _listener(settings.socket, mode=0o600)
    assert settings.socket.is_socket()
    left, listener = tmp_path / "left.sock", _listener(tmp_path / "left.sock", mode=0o600)
    listener.close()  # as a vault leaves it that has died
    (tmp_path / "linked.sock").symlink_to(left)
    (tmp_path / "patients.csv").write_text("mine")
    for name in ("patients.csv", "linked.sock"):
        with pytest.raises(InputError, match=f"{name}: exists and is no socket"):
            _listener(tmp_path / name, mode=0o600)
    assert (tmp_path / "patients.csv").read_text() == "mine"
    assert (tmp_path / "linked.sock").is_symlink()
    _listener(left, mode=0o600).close()


# Every day a vault's child dies so, in test_closing.py, and deployment tests kill every process of a node.
@pytest.mark.slow
def test_a_vault_that_is_killed_and_restarted_answers_what_it_had_answered(settings, train, vault):
    request = train(run="restart")
    before = ask(settings.socket, request)
    vault.process.kill()
    vault.process.wait()
    vault.__init__(settings)
    assert ask(settings.socket, request).frame == before.frame


@pytest.mark.slow
def test_a_killed_vault_leaves_no_process_with_the_records_and_is_closed_until_it_is_opened(settings, train, vault):
    request = train(run="orphan", fields={"local_steps": 600})
    ThreadPoolExecutor(1).submit(ask, settings.socket, request, retry_seconds=0.0)
    wait_until((settings.folder / "working").exists, "work on records, which follows the charge", 60, every=0.01)
    child = psutil.Process(vault.child)
    family = [child, *child.children(recursive=True)]
    vault.process.kill()
    vault.process.wait()
    gone = lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)  # noqa: E731
    wait_until(gone, "the end of its children, which need longer for 600 steps", 2, every=0.01)
    vault.__init__(settings)
    assert ask(settings.socket, request).reason.startswith("refused: closed")
    settings.closed.unlink()
    assert not ask(settings.socket, request).code, "noise alone"
    with reading(settings.ledger) as db:
        assert sum(entry.phase == "charged" and entry.run == "orphan" for entry in db.entries()) == 1


def test_it_ends_with_the_program_that_started_it(settings, tmp_path, tiny_bert):
    own = make_vault(tmp_path / "node", settings.data, tiny_bert)
    running = Running(own, "--with-parent", stdin=subprocess.PIPE)
    running.process.stdin.close()  # as the system does when that program is killed
    assert running.process.wait(30) == 0
    assert not own.socket.exists()
