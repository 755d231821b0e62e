"""A store deletes and writes its own files alone: what others keep in its folder, or behind a link there, stays."""

import re

import numpy as np
import pytest

from fedpriv.errors import StoreError
from fedpriv.models.variants.store import CHARGES_FILE, Store
from tests.foreign import linked, planted
from tests.models.variants.test_store import add, model

# As a store may name its files, yet none that this store can have written.
LOOK_ALIKES = (
    *("blocks.7.npy", "blocks.1.npy.bak", "index.json", "catalogue.0.npy", "index.sqlite.bak"),
    *("manifests/mine.json", "extras/mine.safetensors", "bases/notes.txt", ".charges.json.old"),
)


def opened(path):
    Store(path).close()


def removed(path):
    with Store(path) as store:
        store.remove("one")


def compacted(path):
    with Store(path) as store:
        store.remove("one")
        store.compact()
    opened(path)


def emptied(path):
    with Store(path, empty=True) as store:
        assert store.names == []
        add(store, "one", model(4))


@pytest.mark.parametrize("action", [opened, removed, compacted, emptied])
def test_what_others_keep_in_the_folder_of_a_store_stays(tmp_path, action):
    path = tmp_path / "store"
    with Store(path) as store:
        add(store, "one", model(1))
        add(store, "two", model(2))
    foreign = planted(path, tmp_path / "outside", [name for name in LOOK_ALIKES if name != "blocks.7.npy"])
    behind = linked(path / "linked", tmp_path / "outside")
    action(path)
    foreign.check()
    behind.check()
    with Store(path) as store:
        assert not store.verify()
    foreign.check()


def test_blocks_of_another_number_than_the_next_are_nobodys_leftover(tmp_path):
    with Store(tmp_path) as store:
        add(store, "one", model(1))
    (tmp_path / "blocks.7.npy").write_bytes(b"mine")
    (tmp_path / "blocks.1.npy").write_bytes(b"left by a compaction that was killed")
    opened(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("blocks.*")) == ["blocks.0.npy", "blocks.7.npy"]


@pytest.mark.parametrize(
    ("name", "action"),
    [("blocks.0.npy", opened), ("blocks.1.npy", compacted), ("lock", opened), (".index.sqlite.new", emptied)],
)
def test_nothing_is_written_or_cut_through_a_link(tmp_path, name, action):
    path, outside = tmp_path / "store", tmp_path / "patients.npy"
    outside.write_bytes(np.arange(4000.0).tobytes())
    with Store(path) as store:
        add(store, "one", model(1))
    (path / name).unlink(missing_ok=True)
    behind = linked(path / name, outside)
    with pytest.raises(StoreError, match=re.escape(name)):
        action(path)
    behind.check()


def test_an_emptied_store_keeps_the_charges_of_its_validations_and_is_emptied_damaged(tmp_path):
    with Store(tmp_path) as store:
        add(store, "one", model(1))
    (tmp_path / CHARGES_FILE).write_text("{}")
    (tmp_path / "index.sqlite").write_bytes(b"damaged")
    with pytest.raises(StoreError):
        Store(tmp_path)
    emptied(tmp_path)
    assert (tmp_path / CHARGES_FILE).read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks.0.npy", CHARGES_FILE, "index.sqlite", "lock"]
