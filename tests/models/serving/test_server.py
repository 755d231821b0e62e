"""`fedpriv serve` as a process: where it listens, how it ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from tests.cli.command_line import as_json, fedpriv
from tests.models.serving.running import ROOT, needs_nginx, served

ASKED = {"model": "global", "prompt": "x", "max_tokens": 4}


def test_sigterm_finishes_what_is_under_way_refuses_what_is_new_and_ends_with_0(tmp_path):
    with served(tmp_path, seconds=0.4) as (process, ready), ThreadPoolExecutor(2) as pool, httpx.Client() as client:
        address = f"{ready['url']}/v1/completions"
        plain = pool.submit(httpx.post, address, json=ASKED, timeout=30)
        streamed = pool.submit(httpx.post, address, json={**ASKED, "stream": True}, timeout=30)
        time.sleep(0.6)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        with pytest.raises(httpx.ConnectError):
            client.post(address, json=ASKED)
        assert plain.result().json()["usage"]["completion_tokens"] == 4
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "Traceback" not in err


@pytest.mark.slow
def test_what_does_not_end_in_time_is_given_up_and_the_server_still_ends_with_0(tmp_path):
    with served(tmp_path, "--drain-seconds", 0.3, seconds=5) as (process, ready), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{ready['url']}/v1/completions", json=ASKED, timeout=30)
        time.sleep(0.3)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert time.monotonic() - started < 10
        assert asked.result().status_code == 503
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "timeout graceful shutdown exceeded" in err


@dataclass(frozen=True)
class Guarded:
    """A process that wants tokens and knows aliases, and what it printed."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]
    tokens: Path
    secret: str

    def get(self, secret: str) -> httpx.Response:
        """Its models, for who has this secret."""
        return httpx.get(f"{self.ready['url']}/v1/models", headers={"Authorization": f"Bearer {secret}"})


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    file = folder / "tokens.toml"
    secret = add_new(file, "first", ["*"])
    aliases = ("--alias", "gpt-4o=global", "--alias", "old=round-3")
    with served(folder, "--tokens", file, *aliases) as (process, ready):
        yield Guarded(process, ready, file, secret)


def test_sighup_reads_the_tokens_again(guarded):
    assert guarded.ready["tokens"] is True
    secret = add_new(guarded.tokens, "second", ["client-0"])
    assert guarded.get(secret).status_code == 401
    guarded.process.send_signal(signal.SIGHUP)
    end = time.monotonic() + 5
    while guarded.get(secret).status_code == 401 and time.monotonic() < end:
        time.sleep(0.05)
    assert [model["id"] for model in guarded.get(secret).json()["data"]] == ["client-0"]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::", "example.org"])
def test_beyond_this_machine_it_wants_a_proxy_and_tokens(host):
    for given in ({}, {"has_tokens": True}, {"behind_proxy": True}):
        with pytest.raises(InputError, match=r"--nginx FILE in front, or give --tokens and --behind-proxy"):
            Address(host=host).check(**{"has_tokens": False, "behind_proxy": False, **given})
    Address(host=host).check(has_tokens=True, behind_proxy=True)


@pytest.mark.parametrize(
    "address", [*({"host": h} for h in ("127.0.0.1", "127.9.9.9", "::1", "localhost")), {"path": Path("s")}]
)
def test_on_this_machine_it_needs_neither(address):
    Address(**address).check(has_tokens=False, behind_proxy=False)


def test_a_unix_socket_is_taken_over_from_a_server_that_was_killed_and_from_no_other(tmp_path):
    path = tmp_path / "s"
    with served(tmp_path, "--socket", path) as (process, ready):
        assert ready["url"] == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.post("/v1/completions", json=ASKED).status_code == 200
        with pytest.raises(InputError, match="cannot listen there"):
            run(FastAPI(), Tokens(None), RequestLimits(), Address(path=path), print)
        assert path.exists()
        process.kill()
        process.wait()
    with served(tmp_path, "--socket", path) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not path.exists()


