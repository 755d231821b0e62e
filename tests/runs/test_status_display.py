"""What `fedpriv status` shows in the terminal of events, many clients, and texts that others wrote."""

import json
from pathlib import Path

import pytest

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.runs._rows import MAX_EVENTS
from fedpriv.runs._writer import RunWriter
from fedpriv.runs.show._terminal import MAX_CLIENTS, state_of
from tests.runs.written import SIZES, WriteRun, client_row, event, round_row, shown, status


def test_the_last_events_are_shown_and_lines_that_hold_none_are_counted(write_run: WriteRun) -> None:
    folder = write_run()
    lines = [event("charged", round=n, client=1, recorded=True) for n in range(20)]
    broken = ["{\n", "[1]\n", '"text"\n', '{"time": "2026-11-21T10:15:48"}\n', '{"time": "noon", "event": "x"}\n']
    nested = event("nested", values=[1, 2])
    (folder / "events.jsonl").write_bytes("".join([*broken, nested, *lines]).encode() + b'\xff\n{"time": "20')
    found = status(folder)
    assert (found.num_events, found.num_unreadable_events) == (20, 7)
    assert [each["round"] for each in found.events] == list(range(20 - MAX_EVENTS, 20))
    text = shown(found)
    assert "last of 20 events (UTC), 7 unreadable lines" in text
    assert "2026-11-21 10:15:48  charged  round 19, client 1, recorded True" in text


def test_texts_of_others_do_not_steer_the_terminal(write_run: WriteRun) -> None:
    folder = write_run()
    evil = "\x1b[2J[bold]\x07‮"
    (folder / "events.jsonl").write_text(event("evil", reason=evil))
    path = folder / "clients.csv"
    path.write_text(path.read_text().replace("3,1,900,ok,,", f"3,1,900,failed,{evil},"))
    text = shown(status(folder))
    assert text.count("�[2J[bold]��") == 2
    assert not set(text) & set("\x1b\x07‮")


def test_the_view_that_was_asked_for_comes_first_with_its_limit(tmp_path: Path) -> None:
    rho = {"noise_multiplier": 1.0, "privacy_view": "rho", "budget_epsilon": [3.0, 2.0, 4.0]}
    cases = (
        ({"noise_multiplier": 1.0}, "local 0.301, aggregate does not hold"),
        (rho, "rho 0.601 of smallest budget 2, aggregate does not hold, local 0.301"),
        ({"target_epsilon": 8.0, "budget_epsilon": [9.0]}, "local 0.301 of target 8, aggregate does not hold"),
    )
    for number, (values, line) in enumerate(cases):
        folder = RunWriter.created(tmp_path / str(number), parse(values))
        rows = [client_row(1, client) for client in SIZES]
        folder.add(round_row(0, []), [])
        folder.add(round_row(1, rows), rows)
        text = shown(status(folder.path))
        assert f"largest ε   {line}" in text.replace("\n            ", " ")
        assert (" 0.601 " in text, "ε rho" in text) == (values is rho, values is rho), "so are clients"


def test_clients_of_the_round_under_way_are_shown_by_what_they_do(write_run: WriteRun) -> None:
    folder = write_run(rounds=0)
    registered = {str(c): {"client": c, "name": "", "num_records": n} for c, n in SIZES.items()}
    (folder / "registrations.json").write_text(json.dumps(registered))

    def states() -> list[str]:
        text = shown(found := status(folder))
        assert all(client.doing is None or client.doing in text for client in found.clients)
        return [state_of(client) for client in found.clients]

    assert states() == ["not asked"] * 3
    writer = RunWriter(folder)
    writer.note_progress(1, {0: "training", 1: "replied"})
    assert states() == ["training", "replied", "not asked"]
    writer.note_progress(1, {0: "replied", 1: "replied"})  # sooner than a second later
    assert states()[0] == "training"
    rows = [client_row(1, client) for client in SIZES]
    writer.add(round_row(1, rows), rows)
    assert states() == ["ok"] * 3, "the round is over"
    (folder / "progress.json").write_text('{"round": 2, "clients": [1]}')
    assert states() == ["ok"] * 3, "what cannot be read tells nothing"


@pytest.mark.parametrize("line", ["budget_epsilon = 3.0", 'budget_epsilon = ["much"]', 'target_epsilon = "much"'])
def test_a_damaged_limit_is_one_line(write_run: WriteRun, line: str) -> None:
    folder = write_run()
    (folder / "config.toml").write_text(line)
    with pytest.raises(InputError, match="damaged"):
        status(folder)


@pytest.mark.parametrize(
    ("config", "unit", "counted"),
    [
        ({}, "record", "records"),
        ({"data": "t.csv", "person_column": "patient"}, "person", "persons"),
        ({"recipe": "per-sample", "noise_on": "upload", "noise_multiplier": 1.0}, "client", "records"),
    ],
)
def test_sizes_are_of_the_runs_unit(write_run: WriteRun, config: dict[str, object], unit: str, counted: str) -> None:
    found = status(write_run(**config))
    assert found.as_dict()["unit"] == unit
    assert f"{counted}  round" in shown(found)


def test_every_line_fits_a_terminal_of_80_columns(write_run: WriteRun) -> None:
    folder = write_run(seconds_ago=5)
    long = {"name": "University hospital of a very long name, department 7", "num_records": 10**6}
    registered = {str(client): long | {"client": client} for client in range(30)}
    (folder / "registrations.json").write_text(json.dumps(registered))
    (folder / "events.jsonl").write_text(event("failed", round=1, client=2, reason="x" * 300))
    text = shown(status(folder))
    assert max(map(len, text.splitlines())) <= 80
    assert "1,000,000" in text
    assert "after 1 min 0 s without a sign of life it counts as interrupted" in " ".join(text.split())


def test_of_many_clients_those_in_trouble_are_listed(tmp_path: Path) -> None:
    folder = RunWriter.created(tmp_path / "many", parse({}))
    rows = [client_row(1, c, "malformed" if c % 50 == 7 else "ok", "A: holds NaN" * (c % 50 == 7)) for c in range(200)]
    folder.add(round_row(0, []), [])
    folder.add(round_row(1, rows), rows)
    found = status(folder.path)
    assert len(found.clients) == 200 > MAX_CLIENTS
    text = shown(found)
    assert "196 more clients; --json lists all" in text
    assert [f"client {c}: A: holds NaN" in text for c in (7, 57, 107, 157)] == [True] * 4
