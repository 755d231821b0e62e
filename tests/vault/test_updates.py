"""Updates of other frameworks: what their code, a coordinator and a crash may try, and what the vault then releases."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from fedpriv.accounting import epsilon_of
from fedpriv.errors import InputError
from fedpriv.ledger.reader import reading
from fedpriv.training import UpdateNoise
from fedpriv.vault import _updates, release_update
from fedpriv.vault._updates import UpdateGuard, release
from fedpriv.vault.frames import (
    REFUSED,
    REGISTER,
    RELEASE,
    RETIRED,
    TRAIN,
    UPDATE,
    Request,
    Response,
    ask,
    pack_request,
)
from fedpriv.vault.settings import FILE, VaultSettings
from tests.vault.running import ROOT, Running

pytestmark = pytest.mark.usefixtures("quick_nodes")

# Noise of 1 on an update whose norm is at most 1000: one look tells which of the two a value holds.
CLEAR = {"clip_norm": 1000.0, "noise_multiplier": 1e-3, "budget_epsilon": 1e12}
COSTLY = {"clip_norm": 1.0, "noise_multiplier": 8.0, "budget_epsilon": 2.0}


def make(folder: Path, updates: dict[str, object] | None = CLEAR, **settings: object) -> VaultSettings:
    """A node's folder, with records of the synthetic corpus and a section for updates."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"partition_id": 1, "name": "St. Anna", **settings} | ({"updates": updates} if updates else {})
    (folder / FILE).write_text(tomli_w.dumps(values))
    return VaultSettings.read(folder)


@pytest.fixture
def guard(tmp_path) -> UpdateGuard:
    return UpdateGuard.of(make(tmp_path))


SMALL = {"weight": np.float32([[3000.0, 0.0]]), "bias": np.float64([0.0])}


def request(tensors: dict[str, np.ndarray] = SMALL, run: object = "job", round_: object = 1, **more) -> Request:
    fields = {"run": run, "round": round_, **more}
    return Request(kind=RELEASE, run_config={}, fields=fields, arrays={UPDATE: tensors})


def charges(settings: VaultSettings | UpdateGuard) -> int:
    path = settings.updates_ledger if isinstance(settings, VaultSettings) else settings.policy.ledger
    if not path.exists():
        return 0
    with reading(path) as db:
        return sum(entry.phase == "charged" for entry in db.entries())


def content(response: Response) -> dict[str, bytes]:
    assert not response.code, response.reason
    return {name: array.tobytes() for name, array in response.arrays.items()}


def values(response: Response) -> np.ndarray:
    assert not response.code, response.reason
    return np.concatenate([response.arrays[name].reshape(-1) for name in sorted(response.arrays)])


def test_a_request_sent_again_gets_the_stored_bytes_for_one_charge(guard):
    answers = [content(release(request(), guard)) for _ in range(5)]
    assert all(each == answers[0] for each in answers)
    assert charges(guard) == 1


@pytest.mark.parametrize("bias", [np.float64([-0.0]), np.float64([5e-324])])
def test_a_request_that_differs_in_one_bit_is_another_release(guard, bias):
    one = content(release(request(), guard))
    other = content(release(request({**SMALL, "bias": bias}), guard))
    assert one["weight"] != other["weight"]
    assert charges(guard) == 2


def test_an_update_is_clipped_as_one_vector_and_keeps_its_names_shapes_and_types(guard):
    tensors = {"b": np.float32([[600.0, 0], [0, 800.0]]), "a": np.float64([1000.0 * np.sqrt(3)]), "c": np.float16([0])}
    arrays = release(request(tensors), guard).arrays
    assert {name: (a.shape, a.dtype) for name, a in arrays.items()} == {
        n: (a.shape, a.dtype) for n, a in tensors.items()
    }
    np.testing.assert_allclose(arrays["b"], tensors["b"] / 2, atol=10)
    np.testing.assert_allclose(arrays["a"], 500 * np.sqrt(3), atol=10)


