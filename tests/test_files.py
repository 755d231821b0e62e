"""Files are written completely or not at all; journals and JSON hold plain values alone, which every reader accepts."""

import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from fedpriv import config, files, texts
from fedpriv.errors import InputError
from fedpriv.files import Journal, trace_without_message
from tests.foreign import linked, planted


def test_the_digest_of_a_package_is_that_of_its_sources_however_it_was_installed(tmp_path):
    def digest(name: str, held: dict[str, str]) -> str:
        for file, text in held.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text, newline="")
        (tmp_path / name / ".#lock.py").symlink_to("user@host.1")  # of an editor
        return files.library_digest(tmp_path / name)

    sources = {"a.py": "x = 1\n", "b/a.py": "y = 2\n", "b.py": "", "b/words.toml": "a = 1\n"}
    own = digest("clone", sources)
    wheel = {"page.html": "x", "_apps/a.py": "z = 3\n", "__pycache__/a.pyc": "x"}
    assert digest("wheel", dict(reversed(sources.items())) | wheel) == own
    assert digest("windows", {name: text.replace("\n", "\r\n") for name, text in sources.items()}) == own
    others = [sources | {"a.py": "x = 2\n"}, sources | {"c.py": ""}, {"a.py": "x = 1\n", "b/a.py": "y = 2\n"}]
    others += [sources | {"b/words.toml": "a = 2\n"}]
    assert len({own, *(digest(f"other-{number}", held) for number, held in enumerate(others))}) == 5


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_text_is_utf_8_with_or_without_a_byte_order_mark_and_other_text_is_refused(tmp_path, encoding):
    path = tmp_path / "text"
    for known in ("utf-8", "utf-8-sig"):
        path.write_text("Hôpital Ω\n", encoding=known)
        assert files.read_text(path) == "Hôpital Ω\n"
    path.write_bytes('name = "Hôpital"\n'.encode(encoding))
    with pytest.raises(InputError, match=f"^{path}: is not text in UTF-8; save it as UTF-8$"):
        config.read(path)
    path.write_text(path.read_text(encoding=encoding), encoding="utf-8")
    assert config.read(path) == {"name": "Hôpital"}


# What fedpriv wrote, what came with it or its packages, and what the system tells: no person saves these.
READ_OTHERWISE = {
    *("clients/deploy/doctor", "server/deploy/guarded_superlink", "fedpriv/holder/vault/history"),
    *("fedpriv/cli/main", "fedpriv/exports", "fedpriv/files", "fedpriv/privacy/ledger/statement"),
    *(f"fedpriv/learning/{name}" for name in ("adapters/_base_models", "adapters/lora", "data/hospital")),
    *(f"fedpriv/models/{name}" for name in ("dedup/planning", "publishing/card", "serving/http/server")),
    *("fedpriv/models/variants/folders", "fedpriv/runs/_folder", "fedpriv/runs/_rows", "fedpriv/runs/files"),
    *("fedpriv/runs/show/_progress_page", "fedpriv/runs/show/_tracking"),
}


def test_what_a_person_may_have_saved_is_read_in_one_way():
    root = Path(files.__file__).parents[1]
    paths = [path for package in ("fedpriv", "clients", "server") for path in (root / package).rglob("*.py")]
    read = [path for path in paths if ".read_text(" in path.read_text(encoding="utf-8")]
    assert {path.relative_to(root).with_suffix("").as_posix() for path in read} == READ_OTHERWISE


def test_a_new_file_takes_the_place_neither_of_a_file_nor_of_a_folder_nor_of_a_link_to_nothing(tmp_path):
    path = tmp_path / "key"
    files.write_new(path, b"one", mode=0o600)
    with pytest.raises(InputError, match="exists"):
        files.write_new(path, b"two")
    assert (path.read_bytes(), path.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (b"one", 0o600, [path])
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        files.replace_file(tmp_path / "folder", b"new")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    with pytest.raises(InputError, match="exists"):
        files.write_new(tmp_path / "link", b"one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "key", "link"]


def test_a_full_disk_leaves_nothing_behind_but_the_old_file(tmp_path, monkeypatch):
    def fsync(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "key"
    for write in (files.write_new, files.replace_file):
        with pytest.raises(OSError, match="No space"):
            write(path, b"one")
        assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="No space"):
        files.replace_file(path, b"new")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "key").symlink_to(tmp_path / "mine")
    files.replace_file(tmp_path / "key", b"new")
    assert ((tmp_path / "mine").read_bytes(), (tmp_path / "key").read_bytes()) == (b"mine", b"new")


def test_two_who_replace_a_file_at_once_do_not_mix(tmp_path):
    path = tmp_path / "key"
    with files.replaced_file(path) as one, files.replaced_file(path) as other:
        one.write(b"one")
        other.write(b"other")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"one", [path])


