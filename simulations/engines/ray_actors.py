"""The Ray engine: one actor for each GPU or core, each training its share of a round's clients stacked."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch

from fedpriv.apps import CHECKOUT
from fedpriv.config import RunConfig
from fedpriv.errors import InputError, first_line
from fedpriv.learning.adapters import Adapter, Merged, merged_from_tensors, merged_to_tensors
from fedpriv.learning.data.records import RecordSet
from fedpriv.learning.training.independence import TRAINING, Tell, silent, unfailing
from fedpriv.learning.training.local_update import ClientUpdate, UpdateSpec, UpdateTask
from fedpriv.learning.training.stacked import execute_stacked
from fedpriv.learning.training.workbench import load_model, workbench
from fedpriv.privacy.mechanisms.discrete_gaussian import ClientGrid
from fedpriv.privacy.mechanisms.sources import RandomSource, SecureSource, SeededSource

# Between two questions how far the actors are.
_PAUSE_SECONDS = 0.5
# An actor has a source of its own: a secure stream never leaves the process that keyed it.
_secure = SecureSource()

# Ray sets it for what runs as a submitted job.
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"

# Otherwise Ray hides the devices from a worker without a GPU, and warns that it will stop doing so.
_ENVIRONMENT = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True, kw_only=True)
class _Parcel:
    """An UpdateTask as it is sent: records and adapters lie in the object store, and a secure source is left out."""

    adapter: Any
    merged: Any
    records: Any
    spec: UpdateSpec
    round: int
    num_registered: int
    inclusion: SeededSource | None
    choices: SeededSource | None
    noise: SeededSource | None
    grid: ClientGrid | None


class RayExecutor:
    """Trains a round's clients on Ray actors; a context manager that starts and ends them.

    Actors are made when a round first needs them, so that a round of few clients holds no more cores or GPUs than
    clients. An actor that dies is replaced, and its share is tried once more; after that its clients count as failed.
    They were charged before, and stay charged.

    Args:
        config: of the run; `ray_address` and `ray_workers` say where and how many.

    Raises:
        InputError: Ray is not installed, no cluster answers at the address, or it has no core and no GPU to offer.
    """

    tell: Tell = staticmethod(silent)
    """Told how many client steps of a round are done, on all actors together; to be set before the first round."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._actors: list[Any] = []
        self._tally: Any = None
        self._records: WeakKeyDictionary[RecordSet, Any] = WeakKeyDictionary()
        self._labels = workbench(config).data.label_names

    def __enter__(self) -> Self:
        self._ray = connect(self._config.ray_address)
        resources = self._ray.cluster_resources()
        self._gpus = int(resources.get("GPU", 0)) if self._config.device != "cpu" else 0
        slots = self._gpus or int(resources.get("CPU", 0))
        self._at_most = min(self._config.ray_workers or slots, slots)
        if not self._at_most:
            raise InputError(f"ray_address = {self._config.ray_address!r}: its cluster offers neither core nor GPU")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in [*self._actors, *([self._tally] if self._tally else [])]:
            self._ray.kill(actor)
        self._ray.shutdown()

    def __call__(self, tasks: Sequence[UpdateTask]) -> list[ClientUpdate | Exception]:
        """Train the tasks, an equal share on each actor."""
        if self._tally is None and self.tell is not silent:
            self._tally = self._ray.remote(num_cpus=0)(_Tally).remote()
        num_shares = min(self._at_most, len(tasks))
        while len(self._actors) < num_shares:
            self.tell("starting actors", len(self._actors), num_shares)
            self._actors.append(self._start_actor())
        adapters = _Adapters(self._ray.put)
        parcels = [self._parcel(task, adapters) for task in tasks]
        shares = [parcels[k::num_shares] for k in range(num_shares)]
        if self._tally is not None:
            self._tally.begin.remote(tasks[0].round)
        sent = [self._actors[k].train.remote(share) for k, share in enumerate(shares)]
        self._follow(sent, sum(task.spec.local_steps for task in tasks))
        results: list[ClientUpdate | Exception] = [RuntimeError("not trained")] * len(tasks)
        for k, share in enumerate(shares):
            results[k::num_shares] = self._collect(k, sent[k], share)
        return results

    def _follow(self, sent: Sequence[Any], num_steps: int) -> None:
        """Tell how far the actors are until they have ended, one way or another."""
        pending = list(sent)
        while self._tally is not None and pending:
            _, pending = self._ray.wait(pending, num_returns=len(pending), timeout=_PAUSE_SECONDS)
            if not pending:
                return
            try:
                self.tell(TRAINING, self._ray.get(self._tally.done.remote(), timeout=_PAUSE_SECONDS), num_steps)
            except self._ray.exceptions.RayError:  # what is only shown must not end a round
                continue

    def _collect(self, k: int, sent: Any, share: list[_Parcel]) -> list[ClientUpdate | Exception]:
        """The updates of a share; if its actor dies, another one trains it once more under the same charge."""
        for attempt in ("first", "second"):
            try:
                updates: list[ClientUpdate | Exception] = self._ray.get(sent)
                return updates
            except self._ray.exceptions.RayActorError as error:
                logging.getLogger("flwr").warning("a Ray actor died in its %s attempt: %s", attempt, error)
                self._actors[k] = self._start_actor()
                if attempt == "second":
                    return [error] * len(share)
                sent = self._actors[k].train.remote(share)
        raise AssertionError("unreachable")

    def _start_actor(self) -> Any:
        options = {"num_gpus": 1, "num_cpus": 0} if self._gpus else {"num_cpus": 1}
        return self._ray.remote(**options)(_Worker).remote(self._config, self._labels, self._tally)

    def _parcel(self, task: UpdateTask, adapters: _Adapters) -> _Parcel:
        if task.data not in self._records:
            self._records[task.data] = self._ray.put(task.data)
        return _Parcel(
            adapter=adapters.stored(task.adapter),
            merged=adapters.stored(merged_to_tensors(task.merged)) if task.merged else None,
            records=self._records[task.data],
            spec=task.spec,
            round=task.round,
            num_registered=task.sampler.num_registered,
            inclusion=_seeded(task.sampler.source),
            choices=_seeded(task.sampler.choices),
            noise=_seeded(task.noise),
            grid=task.grid,
        )