def test_its_noise_has_the_deviation_that_it_pays_for(tmp_path):
    guard = UpdateGuard.of(make(tmp_path, {**COSTLY, "max_values": 20_000}))
    noised = values(release(request({"w": np.zeros(20_000)}), guard))
    assert noised.std() == pytest.approx(8.0, rel=0.03)
    with reading(guard.policy.ledger) as db:
        (charged,) = db.releases(guard.data_set().id)
    assert charged.event == UpdateNoise(clip_norm=1.0, noise_multiplier=8.0).event(20_000)
    assert charged.event.unit == "client"
    assert charged.event.effective_noise_multiplier == pytest.approx(4.0, rel=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_an_update_that_is_not_finite_is_released_as_noise_like_any_other(guard, value):
    answer = release(request({"w": np.array([value, 500.0])}), guard)
    assert np.abs(values(answer)).max() < 20
    assert charges(guard) == 1


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"w": np.int64([1])}, "w: is int64; only float16"),
        ({"w": np.array([True])}, "w: is bool"),
        ({"w": np.uint8([1])}, "w: is uint8"),
        ({}, "tensors: are 0; must be 1 to 3"),
        ({str(i): np.zeros(1) for i in range(4)}, "tensors: are 4; must be 1 to 3"),
        ({"w": np.zeros(0)}, "tensors: hold 0 values; must be 1 to 100"),
        ({"w": np.zeros(60), "v": np.zeros(41)}, "tensors: hold 101 values; must be 1 to 100"),
    ],
)
def test_a_layout_that_the_operator_did_not_allow_is_refused_before_the_charge(tmp_path, tensors, named):
    guard = UpdateGuard.of(make(tmp_path, {**CLEAR, "max_tensors": 3, "max_values": 100}))
    answer = release(request(tensors), guard)
    assert answer.code == REFUSED
    assert named in answer.reason
    assert charges(guard) == 0


@pytest.mark.parametrize(
    "asked",
    [
        request(round_=-1),
        request(round_=True),
        request(round_=1.5),
        request(round_=2**63),
        request(run=""),
        request(run="x" * 201),
        request(run="a\nb"),
        request(run=7),
        request(noise_multiplier=0.0),
        Request(kind=RELEASE, run_config={"a": 1}, fields=request().fields, arrays=request().arrays),
        Request(kind=RELEASE, run_config={}, fields=request().fields, arrays={**request().arrays, "more": {}}),
        Request(kind=TRAIN, run_config={}, fields=request().fields, arrays=request().arrays),
    ],
)
def test_whatever_is_no_request_for_a_release_is_refused_before_the_charge(guard, asked):
    answer = release(asked, guard)
    assert answer.code == REFUSED
    assert "\n" not in answer.reason
    assert charges(guard) == 0


@pytest.mark.parametrize(
    "tensors",
    [
        {"weight": np.float32([[1.0, 0.0]])},
        {"weight": np.float32([[1.0], [0.0]]), "bias": np.float64([0.0])},
        {"weight": np.float64([[1.0, 0.0]]), "bias": np.float64([0.0])},
        {"weight": np.float32([[1.0, 0.0]]), "bia": np.float64([0.0])},
    ],
)
def test_names_and_shapes_tell_nothing_since_a_run_keeps_its_first_ones(guard, tensors):
    release(request(), guard)
    answer = release(request(tensors, round_=2), guard)
    assert answer.code == REFUSED
    assert "other names, shapes or types" in answer.reason
    assert charges(guard) == 1
    assert not release(request(tensors, run="another job"), guard).code


