"""Packed models come back bit for bit, depend on no other, take few bytes where they differ little, and tell damage."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.errors import InputError, StoreError
from fedpriv.models.variants import Store, layout_of, lossless
from fedpriv.models.variants import store as store_module
from fedpriv.models.variants.lossless import Reference, best_reference, sample
from tests.models.variants.test_blocks import MODELS, same_bits
from tests.stores import basis_sizes, damage_index

NANS = np.array([0x7FC00001, 0xFFA00002, 0x7F800001, 0x80000000, 0x00000001], np.uint32)


def fine_tuned(num: int, noise: float, size: int = 50_000, dtype: str = "float32") -> list[dict[str, np.ndarray]]:
    """Fine-tunes of one model, and before them that model."""
    rng = np.random.default_rng(1)
    base = 0.02 * rng.standard_normal(size)
    moved = [base, *(base + 0.02 * noise * rng.standard_normal(size) for _ in range(num))]
    return [{"w": values.astype(dtype), "steps": np.array(step)} for step, values in enumerate(moved)]


def num_bytes(packed: dict[str, np.ndarray]) -> int:
    return sum(part.nbytes for part in packed.values())


@st.composite
def two_models(draw):
    """Two models of one layout with bits of any kind: of NaNs with payloads, of zeros of both signs, of subnormals."""
    first = draw(MODELS)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def other(values: np.ndarray) -> np.ndarray:
        if values.dtype == bool:
            return rng.random(values.shape) < 0.5
        changed = np.frombuffer(rng.bytes(values.nbytes), values.dtype).reshape(values.shape)
        return np.where(rng.random(values.shape) < draw(st.sampled_from([0, 0.1, 1])), changed, values)

    return first, {name: other(values) for name, values in first.items()}


@settings(max_examples=12, deadline=None)
@given(models=two_models(), piece=st.sampled_from([1, 3, 2**20]))
def test_any_bits_come_back_and_equal_models_give_equal_bytes(models, piece):
    reference, model = models
    layout = layout_of(reference, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lossless, "_PIECE", piece)
        for basis in (Reference.of(reference, layout), Reference.zeros(layout)):
            packed = basis.pack(model)
            assert same_bits(basis.tensors(packed), model)
            assert same_bits(basis.pack(model), packed)
            again = Reference.from_bytes(basis.to_bytes(), layout)
            assert again.to_bytes() == basis.to_bytes()
            assert same_bits(again.tensors(packed), model)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(models=two_models())
def test_ten_thousand_models_come_back(models):
    reference, model = models
    basis = Reference.of(reference, layout_of(reference, 16))
    assert same_bits(basis.tensors(basis.pack(model)), model)


@pytest.mark.parametrize("size", [1, 2**20 - 1, 2**20, 2**20 + 1])
def test_sizes_around_a_piece_and_payloads_of_nans_come_back(size):
    rng = np.random.default_rng(size)
    bits = np.where(rng.random(size) < 0.5, rng.choice(NANS, size), rng.integers(2**32, size=size, dtype=np.uint32))
    model = {"w": bits.view(np.float32), "half": (bits >> 16).astype(np.uint16).view("bfloat16")}
    other = {name: np.roll(values, 1) for name, values in model.items()}
    basis = Reference.of(other, layout_of(model, 16))
    assert same_bits(basis.tensors(basis.pack(model)), model)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.7), ("bfloat16", 0.4)])
def test_what_differs_takes_the_fewer_bytes_the_less_it_is(dtype, most):
    sizes = []
    for noise in (1e-1, 1e-2, 1e-3):
        base, tuned = fine_tuned(1, noise, dtype=dtype)
        basis = Reference.of(base, layout_of(base, 16))
        sizes.append(num_bytes(basis.pack(tuned)) / sum(values.nbytes for values in tuned.values()))
        # Without a reference all but sign and exponent is noise.
        assert sizes[-1] < num_bytes(Reference.zeros(layout_of(base, 16)).pack(tuned)) / tuned["w"].nbytes
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= most


def test_the_nearest_to_all_is_the_reference_and_zeros_are_where_models_have_nothing_in_common():
    base, *tuned = fine_tuned(4, 1e-3)
    layout = layout_of(base, 16)
    for order in ([base, *tuned], [*tuned, base]):
        samples = [sample(model, layout) for model in order]
        assert order[best_reference(samples, len(order))] is base
    values = np.random.default_rng(0).standard_normal((4, 50_000)).astype("f4")
    strangers = [{"w": each, "steps": np.array(0)} for each in values]
    assert best_reference([sample(model, layout) for model in strangers], 4) is None
    assert best_reference([sample(base, layout)], 1) is None


def test_a_store_restores_packed_models_whoever_else_goes(tmp_path):
    models = dict(zip("abc", fine_tuned(2, 1e-3, dtype="bfloat16"), strict=True))
    layout = layout_of(models["a"], 16)
    basis = Reference.of(models["a"], layout)
    with Store(tmp_path / "s") as store:
        for name, model in models.items():
            store.add(name, layout, basis, basis.pack(model))
        assert len(basis_sizes(tmp_path / "s")) == 1
        assert store.bytes_stored < 0.7 * store.bytes_logical
        store.remove("a")
        store.compact()
    with Store(tmp_path / "s") as store:
        assert store.verify() == []
        assert all(same_bits(store.tensors(name), models[name]) for name in "bc")
        store.remove("b", "c")
        assert basis_sizes(tmp_path / "s") == []


@pytest.mark.parametrize("packs_much", [True, False])
def test_what_sqlite_cannot_hold_in_one_value_is_refused_and_nothing_is_stored(packs_much, tmp_path, monkeypatch):
    base, tuned = fine_tuned(1, 1e-1)
    layout = layout_of(base, 16)
    basis = Reference.zeros(layout) if packs_much else Reference.of(base, layout)
    monkeypatch.setattr(store_module, "MOST_BYTES", 150_000)
    with Store(tmp_path / "s") as store, pytest.raises(InputError, match=r"model 'a': 1[0-9]{5} bytes in one piece"):
        store.add("a", layout, basis, basis.pack(tuned))
    with Store(tmp_path / "s") as store:
        assert store.names == []


@pytest.mark.parametrize(("table", "column"), [("bases", "content"), ("models", "extras")])
def test_damage_is_told_by_name(table, column, tmp_path):
    base, tuned = fine_tuned(1, 1e-3, size=500)
    layout = layout_of(base, 16)
    basis = Reference.of(base, layout)
    with Store(tmp_path / "s") as store:
        store.add("a", layout, basis, basis.pack(tuned))
    damage_index(tmp_path / "s", table, column)
    with Store(tmp_path / "s", read_only=True) as store:
        assert len(store.verify()) == 1
        with pytest.raises(StoreError, match=r"model 'a': its .* damaged"):
            store.tensors("a")


def test_what_is_packed_in_another_way_is_refused_in_one_line():
    base, tuned = fine_tuned(1, 1e-3, size=500)
    layout = layout_of(base, 16)
    basis = Reference.of(base, layout)
    packed = basis.pack(tuned)
    cut = {name: part[:-1] if part.dtype == np.uint8 else part for name, part in packed.items()}
    flipped = {name: part ^ 255 if part.dtype == np.uint8 else part for name, part in packed.items()}
    (other,) = fine_tuned(0, 0, size=501)
    longer = Reference.zeros(layout_of(other, 16)).pack(other)
    as_floats = {name: part.astype("f4") if part.dtype == np.int64 else part for name, part in packed.items()}
    for bad in ({}, cut, flipped, longer, as_floats, {**packed, "lossless/4-sizes": np.int64(3)}):
        with pytest.raises(ValueError, match=r"packed values of [48] bytes") as caught:
            basis.tensors(bad)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="no safetensors"):
        Reference.from_bytes(b"nonsense", layout)
    # A stranger who states many values gets no memory for them.
    layout = layout_of({"w": np.broadcast_to(np.float32(0), (10**13,))}, 16)
    with pytest.raises(ValueError, match="not the pieces of 10000000000000 values"):
        Reference.zeros(layout).tensors({"lossless/4": np.zeros(3, "u1"), "lossless/4-sizes": np.array([3])})


def test_references_of_zeros_of_several_architectures_are_told_apart(tmp_path):
    rng = np.random.default_rng(3)
    models = {name: {name: rng.standard_normal(shape).astype("f4")} for name, shape in (("v", (64, 4)), ("w", (4, 64)))}
    with Store(tmp_path / "s") as store:
        for name, model in models.items():
            basis = Reference.zeros(layout_of(model, 16))
            store.add(name, layout_of(model, 16), basis, basis.pack(model))
        assert len(basis_sizes(tmp_path / "s")) == 1, "their files are the same"
        for name in ("v", "w", "v"):
            assert same_bits(store.tensors(name), models[name])
