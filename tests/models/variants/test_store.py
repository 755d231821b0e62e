"""The store gives back what it got, shares equal blocks, names damage, and is untouched by any error.

It deletes and writes its own files alone: what others keep in its folder, or behind a link there, stays.
"""

import json
import os
import re
import sqlite3
import tempfile
from contextlib import closing, nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.errors import InputError, StoreError
from fedpriv.models.variants import _index
from fedpriv.models.variants.blocks import CATALOGUE, Manifest, layout_of, rows_of
from fedpriv.models.variants.store import CHARGES_FILE, Store
from tests.failing import DISK_IS_FULL, failing
from tests.foreign import linked, planted
from tests.models.variants.test_blocks import MODELS, same_bits
from tests.stores import add, damage_index, flip

SIZE = 16


def model(seed: int = 0) -> dict[str, np.ndarray]:
    """Five blocks in two tensors, and two extras."""
    generator = np.random.default_rng(seed)
    weights = {"a": generator.standard_normal((8, 5)), "b": generator.standard_normal(2 * SIZE)}
    tensors = {name: values.astype("f4") for name, values in weights.items()}
    return {**tensors, "bias": np.full(3, seed, "f4"), "steps": np.array(seed)}


def replaced(tensors: dict[str, np.ndarray], position: int, value: float) -> dict[str, np.ndarray]:
    """The model with one whole block of `b` set to a value."""
    copy = tensors["b"].copy()
    copy[SIZE * position : SIZE * (position + 1)] = value
    return {**tensors, "b": copy}


def files(path: Path) -> dict[Path, bytes]:
    """All files of a folder but the lock."""
    return {p: p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file() and p.name != "lock"}


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store") as opened:
        yield opened


@settings(max_examples=20, deadline=None)
@given(models=st.lists(MODELS, min_size=1, max_size=3), block_size=st.sampled_from([1, 3, 10_000]))
def test_models_come_back_bit_for_bit_also_from_a_new_process(models, block_size):
    with tempfile.TemporaryDirectory() as folder:
        with Store(Path(folder)) as store:
            for number, tensors in enumerate(models):
                add(store, f"m{number}", tensors, block_size)
        with Store(Path(folder), read_only=True) as store:
            assert store.verify() == []
            for number, tensors in enumerate(models):
                assert same_bits(store.tensors(f"m{number}"), tensors)


def test_equal_blocks_are_stored_once_in_a_plain_file_of_numpy_and_what_is_said_of_a_model_is_kept(store):
    base, said = model(), {"privacy": {"epsilon": 2.5, "deltas": [1e-5]}, "provenance": {"round": 3}}
    add(store, "base", base)
    add(store, "variant", replaced(base, 1, 7.0), **said)
    assert len(store.blocks) == 6
    assert store.reference_counts.tolist() == [2, 2, 2, 2, 1, 1]
    add(store, "zeros", {"w": np.zeros(4 * SIZE, "f4")})
    assert store.reference_counts.tolist() == [2, 2, 2, 2, 1, 1, 4]
    assert np.load(store.path / "blocks.0.npy", mmap_mode="r").tobytes() == store.blocks.tobytes()
    with Store(store.path, read_only=True) as again:
        manifest = again.manifest("variant")
        assert {"privacy": manifest.privacy, "provenance": manifest.provenance} == said


def test_base_may_go_while_its_variants_stay_and_compaction_frees_the_rest(store):
    base = model()
    variant = replaced(base, 0, 7.0)
    add(store, "base", base)
    add(store, "variant", variant)
    numbers = store.manifest("variant").blocks
    store.remove("base")
    assert same_bits(store.tensors("variant"), variant)
    assert (len(store.blocks), store.compact(), len(store.blocks), store.compact()) == (6, 1, 5, 0)
    assert same_bits(store.tensors("variant"), variant)
    assert store.manifest("variant").blocks.tolist() == numbers.tolist()
    add(store, "base", base)
    assert store.manifest("base").blocks.max() == 6, "a number is never given twice"
    with Store(store.path, read_only=True) as again:
        assert again.verify() == []
        assert same_bits(again.tensors("base"), base)


def test_a_store_is_empty_becomes_so_and_uses_freed_blocks_again_before_compaction(store):
    assert (store.names, store.verify(), store.compression_ratio, store.compact()) == ([], [], 1.0, 0)
    for _ in range(2):
        add(store, "m", model())
        store.remove("m")
    assert (store.compact(), store.verify(), len(store.blocks)) == (5, [], 0)
    add(store, "m", model())
    assert same_bits(store.tensors("m"), model())


