"""A data holder as its own node knows it, and the runs in which it takes part.

A `NodeHolder` has records of its own, and its operator's settings stand above any run's configuration. Any other
`Holder` takes its records from the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from fedpriv.config import EMBEDDED, ON_NODES, RunConfig, parse
from fedpriv.errors import InputError, LedgerError
from fedpriv.files import Journal, replace_file, require_room
from fedpriv.holder.vault._charging import NodePolicy, RefusedError, WaitingError
from fedpriv.holder.vault._disk import NO_DISK, NodeJournal, Room
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.holder.vault.settings import (
    CLOSED,
    ApprovedModel,
    NodeLimits,
    VaultSettings,
    agreed_runs,
    approved_model,
    differences,
    is_unchanged_model,
    read_models,
    terms_of,
)
from fedpriv.holder.wire.frame import Scalar
from fedpriv.learning.adapters import model_state
from fedpriv.learning.training.local_update import ClientUpdate, UpdateTask
from fedpriv.learning.training.workbench import Workbench, workbench
from fedpriv.privacy.ledger.entries import DataSet
from fedpriv.privacy.ledger.reader import reading
from fedpriv.texts import printable


@dataclass(frozen=True, kw_only=True)
class RecordsToRead:
    """The records that a release reads once it is charged.

    Attributes:
        config: of the run.
        data_set: that was charged.
        aside: whether they are those that the client sets aside for evaluation, instead of those on which it trains.
        may_begin: whether the reply's time suffices to read a node's own records; else they are those in memory.
    """

    config: RunConfig
    data_set: DataSet | None
    aside: bool
    may_begin: bool


# Of a node's own records, in place of the run's.
_COLUMNS = ("prompt_column", "response_column", "messages_column", "choice_columns", "person_column")

Compute = Callable[[Workbench, UpdateTask, RecordsToRead, ExitStack], ClientUpdate | Exception]
"""Computes a task that is charged, on records that it reads first; another process lets go of the room on the disks."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A data holder that takes its records from the run, as in a simulation.

    Attributes:
        client: the partition id; anything but a valid one is refused.
        policy: what may be released, and what records it.
        trusts_run: the holder also starts the runs, as in a simulation.
        name: for display; empty takes that of the run's data.
        identity_key: file of the vault's key, which signs what the node says; None signs nothing.
        journal: of the node's events.
        room: on its disks, without which it refuses everything.
        before_records: called after a charge, before any record is touched, with the seconds after which, or after a
            double of which, the reply may leave; 0 for at once.
        apart: computes releases where there may be records, so that this process has none; None reads them here.
    """

    client: object
    policy: NodePolicy
    trusts_run: bool = False
    name: str = ""
    identity_key: Path | None = None
    journal: Journal
    room: Room = NO_DISK
    before_records: Callable[[float], None] = lambda _: None
    apart: Compute | None = None

    @staticmethod
    def of(settings: VaultSettings) -> Holder:
        """The holder of a node's folder; a `NodeHolder` if the settings name records of its own.

        Raises:
            InputError: the policy file is wrong.
        """
        is_own = settings.data is not None
        policy = NodePolicy(
            allow_not_private=not is_own,
            allow_unrecorded=not is_own,
            limits=NodeLimits.read(settings.policy) if settings.policy.is_file() else NodeLimits(),
            ledger=settings.ledger,
            budget_epsilon=settings.budget_epsilon,
            delta=settings.delta,
            budget_view=settings.budget_view,
            min_survivors=settings.min_survivors,
            colluding_clients=settings.colluding_clients,
            watch=ReceiptWatch.of(settings),
            data_set=_registered(settings.ledger) if is_own else None,
        )
        holder = Holder(
            client=settings.partition_id,
            policy=policy,
            name=settings.name,
            identity_key=settings.key if settings.key.is_file() else None,
            journal=NodeJournal(settings.events, client=settings.partition_id),
            room=Room.of(settings),
        )
        return NodeHolder(**vars(holder), settings=settings) if is_own else holder

    def partition(self, num_clients: int) -> int:
        """The partition id.

        Raises:
            RefusedError: no client of a run with so many clients has it.
        """
        if not isinstance(self.client, int) or not 0 <= self.client < num_clients:
            raise RefusedError(
                f"partition-id = {self.client!r}: must lie in 0..{num_clients - 1}, the clients of this run"
            )
        return self.client


@dataclass(frozen=True, kw_only=True)
class NodeHolder(Holder):
    """A data holder with records of its own, whose operator decides in the node's settings.

    Attributes:
        settings: of the node; no run's configuration changes them.
    """

    settings: VaultSettings

    @property
    def keeps_agreement(self) -> bool:
        """Whether there are runs that the operator agreed to, and others are not taken."""
        return self.settings.other_runs != "allow" and bool(agreed_runs(self.settings.agreed))


def _registered(ledger: Path) -> str:
    """Id of the data set that a ledger holds now; empty if there is none, or it cannot be read."""
    try:
        with reading(ledger) as db:
            data_set = db.data_set(None)
    except LedgerError:
        return ""
    return data_set.id if data_set else ""


def run_of(run_config: Mapping[str, Scalar], holder: Holder) -> RunConfig:
    """The configuration of a run in which the node takes part, with what its operator decides in place of the run's.

    Raises:
        RefusedError: the node does not take part in such a run.
        InputError: the configuration is invalid.
    """
    config = parsed(run_config)
    if isinstance(holder, NodeHolder):
        # Without it there would be no receipts, by which a restored ledger is noticed, nor a registration that counts.
        if holder.identity_key is None:
            raise RefusedError(
                "vault.key: this node has none; its operator must stop it and run `fedpriv node new-key`"
            )
        return _of_node(config, holder.settings, holder.policy)
    if config.data == ON_NODES:
        raise RefusedError(f"data = {ON_NODES}: this node has no records of its own")
    if config.data != EMBEDDED and not holder.trusts_run:
        raise RefusedError(
            f"data = {config.data!r}: this node takes no data from a run's configuration; in a simulation set "
            "FEDPRIV_TRUST_RUN_CONFIG=1"
        )
    return config


def run_named(config: RunConfig) -> str:
    """A run by the name of its folder, and its purpose, as its coordinator has them."""
    return printable(f"run {Path(config.out).name or 'without a name'} ({config.purpose or 'no purpose named'})")


def bench_of(config: RunConfig, holder: Holder) -> Workbench:
    """Model and records of the node in a run; the records of its own are not read yet."""
    return workbench(config, holder.settings.source if isinstance(holder, NodeHolder) else None)


def parsed(run_config: Mapping[str, Scalar]) -> RunConfig:
    """The checked configuration of a run, cached: every message carries it, and checking takes long.

    Raises:
        InputError: it is invalid.
    """
    return _parsed(tuple(run_config.items()))


@lru_cache(maxsize=4)
def _parsed(items: tuple[tuple[str, Scalar], ...]) -> RunConfig:
    return parse(dict(items))


def _of_node(config: RunConfig, settings: VaultSettings, policy: NodePolicy) -> RunConfig:
    """The run's configuration as a node with records of its own carries it out."""
    if settings.closed.exists():
        raise RefusedError(CLOSED)
    _check_agreed(config, settings)
    if policy.budget_epsilon is None:
        raise RefusedError("budget_epsilon: this node has records of its own but no budget; its operator must set one")
    if config.data != ON_NODES:
        raise RefusedError(
            f"data = {config.data!r}: this node holds records of its own; the run needs data = {ON_NODES}"
        )
    source = settings.source
    if config.task != ("SEQ_CLS" if settings.labels and not source.instructs else "CAUSAL_LM"):
        raise RefusedError(f"task = {config.task}: does not suit this node's records")
    unit = "person" if source.person_column else "record"
    if config.unit != unit:
        raise RefusedError(f"unit = {config.unit}: this node's operator decided that the unit is the {unit}")
    if config.most_of_a_person > source.most_of_a_person:
        raise RefusedError(
            f"max_records_per_person = {config.max_records_per_person}: this node keeps at most "
            f"{source.most_of_a_person} of a person"
        )
    if config.instructs != source.instructs:
        held = "prompts with responses" if source.instructs else "plain texts"
        raise RefusedError(f"prompt_column, messages_column: this node's records are {held}; the run is for others")
    if bool(config.choice_columns) != bool(source.choice_columns):
        held = "choices" if source.choice_columns else "none"
        raise RefusedError(f"choice_columns: this node's records have {held}; the run is for others")
    if source.messages_column and config.prompt_template:
        raise RefusedError("prompt_template: this node's records are whole chats, with no place for it")
    if config.labels != settings.labels:
        raise RefusedError("labels: are not those that this node's operator agreed to, in their order")
    if policy.limits is not None and config.max_length > policy.limits.max_length:
        raise RefusedError(f"max_length = {config.max_length}: above this node's maximum {policy.limits.max_length}")
    model = approved_model(config.model, read_models(settings.models))
    if model is None:
        raise RefusedError(f"model = {config.model!r}: this node's operator has not approved it")
    if not _is_unchanged(model):
        raise RefusedError(f"model = {config.model!r}: its files changed since this node's operator approved them")
    return replace(
        config,
        model=model.folder,
        text_pair_column="" if config.task == "CAUSAL_LM" else source.text_pair_column,
        **{key: getattr(source, key) for key in _COLUMNS},
        memory_limit_mb=settings.memory_limit_mb,
        device=settings.device,
    )


