"""Lines of a log: the time in front, none blank, and files that rotate."""

import re
from datetime import UTC, datetime

import pytest

from fedpriv.operate import flower
from fedpriv.operate.flower import Log


def test_a_line_gets_its_time_and_a_blank_one_is_left_out():
    shown: list[str] = []
    log = Log(shown.append)
    coloured = "\x1b[92mINFO \x1b[0m:      [ROUND 1] 100% of %s"
    for line in ("", "   ", "INFO :", "INFO :      ", "\x1b[92mINFO \x1b[0m:      ", coloured, "done"):
        log(line)
    times, texts = zip(*(line.split(" ", 1) for line in shown), strict=True)
    assert texts == (coloured, "done")
    for time in times:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", time)
        assert abs((datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()) < 60


def test_a_file_holds_the_same_without_colours_and_rotates(tmp_path, monkeypatch):
    monkeypatch.setattr(flower, "_FILE_BYTES", 2000)
    shown: list[str] = []
    log = Log(shown.append, tmp_path / "node.log")
    for number in range(200):
        log(f"\x1b[92mline {number}\x1b[0m of 100%")
        log("INFO :      ")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["node.log", "node.log.1", "node.log.2", "node.log.3"]
    assert all(file.stat().st_size <= 2000 for file in files)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert (tmp_path / "node.log").read_text().splitlines()[-1] == shown[-1].replace("\x1b[92m", "").replace(
        "\x1b[0m", ""
    )
    assert not [line for file in files for line in file.read_text().splitlines() if not line.strip()]


@pytest.mark.parametrize("place", ["missing/node.log", "."])
def test_a_file_that_cannot_be_written_costs_the_file_alone(tmp_path, capfd, place):
    shown: list[str] = []
    Log(shown.append, tmp_path / place)("still shown")
    assert shown[0].endswith("still shown")
    assert capfd.readouterr().err == ""