def test_bytes_are_those_on_the_disk_and_those_without_sharing(store):
    big = {"w": np.random.default_rng(0).standard_normal(100 * SIZE).astype("f4")}
    for number in range(10):
        add(store, f"m{number}", big)
    head = len('{"w": {"dtype": "F32", "shape": [1600], "data_offsets": [0, 6400]}}')
    assert store.bytes_logical == 10 * (6400 + head)
    on_disk = sum(map(len, files(store.path).values()))
    # SQLite begins every table and index on a page of its own, and ends every content that is longer on one.
    assert store.bytes_stored <= on_disk < store.bytes_stored + 1024 * (8 + 2 * 10)
    assert store.tensor_bytes == 10 * 6400
    assert store.compression_ratio == store.bytes_stored / store.tensor_bytes < 0.5


def test_mistakes_are_named_in_a_line_and_change_nothing(store):
    add(store, "base", model())
    before, tensors = files(store.path), model(1)
    layout = layout_of(tensors, SIZE)
    blocks, extras = layout.to_blocks(tensors)
    mistakes = {
        "'base': stored already": (store.add, "base", layout, blocks, extras),
        r"'\.\./x': a name has letters": (store.add, "../x", layout, blocks, extras),
        "blocks of 8 float32, but": (add, store, "m", tensors, 8),
        "blocks of 16 float16, but": (store.add, "m", layout_of(tensors, SIZE, "float16"), blocks, extras),
        r"blocks: float32 \[4, 16\], but the layout has": (store.add, "m", layout, blocks[1:], extras),
        "blocks: float64": (store.add, "m", layout, blocks.astype("f8"), extras),
        "extras: tensor 'bias'": (store.add, "m", layout, blocks, {"steps": extras["steps"]}),
        "plain JSON values": (lambda: store.add("m", layout, blocks, extras, privacy={"epsilon": object()}),),
        "block 99: not stored": (store.rows, np.array([99])),
        "'gone': not in .* it has base": (store.remove, "gone"),
        "'lost': not in": (store.tensors, "lost"),
    }
    for said, (call, *arguments) in mistakes.items():
        with pytest.raises(InputError, match=said) as raised:
            call(*arguments)
        assert "\n" not in str(raised.value)
    assert files(store.path) == before
    assert store.verify() == []


def test_full_disk_leaves_the_store_as_it_was(store, monkeypatch):
    add(store, "base", model())
    before, full_database = store.tensors("base"), sqlite3.OperationalError("database or disk is full")
    for owner, name, error in ((os, "fsync", DISK_IS_FULL), (_index, "commit", full_database)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing(error))
            with pytest.raises(StoreError, match=error.args[-1]):
                add(store, "m", model(1))
        assert store.names == ["base"]
    add(store, "m", model(1))
    assert (store.verify(), same_bits(store.tensors("base"), before)) == ([], True)


def test_one_writer_at_a_time_and_readers_beside_it(store):
    add(store, "m", model())
    with pytest.raises(StoreError, match="one writer at a time"):
        Store(store.path)
    with Store(store.path, read_only=True) as reader:
        add(store, "later", model(1))
        assert reader.names == ["m"]
        assert same_bits(reader.tensors("m"), model())
        with pytest.raises(StoreError, match="not open for writing"):
            reader.remove("m")


