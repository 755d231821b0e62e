"""A program in the foreground: its lines are seen, signals reach it, and its exit code comes back."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clients.deploy.folder import _split_address
from fedpriv.errors import FlowerError, InputError
from fedpriv.operate import flower
from server.deploy import folder
from server.deploy.folder import _join_address

ROOT = Path(__file__).resolve().parents[2]

# Runs a child that tells when it is ready, and relays how it ended.
_OUTER = """
import os, sys
from pathlib import Path
from fedpriv.operate.flower import _run_in_foreground
say = lambda line: print(line, flush=True)
sys.exit(_run_in_foreground([sys.executable, "-c", sys.argv[1]], variables=os.environ, folder=Path("."), on_line=say))
"""
_ENDS_WELL = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(60)
"""
_IS_KILLED = 'import time; print("ready", flush=True); time.sleep(60)'


def test_lines_and_exit_code_come_back_and_a_child_that_somebody_else_kills_has_failed(tmp_path):
    lines: list[str] = []
    here = {"variables": os.environ, "folder": tmp_path, "on_line": lines.append}
    told = "import os, sys; print(os.getcwd()); print('to stderr', file=sys.stderr); sys.exit(3)"
    assert flower._run_in_foreground([sys.executable, "-c", told], **here) == 3
    assert sorted(lines) == sorted([str(tmp_path), "to stderr"])
    kills_itself = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert flower._run_in_foreground([sys.executable, "-c", kills_itself], **here) == 137


@pytest.mark.parametrize(
    ("child", "number", "code"),
    [(_ENDS_WELL, signal.SIGTERM, 0), (_ENDS_WELL, signal.SIGINT, 7), (_IS_KILLED, signal.SIGTERM, 0)],
)
def test_signal_reaches_the_child_and_its_exit_code_comes_back(child, number, code):
    outer = subprocess.Popen([sys.executable, "-c", _OUTER, child], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert outer.stdout is not None
    assert outer.stdout.readline() == "ready\n"
    outer.send_signal(number)
    assert outer.wait(timeout=20) == code


def test_flowers_own_exit_code_is_read_from_its_log():
    assert flower._logged_exit_code("\x1b[91mERROR \x1b[0m:     Exit Code: 305") == 305
    assert flower._logged_exit_code("INFO: Started server process [305]") is None


def test_flwr_that_fails_is_one_line(tmp_path):
    (tmp_path / "config.toml").write_text("[superlink]\n")
    with pytest.raises(FlowerError, match="flwr ls: ") as caught:
        folder.flwr(tmp_path, ["ls", "federation"], folder=tmp_path)
    assert "\n" not in str(caught.value)


def test_an_address_survives_being_split_and_what_is_none_is_named():
    for address in ("h.org:1", "10.0.0.1:65535", "[::1]:9093"):
        assert _join_address(*_split_address(address)) == address
    for address in ("", "h.org", "h.org:", ":1", "h.org:0", "h.org:65536", "h.org:x", "::1:9093"):
        with pytest.raises(InputError, match="address = "):
            _split_address(address)


@pytest.mark.parametrize(("waited", "seconds"), [(0.0, 0.05), (0.5, 0.05), (8.0, 0.8), (30.0, 3.0), (3600.0, 3.0)])
def test_a_pause_is_a_tenth_of_the_wait_within_bounds(waited, seconds):
    assert flower.seconds_to_pause(waited, shortest=0.05, longest=3.0) == pytest.approx(seconds)


def test_a_pause_is_never_longer_than_asked_and_an_hour_of_waiting_takes_few_questions():
    assert flower.seconds_to_pause(1e9, shortest=0.05, longest=0.01) == 0.01
    waited, questions = 0.0, 0
    while waited < 3600:
        waited += flower.seconds_to_pause(waited, shortest=0.05, longest=60.0)
        questions += 1
    assert questions < 150


_ONCE_MISSING = """
from flwr.superlink.grid import http_grid
from flwr.supernode import start_client_internal
from fedpriv.operate import flower
from flwr.supercore.inflatable import inflatable_utils
flower.ask_again_soon(inflatable_utils.pull_objects)
assert http_grid.pull_objects is start_client_internal.pull_objects is inflatable_utils.pull_objects
waits = []
class Event(inflatable_utils.threading.Event):
    def wait(self, timeout=None):
        waits.append(timeout)
inflatable_utils.threading.Event = Event
asked = iter([False, False, True])
def pull(object_id):
    if not next(asked):
        raise inflatable_utils.ObjectUnavailableError(object_id)
    return b"array"
assert http_grid.pull_objects(["0"], pull) == {"0": b"array"}
first, second = [seconds for seconds in waits if seconds is not None]
assert 0.04 <= first <= 0.06 and 0.08 <= second <= 0.12, waits
"""


def test_coordinator_and_nodes_soon_ask_again_for_an_array_that_has_not_arrived():
    done = subprocess.run([sys.executable, "-c", _ONCE_MISSING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
