"""Converted weights are in memory once for all processes of a user, and nothing depends on the file that does it."""

import stat
import subprocess
import sys

import pytest
import torch

from fedpriv.learning.adapters import _base_formats as base_formats
from fedpriv.learning.adapters._base_formats import _shared


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPRIV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(base_formats, "_LEAST_BYTES", 1)
    return tmp_path / "cache"


@pytest.fixture
def weights():
    return {"a": torch.randn(300, 200).bfloat16(), "b": torch.randn(7).bfloat16()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_second_process_maps_the_first_ones_file_and_writing_to_it_changes_no_other(folder, weights):
    first, second = _shared(weights), _shared(weights)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for found in (first, second):
        assert_equal(found, weights)
        assert found["a"].data_ptr() != weights["a"].data_ptr()
    first["a"].zero_()
    for found in (second, _shared(weights)):
        assert_equal(found, weights)


@pytest.mark.slow
def test_pages_are_shared_between_processes(folder):
    """The proportional size of a mapping that two processes hold is half its size."""
    code = (
        "import sys, torch; from fedpriv.learning.adapters._base_formats import _shared\n"
        "held = _shared({'a': torch.arange(2**23, dtype=torch.float32).bfloat16()})\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "text = open('/proc/self/smaps').read().split('safetensors', 1)[1]\n"
        "fields = dict(line.split(':') for line in text.splitlines()[1:20] if ':' in line)\n"
        "print(fields['Rss'].split()[0], fields['Pss'].split()[0], flush=True); sys.stdin.readline()\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
            resident, proportional = map(int, process.stdout.readline().split())
            assert resident >= 2**14
            assert proportional <= 0.6 * resident
    finally:
        for process in processes:
            process.communicate("\n", timeout=60)


@pytest.mark.parametrize("damage", [b"", b"other", None])
def test_a_file_with_other_contents_is_not_used(folder, weights, damage, caplog):
    _shared(weights)
    (file,) = folder.iterdir()
    if damage is None:
        other = {name: tensor + 1 for name, tensor in weights.items()}
        _shared(other)
        (foreign,) = set(folder.iterdir()) - {file}
        file.write_bytes(foreign.read_bytes())
    else:
        file.write_bytes(damage)
    with caplog.at_level("INFO"):
        assert_equal(_shared(weights), weights)
    assert caplog.text


def test_without_a_folder_the_weights_stay_the_processs_own(folder, weights):
    folder.write_text("a file")
    assert_equal(_shared(weights), weights)


def test_a_full_disk_leaves_nothing_behind(folder, weights, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.link", full)
    assert_equal(_shared(weights), weights)
    assert not list(folder.iterdir())


def test_small_models_have_no_file(folder, weights, monkeypatch):
    monkeypatch.setattr(base_formats, "_LEAST_BYTES", 2**20)
    assert_equal(_shared(weights), weights)
    assert not folder.exists()
