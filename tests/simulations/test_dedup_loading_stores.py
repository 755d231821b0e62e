"""The benchmark of a given store, and one line from it, restore and verify for a store that cannot be used."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from fedpriv.models.variants import folders
from fedpriv.models.variants.blocks import layout_of
from fedpriv.models.variants.composition import History
from fedpriv.models.variants.store import Store
from tests.cli.command_line import as_json, fedpriv, loading
from tests.stores import EVENT, damage_index, described

WORKLOADS = """
import torch

CALLS = []


class Workload:
    def __init__(self, width=32):
        self.model = torch.nn.Linear(width, 16)

    def infer(self):
        CALLS.append(self.model(torch.ones(1, 32)))


def right():
    return Workload()


def wrong():
    return Workload(31)


def nothing():
    return object()
"""


def tensors_of(number: int) -> dict[str, np.ndarray]:
    weight = np.zeros((16, 32), "f4")
    weight[number] = number + 1
    return {"weight": weight, "bias": np.full(16, number, "f4")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of three variants, their files, and a module of workloads."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "workloads.py").write_text(WORKLOADS)
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


def command(folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    """What `fedpriv dedup` prints, or the benchmark for `bench`."""
    if arguments[0] == "bench":
        return fedpriv(*arguments[1:], folder=folder, code=code, program=loading)
    return fedpriv("dedup", *arguments, folder=folder, code=code)


def error(folder: Path, *arguments: str) -> str:
    """The line that says what is wrong with the arguments; nothing else is printed."""
    out, err = command(folder, *arguments, code=2)
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_json_of_a_measurement(folder):
    before = contents(folder / "store")
    options = ["--queries", "7", "--workload", "workloads:right", "--files", "variants"]
    found = as_json("store", *options, folder=folder, program=loading)
    assert found["num_queries"] == 7
    assert found["memory_bytes"] == (16 * 32 + 16) * 4
    assert found["page_cache_dropped"] in (True, False)
    assert found["failures"] == {}
    for kind in ("cold", "warm"):
        assert found[kind].keys() == {"store", "safetensors", "straight", "mmap"}
        assert all(arm["infer_seconds"] > 0 and 0 <= arm["misses"] <= 7 for arm in found[kind].values())
        assert found["ratios"][kind]["load"].keys() == {"safetensors", "straight", "mmap"}
    assert contents(folder / "store") == before
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        "store",
        "variants",
        "workloads.py",
    ]


@pytest.mark.parametrize(("option", "left_out"), [("--cold", "warm"), ("--warm", "cold")])
def test_lines_of_a_measurement_of_restored_files(folder, option, left_out):
    printed, _ = command(folder, "bench", "store", "--queries", "3", option)
    assert printed.startswith("3 queries over 3 variants, 2112 bytes for each arm on top of its process, bounded by ")
    for arm in ("store", "safetensors", "straight"):
        assert f"\n{option[2:]}, {arm}: " in printed
    assert f"{left_out}, " not in printed
    assert [path.name for path in folder.iterdir() if path.name.startswith("tmp")] == []


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
@pytest.mark.parametrize(
    "arguments", [["bench", "store"], ["restore", "store", "NAME", "--out", "o"], ["verify", "store"]]
)
def test_a_damaged_store_is_reported_and_stays_as_it_is(folder, damage, said, arguments):
    damage(folder / "store")
    before = contents(folder / "store")
    name = "round-2" if damage is damage_block else "round-1"
    out, err = command(folder, *[name if part == "NAME" else part for part in arguments], code=1)
    assert said in err + out
    if arguments[0] != "verify":
        assert len(err.splitlines()) == 1
        assert not (folder / "o").exists()
    assert contents(folder / "store") == before


def test_a_variant_whose_base_was_removed_is_served_and_restored(folder):
    with Store(folder / "store") as store:
        store.remove("round-0")
        store.compact()
    command(folder, "bench", "store", "--queries", "2")
    command(folder, "restore", "store", "round-1", "--out", "o")
    assert np.array_equal(safetensors.numpy.load_file(folder / "o")["weight"], tensors_of(1)["weight"])
    said = error(folder, "restore", "store", "round-0", "--out", "p")
    assert "model = 'round-0': not in store; it has round-1, round-2" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "store = nowhere: no store"),
        (["store", "--files", "store"], "files = 'store': holds no variants"),
        (["store", "--memory-mb", "0"], "--memory-mb 0.0: must be > 0"),
        (["store", "--memory-mb", "0.001"], "memory_bytes = 1048: variant 'round-0' alone needs 2112"),
        (["store", "--workload", "workloads"], "workload = 'workloads': must be MODULE:FUNCTION"),
        (["store", "--workload", "workloads:nothing"], "has no model"),
        (["store", "--workload", "workloads:wrong"], "model: another architecture: tensor 'weight' float32 [16, 31]"),
    ],
)
def test_what_cannot_be_used_is_one_line(folder, arguments, said):
    before = contents(folder / "store")
    assert said in error(folder, "bench", *arguments)
    assert contents(folder / "store") == before


def test_files_of_another_architecture_or_of_too_few_variants_are_refused(folder):
    safetensors.numpy.save_file({"weight": np.ones(3, "f4")}, folder / "variants" / "round-1" / "model.safetensors")
    words = ["bench", "store", "--files", "variants"]
    said = error(folder, *words)
    assert "files: variant 'round-1' has another architecture than the stored one: tensor 'bias'" in said
    shutil.rmtree(folder / "variants" / "round-1")
    assert "files: none for variant 'round-1'" in error(folder, *words)
