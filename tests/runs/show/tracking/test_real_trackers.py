"""Small federations with every tracker as it is: what it holds afterwards is what the tables hold, both ways."""

import csv
import getpass
import json
import math
import os
import socket
import sqlite3
import struct
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console

from fedpriv.config import parse
from fedpriv.runs import files
from fedpriv.runs.show._tracker import CLIENT_METRICS, COMPARISON_METRICS, ROUND_METRICS, Place
from fedpriv.runs.show._trackers import TRACKERS
from fedpriv.runs.show._tracking import RunTeller, read_position
from simulations.engines import federation
from simulations.sites import free_port
from simulations.sweeps.command import sweep
from simulations.sweeps.plan import read
from tests.notes import Notes
from tests.runs.show.tracking.folders import NUM_ROUNDS, begun

ADAPTER = [
    f"adapter/{name}" for name in ("README.md", "adapter_config.json", "adapter_model.safetensors", "fedpriv.json")
]

pytestmark = pytest.mark.slow

Figures = dict[tuple[str, int], float]


def federate(small_run, out: Path, **changes: object) -> list[str]:
    """Run a federation and return what was noticed about its tracker."""
    observer = Notes()
    federation.run(parse({**small_run, "comparison": True, "out": str(out), **changes}), observer)
    return [text for text in observer.notes if "track" in text]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def released(run: Path) -> Figures:
    """{(metric, round): value} by the run's own files, read by other means than the tracker's."""
    told: Figures = {}
    for folder, metrics in ((run, ROUND_METRICS), (run / "comparison", COMPARISON_METRICS)):
        for row in table(folder / "rounds.csv"):
            told |= {(metric, int(row["round"])): float(row[name]) for name, metric in metrics.items() if row[name]}
    for row in table(run / "clients.csv"):
        client = f"client_{int(row['client']):02}"
        told |= {(f"{name}/{client}", int(row["round"])): float(row[name]) for name in CLIENT_METRICS if row[name]}
    return {key: value for key, value in told.items() if math.isfinite(value)}


def reached(run: Path) -> dict[str, float]:
    """{metric: value} of the final figures."""
    summary = json.loads((run / "summary.json").read_text())
    numbers = {f"final/{k}": v for k, v in summary.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    for client in summary["clients"]:
        name = f"client_{client['client']:02}"
        numbers |= {f"final_{key}/{name}": client[key] for key in CLIENT_METRICS if client[key] is not None}
    return numbers


def asked(run: Path) -> dict[str, object]:
    """The configuration as it may be told: the names of files, and no folder."""
    values = tomllib.loads((run / "config.toml").read_text())
    for key in ("out", "ledger", "node_keys", "resume", "ray_address", "table_checks", "track"):
        del values[key]
    values |= {key: Path(values[key]).name for key in ("model", "data")}
    return {key: value for key, value in values.items() if value not in ("", [])}


def check_files(run: Path, folder: Path) -> None:
    """What arrived as files is the run's, without its paths."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == [*ADAPTER, "config.toml", "report.html"]
    assert (folder / "adapter/adapter_model.safetensors").read_bytes() == (
        run / "variants/global/adapter_model.safetensors"
    ).read_bytes()
    for path in (folder / name for name in names if not name.endswith("safetensors")):
        assert_no_machine(path.read_text(), run)
    told = {key: value for key, value in tomllib.loads((folder / "config.toml").read_text()).items() if value}
    assert told == {key: value for key, value in asked(run).items() if value}
    assert "epsilon" in (folder / "report.html").read_text()


def assert_no_machine(text: str, run: Path) -> None:
    config = tomllib.loads((run / "config.toml").read_text())
    secrets = [config["data"], config["model"], str(run), str(Path.cwd()), str(Path.home()) + "/"]
    assert not [secret for secret in secrets if secret in text]


@pytest.fixture(scope="module")
def mlflow_address(tmp_path_factory) -> Iterator[str]:
    """The address of MLflow's own server with a store in SQLite."""
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/store.db", "--artifacts-destination", f"{folder}/files"]
    quiet = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=quiet, start_new_session=True)
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2)
                break
            except OSError:
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.3)
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait()


@pytest.fixture
def mlflow_client(mlflow_address, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_address)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    return MlflowClient(mlflow_address)


def history(client, run_id: str) -> Figures:
    keys = client.get_run(run_id).data.metrics
    return {(key, metric.step): metric.value for key in keys for metric in client.get_metric_history(run_id, key)}


