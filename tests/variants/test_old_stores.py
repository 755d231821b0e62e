"""Stores that older versions wrote are read as they are, and become today's when they are opened for writing.

store_of_version_2.zip was made by version 2: two models and a variant by blocks, one of them removed, and a basis.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedpriv.variants.blocks import layout_of
from fedpriv.variants.store import Store
from tests.variants.test_store_kill import Stop, stopped_at

# SHA-256 of each model's tensors, one after another in the order of their names, as version 2 restored them.
WRITTEN = {
    "m1": "806252219d8443c4cbe969762754a11fa933229130a7dd465c82cfcb061a4afd",
    "m3": "492d534d074e114e1d29e6f07f3c8015106436df955b95141cc6790bc0b52b53",
    "m4": "5271dd828878ddb6d484ba769da69b3fbd2d00d65a6725cfdf43fa1ce76cd752",
    "m5": "b3eeb0dbcf8bfeb2b94850698556afc71a04a49833fd956d73ca435d706aade2",
    "variant": "98d2f51029283dac7f73b39b6aeeeb4c8d85a28e8a0dfd11c2593ebecbfa1a27",
}


@pytest.fixture
def old(tmp_path):
    return unpacked(tmp_path / "store")


def unpacked(path: Path) -> Path:
    with zipfile.ZipFile(Path(__file__).with_name("store_of_version_2.zip")) as archive:
        archive.extractall(path)
    return path


def digests(store: Store) -> dict[str, str]:
    tensors = {name: sorted(store.tensors(name).items()) for name in store.names}
    contents = {name: b"".join(np.ascontiguousarray(v).tobytes() for _, v in own) for name, own in tensors.items()}
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def as_version_1(path: Path) -> None:
    """A store as version 1 wrote it, which had no bases, of the models that need none."""
    index = json.loads((path / "index.json").read_text())["index"]
    for name in (name for name, digests in index["models"].items() if digests["basis"]):
        (path / "manifests" / f"{name}.json").unlink()
        (path / "extras" / f"{name}.safetensors").unlink()
    shutil.rmtree(path / "bases")
    models = {name: files for name, files in index["models"].items() if not files.pop("basis")}
    text = json.dumps({**index, "version": 1, "models": models})
    digest = hashlib.sha256(text.encode()).hexdigest()
    (path / "index.json").write_text(f'{{"sha256": "{digest}", "index": {text}}}\n')


def files(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def test_a_reader_sees_all_of_it_and_changes_nothing(old):
    before = files(old)
    with Store(old, read_only=True) as store:
        assert (store.verify(), digests(store)) == ([], WRITTEN)
        assert store.manifest("variant").provenance == {"bases": ["m1"]}
        assert store.manifest("m1").privacy == {"epsilon": 1.5}
        assert store.sources("m4") == ["m4", "m3", "m5"]
        assert store.describe("m1") is None
    assert files(old) == before


@pytest.mark.parametrize("version", [1, 2])
def test_a_writer_goes_on_in_todays_form(old, version):
    expected = WRITTEN
    if version == 1:
        as_version_1(old)
        expected = {name: WRITTEN[name] for name in ("m1", "variant")}
    tensors = {"w": np.ones((8, 8), "f4"), "bias": np.zeros(3, "f4"), "steps": np.array(9)}
    with Store(old) as store:
        assert (store.verify(), digests(store)) == ([], expected)
        layout = layout_of(tensors, 16)
        store.add("new", layout, *layout.to_blocks(tensors))
        assert store.manifest("new").blocks.min() > store.manifest("m1").blocks.max(), "numbers go on"
    assert sorted(files(old)) == ["blocks.1.npy", "index.sqlite", "lock"]
    with Store(old, read_only=True) as store:
        assert store.verify() == []
        assert {name: digest for name, digest in digests(store).items() if name != "new"} == expected
        assert np.array_equal(store.tensors("new")["w"], tensors["w"])


def test_stopped_between_any_two_writes_it_is_there_in_one_form_or_the_other(tmp_path):
    for call in itertools.count():
        path = unpacked(tmp_path / str(call))
        with pytest.MonkeyPatch.context() as patched:
            stopped_at(call, patched)
            try:
                Store(path).close()
                break
            except Stop:
                pass
        for read_only in (True, False):
            with Store(path, read_only=read_only) as store:
                assert (store.verify(), digests(store)) == ([], WRITTEN)
    assert call > 3


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("manifests/m1.json", "model 'm1': its manifest in index.sqlite: damaged"),
        ("extras/m3.safetensors", "model 'm3'"),
        ("blocks.1.npy", "model 'variant', tensor 'w': 1 of its 4 blocks damaged"),
        ("catalogue.1.npy", "damaged in its catalogue"),
    ],
)
def test_damage_is_still_found_and_the_others_are_restored(old, file, said, read_only):
    content = bytearray((old / file).read_bytes())
    content[-1] ^= 1
    (old / file).write_bytes(content)
    with Store(old, read_only=read_only) as store:
        assert said in "\n".join(store.verify())
        if file != "catalogue.1.npy":
            store.tensors("m5")
