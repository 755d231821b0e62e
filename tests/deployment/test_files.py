"""Files are written completely or not at all."""

import errno
import os

import pytest

from fedpriv.deployment import files
from fedpriv.errors import InputError


@pytest.fixture
def full_disk(monkeypatch):
    def fsync(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_new_file_does_not_replace_one(tmp_path):
    path = tmp_path / "key"
    files.write_new(path, b"one", mode=0o600)
    with pytest.raises(InputError, match="exists"):
        files.write_new(path, b"two")
    assert (path.read_bytes(), path.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (b"one", 0o600, [path])


@pytest.mark.parametrize("write", [files.write_new, files.replace])
def test_a_full_disk_leaves_nothing_behind(tmp_path, full_disk, write):
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "key", b"one")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_file(tmp_path, full_disk):
    path = tmp_path / "key"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="No space"):
        files.replace(path, b"new")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])