class _Adapters:
    """The adapters of a round in the object store; equal ones, such as a common broadcast, are stored once."""

    def __init__(self, put: Callable[[Adapter], Any]) -> None:
        self._put = put
        self._known: list[tuple[Adapter, Any]] = []

    def stored(self, adapter: Adapter) -> Any:
        for known, reference in self._known:
            same_names = known.keys() == adapter.keys()
            if same_names and all(torch.equal(known[name], tensor) for name, tensor in adapter.items()):
                return reference
        self._known.append((adapter, self._put(adapter)))
        return self._known[-1][1]


class _Worker:
    """An actor, which holds the frozen base and the records of the clients that it was sent."""

    def __init__(self, config: RunConfig, labels: tuple[str, ...], tally: Any) -> None:
        if not torch.cuda.is_available():
            torch.set_num_threads(1)
        import ray  # an actor has it

        self._get = ray.get
        _, self._model = load_model(config, labels=labels)
        self._tally, self._told, self._name = tally, 0.0, secrets.token_hex(8)
        if tally is not None:
            self._model.tell = unfailing(self._tell)
        self._records: dict[Any, RecordSet] = {}

    def _tell(self, what: str, done: float, total: float) -> None:
        """Pass on how far the current stack is, not too often; what came before it is added up by the tally."""
        now = time.monotonic()
        if what == TRAINING and (done == total or now - self._told >= _PAUSE_SECONDS):
            self._told = now
            self._tally.tell.remote(self._name, self._round, done, done == total)

    def train(self, parcels: list[_Parcel]) -> list[ClientUpdate | Exception]:
        """The updates of a share of a round."""
        self._round = parcels[0].round
        adapters = {parcel.adapter: self._get(parcel.adapter) for parcel in parcels}
        bases = {parcel.merged: merged_from_tensors(self._get(parcel.merged)) for parcel in parcels if parcel.merged}
        return execute_stacked(self._model, [self._task(parcel, adapters, bases) for parcel in parcels])

    def _task(self, parcel: _Parcel, adapters: dict[Any, Adapter], bases: dict[Any, Merged]) -> UpdateTask:
        if parcel.records not in self._records:
            self._records[parcel.records] = self._get(parcel.records)
        return UpdateTask(
            adapter=adapters[parcel.adapter],
            merged=bases.get(parcel.merged, {}),
            data=self._records[parcel.records],
            spec=parcel.spec,
            round=parcel.round,
            sampler=parcel.spec.sampler(parcel.num_registered, parcel.inclusion or _secure, parcel.choices or _secure),
            noise=parcel.noise or _secure,
            grid=parcel.grid,
        )


class _Tally:
    """An actor that adds up how many client steps of the current round are done."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, round_: int) -> None:
        """Count from zero."""
        self._round, self._finished, self._current = round_, 0.0, dict[str, float]()

    def tell(self, worker: str, round_: int, done: float, is_finished: bool) -> None:
        """Count what a worker has done of its current stack."""
        if round_ == self._round:
            self._finished += done * is_finished
            self._current[worker] = 0.0 if is_finished else done

    def done(self) -> float:
        """Steps in all."""
        return self._finished + sum(self._current.values())


def _seeded(source: RandomSource) -> SeededSource | None:
    return source if isinstance(source, SeededSource) else None


def connect(address: str = "", *, num_cpus: int | None = None) -> Any:
    """The module `ray`, connected; the caller ends with `ray.shutdown()`.

    Args:
        address: of an existing cluster, which gets this project's code; empty takes RAY_ADDRESS, which Ray sets in a
            submitted job, and without it (or with `local`) starts Ray on this machine.
        num_cpus: cores to offer where Ray is started; None offers all.

    Raises:
        InputError: Ray is not installed, or no cluster answers.
    """
    os.environ.update(_ENVIRONMENT)
    address = address or os.environ.get("RAY_ADDRESS", "").removeprefix("local")
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError("Ray is not installed: pip install 'fedpriv[ray]'; or use one process") from None
    on_sigterm = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            _check_reachable(address)
            # A submitted job has brought its code, and may not bring it twice.
            is_job = _JOB in os.environ
            brings = CHECKOUT is not None and not is_job
            code = {"working_dir": str(CHECKOUT), "excludes": [".venv", ".git", "results"]} if brings else {}
            ray.init(address=address, runtime_env=code, **quiet)
        else:
            path = {"PYTHONPATH": str(CHECKOUT)} if CHECKOUT else {}
            environment = {"env_vars": {**path, **_ENVIRONMENT}}
            # `local`, since without an address Ray would join any cluster that it finds on this machine.
            ray.init("local", num_cpus=num_cpus, include_dashboard=False, runtime_env=environment, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"ray_address = {address!r}: no Ray cluster to join ({first_line(error)})") from None
    if threading.current_thread() is threading.main_thread():  # in the place of Ray's handlers, which exit or abort
        signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)
    return ray


def _check_reachable(address: str) -> None:
    """Refuse at once an address where nothing listens: Ray itself would try for minutes."""
    host, sign, port = address.removeprefix("ray://").rpartition(":")
    if sign and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()
