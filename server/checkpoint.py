"""Checkpoints, which a run needs to resume after its server died: written after every round, all or nothing.

A checkpoint holds only what was uploaded or is public: no record, no state of a secure stream, and not which records
were sampled. What was spent is in the ledger alone. A run that is resumed must have its
beginning's configuration, nodes and folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

import fedpriv
from fedpriv.config import KEYS, Fact, RunConfig
from fedpriv.errors import InputError
from fedpriv.files import remove_files, sync_folder
from fedpriv.holder.wire.kinds import Registration
from fedpriv.learning.adapters import Adapter, Merged, merged_from_tensors, merged_to_tensors
from fedpriv.learning.aggregation import GlobalModel
from fedpriv.learning.data.identity import DataDigests
from fedpriv.learning.training.workbench import Workbench, workbench
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.runs import RunWriter, files
from server.registration import NO_NODE, Nodes, check_same, label_of

log = logging.getLogger("flwr")

VERSION = 1
_KEPT = 2
_STATE, _TENSORS, _REGISTRATIONS = "state.json", "tensors.safetensors", "registrations.json"
_FILES = (_TENSORS, _REGISTRATIONS, f"{_STATE}.sha256", _STATE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A run after one of its rounds.

    Attributes:
        run: the run's random id, which is part of the key of requests, charges and stored replies.
        round: the last finished one; 0 before the first.
        digest: of the configuration, with the calibrated noise multiplier.
        ledger: (number, digest) of the last entry of the ledger; (0, "") without a ledger.
        registrations: of all nodes; they do not change during a run.
        retired: {client: reason}.
        skipped: the clients whose nodes had stopped answering.
        model: the global model.
        uploads: {client: (its last upload, what had been merged when it was trained)}.
    """

    run: str
    round: int
    digest: str
    ledger: tuple[int, str]
    registrations: tuple[Registration, ...]
    retired: Mapping[int, str]
    skipped: tuple[int, ...] = ()
    model: GlobalModel = field(repr=False)
    uploads: Mapping[int, tuple[Adapter, Merged]] = field(repr=False)