def test_beyond_the_budget_it_is_refused_in_one_line(tmp_path):
    guard = UpdateGuard.of(make(tmp_path, COSTLY))
    answers = [release(request(round_=round_), guard) for round_ in range(8)]
    codes = [answer.code for answer in answers]
    allowed = codes.index(RETIRED)
    assert allowed > 1
    assert codes == [0] * allowed + [RETIRED] * (8 - allowed)
    assert answers[-1].reason == "retired: budget_epsilon: another round would exceed this node's budget"
    with reading(guard.policy.ledger) as db:
        data_set = guard.data_set()
        assert epsilon_of([each.event for each in db.releases(data_set.id)], data_set.delta).epsilon <= 2.0


def test_the_policys_number_of_releases_holds(tmp_path):
    settings = make(tmp_path)
    settings.policy.write_text("max_releases = 2\n")
    guard = UpdateGuard.of(settings)
    assert [release(request(round_=round_), guard).code for round_ in range(3)] == [0, 0, RETIRED]


def _race(folder: Path, first: int, codes) -> None:
    guard = UpdateGuard.of(VaultSettings.read(folder))
    codes.put([release(request(round_=first + number), guard).code for number in range(6)])


def test_two_processes_that_race_spend_one_budget(tmp_path):
    make(tmp_path / "alone", COSTLY)
    alone = UpdateGuard.of(VaultSettings.read(tmp_path / "alone"))
    allowed = [release(request(round_=number), alone).code for number in range(8)].count(0)
    make(tmp_path / "raced", COSTLY)
    context = multiprocessing.get_context("fork")
    codes = context.Queue()
    racers = [context.Process(target=_race, args=(tmp_path / "raced", first, codes)) for first in (0, 6)]
    for racer in racers:
        racer.start()
    found = codes.get(timeout=60) + codes.get(timeout=60)
    for racer in racers:
        racer.join(60)
    assert found.count(0) == charges(VaultSettings.read(tmp_path / "raced")) == allowed


def test_after_a_crash_between_charge_and_reply_noise_alone_is_released(guard, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(_updates, "store_reply", lambda *_: (_ for _ in ()).throw(OSError("record 17")))
        failed = release(request(), guard)
    assert failed.code
    assert "17" not in failed.reason
    again = release(request(), guard)
    assert np.abs(values(again)).max() < 20
    assert content(release(request(), guard)) == content(again)
    assert charges(guard) == 1


def test_a_ledger_does_not_tell_what_an_update_was(tmp_path):
    found = []
    for name in ("one", "other"):
        guard = UpdateGuard.of(make(tmp_path / name))
        release(request(), guard)
        with reading(guard.policy.ledger) as db:
            (charged,) = db.releases_of(guard.data_set().id, "job")
        found.append(charged[0].request)
    layouts, keyed = zip(*((each[:24], each[24:]) for each in found), strict=True)
    assert layouts[0] == layouts[1]
    assert keyed[0] != keyed[1]


def test_an_account_is_neither_that_of_the_records_nor_without_noise(tmp_path):
    with pytest.raises(InputError, match="is the ledger of the records"):
        make(tmp_path, {**CLEAR, "ledger_file": str(tmp_path / "ledger.sqlite")})
    with pytest.raises(InputError, match=r"updates.noise_multiplier = 0.0: input should be greater than 0"):
        make(tmp_path, {**CLEAR, "noise_multiplier": 0.0})
    with pytest.raises(InputError, match=r"updates.budget_epsilon: field required"):
        make(tmp_path, {"clip_norm": 1.0, "noise_multiplier": 1.0})


@pytest.fixture(scope="module")
def settings() -> Iterator[VaultSettings]:
    with tempfile.TemporaryDirectory() as folder:  # others may pass through it, unlike pytest's own
        Path(folder).chmod(0o711)
        yield make(Path(folder) / "node", client_user="nobody")


@pytest.fixture(scope="module")
def vault(settings) -> Iterator[Running]:
    running = Running(settings)
    yield running
    running.stop()


def test_a_coordinators_socket_releases_no_update_and_the_other_one_nothing_else(vault, settings):
    before = charges(settings)
    answer = ask(settings.socket, request(round_=70))
    assert answer.code == REFUSED
    assert "must be one of register, train" in answer.reason
    for kind in (REGISTER, TRAIN, "advertise", ""):
        other = ask(settings.updates_socket, Request(kind=kind, run_config={}))
        assert other.code == REFUSED
        assert "this socket answers release alone" in other.reason
    assert charges(settings) == before
    assert not settings.ledger.exists()


def test_rounds_that_come_at_once_are_each_charged_once(vault, settings):
    before = charges(settings)
    with ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(lambda i: content(ask(settings.updates_socket, request(run=f"at once {i % 4}"))), range(12))
        )
    assert len({each["weight"] for each in answers}) == 4
    assert charges(settings) == before + 4


