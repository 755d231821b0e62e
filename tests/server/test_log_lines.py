"""What a log tells a person: words, not representations; names where there are any; colours on terminals alone."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from fedpriv.config import RunConfig, parse
from fedpriv.errors import TooFewClientsError
from fedpriv.holder.wire.kinds import Registration
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.operate.flower import _run_in_foreground
from server.app import WithoutTrace
from server.bookkeeping import announce_budgets
from server.observer import LogObserver
from tests.notes import Notes
from tests.runs.written import SIZES, client_row, registrations, round_row

COLOURED = "import sys; sys.stdout.write('\\x1b[93mWARNING \\x1b[0m: the node left\\n')"
WARNED = """
import logging
from simulations.engines.flower_private import colours_on_a_terminal_alone
colours_on_a_terminal_alone()
logging.getLogger("flwr").warning("the node left")
"""


def test_an_update_is_told_in_words() -> None:
    spec = UpdateSpec.of(parse({"recipe": "per-sample", "local_steps": 1, "learning_rate": 0.5, "batch_size": 8}))
    text = str(spec)
    assert "1 step of sgd at learning rate 0.5, B = 8" in text
    assert "noise with z =" in text
    assert "UpdateSpec" not in text


def test_a_round_is_told_on_the_view_of_its_target_first(caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    target = {"privacy_view": "aggregate", "target_epsilon": 2.0, "secure_aggregation": True, "min_clients": 3}
    row = round_row(3, [client_row(3, client) for client in SIZES], epsilon_aggregate_max=1.234)
    with caplog.at_level("INFO", logger="flwr"):  # which a run before this test may have quietened
        for config in (parse({}), parse(target)):
            observer = LogObserver()
            observer.started(config, registrations(), None)
            observer.round_done(row)
        observer.round_done(replace(row, round=0, test_accuracy=None, epsilon_local_max=0.0))
    # Newer pytest listens to a logger that does not propagate, and hears each line twice.
    told = [line for line in dict.fromkeys(caplog.messages) if line.startswith("round")]
    assert told[0].startswith("round 3: accuracy 0.4250, ε ≤ 0.901 of 2.3 local, 1.24 aggregate by rdp, δ ")
    assert told[1].startswith("round 3: accuracy 0.4250, ε ≤ 1.24 of 2 aggregate, 0.901 local by rdp, δ ")
    assert told[2] == "round 0: done"


def test_what_a_service_relays_has_no_colour_codes(tmp_path: Path) -> None:
    lines: list[str] = []
    code = _run_in_foreground([sys.executable, "-c", COLOURED], variables={}, folder=tmp_path, on_line=lines.append)
    assert (code, lines) == (1, ["WARNING : the node left"]), "a service that ends unasked has failed"


def test_warnings_in_a_pipe_have_no_colour_codes() -> None:
    done = subprocess.run([sys.executable, "-c", WARNED], capture_output=True, text=True)
    assert "the node left" in done.stderr
    assert "\x1b" not in done.stderr


def test_the_first_line_of_a_run_names_fifty_sizes(caplog):
    made = [Registration(client=k, num_records=40, name=f"client {k}", data_set=f"d{k}") for k in range(10_000)]
    with caplog.at_level(logging.INFO, logger="flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        LogObserver().started(RunConfig(noise_multiplier=1.0), made, None)
        logging.getLogger("flwr").removeHandler(caplog.handler)
    (line,) = [record.getMessage() for record in caplog.records if "run with" in record.getMessage()][:1]
    assert line.endswith("client 49: 40, 9,950 more, 400,000 in all")
    assert "client 50" not in line


def test_budgets_that_end_early_are_named_for_twenty_clients_and_counted_for_the_rest():
    allowed = {client: 2 + client % 3 for client in range(1000)}
    books = SimpleNamespace(rounds_allowed=allowed, sizes=dict.fromkeys(allowed, 40), is_new=False)
    config, told = RunConfig(rounds=5, budget_epsilon=(4.0,), min_clients=2), Notes()
    announce_budgets(books, config, {client: f"client {client}" for client in allowed}, told)
    (notice,) = told.notes
    assert "client 0: 2, client 1: 3, " in notice
    assert "client 19: 3 and 980 more, the least 2; these clients then retire" in notice


def test_an_expected_end_is_one_line_and_any_other_has_its_trace() -> None:
    """As Flower logs them: the error of a server app, and its own exit code with a page to visit."""
    told = WithoutTrace()

    def record(message: str, error: Exception | None = None) -> logging.LogRecord:
        info = (type(error), error, None) if error else None
        return logging.LogRecord("flwr", logging.ERROR, "", 0, message, (), info)

    errors = TooFewClientsError("round 3: 1 left"), KeyError(1)
    expected, bug = (record("ServerApp raised", error) for error in errors)
    assert [told.filter(each) for each in (expected, bug)] == [True, True]
    assert (expected.getMessage(), expected.exc_info) == ("the run ends: round 3: 1 left", None)
    assert bug.exc_info is not None
    assert not told.filter(record("Exit Code: 201\n\nFor more information, visit: <https://flower.ai/...>"))
