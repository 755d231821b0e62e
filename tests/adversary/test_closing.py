"""A node of which a process dies on records answers nothing more: what a coordinator learns of it, it learns once."""

import errno
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedpriv.config import parse, to_flower
from fedpriv.holder.vault import _service
from fedpriv.holder.vault._service import Closing, Worker, run_worker
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import (
    REGISTER,
    TRAIN,
    Request,
    Response,
    ask,
    receive,
)
from fedpriv.learning.training.independence import side_by_side
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.ledger.reader import reading
from tests.holder.vault.running import Running
from tests.marks import slow
from tests.tiny import LABELS, WORDS
from tests.vaults import make_vault, write_records

REPLY_SECONDS = 1.0
# In steps of an update; they take about as long as the reply may.
LONG = 5

JANE = "jane doe of quartz lane has a rash"


@pytest.fixture
def settings(tmp_path, tiny_bert) -> VaultSettings:
    rows = [(f"{WORDS[i % 13]} {WORDS[i % 7]} {LABELS[i % 3]}", LABELS[i % 3]) for i in range(59)]
    data = write_records(tmp_path / "own.csv", [*rows, (JANE, LABELS[0])])
    more = {"policy": "max_local_steps = 1000\n", "budget_epsilon": 1e6, "reply_seconds": REPLY_SECONDS}
    return make_vault(tmp_path / "node", data, tiny_bert, **more)


@pytest.fixture
def train(run_on_nodes):
    """Builds a request for an update of all records."""
    config = parse(run_on_nodes)
    initial = {name: tensor.numpy() for name, tensor in workbench(config).initial.items()}

    def build(run: str, **changes: object) -> Request:
        fields = {**kinds.pack_instruction(run, 1, UpdateSpec.of(config)), "sampling_probability": 1.0, **changes}
        return Request.of(kind=TRAIN, run_config=to_flower(config), fields=fields, arrays={kinds.ADAPTER: initial})

    return build


@pytest.fixture
def vault(settings) -> Iterator[Running]:
    running = Running(settings)
    yield running
    running.stop()


def with_records(vault: Running) -> list[psutil.Process]:
    """The process that has the records, and those that it has forked for a step."""
    return psutil.Process(vault.child).children(recursive=True)


def kill(victim: psutil.Process) -> bool:
    """Whether it was alive."""
    with suppress(psutil.NoSuchProcess):
        victim.kill()
        return True
    return False


def noted(settings: VaultSettings, event: str, run: str) -> bool:
    """Whether the node's log has this event of the run."""
    return f'"event": "{event}", "client": 1, "run": "{run}"' in settings.events.read_text()


def num_charges(settings: VaultSettings, run: str) -> int:
    with reading(settings.ledger) as db:
        return sum(entry.phase == "charged" and entry.run == run for entry in db.entries())


def same(one: Response, other: Response) -> bool:
    named, others = one.arrays[kinds.ADAPTER], other.arrays[kinds.ADAPTER]
    return one.fields == other.fields and all(np.array_equal(named[name], others[name]) for name in others)


def is_closed(answer: Response) -> bool:
    return answer.reason.startswith("refused: closed")


@pytest.mark.parametrize("num", [2, *slow(40)])
def test_whatever_is_killed_a_node_answers_as_if_nothing_had_happened_or_is_closed(settings, train, num):
    """SIGTERM at random instants, twice in three times after SIGKILL of a process that has records or forked that one.

    In one of these two cases the process with the records is stopped first, so that it is killed on them for certain.
    """
    chance = np.random.default_rng(0)
    died = closed = undisturbed = 0
    vault = Running(settings)
    with ThreadPoolExecutor() as pool:
        for i in range(num):
            run, request = f"run {i}", train(f"run {i}", local_steps=LONG)
            assert not ask(settings.socket, train(f"before {i}")).code
            victims = [*with_records(vault), psutil.Process(vault.child)]
            if i % 3 == 0:
                victims[0].suspend()
            asked = pool.submit(ask, settings.socket, request, retry_seconds=0.0)
            while i % 3 == 0 and not noted(settings, "charged", run):
                time.sleep(0.01)
            time.sleep(chance.uniform(0, REPLY_SECONDS if i % 3 == 0 else 3 * REPLY_SECONDS))
            victims, was_charged = [*with_records(vault), psutil.Process(vault.child)], noted(settings, "charged", run)
            is_killed = i % 3 != 1 and kill(victims[int(chance.integers(len(victims)))])
            time.sleep(chance.choice([0.0, 0.1]))
            vault.process.terminate()
            assert vault.process.wait(300) == 0
            died_on_records = is_killed and was_charged and not noted(settings, "released", run)
            died += died_on_records
            undisturbed += (before := answer_of(asked)) is not None and not before.code

            vault = Running(settings)
            closed += (was_closed := settings.closed.exists())
            assert was_closed or not died_on_records
            assert is_killed or not was_closed
            if was_closed:
                assert is_closed(ask(settings.socket, train(f"another {i}")))
                assert is_closed(ask(settings.socket, request))
                assert num_charges(settings, f"another {i}") == 0
                settings.closed.unlink()
            again = ask(settings.socket, request)
            assert not again.code, again.reason
            assert num_charges(settings, run) == 1
            assert before is None or before.code or same(again, before)
    vault.stop()
    print(f"of {num}: {died} died on records, {closed} closed the node, {undisturbed} were answered meanwhile")
    assert died >= num // 3