def write(run_folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint, keep the one before it, and delete older ones.

    The folder gets its name once everything in it is on disk; of one that cannot be written nothing is left. Files of
    others in these folders stay.
    """
    parent = run_folder / files.CHECKPOINTS
    name = files.checkpoint_name(checkpoint.round)
    final, temporary = parent / name, parent / f"{name}.tmp"
    _remove(run_folder, temporary)
    temporary.mkdir(parents=True, exist_ok=True)
    bases = _Bases(checkpoint)
    named = {name: tensor.contiguous().clone() for name, tensor in _tensors(checkpoint, bases)}
    tensors = safetensors.torch.save(named)
    registrations = _text_of(checkpoint.registrations)
    state = {
        "version": VERSION,
        "run": checkpoint.run,
        "round": checkpoint.round,
        "digest": checkpoint.digest,
        "ledger": list(checkpoint.ledger),
        "registrations": hashlib.sha256(registrations).hexdigest(),
        "skipped": list(checkpoint.skipped),
        "retired": {str(client): reason for client, reason in checkpoint.retired.items()},
        "uploads": {str(client): bases.index(base) for client, (_, base) in checkpoint.uploads.items()},
        "moments": list(checkpoint.model.optimizer_state),
        "packages": _packages(),
        "names": list(named),  # their file has another order; sums of floats and digests of requests depend on it
        "tensors": hashlib.sha256(tensors).hexdigest(),
    }
    text = json.dumps(state, indent=2).encode()
    try:
        contents = {_TENSORS: tensors, _REGISTRATIONS: registrations, _STATE: text}
        for name, content in (contents | {f"{_STATE}.sha256": _digest_line(text)}).items():
            with (temporary / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(temporary / _STATE)
    except BaseException:
        _remove(run_folder, temporary)
        raise
    _remove(run_folder, final)
    if final.exists() or {each.name for each in temporary.iterdir()} != set(_FILES):
        final.mkdir(exist_ok=True)
        for name in _FILES:  # the state last: until then the checkpoint counts as damaged
            (temporary / name).replace(final / name)
        sync_folder(final / _STATE)
        _remove(run_folder, temporary)
    else:
        temporary.rename(final)
    sync_folder(final)
    for older in files.checkpoints(run_folder)[:-_KEPT]:
        _remove(run_folder, older)


def _remove(run_folder: Path, checkpoint: Path) -> None:
    """Delete a checkpoint's files, and its folder if nothing else is in it."""
    remove_files(run_folder, [str(checkpoint.relative_to(run_folder) / file) for file in _FILES])


@lru_cache(maxsize=1)
def _text_of(registrations: tuple[Registration, ...]) -> bytes:
    """The registrations as JSON, by field: they stay the same for all of a run's checkpoints."""
    names = [field.name for field in fields(Registration)]
    return json.dumps({name: [getattr(each, name) for each in registrations] for name in names}).encode()


def read_last(run_folder: Path, initial: Adapter) -> Checkpoint:
    """The last checkpoint of a run.

    Args:
        run_folder: the run's folder, or one of its checkpoints to go back to.
        initial: the tensors that the run started from.

    Raises:
        InputError: there is none, or it is damaged or of another version; one line that names it and the one before.
    """
    if run_folder.parent.name == files.CHECKPOINTS:
        return _read(run_folder, initial)
    checkpoints = files.checkpoints(run_folder)
    if not checkpoints:
        raise InputError(f"resume = {str(run_folder)!r}: holds no checkpoint; the run ended before its first round")
    try:
        return _read(checkpoints[-1], initial)
    except _DamagedError as error:
        remedy = f"; the one before is {checkpoints[-2]}, resume from that" if len(checkpoints) > 1 else ""
        raise InputError(f"{error}{remedy}") from None


class _DamagedError(InputError):
    """A checkpoint that is not as it was written; an earlier one may be."""


def _read(path: Path, initial: Adapter) -> Checkpoint:
    text, digest = _bytes_of(path, _STATE), _bytes_of(path, f"{_STATE}.sha256")
    if digest != _digest_line(text):
        raise _DamagedError(f"checkpoint {path}: damaged: {_STATE} was changed after it was written")
    state = json.loads(text)
    if state.get("version") != VERSION:
        raise InputError(
            f"checkpoint {path}: is version {state.get('version')!r}; this is fedpriv {fedpriv.__version__}, which "
            f"reads {VERSION}: finish the run with the fedpriv that began it"
        )
    for package, installed in _packages().items():
        if (writer := state["packages"].get(package)) != installed:
            raise InputError(f"checkpoint {path}: was written with {package} {writer}; {installed} is installed")
    contents = {name: _bytes_of(path, name) for name in (_TENSORS, _REGISTRATIONS)}
    for name, content in contents.items():
        if hashlib.sha256(content).hexdigest() != state[Path(name).stem]:
            raise _DamagedError(f"checkpoint {path}: damaged: {name} was changed after it was written")
    try:
        columns = json.loads(contents[_REGISTRATIONS])
        rows = zip(*columns.values(), strict=True)
        registrations = tuple(Registration(**dict(zip(columns, row, strict=True))) for row in rows)
        tensors = safetensors.torch.load(contents[_TENSORS])
        return _from(state, registrations, {name: tensors[name] for name in state["names"]}, initial)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _DamagedError(f"checkpoint {path}: damaged: {error}") from None


def _bytes_of(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except OSError as error:
        raise _DamagedError(f"checkpoint {path}: damaged: {error.strerror or error}") from None


def _from(
    state: Mapping[str, Any],
    registrations: tuple[Registration, ...],
    tensors: Mapping[str, Tensor],
    initial: Adapter,
) -> Checkpoint:
    model = GlobalModel(
        initial=initial,
        adapter={name: tensors[f"adapter/{name}"] for name in initial},
        merged=merged_from_tensors(_under("base 0", tensors)),
        optimizer_state={moment: _under(f"moment {moment}", tensors) for moment in state["moments"]},
        last_update=_under("last_update", tensors),
    )
    bases: dict[int, Merged] = {0: model.merged}
    uploads = {}
    for client, index in state["uploads"].items():
        bases.setdefault(index, merged_from_tensors(_under(f"base {index}", tensors)))
        uploads[int(client)] = (_under(f"upload of {client}", tensors), bases[index])
    return Checkpoint(
        run=state["run"],
        round=state["round"],
        digest=state["digest"],
        ledger=(state["ledger"][0], state["ledger"][1]),
        registrations=registrations,
        skipped=tuple(state["skipped"]),
        retired={int(client): reason for client, reason in state["retired"].items()},
        model=model,
        uploads=uploads,
    )


class _Bases:
    """The merged weights in a checkpoint, each once: the model's, and those that uploads were trained on."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.all = [checkpoint.model.merged]
        for _, base in checkpoint.uploads.values():
            if all(base is not known for known in self.all):
                self.all.append(base)

    def index(self, base: Merged) -> int:
        return next(index for index, known in enumerate(self.all) if known is base)


def _tensors(checkpoint: Checkpoint, bases: _Bases) -> Iterator[tuple[str, Tensor]]:
    groups: list[tuple[str, Mapping[str, Tensor]]] = [
        ("adapter", checkpoint.model.adapter),
        ("last_update", checkpoint.model.last_update),
        *((f"moment {moment}", tensors) for moment, tensors in checkpoint.model.optimizer_state.items()),
        *((f"base {index}", merged_to_tensors(base)) for index, base in enumerate(bases.all)),
        *((f"upload of {client}", adapter) for client, (adapter, _) in checkpoint.uploads.items()),
    ]
    for group, tensors in groups:
        for name, tensor in tensors.items():
            yield f"{group}/{name}", tensor


def _under(group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{group}/"
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _packages() -> dict[str, str]:
    """The versions that must be the same for a run to resume as it began."""
    return {"fedpriv": fedpriv.__version__, "flwr": version("flwr"), "torch": torch.__version__}


def _digest_line(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}\n".encode()


def with_base_dtype(config: RunConfig) -> RunConfig:
    """The configuration with the format that `base_dtype = auto` stands for: that of a resumed run's beginning, or else
    the faster one on this machine.

    Raises:
        InputError: the data, the model or the folder of the resumed run cannot be used.
    """
    if config.base_dtype != "auto":
        return config
    if config.resume:
        return replace(config, base_dtype=files.read_config(files.run_folder_of(Path(config.resume))).base_dtype)
    return replace(config, base_dtype=workbench(config).model.base_dtype_name)


def check_configuration(config: RunConfig) -> None:
    """Refuse to resume a run with a configuration other than the one it began with.

    Raises:
        InputError: names the keys that differ.
    """
    if not config.resume:
        return
    began = files.read_config(files.run_folder_of(Path(config.resume)))
    # The folder's file holds what was derived when the run began, which is derived again.
    free = {
        *RunConfig.keys_with(Fact.OUTSIDE),
        *(["noise_multiplier"] if began.has_target else []),
        *(key for key in RunConfig.keys_with(Fact.CALIBRATED) if getattr(config, key) is None),
        *(RunConfig.keys_with(Fact.BY_TRAIN) if began.train == "auto" else ()),
    }
    differing = [key for key in KEYS if getattr(began, key) != getattr(config, key)]
    if named := ", ".join(key for key in differing if key not in free):
        raise InputError(f"resume = {config.resume!r}: the run began with another configuration; {named} differ")


def with_choice(config: RunConfig) -> RunConfig:
    """The configuration of a resumed run with what `train = auto` chose when it began."""
    if config.train != "auto":
        return config
    began = files.read_config(files.run_folder_of(Path(config.resume)))
    return replace(config, **{key: getattr(began, key) for key in RunConfig.keys_with(Fact.BY_TRAIN)})


def may_be_missing(resumed: Checkpoint, min_clients: int, node_keys: Path | None = None) -> set[int]:
    """The clients that the run does not wait for: those that left the federation, whose keys are admitted no more, and
    those that it skipped, if the others are enough for a round.
    """
    clients = {registration.client for registration in resumed.registrations}
    left = clients - keys.files_of_nodes(node_keys).keys() if node_keys else set[int]()
    out = {*resumed.skipped, *resumed.retired, *left}
    return {*resumed.skipped, *left} if len(clients - out) >= min_clients else left


def first_registrations(nodes: Nodes, resumed: Checkpoint, min_clients: int = 1) -> Nodes:
    """The nodes of the run with what they register now; those that are not there get `NO_NODE`.

    Each statement is as its node has signed it. A node without a ledger names a new data set with every start, so it
    keeps what the run began with, which is nobody's to sign but that of its old process, and its new identity. A node
    that is new is left out: the run has neither asked nor charged it.

    Raises:
        InputError: fewer than a round needs are there, or one registers something else.
    """
    before = {registration.client: registration for registration in resumed.registrations}
    if new := sorted(nodes.keys() - before.keys()):
        named = ", ".join(label_of(nodes, client) for client in new)
        log.warning("%s: not in the run that is resumed, and not charged; the next run takes new nodes", named)
    here = {client: nodes[client] for client in before if client in nodes}
    missing = {client: (NO_NODE, before[client]) for client in before if client not in nodes}
    if len(here.keys() - resumed.retired.keys()) < min_clients:
        named = ", ".join(label_of(missing, client) for client in missing)
        raise InputError(
            f"min_clients = {min_clients}: the run that is resumed needs as many of the {len(before)} nodes that it "
            f"began with; missing are {named or 'none, but budgets are spent'}"
        )
    for client, (_, now) in here.items():
        check_same(before[client], now)
    known = {
        client: (node_id, now if now.keeps_replies else replace(before[client], identity=now.identity))
        for client, (node_id, now) in here.items()
    }
    return dict(sorted({**known, **missing}.items()))


def check_data(config: RunConfig, bench: Workbench) -> None:
    """Refuse to resume a simulation whose data have changed since it began.

    Raises:
        InputError: names what differs; or the run's folder does not say what its data were.
    """
    if bench.digests is None:
        return
    began = files.read_values(files.run_folder_of(Path(config.resume)) / files.DIGESTS, optional=True)
    where = f"resume = {config.resume!r}"
    if not began:
        raise InputError(f"{where}: holds no {files.DIGESTS}; finish the run with the fedpriv that began it")
    bench.digests.check_same(DataDigests.from_json(began), f"{where}: data = {config.data!r}")


def reopened_folder(config: RunConfig, resumed: Checkpoint) -> RunWriter:
    """The folder of the run that is resumed.

    Raises:
        InputError: this configuration is not the one that the checkpoint was written with, or a table is damaged.
    """
    if config.digest != resumed.digest:
        raise InputError(f"resume = {config.resume!r}: its checkpoint was written with another configuration")
    return RunWriter.reopened(files.run_folder_of(Path(config.resume)), round_=resumed.round)


@contextmanager
def reopened_ledger(path: Path, resumed: Checkpoint) -> Iterator[Ledger]:
    """The ledger that the run began with, open for writing.

    Raises:
        InputError: it is missing, or does not hold what the run had recorded at its checkpoint.
    """
    if not path.exists():
        raise InputError(f"ledger {path}: is missing; a run is resumed with the ledger that it began with")
    with Ledger(path) as ledger:
        number, digest = resumed.ledger
        if ledger.number_of(digest) != number:
            raise InputError(
                f"ledger {path}: is not the one of the run, or lacks entries that were there at the checkpoint"
            )
        yield ledger
