"""MLflow servers that are gone, silent, garbled or hostile: the run finishes, and no file here is theirs to write."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedpriv.config import parse
from fedpriv.runs import files
from fedpriv.runs.show import _tracking
from fedpriv.runs.show._tracker import Place
from fedpriv.runs.show._trackers import TRACKERS
from fedpriv.runs.show._tracking import RunTeller
from simulations.engines import federation
from simulations.sites import free_port
from tests.notes import Notes
from tests.runs.show.tracking.folders import NUM_ROUNDS, begun, summary

pytestmark = pytest.mark.slow


class Silent(BaseHTTPRequestHandler):
    """Takes a request and never answers."""

    def do_GET(self) -> None:
        time.sleep(60)

    do_POST = do_GET  # noqa: N815, the name that http.server looks for

    def log_message(self, *args: object) -> None:
        pass


class Garbled(Silent):
    """Answers with what would move a terminal's cursor."""

    body = b"\x1b[2J\x00not json"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET  # noqa: N815, the name that http.server looks for


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


@contextmanager
def nobody() -> Iterator[str]:
    yield f"http://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("server", [nobody, lambda: serving(Silent), lambda: serving(Garbled)])
def test_a_run_finishes_whatever_its_tracker_does(small_run, tmp_path, monkeypatch, server):
    monkeypatch.setattr(_tracking, "END_SECONDS", 8.0)
    observer, out = Notes(), tmp_path / "run"
    with server() as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        federation.run(parse({**small_run, "out": str(out), "track": "mlflow"}), observer)
    (told,) = [text for text in observer.notes if "track" in text]
    assert told.startswith("track = mlflow: ")
    assert told.isprintable()
    assert files.is_finished(out)
    assert (out / files.REPORT).is_file()


def test_a_server_cannot_have_files_written_where_it_likes(tmp_path, monkeypatch):
    victim = tmp_path / "home"
    victim.mkdir()
    (victim / "config.toml").write_text("mine")
    run = {"info": {"run_id": "1", "artifact_uri": victim.as_uri(), "status": "RUNNING"}, "data": {}}
    answers = {"experiment": {"experiment_id": "1", "name": "fedpriv"}, "run": run, "run_info": run["info"]}

    class Hostile(Garbled):
        body = json.dumps(answers).encode()

    def stage(folder, into, stored_in):
        (into / "config.toml").write_text("theirs")

    monkeypatch.setattr(_tracking, "stage_run", stage)
    writer = begun(tmp_path / "run", checkpoint=NUM_ROUNDS, rounds=NUM_ROUNDS)
    writer.finish(summary())
    with serving(Hostile) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        tell = RunTeller(TRACKERS["mlflow"], "mlflow", Place(name="run", folder=Path(writer.path)))
        with pytest.raises(ValueError, match="would be on this machine; start it with --serve-artifacts"):
            tell("finished")
    assert (victim / "config.toml").read_text() == "mine"
