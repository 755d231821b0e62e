"""`fedpriv serve` as a process: where it listens, how it ends, and that hostile requests harm nobody."""

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from fastapi import FastAPI

from fedpriv.errors import InputError
from fedpriv.models.serving.http.limits import RequestLimits
from fedpriv.models.serving.http.server import Address, run
from fedpriv.models.serving.http.tokens import Tokens, add_new, read
from server.deploy.certificates import make_ca, make_server_certificate
from simulations.benchmarks.serving_hostile import free_port, nginx, options_of_nginx
from tests.cli.command_line import as_json, fedpriv, refused
from tests.marks import slow
from tests.models.serving.fake import FakeServing
from tests.models.serving.hostile import Attacker, ask_all
from tests.models.serving.running import needs_nginx, running, served
from tests.served import eventually

ASKED = {"model": "global", "prompt": "x", "max_tokens": 4}


def test_sighup_reads_the_tokens_again_and_sigterm_finishes_what_is_under_way_and_ends_with_0(tmp_path):
    file = tmp_path / "tokens.toml"
    secret, aliases = add_new(file, "first", ["*"]), ("--alias", "gpt-4o=global", "--alias", "old=round-3")
    with (
        served(tmp_path, "--tokens", file, *aliases, seconds=0.25) as (process, ready),
        httpx.Client(base_url=ready["url"], timeout=30) as client,
        ThreadPoolExecutor(1) as pool,
    ):

        def bearer(secret: str) -> dict[str, dict[str, str]]:
            return {"headers": {"Authorization": f"Bearer {secret}"}}

        assert (ready["tokens"], ready["origin"], ready["num_variants"]) == (True, "nowhere", 5)
        models = client.get("/v1/models", **bearer(secret)).json()["data"]
        stand_for = {model["id"]: model["alias_of"] for model in models if "alias_of" in model}
        assert stand_for == {"gpt-4o": "global", "old": "round-3"}

        later = add_new(file, "second", ["client-0"])
        assert client.get("/v1/models", **bearer(later)).status_code == 401
        process.send_signal(signal.SIGHUP)
        assert eventually(lambda: client.get("/v1/models", **bearer(later)).status_code == 200)
        assert [model["id"] for model in client.get("/v1/models", **bearer(later)).json()["data"]] == ["client-0"]

        plain = pool.submit(client.post, "/v1/completions", json=ASKED, **bearer(secret))
        with client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}, **bearer(secret)) as streamed:
            lines = streamed.iter_lines()
            next(lines)  # so that both are under way
            process.send_signal(signal.SIGTERM)
            assert eventually(lambda: not listens(ready["url"]))
            assert "data: [DONE]" in list(lines)
        assert plain.result().json()["usage"]["completion_tokens"] == 4
        ended_well(process)


def ended_well(process: subprocess.Popen[str]) -> str:
    """What a process said on stderr that ended with 0 and without a traceback."""
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return err


