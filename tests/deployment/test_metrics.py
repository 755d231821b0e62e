"""The port of metrics: who may read it, and that no reader and no source holds anything up."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
import threading
import time

import pytest

from fedpriv.deployment import metrics
from fedpriv.deployment.metrics import Measured, gauge
from fedpriv.errors import InputError
from simulations.sites import free_port, wait_until
from tests.monitoring import EXAMPLES, ROOT, names, rules, scraped, value


def ask(port: int, path: str = "/metrics", host: str = "127.0.0.1") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", path, headers={"Host": host})
    return connection.getresponse().status


@pytest.fixture
def port() -> int:
    port = free_port()
    metrics.serve(port, [Measured("one", lambda: [gauge("fedpriv_one", "1.", 1.0)])])
    wait_until(lambda: "fedpriv_one" in names(scraped(port)), "figures", 10)
    return port


def test_it_answers_by_its_own_name_alone(port):
    assert ask(port) == ask(port, host=f"127.0.0.1:{port}") == ask(port, host=f"localhost:{port}") == 200
    assert ask(port, host="evil.example") == ask(port, host="127.0.0.1.evil.example:80") == 403
    assert ask(port, "/") == ask(port, "/metrics/../node.toml") == 404


def test_it_listens_on_this_machine_alone(port):
    outside = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in outside or {"127.0.0.2"}:
        with socket.socket() as stranger:
            assert stranger.connect_ex((address, port)) != 0


@pytest.mark.slow
def test_readers_that_never_end_keep_no_other_from_reading_and_make_no_threads_without_end(port):
    before = threading.active_count()
    slow = []
    for _ in range(100):
        connection = socket.create_connection(("127.0.0.1", port), timeout=5)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.")
        slow.append(connection)
    assert value(scraped(port), "fedpriv_one") == 1
    wait_until(lambda: threading.active_count() - before <= 20, "threads that have ended", 10)
    for connection in slow:
        connection.close()


def test_a_source_that_hangs_or_fails_is_left_out_and_named_once(caplog):
    port, numbers = free_port(), iter(range(100))

    def fails():
        if next(numbers) < 3:
            raise ValueError("no such thing")
        return [gauge("fedpriv_mended", "1.", 1.0)]

    sources = [
        Measured("good", lambda: [gauge("fedpriv_good", "1.", 1.0)]),
        Measured("hanging", lambda: time.sleep(1000)),
        Measured("failing", fails, 0.05),
    ]
    with caplog.at_level(logging.WARNING):
        metrics.serve(port, sources)
        wait_until(lambda: "fedpriv_mended" in names(scraped(port)), "figures", 10)
    assert "fedpriv_good" in names(scraped(port))
    assert [record.getMessage() for record in caplog.records if "no figures" in record.getMessage()] == [
        "no figures of the failing: ValueError: no such thing"
    ]


def test_a_taken_port_is_refused_by_name(port):
    with pytest.raises(InputError, match=rf"^metrics = {port}: cannot listen on 127.0.0.1:{port} \(.*\); name a free"):
        metrics.serve(port, [])


def known_figures() -> set[str]:
    """The names of all figures, from the source, as Prometheus writes them."""
    sources = [(ROOT / side / "deploy" / "metrics.py").read_text() for side in ("clients", "server")]
    text = "".join(sources)
    counters = set(re.findall(r'counter\(\s*"(fedpriv_\w+)"', text))
    epsilons = {f"fedpriv_epsilon_{name}" for name in ("spent", "budget", "left")}
    plain = set(re.findall(r'"(fedpriv_\w+)"', text)) - counters
    return plain | epsilons | {f"{name}_total" for name in counters}


def test_alerts_dashboard_and_page_name_figures_that_there_are():
    known = known_figures()
    assert len(known) > 20, "the check would be blind"
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text())
    shown = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    page = (ROOT / "docs" / "monitoring.md").read_text()
    for text in (shown, " ".join(rules().values()), page):
        assert set(re.findall(r"fedpriv_[a-z_]+", text)) <= known
    assert known <= set(re.findall(r"fedpriv_[a-z_]+", page)), "the page lists all"
    assert "MetricsSilent" in rules(), "the page names it"
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)
