"""Tensors become blocks and tensors again, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.errors import InputError
from fedpriv.models.variants.blocks import DTYPES, fitting_block_size, layout_of

SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7)
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: (
        hnp.arrays("u2", SHAPES).map(lambda a: a.view(dtype)) if dtype == "bfloat16" else hnp.arrays(dtype, SHAPES)
    )
)
MODELS = st.dictionaries(st.text("abc.", min_size=1, max_size=4), ARRAYS, max_size=6)


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        (a.shape, a.dtype, a.tobytes()) == (other[name].shape, other[name].dtype, other[name].tobytes())
        for name, a in one.items()
    )


@given(tensors=MODELS, block_size=st.sampled_from([1, 2, 3, 16, 10_000]), dtype=st.sampled_from(DTYPES))
def test_round_trip_is_bit_exact(tensors, block_size, dtype):
    layout = layout_of(tensors, block_size, dtype)
    blocks, extras = layout.to_blocks(tensors)
    assert blocks.shape == (layout.num_blocks, block_size)
    assert same_bits(layout.from_blocks(blocks, extras), tensors)
    assert layout.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_blocks_go_tensor_by_tensor_in_the_order_of_names_with_padding():
    tensors = {"b": np.arange(5, dtype="f4"), "a": np.arange(6, dtype="f4").reshape(2, 3).T, "small": np.ones(1, "f4")}
    layout = layout_of(tensors, 4)
    blocks, extras = layout.to_blocks(tensors)
    assert blocks.tolist() == [[0, 3, 1, 4], [2, 5, 0, 0], [0, 1, 2, 3], [4, 0, 0, 0]]
    assert layout.blocked == {"a": range(0, 2), "b": range(2, 4)}
    assert list(extras) == ["small"]


def test_special_values_keep_their_bits_and_tensors_of_another_dtype_and_small_ones_are_extras():
    bits = np.array([0x7FC00001, 0xFFA00002, 0x80000000, 0x00000001], np.uint32)
    tensors = {"w": bits.view(np.float32)}
    layout = layout_of(tensors, 3)
    assert layout.from_blocks(*layout.to_blocks(tensors))["w"].view(np.uint32).tolist() == bits.tolist()
    tensors = {"half": np.zeros(8, "f2"), "empty": np.zeros((0, 3), "f4"), "scalar": np.float32(1).reshape(())}
    assert layout_of(tensors, 4).num_blocks == 0
    assert layout_of(tensors, 1).blocked == {"scalar": range(0, 1)}


def test_tensors_share_memory_with_their_blocks():
    layout = layout_of({"w": np.zeros((2, 3), "f4")}, 4)
    blocks = np.zeros((2, 4), "f4")
    tensor = layout.from_blocks(blocks, {})["w"]
    blocks[1, 0] = 7
    assert tensor[1, 1] == 7


BASE = {"a": np.zeros((2, 2), "f4"), "b": np.zeros(3, "f4")}


def test_comparison_names_the_first_difference():
    for other, block_size, said in (
        ({"b": BASE["b"] + 1, "a": BASE["a"] - 1}, 2, None),
        ({"a": BASE["a"]}, 2, "tensor 'b' float32 [3] is missing"),
        ({**BASE, "c": BASE["b"]}, 2, "tensor 'c' float32 [3] is one too many"),
        ({**BASE, "a": np.zeros(4, "f4")}, 2, "tensor 'a' float32 [4] instead of 'a' float32 [2, 2]"),
        ({**BASE, "b": np.zeros(3, "f2")}, 2, "tensor 'b' float16 [3] instead of 'b' float32 [3]"),
        (BASE, 3, "block_size = 3 instead of 2"),
    ):
        layout, found = layout_of(BASE, 2), layout_of(other, block_size)
        assert layout.difference(found) == said
        assert (layout == found) == (said is None)


def test_mistakes_are_named():
    for call, said in (
        (lambda: layout_of(BASE, 0), "block_size = 0"),
        (lambda: layout_of({"w": np.zeros(2, ">f4")}, 2), "tensor 'w': values of type >f4"),
        (lambda: layout_of({"w": np.array(["text"])}, 2), "tensor 'w': values of type <U4"),
        (lambda: layout_of(BASE, 2).to_blocks({"a": BASE["a"]}), "tensor 'b' float32"),
        (lambda: layout_of(BASE, 2).from_blocks(np.zeros((3, 2), "f4"), {}), r"float32 \[3, 2\]"),
        (lambda: layout_of(BASE, 4).from_blocks(np.zeros((1, 4), "f4"), {}), "extras: tensor 'b'"),
    ):
        with pytest.raises(InputError, match=said):
            call()


def test_a_block_size_fits_the_model():
    assert fitting_block_size([1536] * 4 + [3072, 8]) == 64, "a LoRA adapter"
    assert fitting_block_size([22_000_000]) == 1024, "a whole encoder"
    for sizes, expected in (([384 * 384], 512), ([128, 40], 64), ([40, 9], 32), ([1], 1), ([], 1)):
        assert fitting_block_size(sizes) == expected
