"""The file of metrics: who may read it, when it is old, and that no source holds anything up."""

import json
import logging
import os
import re
import time

import pytest

from fedpriv.errors import InputError
from fedpriv.operate import metrics
from fedpriv.operate.metrics import Measured, gauge
from simulations.sites import wait_until
from tests.monitoring import EXAMPLES, MTIME, ROOT, exported, firing, names, rules


def numbered(name: str) -> Measured:
    return Measured(name, lambda: [gauge(f"fedpriv_{name}", "1.", 1.0)], 0.05)


def test_each_reader_sees_a_whole_file_whose_folder_is_its_owners_to_open(tmp_path):
    path = metrics.write(tmp_path, [numbered("one"), numbered("two")])
    wait_until(lambda: {"fedpriv_one", "fedpriv_two"} <= names(exported(tmp_path)), "figures", 10)
    for _ in range(200):
        assert {"fedpriv_one", "fedpriv_two"} <= names(exported(tmp_path))
    assert path == tmp_path / "metrics" / "fedpriv.prom"
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o644)
    path.parent.chmod(0o755)
    metrics.write(tmp_path, [])
    assert path.parent.stat().st_mode & 0o777 == 0o755
    assert not [other for other in path.parent.iterdir() if other.suffix == ".prom" and other != path]


def test_a_file_that_nobody_writes_any_more_fires_and_another_of_the_exporter_does_not(tmp_path):
    path = metrics.write(tmp_path, [])
    assert not firing(exported(tmp_path))
    old = time.time() - 301
    os.utime(path, (old, old))
    assert firing(exported(tmp_path)) == {"MetricsSilent"}
    assert not firing({(MTIME, frozenset({("file", "/var/lib/other.prom")})): old})


def test_a_source_that_hangs_or_fails_is_left_out_and_named_once(tmp_path, caplog):
    numbers = iter(range(100))

    def fails():
        if next(numbers) < 3:
            raise ValueError("no such thing")
        return [gauge("fedpriv_mended", "1.", 1.0)]

    sources = [numbered("good"), Measured("hanging", lambda: time.sleep(1000)), Measured("failing", fails, 0.05)]
    with caplog.at_level(logging.WARNING):
        metrics.write(tmp_path, sources)
        wait_until(lambda: "fedpriv_mended" in names(exported(tmp_path)), "figures", 10)
    assert "fedpriv_good" in names(exported(tmp_path))
    assert [record.getMessage() for record in caplog.records if "no figures" in record.getMessage()] == [
        "no figures of the failing: ValueError: no such thing"
    ]


def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "metrics").touch()
    with pytest.raises(InputError, match=r"metrics/fedpriv.prom: cannot be written \(.*\); make it writable$"):
        metrics.write(tmp_path, [])


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
