"""Counted bytes are those of the objects that Flower's link sends."""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from server.exchange import wire_bytes


def content(**arrays: np.ndarray) -> RecordDict:
    records = ArrayRecord({name: Array.from_numpy_ndarray(values) for name, values in arrays.items()})
    return RecordDict({"adapter": records, "instruction": ConfigRecord({"round": 3, "spec": "dp-lora"})})


def test_counted_bytes_are_those_of_the_objects_that_flower_sends():
    generator = np.random.default_rng(0)
    # One is longer than the pieces in which Flower sends an array.
    sizes = {"short": 10, "long": 8_000_000}
    records = content(**{name: generator.standard_normal(size).astype("f4") for name, size in sizes.items()})
    objects = get_all_nested_objects(records)
    assert len(objects) > 5, "the long array travels in pieces"
    assert wire_bytes(records) == sum(len(each.deflate()) for each in objects.values()) > 4 * sum(sizes.values())


def test_arrays_of_equal_content_travel_once():
    one, two = np.ones(1000, "f4"), np.full(1000, 2.0, "f4")
    assert wire_bytes(content(a=one, b=one)) < wire_bytes(content(a=one)) + 1000
    assert wire_bytes(content(a=one, b=two)) > wire_bytes(content(a=one)) + 4000