def test_only_the_vaults_own_user_may_ask_even_where_the_supernodes_may_open_the_other_socket(vault, settings):
    assert settings.socket.stat().st_mode & 0o777 == 0o666
    assert settings.updates_socket.stat().st_mode & 0o777 == 0o600
    python = shutil.which("python3", path=os.defpath)  # that others may run; the attack needs no package
    if os.geteuid() or python is None:
        pytest.skip("one user: cannot become another")
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
        "s.sendall(sys.stdin.buffer.read()); print('answer:', s.recv(100))"
    )

    def asked(path: Path) -> str:
        command = [str(python), "-c", code, str(path)]
        frame = pack_request(request(round_=71))
        done = subprocess.run(command, input=frame, capture_output=True, user="nobody", cwd="/", check=False)
        return (done.stdout + done.stderr).decode().splitlines()[-1]

    assert asked(settings.socket).startswith("answer: b'\\x00"), "the check would be blind"
    before = charges(settings)
    assert asked(settings.updates_socket).startswith("PermissionError")
    settings.updates_socket.chmod(0o666)  # what remains is the kernel's word on who asks
    assert not asked(settings.updates_socket).startswith("answer: b'\\x00")
    settings.updates_socket.chmod(0o600)
    assert charges(settings) == before


def test_a_process_killed_between_charge_and_reply_means_noise_alone(vault, settings):
    big, before = {"w": np.full(2**20, 1.0, np.float32)}, charges(settings)
    big["w"][0] = 3000.0
    answers: list[dict[str, np.ndarray]] = []
    asking = threading.Thread(target=lambda: answers.append(release_update(settings.updates_socket, "killed", 1, big)))
    asking.start()
    while charges(settings) == before:
        time.sleep(0.002)
    os.kill(vault.child, signal.SIGKILL)
    asking.join(120)
    assert abs(answers[0]["w"][0]) < 20
    assert charges(settings) == before + 1
    assert np.array_equal(release_update(settings.updates_socket, "killed", 1, big)["w"], answers[0]["w"])
    assert not settings.closed.exists()


def test_a_client_needs_no_torch_and_gets_its_own_names_and_shapes(vault, settings):
    code = (
        "import sys, numpy; from fedpriv.vault import release_update; "
        "u = release_update(sys.argv[1], 'small', 1, {'a': numpy.float32(900), 'b': numpy.zeros((2, 1))}); "
        "print({n: (x.shape, str(x.dtype)) for n, x in u.items()}, 800 < u['a'] < 1000); "
        "print(*{'torch', 'scipy', 'pydantic', 'flwr'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(settings.updates_socket)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "{'a': ((), 'float32'), 'b': ((2, 1), 'float64')} True\n\n"


def test_a_refusal_is_one_line_for_the_client(vault, settings):
    with pytest.raises(InputError, match=r"refused: w: is int64; only float16, float32 and float64 are noised"):
        release_update(settings.updates_socket, "ints", 1, {"w": np.int64([1])})


def test_without_the_section_there_is_no_such_socket(tmp_path):
    own = make(tmp_path / "node", None)
    running = Running(own)
    try:
        assert own.socket.exists()
        assert not own.updates_socket.exists()
    finally:
        running.stop()