@needs_nginx
def test_openai_s_client_through_the_nginx_that_it_configures(tmp_path):
    file, port = tmp_path / "tokens.toml", free_port()
    secret = add_new(file, "clinic", ["global"])
    with (
        served(tmp_path, "--tokens", file, *options_of_nginx(tmp_path, port), seconds=0.1),
        nginx(tmp_path, port) as trust,
    ):
        http = httpx.Client(verify=trust)
        client = openai.OpenAI(base_url=f"https://localhost:{port}/v1", api_key=secret, max_retries=0, http_client=http)
        assert [model.id for model in client.models.list()] == ["global"]
        started, times = time.monotonic(), []
        for _ in client.completions.create(**ASKED, stream=True):
            times.append(time.monotonic() - started)
        assert times[-1] - times[0] > 0.2, "a stream comes in pieces, as they are made"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        long = http.post(f"https://localhost:{port}/v1/completions", content=b"x" * 2**21)
        assert (long.status_code, long.json()["error"]["code"]) == (413, "body_too_large")


@needs_nginx
def test_an_address_has_few_connections_at_nginx_and_few_requests_a_second(tmp_path):
    port = free_port()
    add_new(tmp_path / "tokens.toml", "clinic", ["global"])
    options = [*options_of_nginx(tmp_path, port), "--connections-per-address", 5]
    with (
        served(tmp_path, "--tokens", tmp_path / "tokens.toml", *options),
        nginx(tmp_path, port) as trust,
        httpx.Client(base_url=f"https://localhost:{port}", verify=trust) as client,
    ):
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
        assert says in refused(tmp_path, *arguments)
    assert not (tmp_path / "n.conf").exists()
    (tmp_path / "server.key").chmod(0o604)
    assert "chmod o=" in refused(tmp_path, *conf, *tokens, *files)


def refused(*arguments):
    _, err = fedpriv("serve", *arguments, code=2)
    assert err.count("\n") == 1
    return err


def test_the_command_says_in_one_line_what_is_wrong(tmp_path):
    for arguments, says in (
        ([tmp_path / "none"], "must be the folder of a run or a store"),
        ([tmp_path, "--host", "0.0.0.0"], "other machines could ask and listen in"),
        ([tmp_path, "--memory", "lots"], "must be a size such as"),
        ([tmp_path, "--alias", "global"], "must be NAME=VARIANT"),
        ([tmp_path, "--alias", "a=global", "--alias", "a=client-0"], "each name once"),
        ([tmp_path, "--tokens", tmp_path / "no.toml"], "it should hold tokens"),
    ):
        assert says in refused(*arguments)


def test_aliases_are_given_on_the_command_line_and_the_line_says_from_where_it_answers(guarded):
    ready, models = guarded.ready, guarded.get(guarded.secret).json()["data"]
    assert {model["id"]: model["alias_of"] for model in models if "alias_of" in model} == {
        "gpt-4o": "global",
        "old": "round-3",
    }
    assert (ready["origin"], ready["num_variants"]) == ("nowhere", 5)


def test_a_missing_extra_is_one_line():
    code = "import sys; sys.modules['fastapi'] = None\nfrom fedpriv.cli.main import main; main(['serve', '.'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install 'fedpriv[serve]'" in done.stderr


def test_new_token_prints_it_once(tmp_path):
    file = tmp_path / "tokens.toml"
    made = as_json("serve", "new-token", "clinic", "--tokens", file, "--variants", "global, round-*")
    assert made["variants"] == ["global", "round-*"]
    assert made["token"] not in file.read_text()
    assert as_json("serve", "new-token", "chief", "--tokens", file, "--metrics")["metrics"]
    assert [token.metrics for token in read(file)] == [False, True]
    fedpriv("serve", "new-token", "nobody", "--tokens", file, code=2)
