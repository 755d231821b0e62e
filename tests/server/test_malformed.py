"""Many malformed replies from a generator: none is aggregated, none stops the server, each is counted by name."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedpriv import protocol
from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.adapters.codecs import CODECS
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.protocol import UploadRelease
from simulations.engines.flower_private import task_identity
from tests.server.test_strategy import ADAPTER, SIZES, ask, make_strategy


@pytest.fixture(autouse=True)
def _identity():
    with task_identity(1):
        yield


def harmed_array(rng: random.Random, array: Array) -> Array:
    """An array whose header, data or both are wrong."""
    good = array.numpy()
    kind = rng.choice(["dtype", "shape", "truncated", "garbage", "object", "huge", "empty", "lying", "nan", "scalar"])
    match kind:
        case "dtype":
            return Array.from_numpy_ndarray(
                good.astype(rng.choice(["float64", "float16", "int64", "complex64", "bool"]))
            )
        case "shape":
            return Array.from_numpy_ndarray(np.zeros((good.size + rng.randint(1, 9),), dtype=good.dtype))
        case "truncated":
            return Array(array.dtype, array.shape, array.stype, array.data[: rng.randrange(len(array.data))])
        case "garbage":
            data = bytes(rng.randrange(256) for _ in range(len(array.data)))
            return Array(array.dtype, array.shape, array.stype, data)
        case "object":
            header = array.data.replace(b"<f4", b"|O8").replace(b"|u1", b"|O8").replace(b"|i1", b"|O8")
            return Array(array.dtype, array.shape, array.stype, header.replace(b"<i2", b"|O8"))
        case "huge":  # a header that asks for terabytes
            text = str(array.shape).encode()
            claim = b"(1000000000000,)"
            pad = b" " * max(0, len(claim) - len(text))
            return Array(array.dtype, array.shape, array.stype, array.data.replace(pad, b"").replace(text, claim, 1))
        case "empty":
            return Array(array.dtype, array.shape, array.stype, b"")
        case "lying":
            return Array(array.dtype, array.shape, rng.choice(["torch", "pickle", ""]), array.data)
        case "nan":
            wrong = good.astype(np.float32)
            wrong.flat[rng.randrange(good.size)] = rng.choice([math.nan, math.inf, -math.inf])
            return Array.from_numpy_ndarray(wrong)
        case _:
            return Array.from_numpy_ndarray(np.array(3.0, dtype=np.float32))


def harmed(rng: random.Random, message: Message, good: RecordDict) -> Message:
    """The reply with something wrong in it."""
    records = dict(good)
    arrays = dict(records[protocol.ADAPTER])
    release = dict(records[protocol.RELEASE])
    name = rng.choice(sorted(arrays))
    match rng.choice(["array"] * 6 + ["missing", "extra", "renamed", "record", "field", "value", "silent"]):
        case "array":
            arrays[name] = harmed_array(rng, arrays[name])
        case "missing":
            del arrays[name]
        case "extra":
            arrays["extra"] = arrays[name]
        case "renamed":
            arrays[f"{name}x"] = arrays.pop(name)
        case "record":
            records["metrics" if rng.random() < 0.5 else "more"] = ArrayRecord(arrays)
        case "field":
            release.pop(rng.choice(sorted(release)))
        case "value":
            key = rng.choice(sorted(release))
            release[key] = rng.choice([9999, -1, 2**62, 3.5, "", "{}", "[" * 1000, b"x", [1, 2]])
        case "silent":
            release["silent"] = True
    return Message(
        RecordDict({**records, protocol.ADAPTER: ArrayRecord(arrays), protocol.RELEASE: ConfigRecord(release)}),
        reply_to=message,
    )


@pytest.mark.parametrize("num", [80, pytest.param(250, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "codec", [pytest.param(each, marks=[] if each in ("float32", "ternary") else pytest.mark.slow) for each in CODECS]
)
def test_many_malformed_replies(codec, num):
    rng = random.Random(codec)
    strategy = make_strategy(upload_codec=codec, rounds=num)
    broadcast = protocol.Broadcast(adapter=ADAPTER)
    reasons: dict[str, int] = {}
    for round_ in range(1, num + 1):
        messages = ask(strategy, round_)
        replies = []
        for client, message in enumerate(messages):
            event = strategy.event(client)
            release = UploadRelease(round=round_, event=event, num_records=SIZES[client])
            moved = {name: torch.full_like(tensor, 0.25) for name, tensor in ADAPTER.items()}
            encoded = protocol.pack_upload(moved, broadcast, strategy.spec, ADAPTER, SeededSource(round_, client))
            good = RecordDict(
                {
                    protocol.ADAPTER: ArrayRecord(encoded),
                    protocol.RELEASE: ConfigRecord(protocol.pack(release)),
                }
            )
            replies.append(harmed(rng, message, good) if client == 1 else Message(good, reply_to=message))
        arrays, _ = strategy.aggregate_train(round_, replies)
        assert [row.status for row in strategy._rows] == ["ok", "malformed", "ok"], strategy._rows[1].detail
        assert strategy._rows[1].detail
        assert "\n" not in strategy._rows[1].detail
        reasons[strategy._rows[1].detail.split(":")[0]] = reasons.get(strategy._rows[1].detail.split(":")[0], 0) + 1
        for tensor in arrays.to_torch_state_dict().values():
            torch.testing.assert_close(tensor, torch.full_like(tensor, 0.25))
    assert sum(reasons.values()) == num
    assert len(reasons) >= 5, reasons


def test_an_event_that_costs_less_is_malformed_too():
    strategy = make_strategy()
    message = ask(strategy)[0]
    cheap = SubsampledGaussian(noise_multiplier=50.0, sampling_probability=1e-6)
    release = protocol.pack(UploadRelease(round=1, event=cheap, num_records=SIZES[0]))
    content = {protocol.ADAPTER: ArrayRecord(ADAPTER), protocol.RELEASE: ConfigRecord(release)}
    strategy.aggregate_train(1, [Message(RecordDict(content), reply_to=message)])
    assert strategy._rows[0].status == "malformed"
    assert "the instruction costs" in strategy._rows[0].detail
