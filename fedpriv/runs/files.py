"""The files in the folder of a run or a sweep: their names, how TOML and JSON files are read and written, and a lock.

The lock tells whether the process of a run or a sweep lives: the kernel unlocks its file as the process dies. It
belongs to an open file (Linux's open file description locks): it survives that someone in the same process opens and
closes the file, and it is asked for without being taken, so that nobody who looks can be in a run's way. Locks tell of
processes on the same machine only. So the file names the machine's boot; of any other, nothing is known.
"""

import errno
import fcntl
import json
import math
import os
import re
import struct
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fedpriv import config as configuration
from fedpriv import texts
from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.files import is_free, read_text, replaced_file

VERSION = 1
"""That of a run's folder, which its environment.json names."""

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
REGISTRATIONS = "registrations.json"
DIGESTS = "data.json"  # of a simulation's data
ROUNDS = "rounds.csv"
CLIENTS = "clients.csv"
EVENTS = "events.jsonl"
INCLUSIONS = "inclusions.jsonl"  # what each round's sum was made of, which the coordinator signs
LEDGER = "ledger.sqlite"
SAMPLES = "samples.jsonl"
STORED_ANSWERS = "stored_answers.jsonl"
AUDIT = "audit.json"  # the canaries of an audited run, written before its first round
AUDIT_SCORES = "audit_scores.csv"  # of its canaries, for `fedpriv audit one-run --scores`
SUMMARY = "summary.json"  # written last: it marks the run as finished
REPORT = "report.html"
TRACKER = "tracker.json"  # how far a tracker has been told
PROGRESS = "progress.json"  # what the clients of the round under way do
PRESENCE = "process.json"  # locked while the run's process lives
CHECKPOINTS = "checkpoint"
COMPARISON = "comparison"  # a run folder of its own, of the rounds without noise
VARIANTS = "variants"
STORE = "store"
SWEEP_PLAN = "sweep.json"  # what is planned: title and runs, written before the first of them
SWEEP_TABLE = "sweep.csv"  # written at the end, or when the sweep is interrupted
UNFINISHED = "unfinished"  # earlier attempts, whose releases count

# What varies and a digest of the configuration, which name the folder of a sweep's run.
SWEEP_KEY = re.compile(r"[A-Za-z0-9+][A-Za-z0-9.+-]{0,79}-[0-9a-f]{8}")

# Keys whose values may be infinite.
_BOUND = re.compile(r"epsilon|\bmu(_|$)")

