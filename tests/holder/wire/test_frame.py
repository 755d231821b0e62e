"""The frame: what was packed comes out, and of bytes that anyone may have made nothing else is read."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedpriv.holder.wire import frame, kinds
from fedpriv.holder.wire.frame import FRAME, OWN, FrameError, Request, Response, carried, frame_in
from server.exchange import content_of
from tests.wire import with_body

ARRAYS = {
    f"layer.{9 - index}": np.arange(6, dtype=kind).reshape(2, 3) + index
    for index, kind in enumerate(("f4", "f2", "i1", "u1", "i8", "f4"))
}
FIELDS = {"run": "r", "round": 1, "rate": 0.1, "silent": False}


def request(**changes) -> Request:
    values = {"fields": FIELDS, "arrays": {"a": ARRAYS}, "own": {"receipt": "a receipt"}} | changes
    return Request.of("train", {"model": "tiny", "rank": 4}, **values)


def test_what_was_packed_comes_out_in_its_order_and_may_be_written():
    found = Request.unpacked(request().packed())
    assert (found.kind, found.run_config, found.own) == ("train", request().run_config, request().own)
    assert found.fields == FIELDS
    assert list(map(type, found.fields.values())) == list(map(type, FIELDS.values()))
    assert list(found.arrays["a"]) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert found.arrays["a"][name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays["a"][name], array)
        found.arrays["a"][name] += 1
    assert Response.of().arrays == {}
    response = Response(Response.of(code=100, reason="refused:\n no").frame)
    assert (response.code, response.reason, response.fields) == (100, "refused: no", {})


def test_the_digest_is_of_all_that_every_node_is_asked_alike_and_of_nothing_else():
    digest = request().digest
    assert Request.unpacked(request().packed()).digest == digest
    assert request(own={}).digest == Request.of("train", fields=FIELDS, arrays={"a": ARRAYS}).digest == digest
    others = [
        request(fields={**FIELDS, "round": 2}),
        request(fields={**FIELDS, "rate": 0.1 + 1e-16}),
        request(arrays={"b": ARRAYS}),
        request(arrays={"a": {**ARRAYS, "layer.9": ARRAYS["layer.9"] + np.float32(1e-6)}}),
        request(arrays={"a": dict(reversed(ARRAYS.items()))}),
        Request.of("evaluate", fields=FIELDS, arrays={"a": ARRAYS}),
    ]
    assert len({digest, *(other.digest for other in others)}) == 1 + len(others)


def test_a_message_is_fewer_objects_than_one_array_and_fewer_bytes_than_many():
    plain = RecordDict({"a": ArrayRecord({name: Array(array) for name, array in ARRAYS.items()})})
    one, many = (get_all_nested_objects(each) for each in (content_of(request(own={})), plain))
    assert (len(one), len(many)) == (2, 2 + 2 * len(ARRAYS))
    assert sum(len(each.deflate()) for each in one.values()) < sum(len(each.deflate()) for each in many.values())


def test_a_message_with_anything_else_carries_no_frame():
    sound = ConfigRecord({FRAME: b"x"})
    wrong = [{}, {OWN: ConfigRecord({"receipt": "a receipt"})}, {"frame-1": sound}, {"other": sound}]
    wrong += [{"frame-0": sound, "frame-2": sound}, {"frame-0": sound, "more": ArrayRecord({})}]
    wrong += [{"frame-0": ArrayRecord({FRAME: Array(np.zeros(3, "u1"))})}]
    for held in ({FRAME: "text"}, {FRAME: [b"x"]}, {FRAME: b"x", "more": b"x"}, {"other": b"x"}):
        wrong.append({"frame-0": ConfigRecord(held)})
    for records in wrong:
        with pytest.raises(FrameError, match="records: must be frame-0"):
            frame_in(RecordDict(records))


@pytest.mark.parametrize(("length", "pieces"), [(1, 1), (frame._PIECE_BYTES, 1), (2 * frame._PIECE_BYTES + 1, 3)])
def test_a_long_frame_travels_in_pieces(length, pieces):
    sent = np.random.default_rng(0).bytes(length)
    records = {name: ConfigRecord(record) for name, record in reversed(carried(sent).items())}
    assert len(records) == pieces
    assert frame_in(RecordDict(records)) == sent
    assert frame_in(RecordDict({**records, OWN: ConfigRecord({"receipt": "a receipt"})})) == sent


def with_header(sent: bytes, change: Callable[[str], str]) -> bytes:
    """The frame with another header, whose length it states."""
    end = frame.PREFIX_BYTES + int.from_bytes(sent[:4], "big")
    header = change(sent[frame.PREFIX_BYTES : end].decode()).encode()
    return len(header).to_bytes(4, "big") + sent[4:8] + header + sent[end:]


def replaced(old: str, new: str) -> Callable[[bytes], bytes]:
    def change(sent: bytes) -> bytes:
        changed = with_header(sent, lambda header: header.replace(old, new))
        assert changed != sent
        return changed

    return change


def with_part(pattern: str, new: str) -> Callable[[bytes], bytes]:
    return lambda sent: with_header(sent, lambda header: re.sub(pattern, new, header))


def with_longer_header(sent: bytes) -> bytes:
    """The frame, which states one byte more of a header and one less of a body."""
    header, body = (int.from_bytes(sent[at : at + 4], "big") for at in (0, 4))
    return (header + 1).to_bytes(4, "big") + (body - 1).to_bytes(4, "big") + sent[8:]


HARMS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda sent: sent[:-1], "its length"),
    "trailing bytes": (lambda sent: sent + b"\0", "its length"),
    "shorter than a prefix": (lambda sent: sent[:5], "its length"),
    "a header of gigabytes": (lambda sent: b"\xff" + sent[1:], "at most"),
    "a body of gigabytes": (lambda sent: sent[:4] + b"\xff" + sent[5:], "at most"),
    "bytes moved from body to header": (with_longer_header, "not JSON"),
    "another version": (replaced('"version": 1', '"version": 2'), "of version 1"),
    "no header": (lambda sent: with_header(sent, lambda _: "[]"), "of version 1"),
    "a header too deep": (lambda sent: with_header(sent, lambda _: "[" * 10**5), "not JSON"),
    "a field twice": (replaced('"round": 1', '"round": 1, "round": 2'), "names a field twice"),
    "a header's field twice": (replaced('"version": 1', '"version": 1, "version": 1'), "names a field twice"),
    "a field that is no scalar": (replaced('"round": 1', '"round": [1]'), "scalars alone"),
    "fields that are none": (with_part('"fields": {[^}]*}', '"fields": []'), "fields"),
    "a field of the frame too many": (replaced('"version": 1', '"version": 1, "code": 0'), "must hold kind"),
    "a field of the frame too few": (replaced('"kind": "train", ', ""), "must hold kind"),
    "another body": (lambda sent: sent[:-1] + bytes([sent[-1] ^ 1]), "not what its header states"),
    "a digest of nothing": (with_part('"body": "[0-9a-f]*"', '"body": ""'), "not what its header states"),
    "two arrays of one name": (replaced("layer.8", "layer.9"), "one name each"),
    "a name too many": (replaced('["a", "layer.9"]', '["a", "layer.9"], ["a", "x"]'), "one name each"),
    "a name too few": (replaced('["a", "layer.9"], ', ""), "one name each"),
    "a name that is none": (replaced('["a", "layer.9"]', '["a", 9]'), "one name each"),
    "names nested too deep": (replaced('["a", "layer.9"]', '[["a"], ["layer.9"]]'), "one name each"),
    "a body of objects": (lambda sent: with_body(sent, lambda body: body.replace(b'"F32"', b'"O32"')), "one name each"),
    "a pickled body": (lambda sent: with_body(sent, lambda _: b"\x80\x04pickled"), "one name each"),
    "bytes after the arrays": (lambda sent: with_body(sent, lambda body: body + b"\0"), "one name each"),
    "no body": (lambda sent: with_body(sent, lambda _: b""), "one name each"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_frame_that_states_what_it_does_not_hold_is_refused_in_one_line(harm):
    change, reason = HARMS[harm]
    harmed = Request(frame=change(request().frame))
    with pytest.raises(FrameError, match=reason) as refused:
        _ = harmed.kind, harmed.fields, harmed.arrays
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200


def test_what_flower_and_the_server_tell_a_node_are_scalars_too_and_neither_objects_nor_bytes_are_packed():
    for part in ("run_config", OWN):
        told = {"run_config": {}, OWN: {}, part: {"x": [1]}}
        with pytest.raises(FrameError, match=f"{part}: must hold scalars alone"):
            Request.unpacked(frame._joined(told, request().frame))
    for changes in ({"arrays": {"a": {"b": np.array([object()])}}}, {"fields": {"b": b"bytes"}}):
        with pytest.raises(FrameError, match="a type that no frame holds"):
            request(**changes)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Request.of("steal"), "kind = 'steal': must be one of register, afford, train"),
        (Request.of("register", fields={"run": "r"}), "fields: register holds no 'run'"),
        (Request.of("register", own={"receipt": "x"}), "own: register holds no 'receipt'"),
        (Request.of("afford", fields={"plan": "[]"}, arrays={"adapter": ARRAYS}), "records: afford holds no 'adapter'"),
        (Request.of("evaluate", arrays={"adapter": ARRAYS, "signs": ARRAYS}), "records: evaluate holds no 'signs'"),
        (Request.of("evaluate", own={"terms": "x"}), "own: evaluate holds no 'terms'"),
        (Request.of("train", own={"budget": 9.0}), "own: train holds no 'budget'"),
        (Request.of("share", own={"terms": "x"}), "own: share holds no 'terms'"),
    ],
)
def test_what_belongs_to_another_kind_is_refused(asked, reason):
    with pytest.raises(FrameError, match=re.escape(reason)):
        kinds.check(asked)
    for kind in set(kinds.KINDS) - {"train"}:  # only an update brings arrays
        with pytest.raises(ValueError, match=f"are no part of an answer to {kind}"):
            kinds.answer_of(kind, Response.of(arrays={"adapter": ARRAYS}))