def test_folder_that_is_no_store_and_one_of_an_unknown_version_are_refused_and_left_alone(store, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    for path, read_only, said in (
        (folder, False, "no store, yet not empty"),
        (folder / "thesis.txt", False, "a folder"),
        (folder / "nothing", True, "no store"),
    ):
        with pytest.raises(InputError, match=said):
            Store(path, read_only=read_only)
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    store.close()
    with closing(sqlite3.connect(store.path / "index.sqlite")) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(StoreError, match=r"index\.sqlite: version 7: this fedpriv reads version 1"):
        Store(store.path)


@pytest.fixture
def two(store):
    """A closed store of a base and a variant that shares all but one of its blocks."""
    add(store, "base", model())
    add(store, "variant", replaced(model(), 1, 7.0))
    store.close()
    return store.path


def found(path: Path) -> str:
    """What opening and verifying say, as one text."""
    try:
        with Store(path, read_only=True) as store:
            return "\n".join(store.verify())
    except (StoreError, InputError) as error:
        return str(error)


def all_of(path: Path) -> dict[str, object]:
    """The manifests and tensors of a store's models."""
    with Store(path, read_only=True) as store:
        tensors = {name: {key: v.tobytes() for key, v in store.tensors(name).items()} for name in store.names}
        return {name: (each, store.manifest(name).to_json()) for name, each in tensors.items()}


def test_every_flipped_bit_is_found_and_put_back_it_is_sound(two):
    """But of SQLite's own bytes, most of which hold nothing: there all that the store tells is as it was."""
    generator = np.random.default_rng(0)
    expected = all_of(two)
    for file, content in files(two).items():
        held = range(len(content)) if file.name != "index.sqlite" else held_in_index(two, content)
        places = generator.choice(len(content), size=min(100, len(content)), replace=False)
        for place in (*places, *generator.choice(held, size=40)):
            flipped = bytearray(content)
            flipped[place] ^= 1 << generator.integers(8)
            file.write_bytes(flipped)
            if said := found(two):
                assert file.name.split(".")[0] in said or "tensor" in said, f"{file} byte {place}"
            else:
                assert place not in held, f"{file} byte {place}"
                assert all_of(two) == expected, f"{file} byte {place}"
        file.write_bytes(content)
        assert found(two) == ""


def held_in_index(path: Path, content: bytes) -> list[int]:
    """The places of what the store itself put into its index."""
    with closing(sqlite3.connect(path / "index.sqlite")) as db:
        queries = "SELECT manifest FROM models", "SELECT extras FROM models", "SELECT rows FROM catalogue"
        held = [value for query in queries for (value,) in db.execute(query)]
        held += [value.encode() for value in db.execute("SELECT dtype, catalogue, seal FROM state").fetchone()]
    starts = [content.index(value) for value in held]
    return [place for start, value in zip(starts, held, strict=True) for place in range(start, start + len(value))]


def test_every_truncation_and_loss_is_found(two):
    expected = all_of(two)
    for file, content in files(two).items():
        for length in (0, 1, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:length])
            # The last page of the index holds nothing but zeros at its end.
            is_whole = file.name == "index.sqlite" and not any(content[length:]) and all_of(two) == expected
            assert found(two) or is_whole, f"{file} cut to {length} bytes"
        file.unlink()
        assert found(two), f"{file} lost"
        file.write_bytes(content)


def truncate_extras(two: Path) -> None:
    with closing(sqlite3.connect(two / "index.sqlite")) as db, db:
        db.execute("UPDATE models SET extras = substr(extras, 1, 9) WHERE name = 'base'")


LAST = "model 'variant', tensor 'b': 1 of its 2 blocks damaged, the first is block 5"
FIRST = [f"model '{name}', tensor 'a': 1 of its 3 blocks damaged" for name in ("base", "variant")]
IN_INDEX = "in index.sqlite: damaged"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda two: flip(two / "blocks.0.npy"), [LAST]),
        (lambda two: flip(two / "blocks.0.npy", 128), FIRST),
        (lambda two: damage_index(two, "models", "extras"), [f"model 'base', tensor 'bias': its extras {IN_INDEX}"]),
        (truncate_extras, [f"model 'base': its extras {IN_INDEX}", "holds 'bias', 'steps'"]),
        (lambda two: damage_index(two, "models", "manifest", 5), [f"model 'base': its manifest {IN_INDEX}"]),
        (lambda two: damage_index(two, "catalogue", "rows"), ["index.sqlite is damaged in its catalogue"]),
        (lambda two: damage_index(two, "state", "dtype", 0), ["index.sqlite: damaged: its SHA-256 does not match"]),
    ],
)
def test_damage_is_named_with_model_and_tensor(two, damage, said):
    damage(two)
    assert all(each in found(two) for each in said)


def test_a_stranger_s_manifest_that_no_store_writes_is_refused_in_one_line(two):
    with Store(two, read_only=True) as store:
        content = store.manifest("base").to_json()
    assert Manifest.from_json(content).to_json() == content
    for change in (
        lambda made: made["layout"]["tensors"][0].update(shape=[2**40, -(2**20)]),
        lambda made: made["layout"]["tensors"][0].update(shape="all"),
        lambda made: made["layout"].update(tensors=None),
        lambda made: made.update(blocks=made["blocks"] * 2**10),
        lambda made: made.update(blocks=[made["blocks"]]),
        lambda made: made.update(blocks=[2**70] * len(made["blocks"])),
        lambda made: made.update(basis="0" * 64),
        lambda made: made.pop("extras"),
        lambda made: made.update(more=1),
    ):
        change(made := json.loads(content))
        with pytest.raises(ValueError, match=r"\A.+\Z"):
            Manifest.from_json(json.dumps(made).encode())