def listens(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as tried:
        return tried.connect_ex((parts.hostname, parts.port)) == 0


@pytest.mark.slow
def test_what_does_not_end_in_time_is_given_up_and_the_server_still_ends_with_0(tmp_path):
    with served(tmp_path, "--drain-seconds", 0.3, seconds=5) as (process, ready), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{ready['url']}/v1/completions", json=ASKED, timeout=30)
        time.sleep(0.3)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert "timeout graceful shutdown exceeded" in ended_well(process)
        assert time.monotonic() - started < 10
        assert asked.result().status_code == 503


def test_beyond_this_machine_it_wants_a_proxy_and_tokens_and_on_it_neither():
    for host in ("0.0.0.0", "192.0.2.7", "::", "example.org"):
        for given in ({}, {"has_tokens": True}, {"behind_proxy": True}):
            with pytest.raises(InputError, match=r"--nginx FILE in front, or give --tokens and --behind-proxy"):
                Address(host=host).check(**{"has_tokens": False, "behind_proxy": False, **given})
        Address(host=host).check(has_tokens=True, behind_proxy=True)
    for address in (*({"host": h} for h in ("127.0.0.1", "127.9.9.9", "::1", "localhost")), {"path": Path("s")}):
        Address(**address).check(has_tokens=False, behind_proxy=False)


def test_a_unix_socket_is_taken_over_from_a_server_that_was_killed_and_from_no_other(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as of_a_killed_server:
        of_a_killed_server.bind(str(path))
    with running(FakeServing(), address=Address(path=path)) as server:
        assert server.url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.post("/v1/completions", json=ASKED).status_code == 200
        with pytest.raises(InputError, match="cannot listen there"):
            run(FastAPI(), Tokens(None), RequestLimits(), Address(path=path), print)
        assert path.exists()
    assert not path.exists()


@contextmanager
def behind_nginx(folder, *options, seconds=0.0):
    """The token of a clinic, a client of an nginx in front of a server with these options, and its port."""
    secret, port = add_new(folder / "tokens.toml", "clinic", ["global", "client-*"]), free_port()
    options = ["--tokens", folder / "tokens.toml", *options_of_nginx(folder, port), *options]
    with (
        served(folder, *options, seconds=seconds),
        nginx(folder, port) as trust,
        httpx.Client(base_url=f"https://localhost:{port}", verify=trust) as client,
    ):
        yield secret, client, port


@needs_nginx
def test_openai_s_client_through_the_nginx_that_it_configures(tmp_path):
    with behind_nginx(tmp_path, seconds=0.1) as (secret, http, port):
        url = f"https://localhost:{port}/v1"
        client = openai.OpenAI(base_url=url, api_key=secret, max_retries=0, http_client=http)
        assert [model.id for model in client.models.list()] == ["global", "client-0", "client-1"]
        started, times = time.monotonic(), []
        for _ in client.completions.create(**ASKED, stream=True):
            times.append(time.monotonic() - started)
        assert times[-1] - times[0] > 0.2, "a stream comes in pieces, as they are made"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        long = http.post("/v1/completions", content=b"x" * 2**21)
        assert (long.status_code, long.json()["error"]["code"]) == (413, "body_too_large")


@needs_nginx
def test_an_address_has_few_connections_at_nginx_and_few_requests_a_second(tmp_path):
    with behind_nginx(tmp_path, "--connections-per-address", 5) as (_, client, _):
        answers = [client.get("/health") for _ in range(20)]
    statuses = [answer.status_code for answer in answers]
    assert statuses[:6] == [200] * 6
    assert statuses.count(429) >= 10
    assert answers[-1].json()["error"]["code"] == "too_many_requests"


def test_what_nginx_could_not_read_is_refused_in_one_line(tmp_path):
    add_new(tmp_path / "tokens.toml", "clinic", ["global"])
    make_ca(tmp_path, 10)
    make_server_certificate(tmp_path, ["localhost"], 10)
    conf, tokens = ["--nginx", tmp_path / "n.conf"], ["--tokens", tmp_path / "tokens.toml"]
    files = ["--certificate", tmp_path / "server.crt", "--key", tmp_path / "server.key"]
    for arguments, says in (
        ([*conf, *files], "give --tokens, --certificate and --key"),
        ([*conf, *tokens], "give --tokens, --certificate and --key"),
        (files, "are for the nginx of --nginx FILE"),
        ([*conf, *tokens, *files, "--port", 0], "give --port or --socket"),
        ([*conf, *tokens, *files, "--socket", tmp_path / "a;b"], "of letters, digits and"),
        ([*conf, *tokens, "--certificate", tmp_path / "no.pem", "--key", tmp_path / "no.key"], "cannot be used"),
    ):
        assert says in refused("serve", tmp_path, *arguments)
    assert not (tmp_path / "n.conf").exists()
    (tmp_path / "server.key").chmod(0o604)
    assert "chmod o=" in refused("serve", tmp_path, *conf, *tokens, *files)


def test_the_command_says_in_one_line_what_is_wrong(tmp_path):
    for arguments, says in (
        ([tmp_path / "none"], "must be the folder of a run or a store"),
        ([tmp_path, "--host", "0.0.0.0"], "other machines could ask and listen in"),
        ([tmp_path, "--memory", "lots"], "must be a size such as"),
        ([tmp_path, "--alias", "global"], "must be NAME=VARIANT"),
        ([tmp_path, "--alias", "a=global", "--alias", "a=client-0"], "each name once"),
        ([tmp_path, "--tokens", tmp_path / "no.toml"], "it should hold tokens"),
    ):
        assert says in refused("serve", *arguments)


def test_a_missing_extra_is_one_line(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("fedpriv.models.serving.http")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "pip install 'fedpriv[serve]'" in refused("serve", tmp_path)


def test_new_token_prints_it_once(tmp_path):
    file = tmp_path / "tokens.toml"
    made = as_json("serve", "new-token", "clinic", "--tokens", file, "--variants", "global, round-*")
    assert made["variants"] == ["global", "round-*"]
    assert made["token"] not in file.read_text()
    assert as_json("serve", "new-token", "chief", "--tokens", file, "--metrics")["metrics"]
    assert [token.metrics for token in read(file)] == [False, True]
    fedpriv("serve", "new-token", "nobody", "--tokens", file, code=2)


# Of a traceback, of paths, and of what only the server knows.
NEVER_SAID = (b"Traceback", b"site-packages", b".py", b"fedpriv/", b"/srv", b"client-1", b"sha256", b"nginx")
# nginx says nothing to those who take too long, or leave before the end.
UNANSWERED = {"slow_body", "slow_head", "truncated"}


@needs_nginx
@pytest.mark.parametrize("number", [220, *slow(1000)])
def test_hostile_requests_are_refused_clearly_and_the_server_goes_on(tmp_path, number):
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


def test_another_seed_asks_otherwise_and_the_same_one_the_same():
    assert Attacker(1, "t").requests(50) == Attacker(1, "t").requests(50)
    assert Attacker(1, "t").requests(50) != Attacker(2, "t").requests(50)
