"""A run that is done again cleans up what it had written, and nothing that others keep in its folders."""

import pytest

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.models.variants.store import Store
from fedpriv.runs import RunWriter, files
from server.observer import LogObserver
from simulations.engines import federation
from tests.foreign import linked, planted


def test_what_others_keep_in_a_runs_folders_outlives_its_resumption(small_run, tmp_path):
    folder = tmp_path / "run"
    values = {**small_run, "rounds": 1, "comparison": True, "dedup": "lossless", "out": str(folder)}
    federation.run(parse(values), LogObserver())
    places = (
        "",
        files.CHECKPOINTS,
        files.COMPARISON,
        files.STORE,
        f"{files.VARIANTS}/global",
        "checkpoint/round-000001",
    )
    foreign = [planted(folder / place, tmp_path / "outside" / (place or "run")) for place in places]
    foreign.append(linked(folder / files.COMPARISON / "linked", tmp_path / "outside" / "store"))
    (folder / files.SUMMARY).unlink()
    with Store(folder / files.STORE) as store:
        of_another_attempt = store.names[0]
        store.remove(of_another_attempt)
        store.add("stranger", store.manifest(store.names[0]).layout, *_zeros(store))
    federation.run(parse({**values, "resume": str(folder)}), LogObserver())
    for each in foreign:
        each.check()
    assert files.is_finished(folder)
    assert files.is_finished(folder / files.COMPARISON)
    with Store(folder / files.STORE, read_only=True) as store:
        assert of_another_attempt in store.names
        assert "stranger" not in store.names
        assert not store.verify()


def _zeros(store):
    layout = store.manifest(store.names[0]).layout
    tensors = {name: values * 0 for name, values in store.tensors(store.names[0]).items()}
    return layout.to_blocks(tensors)


def test_of_two_runs_that_begin_in_one_folder_at_once_the_second_is_refused(tmp_path, monkeypatch):
    first = RunWriter.created(tmp_path / "run", parse({"seed": 1}))
    before = (first.path / files.CONFIG).read_bytes()
    monkeypatch.setattr(files, "check_unused", lambda _: None)  # both have looked before either wrote
    with pytest.raises(InputError, match=r"config\.toml: exists"):
        RunWriter.created(tmp_path / "run", parse({"seed": 2}))
    assert (first.path / files.CONFIG).read_bytes() == before


def test_a_comparison_behind_a_link_is_not_written_over(tmp_path):
    other = RunWriter.created(tmp_path / "other", parse({"seed": 1}))
    (tmp_path / "run").mkdir()
    behind = linked(tmp_path / "run" / files.COMPARISON, other.path)
    with pytest.raises(InputError, match="already holds a run"):
        RunWriter.started_over(tmp_path / "run" / files.COMPARISON, parse({"seed": 2}))
    behind.check()


def test_a_temporary_name_takes_nobodys_file(tmp_path):
    writer = RunWriter.created(tmp_path, parse({}))
    foreign = planted(tmp_path, tmp_path / "outside", ("summary.tmp", "rounds.csv.tmp", "samples.tmp", "tracker.tmp"))
    behind = linked(tmp_path / "progress.tmp", tmp_path / "outside" / "patients.csv")
    writer.finish({"accuracy": 1.0})
    writer.note_progress(1, {0: "training"})
    writer._write_tables()
    foreign.check()
    behind.check()
