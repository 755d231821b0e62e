"""One line from restore and verify for a store that cannot be used."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from fedpriv.models.variants import folders
from fedpriv.models.variants.blocks import layout_of
from fedpriv.models.variants.composition import History
from fedpriv.models.variants.store import Store
from tests.cli.command_line import fedpriv
from tests.stores import EVENT, damage_index, described


def tensors_of(number: int) -> dict[str, np.ndarray]:
    weight = np.zeros((16, 32), "f4")
    weight[number] = number + 1
    return {"weight": weight, "bias": np.full(16, number, "f4")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of three variants, and their files."""
    folder = tmp_path_factory.mktemp("bench")
    with Store(folder / "store") as store:
        for number in range(3):
            name = f"round-{number}"
            layout = layout_of(tensors_of(number), 32)
            store.add(name, layout, *layout.to_blocks(tensors_of(number)))
            history = History(name=name, ancestors=None, events={"clinic": (EVENT,)})
            variant = described(name, utility=0.9, epsilon_bound=1, utility_bound=0.1, history=history)
            folders.write(folder / "variants" / name, variant, tensors_of(number))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def damage_block(store: Path) -> None:
    blocks = next(store.glob("blocks.*.npy"))
    content = bytearray(blocks.read_bytes())
    content[-3] ^= 1
    blocks.write_bytes(content)


def damage_manifest(store: Path) -> None:
    damage_index(store, "models", "manifest", name="round-1")


def drop_blocks(store: Path) -> None:
    next(store.glob("blocks.*.npy")).unlink()


def damage_state(store: Path) -> None:
    (store / "index.sqlite").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_block, "tensor 'weight': 1 of its 16 blocks damaged"),
        (damage_manifest, "model 'round-1': its manifest in index.sqlite: damaged"),
        (drop_blocks, "16 of its 16 blocks damaged"),
        (damage_state, "index.sqlite: damaged"),
    ],
)
@pytest.mark.parametrize("arguments", [["restore", "store", "NAME", "--out", "o"], ["verify", "store"]])
def test_a_damaged_store_is_reported_and_stays_as_it_is(folder, damage, said, arguments):
    damage(folder / "store")
    before = contents(folder / "store")
    name = "round-2" if damage is damage_block else "round-1"
    words = ["dedup", *(name if part == "NAME" else part for part in arguments)]
    out, err = fedpriv(*words, folder=folder, code=1)
    assert said in err + out
    if arguments[0] != "verify":
        assert len(err.splitlines()) == 1
        assert not (folder / "o").exists()
    assert contents(folder / "store") == before


def test_a_variant_whose_base_was_removed_is_restored(folder):
    with Store(folder / "store") as store:
        store.remove("round-0")
        store.compact()
    fedpriv("dedup", "restore", "store", "round-1", "--out", "o", folder=folder)
    assert np.array_equal(safetensors.numpy.load_file(folder / "o")["weight"], tensors_of(1)["weight"])
    _, said = fedpriv("dedup", "restore", "store", "round-0", "--out", "p", folder=folder, code=2)
    assert said.count("\n") == 1
    assert "model = 'round-0': not in store; it has round-1, round-2" in said
