"""An adapter is packed and unpacked once each way at the server, and once each way in the vaults of a simulation."""

from collections import Counter

import pytest

from fedpriv.holder.wire import frame
from tests.marks import slow
from tests.server.parts import run

ROUNDS, CLIENTS = 2, 3


@pytest.mark.parametrize("codec", ["int8", *slow("float32")])
def test_an_adapter_is_packed_and_unpacked_once_each_way(small_run, tmp_path, monkeypatch, codec):
    """The server packs one request for all clients of a round, read once by the vaults of a simulation."""
    counts: Counter[str] = Counter()

    def counted(name, function):
        def call(*arguments):
            counts[name] += any(map(len, arguments))
            return function(*arguments)

        return call

    for name in ("packed_arrays", "unpacked_arrays"):
        monkeypatch.setattr(frame, name, counted(name, getattr(frame, name)))
    run(small_run, tmp_path / "run", upload_codec=codec, rounds=ROUNDS)
    assert counts == {"packed_arrays": ROUNDS * (1 + CLIENTS), "unpacked_arrays": ROUNDS * (1 + CLIENTS)}
