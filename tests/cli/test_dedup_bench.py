"""`fedpriv dedup bench`, and one line from bench, restore and verify for a store that cannot be used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.cli.main import main
from fedpriv.dedup import variants
from fedpriv.dedup.blocks import layout_of
from fedpriv.dedup.composition import History
from fedpriv.dedup.store import Store
from fedpriv.dedup.variants import Described

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
    event = SubsampledGaussian(noise_multiplier=1.5, sampling_probability=0.05)
    with Store(folder / "store") as store:
        for number in range(3):
            name = f"round-{number}"
            layout = layout_of(tensors_of(number), 32)
            store.add(name, layout, *layout.to_blocks(tensors_of(number)))
            described = Described(
                name=name,
                architecture="linear",
                utility=0.9,
                epsilon_bound=1,
                utility_bound=0.1,
                deltas={"clinic": 1e-5},
                history=History(name=name, ancestors=None, events={"clinic": (event,)}),
            )
            variants.write(folder / "variants" / name, described, tensors_of(number))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may damage, as the working directory."""
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "copy"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fedpriv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code, and what was printed, on stdout if all went well."""
    monkeypatch.setattr(sys, "argv", ["fedpriv", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    code = int(ended.value.code or 0)
    return code, printed.err if code else printed.out


def test_json_of_a_measurement(folder):
    before = contents(folder / "store")
    command = [Path(sys.executable).parent / "fedpriv", "dedup", "bench", "store", "--queries", "7", "--json"]
    command += ["--workload", "workloads:right", "--files", "variants"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["num_queries"] == 7
    assert found["memory_bytes"] == (16 * 32 + 16) * 4
    assert found["page_cache_dropped"] in (True, False)
    for kind in ("cold", "warm"):
        assert found[kind].keys() == {"plain", "store", "load_ratio", "total_ratio"}
        for arm in ("plain", "store"):
            assert found[kind][arm].keys() == {"load_seconds", "infer_seconds", "misses", "bytes_read"}
            assert found[kind][arm]["infer_seconds"] > 0
            assert 0 < found[kind][arm]["misses"] <= 7
        assert found[kind]["load_ratio"] > 0
    assert contents(folder / "store") == before
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        "store",
        "variants",
        "workloads.py",
    ]


@pytest.mark.parametrize(("option", "left_out"), [("--cold", "warm"), ("--warm", "cold")])
def test_lines_of_a_measurement_of_restored_files(folder, monkeypatch, capsys, option, left_out):
    code, printed = fedpriv(monkeypatch, capsys, "dedup", "bench", "store", "--queries", "3", option)
    assert code == 0
    assert printed.startswith("3 queries over 3 variants, 2112 bytes for each arm\n")
    assert f"\n{option[2:]}: plain files " in printed
    assert f"{left_out}: " not in printed
    assert [path.name for path in folder.iterdir() if path.name.startswith("tmp")] == []


def damage_block(store: Path) -> None:
    blocks = next(store.glob("blocks.*.npy"))
    content = bytearray(blocks.read_bytes())
    content[-3] ^= 1
    blocks.write_bytes(content)


def damage_manifest(store: Path) -> None:
    path = store / "manifests" / "round-1.json"
    path.write_bytes(path.read_bytes()[:-1])


def drop_blocks(store: Path) -> None:
    next(store.glob("blocks.*.npy")).unlink()


def damage_index(store: Path) -> None:
    (store / "index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_block, "tensor 'weight': 1 of its 16 blocks damaged"),
        (damage_manifest, "manifests/round-1.json is damaged"),
        (drop_blocks, "16 of its 16 blocks damaged"),
        (damage_index, "index.json: damaged"),
    ],
)
@pytest.mark.parametrize(
    "arguments", [["bench", "store"], ["restore", "store", "NAME", "--out", "o"], ["verify", "store"]]
)
def test_damaged_store_is_told_of_and_stays_as_it_is(folder, monkeypatch, capsys, damage, said, arguments):
    damage(folder / "store")
    before = contents(folder / "store")
    name = "round-2" if damage is damage_block else "round-1"
    monkeypatch.setattr(sys, "argv", ["fedpriv", "dedup", *[name if part == "NAME" else part for part in arguments]])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 1
    assert said in printed.err + printed.out
    if arguments[0] != "verify":
        assert len(printed.err.splitlines()) == 1
        assert not (folder / "o").exists()
    assert contents(folder / "store") == before


def test_variant_whose_base_was_removed_is_served_and_restored(folder, monkeypatch, capsys):
    with Store(folder / "store") as store:
        store.remove("round-0")
        store.compact()
    assert fedpriv(monkeypatch, capsys, "dedup", "bench", "store", "--queries", "2")[0] == 0
    assert fedpriv(monkeypatch, capsys, "dedup", "restore", "store", "round-1", "--out", "o")[0] == 0
    assert np.array_equal(safetensors.numpy.load_file(folder / "o")["weight"], tensors_of(1)["weight"])
    code, said = fedpriv(monkeypatch, capsys, "dedup", "restore", "store", "round-0", "--out", "p")
    assert (code, len(said.splitlines())) == (2, 1)
    assert "model = 'round-0': not in store; it has round-1, round-2" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "store = nowhere: no store"),
        (["store", "--files", "store"], "files = 'store': holds no variants"),
        (["store", "--memory-mb", "0"], "--memory-mb 0.0: must be > 0"),
        (["store", "--memory-mb", "0.001"], "memory_bytes = 1048: file 'round-0' alone needs 2112"),
        (["store", "--reader", "pickle"], "--reader pickle: must be one of direct, safetensors"),
        (["store", "--workload", "workloads"], "workload = 'workloads': must be MODULE:FUNCTION"),
        (["store", "--workload", "workloads:nothing"], "has no model"),
        (["store", "--workload", "workloads:wrong"], "model: another architecture: tensor 'weight' float32 [16, 31]"),
    ],
)
def test_what_cannot_be_used_is_one_line(folder, monkeypatch, capsys, arguments, said):
    before = contents(folder / "store")
    code, printed = fedpriv(monkeypatch, capsys, "dedup", "bench", *arguments)
    assert code == 2
    assert said in printed
    assert len(printed.splitlines()) == 1
    assert contents(folder / "store") == before


def test_files_of_another_architecture_or_of_too_few_variants_are_refused(folder, monkeypatch, capsys):
    safetensors.numpy.save_file({"weight": np.ones(3, "f4")}, folder / "variants" / "round-1" / "model.safetensors")
    command = ["dedup", "bench", "store", "--files", "variants"]
    code, said = fedpriv(monkeypatch, capsys, *command)
    assert (code, len(said.splitlines())) == (2, 1)
    assert "files: variant 'round-1' has another architecture than the stored one: tensor 'bias'" in said
    shutil.rmtree(folder / "variants" / "round-1")
    code, said = fedpriv(monkeypatch, capsys, *command)
    assert code == 2
    assert "files: none for variant 'round-1'" in said
