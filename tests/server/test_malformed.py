"""Many malformed replies from a generator: none is aggregated, none stops the server, each is counted by name."""

import math
import random
import re

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict

from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import Arrays, Response, Scalars
from fedpriv.holder.wire.kinds import UploadRelease
from fedpriv.learning.adapters.codecs import CODECS
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.marks import slow
from tests.server.test_strategy import ADAPTER, SIZES, ask, make_strategy
from tests.wire import answered, records_of

pytestmark = pytest.mark.usefixtures("as_a_task")


def harmed_array(rng: random.Random, good: np.ndarray) -> np.ndarray:
    """An array of another type or shape, or with a value that is no number."""
    match rng.choice(["dtype", "shape", "nan", "scalar", "empty"]):
        case "dtype":
            return good.astype(rng.choice(["float64", "float16", "int64", "bool"]))
        case "shape":
            return np.zeros((good.size + rng.randint(1, 9),), dtype=good.dtype)
        case "nan":
            wrong = good.astype(np.float32)
            wrong.flat[rng.randrange(good.size)] = rng.choice([math.nan, math.inf, -math.inf])
            return wrong
        case "empty":
            return good.reshape(-1)[:0]
        case _:
            return np.array(3.0, dtype=np.float32)


def harmed_bytes(rng: random.Random, content: bytes) -> RecordDict:
    """Records that carry all arrays, with a header, data or name that is wrong."""
    kind = rng.choice(["truncated", "garbage", "type", "huge", "empty", "longer", "lying", "crowd", "names", "lengths"])
    name = "frame-0"
    match kind:
        case "truncated":
            content = content[: rng.randrange(len(content))]
        case "garbage":
            content = bytes(rng.randrange(256) for _ in range(len(content)))
        case "type":
            content = re.sub(rb'"dtype":"[A-Z0-9]+"', rb'"dtype":"O8"', content)
        case "huge":  # a header that asks for terabytes, as long as before
            content = re.sub(
                rb'"shape":\[[0-9,]+\]', lambda found: b'"shape":[' + b"9" * (len(found[0]) - 10) + b"]", content
            )
        case "empty":
            content = b""
        case "longer":
            content += b"\0" * rng.randint(1, 9)
        case "lying":
            name = rng.choice(["frame", "frame-1", "own", ""])
        case "crowd":
            content = b"[" * 10**5 + content
        case "names":
            content = content.replace(b'"A"', b'"B"') if b'"A"' in content else content[:-1]
        case "lengths":
            content = b"\xff" * 8 + content[8:]
    return records_of(content, name)


def harmed(rng: random.Random, message: Message, release: Scalars, good: Arrays) -> Message:
    """The reply with something wrong in it."""
    fields, records, arrays = dict(release), dict(good), dict(good[kinds.ADAPTER])
    name = rng.choice(sorted(arrays))
    match rng.choice(
        ["array"] * 3 + ["bytes"] * 4 + ["missing", "extra", "renamed", "record", "field", "value", "silent"]
    ):
        case "array":
            arrays[name] = harmed_array(rng, arrays[name])
        case "bytes":
            whole = Response.of(fields=fields, arrays=good).frame
            return Message(harmed_bytes(rng, whole), reply_to=message)
        case "missing":
            del arrays[name]
        case "extra":
            arrays["extra"] = arrays[name]
        case "renamed":
            arrays[f"{name}x"] = arrays.pop(name)
        case "record":
            records["metrics" if rng.random() < 0.5 else "more"] = arrays
        case "field":
            fields.pop(rng.choice(sorted(fields)))
        case "value":
            fields[rng.choice(sorted(fields))] = rng.choice([9999, -1, 2**62, 3.5, "", "{}", "[" * 1000])
        case "silent":
            fields["silent"] = True
    return answered(message, fields, arrays={**records, kinds.ADAPTER: arrays})


@pytest.mark.parametrize("num", [80, *slow(250)])
@pytest.mark.parametrize("codec", ["float32", "ternary", *slow(*sorted(set(CODECS) - {"float32", "ternary"}))])
def test_many_malformed_replies(codec, num):
    rng = random.Random(codec)
    strategy = make_strategy(upload_codec=codec, rounds=num)
    broadcast = kinds.Broadcast(adapter=ADAPTER)
    reasons: dict[str, int] = {}
    for round_ in range(1, num + 1):
        messages = ask(strategy, round_)
        replies = []
        for client, message in enumerate(messages):
            event = strategy.event(client)
            release = UploadRelease(round=round_, event=event, num_records=SIZES[client])
            moved = {name: torch.full_like(tensor, 0.25) for name, tensor in ADAPTER.items()}
            encoded = kinds.pack_upload(moved, broadcast, strategy.spec, ADAPTER, SeededSource(round_, client))
            fields = kinds.pack(release)
            bad = harmed(rng, message, fields, encoded) if client == 1 else None
            replies.append(bad or answered(message, fields, arrays=encoded))
        arrays, _ = strategy.aggregate_train(round_, replies)
        assert [row.status for row in strategy._rows] == ["ok", "malformed", "ok"], strategy._rows[1].detail
        assert strategy._rows[1].detail
        assert "\n" not in strategy._rows[1].detail
        reason = ":".join(strategy._rows[1].detail.split(":")[:2])
        reasons[reason] = reasons.get(reason, 0) + 1
        for tensor in arrays.to_torch_state_dict().values():
            torch.testing.assert_close(tensor, torch.full_like(tensor, 0.25))
    assert sum(reasons.values()) == num
    assert len(reasons) >= 5, reasons
