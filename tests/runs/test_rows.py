"""What a run writes into its tables and samples is what its readers find there; damage is refused by its line."""

import math
from pathlib import Path

import pytest

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.runs import _rows as rows
from fedpriv.runs import _status as status
from fedpriv.runs._folder import CLIENT_COLUMNS, COMPARISON_COLUMNS, ROUND_COLUMNS
from fedpriv.runs._rows import ClientRow, RoundRow, Sample, column_types, read_rows
from fedpriv.runs._writer import RunWriter

ROUND = RoundRow(
    **{"round": 0, "num_selected": 2, "num_replies": 1, "num_silent": 0, "num_failures": 1, "num_late": 0},
    **{"num_retired": 0, "test_accuracy": 0.1 + 0.2, "test_loss": 1e-17, "test_perplexity": 1.5, "seconds": 0.5},
    **{"epsilon_local_max": math.inf, "epsilon_rho_max": 2.0, "epsilon_aggregate_max": None},
    **{"bytes_up": 10**12, "bytes_down": 0},
)

CLIENT = ClientRow(
    **{"round": 0, "client": 1, "num_records": 300, "status": "malformed", "detail": 'A: "NaN",\nhere', "steps": 3},
    **{"sampling_probability": 0.1, "noise_multiplier": 1.0, "effective_noise_multiplier": 1.0, "weight": 0.0},
    **{"rho_bar": 0.0, "epsilon_local": 0.1, "epsilon_rho": 0.2, "epsilon_aggregate": 0.05, "delta": 1e-5},
    **{"bytes_up": 1, "bytes_down": 2, "seconds": 1.25},
)

ROUNDS_CSV = (
    "round,num_selected,num_replies,num_silent,num_failures,num_late,num_retired,test_accuracy,test_loss,"
    "test_perplexity,epsilon_local_max,epsilon_rho_max,epsilon_aggregate_max,bytes_up,bytes_down,seconds,"
    "epsilon_this_run_max,epsilon_before_max\r\n"
    "0,2,1,0,1,0,0,0.30000000000000004,1e-17,1.5,inf,2.0,,1000000000000,0,0.5,,\r\n"
)

CLIENTS_CSV = (
    "round,client,num_records,status,detail,sampling_probability,noise_multiplier,effective_noise_multiplier,steps,"
    "weight,rho_bar,epsilon_local,epsilon_rho,epsilon_aggregate,delta,bytes_up,bytes_down,seconds\r\n"
    '0,1,300,malformed,"A: ""NaN"",\nhere",0.1,1.0,1.0,3,0.0,0.0,0.1,0.2,0.05,1e-05,1,2,1.25\r\n'
)

SAMPLES = [
    Sample(prompt="What is\nflu?", reference="\u2028a disease", untrained='"', private="", non_private=None),
    Sample(prompt="ä", reference="<b>", untrained="x\r\ny", private="\u202e", non_private="z"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder after round 0."""
    writer = RunWriter.created(tmp_path / "run", parse({}))
    writer.add(ROUND, [CLIENT])
    return writer.path


def test_tables_are_written_to_the_byte_and_read_as_they_were(folder: Path) -> None:
    assert [RoundRow(**row) for row in read_rows(folder / "rounds.csv", RoundRow)] == [ROUND]
    assert [ClientRow(**row) for row in read_rows(folder / "clients.csv", ClientRow)] == [CLIENT]
    assert (folder / "rounds.csv").read_bytes().decode() == ROUNDS_CSV
    assert (folder / "clients.csv").read_bytes().decode() == CLIENTS_CSV


def test_a_reopened_folder_keeps_its_bytes_and_drops_later_rounds_and_half_lines(folder: Path) -> None:
    with (folder / "rounds.csv").open("a", newline="") as file:
        file.write(ROUNDS_CSV.splitlines()[1].replace("0,", "1,", 1) + "\r\n2,3")
    again = RunWriter.reopened(folder, round_=0)
    assert (again.rounds, again.totals.bytes_up) == ([ROUND], {CLIENT.client: CLIENT.bytes_up})
    test_tables_are_written_to_the_byte_and_read_as_they_were(folder)


def test_readers_ask_only_for_columns_that_a_run_writes() -> None:
    rounds, clients = column_types(RoundRow).keys(), column_types(ClientRow).keys()
    assert {*ROUND_COLUMNS, *COMPARISON_COLUMNS, *status.ROUND_COLUMNS} <= rounds
    assert {*CLIENT_COLUMNS, *status.CLIENT_COLUMNS} <= clients


def test_columns_that_nobody_asks_for_may_be_missing(folder: Path) -> None:
    path = folder / "rounds.csv"
    path.write_text("round\n0\n")
    assert read_rows(path, RoundRow, ["round"]) == [{"round": 0}]
    with pytest.raises(InputError, match=r"rounds\.csv: column num_selected is missing"):
        read_rows(path, RoundRow)


@pytest.mark.parametrize("line", ["zero", "0,2,1", ROUNDS_CSV.splitlines()[1].replace("2.0", "-2.0")])
def test_a_damaged_line_is_named(folder: Path, line: str) -> None:
    with (folder / "rounds.csv").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(InputError, match=r"rounds\.csv: line 3 is damaged"):
        read_rows(folder / "rounds.csv", RoundRow)


def test_samples_are_read_as_they_were_written(tmp_path):
    assert rows.read_answers(tmp_path / "samples.jsonl", rows.Sample) == (), "a run without answers"
    RunWriter(tmp_path).write_answers(SAMPLES)
    assert rows.read_answers(tmp_path / "samples.jsonl", rows.Sample) == tuple(SAMPLES)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 2 is damaged"),
        ('{"prompt": "a"}', "line 2 is damaged; it must hold prompt, reference"),
        (
            '{"prompt": "a", "reference": 3, "untrained": "", "private": "", "non_private": null}',
            "line 2: reference = 3: must be text",
        ),
    ],
)
def test_a_damaged_line_of_samples_is_named(tmp_path, line, expected):
    path = tmp_path / "samples.jsonl"
    RunWriter(tmp_path).write_answers(SAMPLES[:1])
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(InputError, match=expected):
        rows.read_answers(path, rows.Sample)
