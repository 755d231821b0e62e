"""TensorBoard's event files, written by its own encoder; torch's writer would put the machine's name in theirs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpriv.runs.show._tracker import Ending, MetricPoint, Parameter, Place

# Where runs are written together; transformers reads the same variable. Without it, a run's folder holds them.
FOLDER = "TENSORBOARD_LOGGING_DIR"

# What the table of runs shows first.
_KEY_FIGURES = (
    *("final/accuracy", "final/perplexity", "final/accuracy_non_private"),
    *("final/epsilon_local_max", "final/epsilon_rho_max", "final/epsilon_aggregate_max", "final/seconds"),
)


class TensorboardRun:
    """A folder of event files; each process writes one of its own."""

    def __init__(self, folder: Path, name: str, run_id: str) -> None:
        self._folder, self._name, self._id = folder, name, run_id
        self._file: Path | None = None

    @property
    def id(self) -> str:
        """The folder, from the run's: a run may be moved and resumed."""
        return self._id

    def log_parameters(self, values: Mapping[str, Parameter]) -> None:
        """Log the parameters for the page HParams, and as a table among the texts."""
        from tensorboard.plugins.hparams import summary_v2
        from tensorboard.plugins.text.summary_v2 import text_pb

        rows = [f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in values.items()]
        table = "\n".join(["| key | value |", "| --- | --- |", *rows])
        self._write([summary_v2.hparams_pb(dict(values), trial_id=self._name), text_pb("configuration", table)])

    def log_points(self, points: Sequence[MetricPoint]) -> None:
        """Write scalars, of 32 bits, with the round as step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        by_round: dict[int, list[Any]] = {}
        for point in points:
            value = Summary.Value(tag=point.metric, simple_value=point.value)
            by_round.setdefault(point.round, []).append(value)
        for round_, values in by_round.items():
            self._write([Summary(value=values)], step=round_)

    def log_final(self, figures: Mapping[str, float], facts: Mapping[str, str], round_: int) -> None:
        """Figures as scalars after the last round, words among the texts."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        self.log_points([MetricPoint(metric=name, value=value, round=round_) for name, value in figures.items()])
        self._write([text_pb(f"final/{key}", value) for key, value in facts.items()], step=round_)

    def log_files(self, folder: Path) -> None:
        """Event files have no place for files; the run's own folder holds them."""

    def end(self, ending: Ending) -> None:
        """Write how the run ended, for the page HParams."""
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = {"finished": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE}[ending]
        info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        said = plugin_data_pb2.HParamsPluginData(session_end_info=info)
        self._write([_about_hparams(metadata.SESSION_END_INFO_TAG, said)])

    def _write(self, summaries: Iterable[Any], step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        _append(self._opened(), [Event(wall_time=time.time(), step=step, summary=s) for s in summaries])

    def _opened(self) -> Path:
        if self._file is None:
            self._file = _new_file(self._folder)
        return self._file


def open_run(place: Place, known: str | None) -> TensorboardRun:
    """The folder RUN/tensorboard or SWEEP/tensorboard/NAME, or one in TENSORBOARD_LOGGING_DIR, by the run's name."""
    if known:
        return TensorboardRun(place.folder / known, place.name, known)
    elsewhere = os.environ.get(FOLDER)
    if elsewhere:
        parent = Path(elsewhere).expanduser().absolute()
        folder = _unused(parent / _file_name(place.sweep) if place.sweep else parent, place.name)
    elif place.sweep_folder:
        folder = _unused(place.sweep_folder / "tensorboard", place.name)
    else:
        return TensorboardRun(place.folder / "tensorboard", place.name, "tensorboard")
    return TensorboardRun(folder, folder.name, str(folder))


def open_sweep(title: str, folder: Path, keys: Sequence[str], known: str | None) -> None:
    """The columns that the page HParams begins with: what varies, and the figures that runs are compared by."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    elsewhere = os.environ.get(FOLDER)
    parent = Path(elsewhere).expanduser().absolute() / _file_name(title) if elsewhere else folder / "tensorboard"
    if parent.is_dir() and any(parent.glob("events.out.tfevents.*")):
        return
    metrics = [
        api_pb2.MetricInfo(name=api_pb2.MetricName(tag=name), display_name=name.removeprefix("final/"))
        for name in _KEY_FIGURES
    ]
    experiment = api_pb2.Experiment(hparam_infos=[api_pb2.HParamInfo(name=key) for key in keys], metric_infos=metrics)
    columns = _about_hparams(metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment))
    _append(_new_file(parent), [Event(wall_time=time.time(), summary=columns)])


def _about_hparams(tag: str, said: Any) -> Any:
    """A summary that the page HParams reads; TensorBoard's own function for it needs TensorFlow."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    about = metadata.create_summary_metadata(said)
    return Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)])


def _new_file(folder: Path) -> Path:
    """A file that TensorBoard takes for its own, by its name."""
    from tensorboard.compat.proto.event_pb2 import Event

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"events.out.tfevents.{time.time_ns()}.fedpriv"
    _append(file, [Event(wall_time=time.time(), file_version="brain.Event:2")])
    return file


def _append(file: Path, events: Iterable[Any]) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    with file.open("ab") as stream:
        writer = RecordWriter(stream)
        for event in events:
            writer.write(event.SerializeToString())


def _unused(parent: Path, name: str) -> Path:
    """A folder of that name, or of NAME-2 and so on: an earlier attempt keeps its own."""
    plain = _file_name(name)
    folder, number = parent / plain, 1
    while folder.exists():
        number += 1
        folder = parent / f"{plain}-{number}"
    return folder


def _file_name(name: str) -> str:
    kept = "".join(c if c.isalnum() or c in " =,.+-_" else "_" for c in name)
    return kept.strip(" .")[:100] or "run"