def test_a_manifest_that_unpacks_to_more_than_an_index_holds_is_refused(two, monkeypatch):
    with Store(two, read_only=True) as store:
        size = len(store.manifest("base").to_json())
    for most, refusal in ((size, nullcontext()), (size - 1, pytest.raises(StoreError, match="its manifest in"))):
        monkeypatch.setattr(_index, "MOST_BYTES", most)
        with refusal, Store(two, read_only=True) as store:
            store.manifest("base")


def test_damaged_model_is_not_restored_and_the_other_one_is(two):
    flip(two / "blocks.0.npy")
    with Store(two) as store:
        with pytest.raises(StoreError, match="model 'variant', tensor 'b'"):
            store.tensors("variant")
        assert same_bits(store.tensors("base"), model())
        with pytest.raises(StoreError, match="block 5 is damaged"):
            add(store, "again", replaced(model(), 1, 7.0))
        assert store.names == ["base", "variant"]


def test_truncated_blocks_name_every_tensor_that_lost_some(two):
    file = two / "blocks.0.npy"
    file.write_bytes(file.read_bytes()[:-70])
    assert "blocks.0.npy is truncated" in found(two)
    for name in ("base", "variant"):
        assert f"model '{name}', tensor 'b'" in found(two)
    with Store(two) as store:
        assert store.verify()
        with pytest.raises(StoreError, match="tensor 'b'"):
            store.tensors("base")
        with pytest.raises(StoreError, match="truncated"):
            store.compact()


def test_blocks_that_are_sound_but_not_the_models_own_are_told(tmp_path):
    one, other = ({"w": np.full(SIZE, value, "f4")} for value in (1, 2))
    with Store(tmp_path / "s") as store:
        add(store, "a", one)
        add(store, "b", other)
    np.save(tmp_path / "s" / "blocks.0.npy", np.load(tmp_path / "s" / "blocks.0.npy")[::-1])
    with closing(sqlite3.connect(tmp_path / "s" / "index.sqlite")) as db, db:
        parts = [rows for (rows,) in db.execute("SELECT rows FROM catalogue ORDER BY first")]
        whole = np.frombuffer(b"".join(parts), CATALOGUE).copy()
        whole["sha256"] = whole["sha256"][::-1]
        db.execute("DELETE FROM catalogue")
        db.execute("INSERT INTO catalogue VALUES (0, ?)", (whole.tobytes(),))
    with Store(tmp_path / "s", read_only=True) as store:
        for name in "ab":
            with pytest.raises(StoreError, match=f"model '{name}': its blocks are not those of its digest"):
                store.tensors(name)


def test_a_block_has_the_row_of_its_number_or_none():
    for numbers, expected in (
        ([], [-1, -1, -1, -1]),
        ([3, 4, 5], [-1, 0, 2, -1]),
        ([3, 5, 9], [-1, 0, 1, 2]),
        ([3, 5, 4, 6], [-1, 0, -1, -1]),  # damaged: no block may pass for another one
    ):
        catalogue = np.zeros(len(numbers), CATALOGUE)
        catalogue["block"] = numbers
        assert rows_of(catalogue, np.array([2, 3, 5, 9])).tolist() == expected


# As a store may name its files, yet none that this store can have written.
LOOK_ALIKES = (
    *("blocks.1.npy.bak", "index.json", "catalogue.0.npy", "index.sqlite.bak"),
    *("manifests/mine.json", "extras/mine.safetensors", "bases/notes.txt", ".charges.json.old"),
)


def opened(path):
    Store(path).close()


def compacted(path):
    with Store(path) as store:
        store.remove("one")
        store.compact()
    opened(path)


def emptied(path):
    with Store(path, empty=True) as store:
        assert store.names == []
        add(store, "one", model(4))


@pytest.mark.parametrize("action", [opened, compacted, emptied])
def test_what_others_keep_in_the_folder_of_a_store_stays(tmp_path, action):
    path = tmp_path / "store"
    with Store(path) as store:
        add(store, "one", model(1))
        add(store, "two", model(2))
    foreign = planted(path, tmp_path / "outside", LOOK_ALIKES)
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