_CHECKPOINT_PREFIX = "round-"
_CHECKPOINT = re.compile(rf"{_CHECKPOINT_PREFIX}[0-9]{{6,}}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# `struct flock` of 64-bit Linux: type, whence, start, length (0 for all), process (must be 0), padding.
_FLOCK = struct.Struct("hhqqi4x")

# macOS has no such locks: there a run is judged by its silence alone.
_GET: int | None = getattr(fcntl, "F_OFD_GETLK", None)

_SET: int | None = getattr(fcntl, "F_OFD_SETLK", None)
_MAX_BYTES = 1000


def is_finished(run_dir: Path) -> bool:
    """Whether the run in the folder is finished."""
    return (run_dir / SUMMARY).is_file()


def read_config(run_dir: Path) -> RunConfig:
    """The resolved configuration of the run in the folder; InputError if it is missing, or not valid."""
    return configuration.parse(configuration.read(run_dir / CONFIG))


def check_version(run_dir: Path) -> None:
    """Refuse, with an InputError, the folder of a run that is of another version, or names none."""
    path = run_dir / ENVIRONMENT
    version = read_values(path).get("version")
    if version != VERSION:
        raise InputError(f"{path}: is version {version!r}; this is fedpriv {texts.VERSION}, which reads {VERSION}")


def read_values(path: Path, *, optional: bool = False, only: Collection[str] = ()) -> dict[str, Any]:
    """The keys and values of a TOML or JSON file, "inf" of a bound being a number; none if it is optional and missing.

    InputError if it is missing, damaged, or holds something else.

    Args:
        only: of objects of a JSON file that hold no other object, the keys that are kept; all by default.
    """
    loads: Callable[[str], Any] = tomllib.loads if path.suffix == ".toml" else partial(_from_json, only=only)
    try:
        values = loads(read_text(path))
    except FileNotFoundError:
        if optional:
            return {}
        raise missing(path) from None
    except ValueError as error:
        raise InputError(f"{path}: not valid {path.suffix[1:]} ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold keys and values, holds a {type(values).__name__}")
    return values


def _from_json(text: str, only: Collection[str]) -> Any:
    def bounded(values: dict[str, Any]) -> dict[str, Any]:
        if only and not any(isinstance(value, dict) for value in values.values()):
            values = {key: values[key] for key in only if key in values}
        for key, value in values.items():
            if value == "inf" and _BOUND.search(key):
                values[key] = math.inf
        return values

    # Many clients have the same figures, which are one object then.
    return json.loads(text, object_hook=bounded, parse_float=lru_cache(maxsize=2**12)(float))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically; NaN becomes null and an infinity "inf", since JSON has neither."""
    with replaced_file(path) as file:
        file.writelines(part.encode() for part in _json_parts(content))


def _json_parts(content: Mapping[str, Any]) -> Iterator[str]:
    """The text, piece by piece: a line for each key, and for each entry of a list of objects, such as a client."""
    before = "{"
    for key, value in content.items():
        yield f"{before}\n  {json.dumps(key)}: "
        if isinstance(value, Sequence) and len(value) and isinstance(value[0], Mapping):
            for position, entry in enumerate(value):
                yield f"{',' if position else '['}\n    {texts.strict_json(entry)}"
            yield "\n  ]"
        else:
            yield texts.strict_json(value)
        before = ","
    yield "\n}\n" if content else "{}\n"


def missing(path: Path) -> InputError:
    """The error for a file that a finished run's folder should hold."""
    return InputError(f"{path}: no such file; give the folder of a finished run, which holds it")


def check_unused(folder: Path) -> None:
    """Refuse, with an InputError, a folder for a new run's results that is not empty, or is a file."""
    if not is_free(folder):
        raise InputError(f"out = {str(folder)!r}: already holds a run; name another folder, or resume it")


def checkpoint_name(round_: int) -> str:
    """The name of the folder that holds the checkpoint after a round."""
    return f"{_CHECKPOINT_PREFIX}{round_:06}"


def checkpoint_round(checkpoint: Path) -> int:
    """The round after which a checkpoint was written, from the name of its folder."""
    return int(checkpoint.name.removeprefix(_CHECKPOINT_PREFIX))


def checkpoints(run_dir: Path) -> list[Path]:
    """The folders of the run's complete checkpoints, the last round last."""
    found = (run_dir / CHECKPOINTS).glob(f"{_CHECKPOINT_PREFIX}[0-9]*")
    return sorted(path for path in found if _CHECKPOINT.fullmatch(path.name))


def run_folder_of(path: Path) -> Path:
    """The run's folder, given that folder or one of its checkpoints."""
    return path.parent.parent if path.parent.name == CHECKPOINTS else path


@contextmanager
def marked_alive(run_dir: Path) -> Iterator[None]:
    """While the block runs, `is_alive(run_dir)` is True for all processes here; InputError if another one runs it.

    Where the file system has no locks the block runs all the same, and nobody can tell.
    """
    refuse_second(run_dir)
    file = os.open(run_dir / PRESENCE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        content = b""
        if _lock(file, run_dir):
            content = json.dumps({"boot": _boot(), "process": os.getpid()}).encode() + b"\n"
        # In this order a run that is killed between the two leaves a first line that names the machine.
        os.pwrite(file, content, 0)
        os.ftruncate(file, len(content))
        yield
    finally:
        os.close(file)


def refuse_second(run_dir: Path) -> None:
    """Refuse, with an InputError, to touch a run or a sweep that another process runs."""
    if is_alive(run_dir):
        raise _second(run_dir)


def _second(run_dir: Path) -> InputError:
    kind = "sweep" if (run_dir / SWEEP_PLAN).is_file() else "run"
    number = _noted(run_dir).get("process")
    named = "" if number is None else f", process {number}"
    return InputError(f"{run_dir}: another process runs this {kind}{named}; wait until it ends, or end it first")


def is_alive(run_dir: Path) -> bool | None:
    """Whether the process that runs the run lives; None if that cannot be told.

    That is so for a process on another machine or before this one was restarted.
    """
    try:
        if _GET is None or str(_noted(run_dir).get("boot", "")) != _boot():  # "" is no machine's
            return None
        with (run_dir / PRESENCE).open("rb") as file:
            asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            found: int = _FLOCK.unpack(fcntl.fcntl(file, _GET, asked))[0]
    except OSError:
        return None
    return found != fcntl.F_UNLCK


def _lock(file: int, run_dir: Path) -> bool:
    """Lock the file; False where there are no locks."""
    if _SET is None or _boot() is None:
        return False
    try:
        fcntl.fcntl(file, _SET, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise _second(run_dir) from None
        return False
    return True


def _boot() -> str | None:
    """Names this machine since it was last started, containers on it included; None if it has no such name."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return None


def _noted(run_dir: Path) -> dict[str, object]:
    """The machine's boot and the process that its file names; nothing if the file is missing or damaged."""
    try:
        with (run_dir / PRESENCE).open("rb") as file:
            found = json.loads(file.read(_MAX_BYTES).partition(b"\n")[0])
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