def test_what_was_written_by_the_name_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    with files.replaced_file(tmp_path / "key") as file:
        (tmp_path / "other").write_bytes(b"new")
        (tmp_path / "other").rename(file.name)  # as safetensors does
    assert (tmp_path / "key").read_bytes() == b"new"
    assert (tmp_path / "key").stat().st_ino in flushed


@pytest.mark.parametrize("by_its_name", [False, True])
@pytest.mark.parametrize(("mode", "expected"), [(None, 0o640), (0o644, 0o644), (0o600, 0o600)])
def test_without_a_mode_a_file_has_what_the_process_gives_to_new_files(tmp_path, mode, expected, by_its_name):
    umask = os.umask(0o027)
    try:
        with files.replaced_file(tmp_path / "key", mode=mode) as file:
            if by_its_name:
                safetensors.numpy.save_file({"x": np.zeros(2)}, file.name)  # of a mode of its own
    finally:
        os.umask(umask)
    assert (tmp_path / "key").stat().st_mode & 0o777 == expected


def test_only_named_files_are_deleted_and_only_emptied_folders(tmp_path):
    folder, own = tmp_path / "folder", ("state", "a/state", "b/c/state", "gone/state")
    for name in own[:3]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"ours")
    foreign = [planted(folder / place, tmp_path / f"outside-{place}") for place in ("", "b")]
    (tmp_path / "state").write_bytes(b"mine")
    (folder / "state2").symlink_to(tmp_path / "state")
    behind = [linked(folder / "state3", tmp_path / "state"), linked(folder / "linked", tmp_path / "outside-")]
    (tmp_path / "outside-" / "state").write_bytes(b"mine")
    not_ours = ("state3", "linked/state", "../state", "b", "to-nothing", str(tmp_path / "outside-b" / "patients.csv"))
    files.remove_files(folder, (*own, *not_ours))
    for each in (*foreign, *behind):
        each.check()
    assert not any((folder / name).exists() for name in (*own, "a", "b/c"))
    assert [(tmp_path / name).read_bytes() for name in ("state", "outside-/state")] == [b"mine", b"mine"]


def test_each_event_is_a_line_with_its_time_and_what_all_share(tmp_path):
    journal = Journal(tmp_path / "events.jsonl", run="r", client=2)
    journal.write("charged", round=1)
    journal.write("refused", round=2, reason="x" * 1000)
    first, second = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {"event": "charged", "run": "r", "client": 2, "round": 1}
    assert len(second["reason"]) == 300


def test_what_is_no_plain_value_is_refused_and_a_file_that_cannot_be_written_costs_the_event_alone(tmp_path, caplog):
    for path in (tmp_path / "events.jsonl", None):
        with pytest.raises(TypeError, match="texts: an event holds plain values, not list"):
            Journal(path).write("released", texts=["a record"])
    assert not list(tmp_path.iterdir())
    Journal(tmp_path / "missing" / "events.jsonl").write("charged")
    assert "could not be written" in caplog.text
    Journal(None).write("charged")


def test_where_tells_the_lines_but_not_the_message():
    def fails():
        raise ValueError("Jane Doe has a rash")

    try:
        fails()
    except ValueError as error:
        text = trace_without_message(error)
    assert "ValueError at" in text
    assert "in fails" in text
    assert "Jane Doe has" not in text.replace('raise ValueError("Jane Doe has a rash")', "")


@pytest.mark.parametrize(
    ("number", "written"),
    [(math.inf, '"inf"'), (-math.inf, '"-inf"'), (np.float64("inf"), '"inf"'), (np.float64("nan"), "null")],
)
def test_an_infinity_is_not_what_is_unknown_at_any_depth(number, written):
    text = texts.strict_json({"epsilon": number, "rows": [{"loss": (1.5, number)}]})
    assert text == f'{{"epsilon": {written}, "rows": [{{"loss": [1.5, {written}]}}]}}'


def test_everything_else_is_as_json_writes_it_or_refused():
    value = {"epsilon": 0.1 + 0.2, "largest": 1.7976931348623157e308, "count": 2**70, "name": "NaN", "none": None}
    assert texts.strict_json(value) == json.dumps(value)
    assert texts.strict_json(value, indent=2) == json.dumps(value, indent=2)
    with pytest.raises(TypeError, match="set"):
        texts.strict_json({"names": {"a"}})