def test_mlflow_holds_the_tables_and_nothing_else(small_run, tmp_path, mlflow_client):
    out = tmp_path / "ward"
    assert federate(small_run, out, track="mlflow") == []
    run = mlflow_client.get_run(read_position(out, "mlflow").run)
    last = int(small_run["rounds"])
    final = {(name, last): value for name, value in reached(out).items()}
    assert history(mlflow_client, run.info.run_id) == released(out) | final
    as_text = {key: ", ".join(value) if isinstance(value, list) else str(value) for key, value in asked(out).items()}
    assert run.data.params == as_text
    summary = json.loads((out / "summary.json").read_text())
    words = {"private", "unit", "accountant", "noise_source", "adapters_moved", "run_id", "configuration_digest"}
    assert run.data.tags.keys() == words | {"ledger_head", "mlflow.runName"}
    assert run.data.tags["ledger_head"] == summary["ledger_head"]
    assert run.data.tags["private"] == "false", "a simulation is not private, and the tracker says so"
    assert (run.info.status, run.info.run_name, run.info.user_id) == ("FINISHED", "ward", "unknown")
    assert mlflow_client.get_experiment(run.info.experiment_id).name == "fedpriv"
    (tmp_path / "files").mkdir()
    check_files(out, Path(mlflow_client.download_artifacts(run.info.run_id, "", str(tmp_path / "files"))))


def test_mlflow_nests_a_sweep_s_runs_and_goes_on_with_them(small_run, tmp_path, mlflow_client):
    file = tmp_path / "study.toml"
    file.write_text(tomli_w.dumps({**small_run, "track": "mlflow", "rounds": 1, "grid": {"rank": [2, 4]}}))
    for _ in range(2):  # the second time, all of it is finished
        assert sweep(read(file), tmp_path / "out", max_parallel=1, console=Console(quiet=True)).is_finished
    experiment = mlflow_client.get_experiment_by_name("study")
    runs = {run.info.run_name: run for run in mlflow_client.search_runs([experiment.experiment_id])}
    assert runs.keys() == {"study", "rank=2", "rank=4"}
    parent = runs["study"].info.run_id
    assert [runs[f"rank={r}"].data.tags["mlflow.parentRunId"] for r in (2, 4)] == [parent, parent]
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    total = float(table(tmp_path / "out" / "sweep.csv")[0]["epsilon_sum"])
    assert runs["study"].data.metrics["sweep/epsilon_sum"] == total
    assert runs["rank=4"].data.params["rank"] == "4"


def test_mlflow_goes_on_with_the_run_that_it_knows_and_makes_one_where_it_does_not(tmp_path, monkeypatch):
    def follow(store: str, rounds: int, ending: str) -> str:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/{store}.db")
        (tmp_path / "run" / files.CHECKPOINTS / files.checkpoint_name(rounds)).mkdir(exist_ok=True)
        place = Place(name="run", folder=tmp_path / "run")
        RunTeller(TRACKERS["mlflow"], "mlflow", place)("failed")
        with sqlite3.connect(tmp_path / f"{store}.db") as db:
            return db.execute("select run_uuid, max(step) from metrics join runs using (run_uuid)").fetchall()

    monkeypatch.chdir(tmp_path)
    begun(tmp_path / "run", checkpoint=1, rounds=NUM_ROUNDS)
    ((first, one),) = follow("here", 1, "failed")
    ((again, three),) = follow("here", 3, "failed")
    ((other, four),) = follow("elsewhere", 4, "failed")
    assert (first, one, three, four) == (again, 1, 3, 4)
    assert other != first


def test_tensorboard_holds_the_tables_and_nothing_else(small_run, tmp_path):
    out = tmp_path / "ward"
    assert federate(small_run, out, track="tensorboard") == []
    figures, words, hparams = events(out / "tensorboard")
    expected = released(out) | {(name, int(small_run["rounds"])): value for name, value in reached(out).items()}
    assert figures == pytest.approx(expected, rel=1e-6)  # of 32 bits
    assert hparams == {k: ", ".join(v) if isinstance(v, list) else v for k, v in asked(out).items()}
    assert words["final/private"] == "false"
    for file in (out / "tensorboard").iterdir():
        assert socket.gethostname() not in file.name
        assert_no_machine(file.read_bytes().decode("latin-1"), out)