def answer_of(asked: Future[Response]) -> Response | None:
    """What the coordinator got, if it got anything."""
    with suppress(OSError):
        return asked.result(60)
    return None


def test_the_process_that_checks_measures_and_refuses_has_no_records_and_that_which_has_them_may_not_die(
    vault, settings, train
):
    assert not ask(settings.socket, train("first")).code
    assert not ask(settings.socket, train("again")).code
    (apart,) = with_records(vault)
    assert holds(apart.pid, JANE), "what is looked for can be found"
    assert not holds(vault.child, JANE)
    apart.kill()  # between two requests, such as by the system for the sake of another process
    while apart.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert is_closed(ask(settings.socket, train("next")))
    assert num_charges(settings, "next") == 0


def holds(pid: int, text: str) -> bool:
    """Whether the text is in a process's memory that it may write."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            begin, end, mode = re.match(r"(\w+)-(\w+) (\S+)", line).groups()
            if mode.startswith("rw"):
                with suppress(OSError):
                    memory.seek(int(begin, 16))
                    if text.encode() in memory.read(int(end, 16) - int(begin, 16)):
                        return True
    return False


def run_out_of_memory(connection, folder) -> None:
    """A vault's child in which no memory is left for passes of records; for synthetic ones there was."""
    from fedpriv.holder.vault import _records
    from fedpriv.learning.training.model import TrainingModel

    of_release = _records.of_release

    def failing(*_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")

    def records(*args, **options):
        TrainingModel.logits = failing
        return of_release(*args, **options)

    _records.of_release = records
    run_worker(connection, folder)


def test_a_record_for_which_memory_runs_out_closes_the_node_instead_of_counting_as_zero(settings, train):
    worker = Worker(settings.folder, Closing.of(settings), run_out_of_memory)
    try:
        answer, another = (Response(worker.answer(train(run).packed())) for run in ("one", "another"))
    finally:
        worker.stop()
    assert is_closed(answer)
    assert settings.closed.exists()
    assert is_closed(another)
    assert num_charges(settings, "another") == 0


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no"), RuntimeError("std::bad_alloc")])
def test_a_worker_without_memory_takes_the_process_with_it(error):
    def fail(*_: int) -> None:
        raise error

    child = os.fork()
    if not child:
        os.close(2)
        with suppress(RuntimeError):
            side_by_side(fail, 2, 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_no_frame_is_received_while_another_is_held(tmp_path, monkeypatch):
    """What a coordinator sends meanwhile takes neither memory nor time of the work on records."""
    held, received_meanwhile = threading.Event(), threading.Event()

    def watched(*args, **options):
        if held.is_set():
            received_meanwhile.set()
        return receive(*args, **options)

    class Holding:
        def answer(self, _frame: bytes) -> bytes:
            held.set()
            received_meanwhile.wait(0.5)
            held.clear()
            return Response.of(fields={"said": "answer"}).frame

    def asked(_number: int) -> Response:
        return ask(tmp_path / "socket", Request.of(kind=REGISTER, run_config={}))

    monkeypatch.setattr(_service, "receive", watched)
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor() as pool:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        threading.Thread(target=_service._accept, args=(listener, {os.geteuid()}, Holding()), daemon=True).start()
        assert [answer.fields["said"] for answer in pool.map(asked, range(3))] == ["answer"] * 3
    assert not received_meanwhile.is_set()
