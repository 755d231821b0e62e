"""What a node has room for is decided by public numbers: a record's length decides nothing about the others."""

import errno
from types import SimpleNamespace

import torch

from fedpriv.learning.training import _caches as caches
from fedpriv.learning.training import stacked
from tests.adversary.exchanges import N_K, ROWS
from tests.adversary.nodes import ask, make_node, num_charges, restart, run_config, training
from tests.adversary.stand_ins import StandIns, largest_excess, standing_in
from tests.tiny import LABELS, WORDS

# On the tiny BERT, the states of 128 records of max_length = 32 tokens fill a MiB.
LONG = (" ".join(WORDS[i % 13] for i in range(40)), LABELS[0])
NUM_WATCHED = 128


def node_with_little_memory(folder, rows, approved, *, memory_limit_mb):
    node = make_node(folder, rows, num_registered=N_K, models=approved)
    with (node.folder / "vault.toml").open("a") as file:
        file.write(f"memory_limit_mb = {memory_limit_mb}\n")
    restart()
    return node


def test_one_more_record_than_memory_has_room_for_silences_no_other(approved, starts, tmp_path, monkeypatch):
    """Its states would need a file, for which there is no room."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caches, "tempfile", SimpleNamespace(TemporaryFile=full))
    sums = []
    for folder, num in ((tmp_path / "more", NUM_WATCHED + 1), (tmp_path / "fewer", NUM_WATCHED)):
        node = node_with_little_memory(folder, [LONG] * num, approved, memory_limit_mb=1)
        with standing_in(StandIns(watched=NUM_WATCHED)) as seen:
            assert ask(node, training(run_config(), starts["tiny"])).code == 0
        sums.append(seen.sums)
    assert any(step.values.any() for step in sums[0]), "no record counted at all"
    assert largest_excess(*sums) <= 1 + 1e-9


def with_rank(adapter, rank):
    shapes = {"lora_A": lambda t: (rank, t.shape[1]), "lora_B": lambda t: (t.shape[0], rank)}
    return {
        name: next((torch.zeros(shape(t)) for part, shape in shapes.items() if part in name), t)
        for name, t in adapter.items()
    }


def test_the_memory_limit_holds_for_a_broadcast_of_another_rank(approved, starts, tmp_path, monkeypatch):
    node = node_with_little_memory(tmp_path / "node", ROWS, approved, memory_limit_mb=8)
    computed, sizes = stacked._pass_gradients, []

    def watched(*arguments):
        rows = computed(*arguments)
        sizes.append((len(rows), 4 * rows.numel()))
        return rows

    monkeypatch.setattr(stacked, "_pass_gradients", watched)
    assert ask(node, training(run_config(rank=1), with_rank(starts["tiny"], 1500))).code == 0
    assert num_charges(node) == 1
    assert {rows for rows, _ in sizes} == {1}
    assert max(size for _, size in sizes) <= 8 * 2**20
