"""Many hostile requests, a thousand in the slow series: each a clear refusal, nothing leaks, and the server goes on."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from fedpriv.serving.http.limits import RequestLimits
from fedpriv.serving.http.tokens import Tokens, add_new
from tests.serving.fake import FakeServing
from tests.serving.hostile import Attacker, ask_all
from tests.serving.running import running

# Of a traceback, of paths, and of what only the server knows.
NEVER_SAID = (b"Traceback", b"site-packages", b".py", b"fedpriv/", b"/srv", b"client-1", b"sha256")


@pytest.mark.parametrize("number", [220, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_requests_are_refused_clearly_and_the_server_goes_on(tmp_path: Path, number: int) -> None:
    secret = add_new(tmp_path / "tokens.toml", "clinic", ["global", "client-*"])
    limits, serving = (
        RequestLimits(body_seconds=0.3, header_seconds=0.3, drain_seconds=5, connections_per_address=2000),
        FakeServing(),
    )
    with running(serving, tokens=Tokens(tmp_path / "tokens.toml"), limits=limits) as server:
        answers = ask_all(server.address, Attacker(0, secret).requests(number, slow=20))
        headers = {"Authorization": f"Bearer {secret}"}
        alive = httpx.post(f"{server.url}/v1/completions", json={"model": "global", "prompt": "x"}, headers=headers)
    assert alive.status_code == 200
    assert len(answers) == number
    for hostile, status, body in answers:
        about = hostile.kind, hostile.pieces[0][:200], status, body[:200]
        assert 400 <= status < 500, about
        assert not [said for said in NEVER_SAID if said in body], about
        if not hostile.pieces[0].startswith(b"HEAD"):
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}, about
            assert error["message"], about
            assert len(body) < 1000, about
    assert len(serving.tickets) == 1, "only the last, good request may have reached the engine"


def test_another_seed_asks_otherwise_and_the_same_one_the_same() -> None:
    assert Attacker(1, "t").requests(50) == Attacker(1, "t").requests(50)
    assert Attacker(1, "t").requests(50) != Attacker(2, "t").requests(50)
