"""Arrays in Flower's messages: few objects, whatever the number of names, and nothing but what was packed comes out."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedpriv.holder.wire.carrier import unpacked
from tests.wire import carried

ADAPTER = {
    f"layer.{9 - index}": np.arange(6, dtype=kind).reshape(2, 3) + index
    for index, kind in enumerate(("f4", "f2", "i1", "u1", "i8", "f4"))
}


def test_what_was_packed_comes_out_in_its_order_and_may_be_written():
    found = unpacked(carried(ADAPTER))
    assert list(found) == list(ADAPTER)
    for name, array in ADAPTER.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
        found[name] += 1
    assert unpacked(carried({})) == {}


def test_a_record_is_as_few_objects_as_one_array_and_fewer_bytes_than_many():
    plain = ArrayRecord({name: Array(array) for name, array in ADAPTER.items()})
    objects, many = (get_all_nested_objects(RecordDict({"adapter": each})) for each in (carried(ADAPTER), plain))
    assert (len(objects), len(many)) == (4, 2 + 2 * len(ADAPTER))
    assert sum(len(each.deflate()) for each in objects.values()) < sum(len(each.deflate()) for each in many.values())


@pytest.mark.parametrize(
    "record",
    [
        ArrayRecord({}),
        ArrayRecord({"arrays": Array(np.zeros(3, "u1"))}),
        ArrayRecord({**carried(ADAPTER), "more": Array(np.zeros(3))}),
        ArrayRecord({"other": carried(ADAPTER)["arrays"]}),
        ArrayRecord({"arrays": Array("uint8", (9,), "fedpriv-frame", b"\x80\x04pickled")}),
    ],
)
def test_another_record_is_refused(record):
    with pytest.raises(ValueError, match=r"arrays|frame"):
        unpacked(record)


def test_an_array_of_objects_is_not_carried():
    with pytest.raises(ValueError, match="of a type that no frame holds"):
        carried({"a": np.array([object()])})
