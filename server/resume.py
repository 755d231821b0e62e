"""What a run that is resumed must have in common with its beginning: configuration, nodes, folder and ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fedpriv import config as configuration
from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.ledger.ledger import Ledger
from fedpriv.runs import files
from fedpriv.runs.writer import RunWriter
from fedpriv.training.workbench import workbench
from server.checkpoint import Checkpoint
from server.registration import NO_NODE, Nodes, check_same

# What `train = auto` decides.
_DECIDED = (
    "lora_rounds",
    "lora_share",
    "lora_sampling_probability",
    "lora_server_optimizer",
    "lora_server_learning_rate",
)


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
        *configuration.OUTSIDE_KEYS,
        *(["noise_multiplier"] if began.target_epsilon else []),
        *(key for key in ("start_noise_multiplier", "lora_noise_multiplier") if getattr(config, key) is None),
        *(_DECIDED if began.train == "auto" else ()),
    }
    differing = [key for key in configuration.KEYS if getattr(began, key) != getattr(config, key)]
    if named := ", ".join(key for key in differing if key not in free):
        raise InputError(f"resume = {config.resume!r}: the run began with another configuration; {named} differ")


def may_be_missing(resumed: Checkpoint, min_clients: int) -> tuple[int, ...]:
    """The clients that the run does not wait for: those that it skipped, if the others are enough for a round."""
    out = {*resumed.skipped, *resumed.retired}
    num_others = sum(registration.client not in out for registration in resumed.registrations)
    return resumed.skipped if num_others >= min_clients else ()


def first_registrations(nodes: Nodes, resumed: Checkpoint) -> Nodes:
    """The nodes with the registrations that the run began with; those that it skipped may still be missing.

    Raises:
        InputError: a node is missing or new, or registers something else.
    """
    before = {registration.client: registration for registration in resumed.registrations}
    missing = set(resumed.skipped) - nodes.keys()
    if changed := sorted((before.keys() ^ nodes.keys()) - missing):
        raise InputError(f"partition-id {', '.join(map(str, changed))}: the run that is resumed began with other nodes")
    for client, (_, now) in nodes.items():
        check_same(before[client], now)
    # A simulated node makes its key anew when it starts.
    here = {
        client: (node_id, replace(before[client], identity=now.identity, signature=now.signature))
        for client, (node_id, now) in nodes.items()
    }
    return dict(sorted({**here, **{client: (NO_NODE, before[client]) for client in missing}}.items()))


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
        if not ledger.has_entry(*resumed.ledger):
            raise InputError(
                f"ledger {path}: is not the one of the run, or lacks entries that were there at the checkpoint"
            )
        yield ledger
