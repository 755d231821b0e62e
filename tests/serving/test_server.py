"""`fedpriv serve` as a process: where it listens, how it ends."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedpriv.errors import InputError
from fedpriv.serving.http.server import Address
from fedpriv.serving.http.tokens import add_new, read
from server.deploy.certificates import make_ca, make_server_certificate
from tests.cli.command_line import as_json, fedpriv
from tests.serving.fake import FakeServing
from tests.serving.running import running

ROOT = Path(__file__).parents[2]
ASKED = {"model": "global", "prompt": "x", "max_tokens": 4}


@contextmanager
def served(
    folder: Path, *arguments: object, seconds: float = 0.0
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process, and what it printed once clients can connect."""
    command = [sys.executable, "-m", "tests.serving.child", seconds, folder, "--port", 0, "--json", *arguments]
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_sigterm_finishes_what_is_under_way_refuses_what_is_new_and_ends_with_0(tmp_path):
    with served(tmp_path, seconds=0.4) as (process, ready), ThreadPoolExecutor(2) as pool, httpx.Client() as client:
        address = f"{ready['url']}/v1/completions"
        plain = pool.submit(httpx.post, address, json=ASKED, timeout=30)
        streamed = pool.submit(httpx.post, address, json={**ASKED, "stream": True}, timeout=30)
        time.sleep(0.6)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = client.post(address, json=ASKED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
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
    assert "not all requests were answered" in err


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
def test_beyond_this_machine_it_wants_tokens_and_tls(host):
    for has_tokens, says in ((False, "--tokens and --certificate"), (True, "give --certificate")):
        with pytest.raises(InputError, match=says):
            Address(host=host, port=0).check(has_tokens=has_tokens, insecure=False)
    Address(host=host, port=0).check(has_tokens=False, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_on_this_machine_it_needs_neither(host):
    Address(host=host, port=0).check(has_tokens=False, insecure=False)


def test_with_a_certificate_it_speaks_tls_and_nothing_else(tmp_path):
    make_ca(tmp_path, 10)
    make_server_certificate(tmp_path, ["localhost"], 10)
    files = {"certificate": tmp_path / "server.crt", "key": tmp_path / "server.key"}
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    Address(host="0.0.0.0", port=0, **files).check(has_tokens=True, insecure=False)
    with running(FakeServing(), **files) as server:
        assert server.url.startswith("https://")
        assert httpx.post(f"{server.url}/v1/completions", json=ASKED, verify=trusted).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url)
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http"))
    files["key"].chmod(0o604)
    with pytest.raises(InputError, match="chmod o="):
        Address(host="localhost", port=0, **files).check(has_tokens=True, insecure=False)


def test_the_command_says_in_one_line_what_is_wrong(tmp_path):
    for arguments, says in (
        ([tmp_path / "none"], "must be the folder of a run or a store"),
        ([tmp_path, "--host", "0.0.0.0"], "other machines could ask and listen in"),
        ([tmp_path, "--memory", "lots"], "must be a size such as"),
        ([tmp_path, "--alias", "global"], "must be NAME=VARIANT"),
        ([tmp_path, "--alias", "a=global", "--alias", "a=client-0"], "each name once"),
        ([tmp_path, "--tokens", tmp_path / "no.toml"], "it should hold tokens"),
        ([tmp_path, "--certificate", tmp_path / "no.pem"], "give both or neither"),
        ([tmp_path, "--certificate", tmp_path / "no.pem", "--key", tmp_path / "no.key"], "cannot be used"),
    ):
        _, err = fedpriv("serve", *arguments, code=2)
        assert says in err
        assert err.count("\n") == 1


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