def events(folder: Path) -> tuple[Figures, dict[str, str], dict[str, object]]:
    """The scalars, texts and parameters in a folder's event files."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from tensorboard.util.tensor_util import make_ndarray

    figures, words, hparams = {}, {}, {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                plugin = value.metadata.plugin_data
                if plugin.plugin_name == "hparams":
                    start = HParamsPluginData.FromString(plugin.content).session_start_info.hparams
                    hparams |= {key: getattr(v, v.WhichOneof("kind")) for key, v in start.items()}
                elif plugin.plugin_name == "text":
                    words[value.tag] = make_ndarray(value.tensor).item().decode()
                else:
                    figures[value.tag, event.step] = float(make_ndarray(value.tensor))
    return figures, words, hparams


def test_a_resumed_run_goes_on_in_its_folder_of_events(small_run, tmp_path):
    out, values = tmp_path / "ward", {"rounds": 4, "track": "tensorboard", "comparison": False}
    federate(small_run, out, **values)
    whole = events(out / "tensorboard")[0]
    (out / files.SUMMARY).unlink()
    federate(small_run, out, **values, resume=str(files.checkpoints(out)[0]))
    assert len(list((out / "tensorboard").iterdir())) == 2
    again = events(out / "tensorboard")[0]
    assert again.keys() == whole.keys()
    # Seconds differ: the last round was repeated. The rest is the same to the bit, since the run is simulated.
    assert {k: v for k, v in again.items() if "seconds" not in k[0]} == {
        k: v for k, v in whole.items() if "seconds" not in k[0]
    }


def test_a_sweep_has_a_folder_of_events_by_the_name_of_each_run(small_run, tmp_path):
    file = tmp_path / "study.toml"
    values = {**small_run, "track": "tensorboard", "rounds": 1, "grid": {"rank": [2, 4]}}
    file.write_text(tomli_w.dumps(values))
    assert sweep(read(file), tmp_path / "out", max_parallel=1, console=Console(quiet=True)).is_finished
    board = tmp_path / "out" / "tensorboard"
    assert sorted(path.name for path in board.iterdir() if path.is_dir()) == ["rank=2", "rank=4"]
    assert events(board / "rank=4")[2]["rank"] == 4
    assert not list((tmp_path / "out").glob("*/tensorboard/"))


_HEADER_BYTES, _BLOCK_BYTES, _RECORD_HEADER_BYTES = 7, 32768, 7
_FULL, _LAST = 1, 4


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of the file that W&B writes offline: in blocks, as LevelDB logs them, after a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    assert content.startswith(b":W&B")
    position, parts = _HEADER_BYTES, b""
    while position < len(content):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _RECORD_HEADER_BYTES:  # the rest of a block is filled up
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + _RECORD_HEADER_BYTES])
        position += _RECORD_HEADER_BYTES
        parts += content[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def test_wandb_holds_the_tables_and_nothing_else(small_run, tmp_path, monkeypatch):
    out = tmp_path / "ward"
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_PROJECT": "study"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    assert federate(small_run, out, track="wandb") == []
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    figures, final, config, run, artifacts, kinds = {}, {}, {}, None, [], set()
    for record in wandb_records(file):
        kind = record.WhichOneof("record_type")
        kinds.add(kind)
        if kind == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            round_ = row.pop("round")
            figures |= {(name, round_): value for name, value in row.items() if not name.startswith("_")}
        elif kind == "summary":
            final |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.summary.update}
        elif kind == "config":
            config |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.config.update}
        elif kind == "run":
            run = record.run
        elif kind == "artifact":
            artifacts.append(record.artifact)
        if kind != "artifact":  # which says where the files to send are, in this file alone
            assert_no_machine(str(record), out)
            assert f'"{socket.gethostname()}"' not in str(record)
    assert figures == released(out)
    assert reached(out).items() <= final.items()
    assert final["private"] == "false"
    assert {k: v for k, v in config.items() if k != "_wandb"} == {
        k: ", ".join(v) if isinstance(v, list) else v for k, v in asked(out).items()
    }
    assert (run.project, run.display_name, run.run_id) == ("study", "ward", read_position(out, "wandb").run)
    assert (run.host, run.sweep_id, run.git.remote_url) == ("", "", "")
    assert not kinds & {"stats", "output", "output_raw", "environment", "files"}
    (artifact,) = artifacts
    assert sorted(entry.path for entry in artifact.manifest.contents) == [*ADAPTER, *("config.toml", "report.html")]
    assert getpass.getuser() not in (run.host, run.entity)
