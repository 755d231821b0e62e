"""A registry serves what is stored, within its memory, and copies only what differs; a view renames a live model."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedpriv.errors import InputError
from fedpriv.models.variants.blocks import layout_of
from fedpriv.models.variants.store import Store
from simulations.benchmarks._store_registry import (
    StoreRegistry,
    _distinct_bytes,
    _OpenRows,
    _read_rows,
    _Wanted,
    memory_for_models,
)

SIZE = 64
NUM_MODELS = 4


def add(store: Store, name: str, tensors: dict[str, np.ndarray], size: int = SIZE) -> None:
    """Store a model in blocks of so many values."""
    layout = layout_of(tensors, size)
    store.add(name, layout, *layout.to_blocks(tensors))


def network(seed: int = 0) -> nn.Module:
    """Two linear layers and a batch norm with an integer buffer."""
    torch.manual_seed(seed)
    built = nn.Sequential(nn.Linear(32, 33), nn.BatchNorm1d(33), nn.Linear(33, 10))
    return built.eval()


def variant(number: int) -> dict[str, np.ndarray]:
    """The base with two rows of a matrix and a bias of its own."""
    tensors = {name: tensor.numpy().copy() for name, tensor in network().state_dict().items()}
    tensors["0.weight"][2 * number : 2 * number + 2] = number
    tensors["2.bias"][:] = number
    return tensors


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store") as opened:
        for number in range(NUM_MODELS):
            add(opened, f"v{number}", variant(number))
        yield opened


@pytest.fixture
def one_model(store) -> int:
    """Bytes of one model in memory."""
    return store.manifest("v0").layout.padded_bytes


def is_variant(tensors: dict[str, torch.Tensor], number: int) -> bool:
    expected = variant(number)
    return tensors.keys() == expected.keys() and all(
        np.array_equal(tensors[name].detach().numpy(), values) for name, values in expected.items()
    )


@pytest.mark.parametrize("capacity", [1, 2, 3, NUM_MODELS])
def test_any_order_of_requests_gives_the_models_asked_for_within_the_bound(store, one_model, capacity):
    registry, built = StoreRegistry(store, capacity * one_model), network(1)
    for number in np.random.default_rng(0).integers(NUM_MODELS, size=40):
        registry.load_into(built, f"v{number}")
        assert is_variant(built.state_dict(), number)
        assert is_variant(registry.get(f"v{number}"), number)
        assert registry.used_bytes <= capacity * one_model


def test_last_ones_asked_for_stay(store, one_model):
    registry = StoreRegistry(store, 2 * one_model)  # the third would need more, although they have tensors in common
    for name in ("v0", "v1", "v0", "v2"):
        registry.get(name)
    assert registry.names == ["v0", "v2"]
    assert (registry.statistics.hits, registry.statistics.misses) == (1, 3)


def test_only_what_differs_is_copied(store, one_model):
    registry, built = StoreRegistry(store, one_model), network(1)
    registry.load_into(built, "v1")
    assert registry.statistics.bytes_read == one_model
    registry.load_into(built, "v1")
    assert registry.statistics.bytes_read == one_model
    registry.load_into(built, "v2")
    differing = np.count_nonzero(store.manifest("v1").blocks != store.manifest("v2").blocks)
    assert differing == 2
    assert registry.statistics.bytes_read == one_model + differing * SIZE * 4 + variant(0)["2.bias"].nbytes


def test_loaded_model_computes_what_the_original_does_with_the_same_parameter_objects(store, one_model):
    original, built, x = network(), network(1), torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    original.load_state_dict({name: torch.from_numpy(values) for name, values in variant(3).items()})
    registry, before = StoreRegistry(store, one_model), list(built.parameters())
    for name in ("v0", "v3"):
        registry.load_into(built, name)
    assert torch.equal(built(x), original(x))
    assert all(one is other for one, other in zip(before, built.parameters(), strict=True))


def test_weights_changed_in_place_are_loaded_anew(store, one_model):
    registry, built = StoreRegistry(store, 2 * one_model), network(1)
    registry.load_into(built, "v1")
    with torch.no_grad():
        built[0].weight.add_(1)
    assert is_variant(registry.get("v1"), 1)
    registry.load_into(built, "v1")
    nn.init.zeros_(built[2].weight)
    del built
    gc.collect()
    assert is_variant(registry.get("v1"), 1)
    registry.get("v1")
    assert registry.statistics.hits == 2


def test_models_that_are_served_keep_their_memory(store, one_model):
    registry, one, other = StoreRegistry(store, 2 * one_model), network(1), network(2)
    registry.load_into(one, "v1")
    for number in (2, 3, 0):
        registry.load_into(other, f"v{number}")
        assert is_variant(one.state_dict(), 1)
    with pytest.raises(InputError, match="no room for model 'v3' with the 2 models"):
        registry.get("v3")
    assert is_variant(other.state_dict(), 0)
    del one
    gc.collect()
    assert is_variant(registry.get("v3"), 3)


def test_models_of_two_architectures_share_one_memory(store, one_model):
    small = {"w": np.ones(SIZE, "f4")}
    add(store, "small", small)
    registry = StoreRegistry(store, one_model)
    for _ in range(2):
        assert is_variant(registry.get("v1"), 1)
        assert registry.get("small")["w"].tolist() == [1] * SIZE
        assert registry.names == ["small"]


def test_numbers_outlive_removal_and_compaction(store, one_model):
    registry = StoreRegistry(store, one_model)
    registry.get("v0")
    store.remove("v0")
    store.compact()
    assert is_variant(registry.get("v3"), 3)
    with pytest.raises(InputError, match="'v0': not in"):
        registry.get("v0")
    store.remove("v3")
    add(store, "v3", variant(7))
    assert is_variant(registry.get("v3"), 7)


def test_a_released_model_leaves_its_memory_to_others(store, one_model):
    registry, one, other = StoreRegistry(store, one_model), network(1), network(2)
    registry.load_into(one, "v1")
    with pytest.raises(InputError, match="no room for model 'v2' with the 1 models"):
        registry.load_into(other, "v2")
    nn.init.zeros_(one[2].weight)
    registry.release(one)
    registry.load_into(other, "v2")
    assert is_variant(other.state_dict(), 2)


def test_tied_tensors_may_be_stored_once_and_equal_ones_of_one_model_have_memory_of_their_own(tmp_path):
    built = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    built[1].weight = built[0].weight
    tensors = {"0.weight": np.full((8, 8), 3, "f4")}
    with Store(tmp_path / "tied") as store:
        add(store, "m", tensors, 16)
        StoreRegistry(store, 10**6).load_into(built, "m")
    assert built[1].weight.eq(3).all()
    tensors = {"one": np.ones(SIZE, "f4"), "two": np.ones(SIZE, "f4"), "three": np.ones(3, "f4")}
    with Store(tmp_path / "equal") as store:
        add(store, "m", tensors)
        loaded = StoreRegistry(store, 10**6).get("m")
    assert len({tensor.data_ptr() for tensor in loaded.values()}) == 3


@pytest.mark.parametrize(
    ("built", "said"),
    [
        (nn.Linear(32, 33), "tensor '0.bias'"),
        (nn.Sequential(*network(), nn.Linear(10, 1)), "tensor '3.bias' float32 .* one too many"),
        (network().double(), "tensor '0.bias' float64"),
        (network().to("meta"), "on meta"),
    ],
)
def test_model_of_another_architecture_is_refused_and_left_alone(store, built, said):
    def addresses() -> list[int]:
        return [tensor.data_ptr() if tensor.device.type == "cpu" else 0 for tensor in built.parameters()]

    before = addresses()
    with pytest.raises(InputError, match=said):
        StoreRegistry(store, 10**6).load_into(built, "v0")
    assert addresses() == before


def test_bound_below_one_model_is_refused(store, one_model):
    with pytest.raises(InputError, match=f"memory_bytes = {one_model - 1}: model 'v0' alone needs {one_model}"):
        StoreRegistry(store, one_model - 1).get("v0")


def test_tensors_in_common_are_in_memory_once_and_loaded_anew_for_all_if_one_model_changed_them(store, one_model):
    registry, one, other = StoreRegistry(store, 10 * one_model), network(1), network(2)
    registry.load_into(one, "v1")
    registry.load_into(other, "v2")
    own = sum(variant(0)[name].nbytes for name in ("0.weight", "2.bias"))
    padding = one_model - sum(values.nbytes for values in variant(0).values())
    assert registry.used_bytes <= one_model + own + padding
    shared = [
        name for name, tensor in one.state_dict().items() if tensor.data_ptr() == other.state_dict()[name].data_ptr()
    ]
    assert set(variant(0)) - set(shared) == {"0.weight", "2.bias"}
    with torch.no_grad():
        one[2].weight.zero_()
    registry.load_into(other, "v2")
    assert is_variant(one.state_dict(), 1)
    assert is_variant(other.state_dict(), 2)


def test_models_get_all_memory_where_it_holds_every_distinct_tensor(store, one_model):
    everything = _distinct_bytes([store.manifest(name) for name in store.names])
    assert one_model < everything < NUM_MODELS * one_model
    assert memory_for_models(store, everything) == everything
    registry = StoreRegistry(store, everything)
    for name in store.names * 2:
        registry.get(name)
    assert (registry.names, registry.statistics.misses) == (store.names, NUM_MODELS)


def test_memory_left_for_the_files_is_what_they_take(tmp_path):
    generator = np.random.default_rng(0)
    base = generator.standard_normal((64, 1024)).astype("f4")
    with Store(tmp_path / "scattered") as store:
        for number in range(6):
            base[number] += 1
            add(store, f"v{number}", {"w": base}, 1024)
        assert memory_for_models(store, 3 * base.nbytes) == 3 * base.nbytes - store.bytes_stored
        assert memory_for_models(store, store.bytes_stored) == base.nbytes
        assert memory_for_models(store, store.bytes_stored - 1) == store.bytes_stored - 1


@pytest.mark.parametrize("loaded_before", [True, False])
def test_blocks_are_read_after_a_compaction_elsewhere_replaced_their_file(store, one_model, loaded_before):
    store.close()
    with Store(store.path, read_only=True) as reader:
        registry = StoreRegistry(reader, one_model)
        if loaded_before:
            registry.get("v0")
        with Store(store.path) as writer:
            writer.remove("v0")
            writer.compact()
        assert is_variant(registry.get("v3"), 3)


@settings(deadline=None, max_examples=60)
@given(
    width=st.sampled_from([1, 100, 5000]),
    positions=st.sets(st.integers(0, 19)).map(sorted),
    seed=st.integers(0, 9),
    contiguous=st.booleans(),
)
def test_rows_are_read_as_a_loop_would(tmp_path_factory, width, positions, seed, contiguous):
    generator = np.random.default_rng(seed)
    source = generator.standard_normal((30, width))
    rows = np.arange(len(positions)) + 3 if contiguous else generator.integers(30, size=len(positions))
    target, expected = np.zeros((20, width)), np.zeros((20, width))
    path = tmp_path_factory.mktemp("rows") / "file"
    path.write_bytes(b"head" + source.tobytes())
    with path.open("rb") as file:
        _read_rows(_OpenRows(file.fileno(), 4, 8 * width), [_Wanted(target, np.array(positions, np.int64), rows)])
    for position, row in zip(positions, rows, strict=True):
        expected[position] = source[row]
    assert np.array_equal(target, expected)


def test_more_runs_than_one_call_takes_are_read(tmp_path):
    source = np.random.default_rng(0).integers(255, size=(5000, 7), dtype=np.uint8)
    (tmp_path / "file").write_bytes(source.tobytes())
    rows = np.random.default_rng(1).permutation(5000)[:3000]
    target = np.zeros((3000, 7), np.uint8)
    with (tmp_path / "file").open("rb") as file:
        _read_rows(_OpenRows(file.fileno(), 0, 7), [_Wanted(target, np.arange(3000), rows)])
        assert np.array_equal(target, source[rows])
        with pytest.raises(ValueError, match="7 bytes are missing at the end of the blocks"):
            _read_rows(_OpenRows(file.fileno(), 0, 7), [_Wanted(target, np.arange(1), np.array([5000]))])
