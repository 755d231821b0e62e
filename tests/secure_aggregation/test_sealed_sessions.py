"""A session between processes that each do one step: the sum is the same, and no step is done twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fedpriv.secure_aggregation import SECRET_BYTES, ProtocolError, SealedSession, Session
from fedpriv.secure_aggregation._masks import verify_once
from tests.secure_aggregation.attempts import Attempt, attempted, make_terms, node

KEY = bytes(range(SECRET_BYTES))


class Restarted:
    """A session that waits in a file between its steps."""

    def __init__(self, path: Path, client: int) -> None:
        self.sealed, self.client = SealedSession(path, os.urandom(SECRET_BYTES)), client
        session = Session(make_terms(), client, sign=node(client).sign, approved=None, verify=verify_once)
        self.advertisement = session.advertisement
        self.sealed.put(session)

    @contextmanager
    def taken(self) -> Iterator[Session]:
        session = self.sealed.take(sign=node(self.client).sign, verify=verify_once)
        assert session.advertisement == self.advertisement
        yield session
        if session.expects is not None:
            self.sealed.put(session)

    def __getattr__(self, step: str):
        def taken(*arguments):
            with self.taken() as session:
                return getattr(session, step)(*arguments)

        return taken


def test_a_sum_over_files_is_the_sum(tmp_path):
    sessions = {client: Restarted(tmp_path / str(client), client) for client in range(4)}
    attempt = Attempt(terms=make_terms(), sessions=sessions).advertise().share().mask((1, 2, 3)).confirm()
    found = attempt.reveal()
    assert found.survivors == (1, 2, 3)
    np.testing.assert_array_equal(found.values, sum(attempt.values[client] for client in (1, 2, 3)))
    assert [path.name for path in tmp_path.iterdir()] == ["0"], "only who dropped out was not asked to the end"


@pytest.mark.parametrize("until", ["advertise", "share", "mask", "confirm"])
def test_a_file_says_nothing_without_its_key_and_is_its_owners_alone(until, tmp_path):
    session = attempted(make_terms(), until).sessions[1]
    sealed = SealedSession(tmp_path / "s", KEY)
    sealed.put(session)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    content = (tmp_path / "s").read_bytes()
    assert b"seed" in session.text().encode()
    assert b"seed" not in content
    with pytest.raises(ProtocolError, match="may have been restarted"):
        SealedSession(tmp_path / "s", bytes(SECRET_BYTES)).take(sign=node(1).sign)
    with pytest.raises(ProtocolError, match="takes part in no attempt"):
        sealed.take(sign=node(1).sign)  # whoever tried, it is over


def test_a_session_is_had_by_one_and_then_by_nobody(tmp_path):
    sealed = SealedSession(tmp_path / "s", KEY)
    sealed.put(attempted(make_terms(), "share").sessions[1])

    def take(_: int) -> bool:
        try:
            sealed.take(sign=node(1).sign)
        except ProtocolError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(8))) == 1
    assert not list(tmp_path.iterdir())


def test_a_changed_file_is_none_and_a_session_that_is_over_is_not_kept(tmp_path):
    session = attempted(make_terms(), "share").sessions[1]
    sealed = SealedSession(tmp_path / "s", KEY)
    sealed.put(session)
    content = bytearray((tmp_path / "s").read_bytes())
    content[-1] ^= 1
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(ProtocolError):
        sealed.take(sign=node(1).sign)
    session.end()
    with pytest.raises(ProtocolError, match="is over"):
        sealed.put(session)
    assert not list(tmp_path.iterdir())
