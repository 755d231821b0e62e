"""Many hostile requests, a thousand in the slow series: each a clear refusal, nothing leaks, and the server goes on."""

import json
from pathlib import Path

import httpx
import pytest

from fedpriv.models.serving.http.tokens import add_new
from simulations.benchmarks.serving_hostile import free_port, nginx, options_of_nginx
from tests.models.serving.hostile import Attacker, ask_all
from tests.models.serving.running import needs_nginx, served

# Of a traceback, of paths, and of what only the server knows.
NEVER_SAID = (b"Traceback", b"site-packages", b".py", b"fedpriv/", b"/srv", b"client-1", b"sha256", b"nginx")
# nginx says nothing to those who take too long, or leave before the end.
UNANSWERED = {"slow_body", "slow_head", "truncated"}


@needs_nginx
@pytest.mark.parametrize("number", [220, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_requests_are_refused_clearly_and_the_server_goes_on(tmp_path: Path, number: int) -> None:
    secret = add_new(tmp_path / "tokens.toml", "clinic", ["global", "client-*"])
    monitor = add_new(tmp_path / "tokens.toml", "monitor", [], metrics=True)
    port = free_port()
    options = [*options_of_nginx(tmp_path, port), "--connections-per-address", 2000]
    with served(tmp_path, "--tokens", tmp_path / "tokens.toml", *options):
        written = tmp_path / "fedpriv.conf"
        written.write_text(written.read_text().replace("timeout 10s", "timeout 1s"))
        url = f"https://localhost:{port}"
        with nginx(tmp_path, port) as trust, httpx.Client(base_url=url, verify=trust) as client:
            answers = ask_all(("localhost", port), Attacker(0, secret).requests(number, slow=20), trust)
            headers = {"Authorization": f"Bearer {secret}"}
            alive = client.post("/v1/completions", json={"model": "global", "prompt": "x"}, headers=headers)
            metrics = client.get("/metrics", headers={"Authorization": f"Bearer {monitor}"}).text
    assert alive.status_code == 200
    assert len(answers) == number
    for hostile, status, body in answers:
        about = hostile.kind, hostile.pieces[0][:200], status, body[:200]
        assert not [said for said in NEVER_SAID if said in body], about
        if hostile.kind in UNANSWERED and not status:
            continue
        assert 400 <= status < 500, about
        if not hostile.pieces[0].startswith(b"HEAD"):
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}, about
            assert error["message"], about
            assert len(body) < 1000, about
    assert "fedpriv_variant_hits_total 1.0" in metrics, "only the last, good request may have reached the engine"


def test_another_seed_asks_otherwise_and_the_same_one_the_same() -> None:
    assert Attacker(1, "t").requests(50) == Attacker(1, "t").requests(50)
    assert Attacker(1, "t").requests(50) != Attacker(2, "t").requests(50)