def _check_agreed(config: RunConfig, settings: VaultSettings) -> None:
    """Refuse a run that differs from those that the operator agreed to, or is over; note one that may wait.

    Raises:
        WaitingError: the operator may still agree.
        RefusedError: the operator takes no such run.
    """
    if config.until and datetime.now(UTC).date().isoformat() > config.until:
        raise RefusedError(f"until = {config.until}: is over, and this node takes part no more")
    if settings.require_secure_sums and not config.secure_aggregation:
        raise RefusedError("secure_aggregation = false: this node requires secure sums, require_secure_sums = true")
    if settings.other_runs == "allow":
        return
    asked = terms_of(config)
    if not (differing := differences(asked, agreed_runs(settings.agreed))):
        return
    said = f"from what this node's operator agreed to: {'; '.join(differing)}"
    if settings.other_runs == "refuse":
        raise RefusedError(f"run: differs {said}")
    with suppress(OSError):
        text = json.dumps(asked).encode()
        if not settings.waiting.is_file() or settings.waiting.read_bytes() != text:
            require_room(settings.folder, len(text))
            replace_file(settings.waiting, text, mode=0o600)
    raise WaitingError(f"run: waits for `fedpriv node approve-run`, since it differs {said}")


def _is_unchanged(model: ApprovedModel) -> bool:
    """Whether a model's files are those that were approved; read again only if their sizes or times changed."""
    try:
        return _is_unchanged_in(model, model_state(Path(model.folder)))
    except (InputError, OSError):
        return False


@lru_cache(maxsize=8)
def _is_unchanged_in(model: ApprovedModel, _state: object) -> bool:
    return is_unchanged_model(model)
