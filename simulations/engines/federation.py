"""A whole federation on this machine: server and nodes in this process, clients trained by the chosen engine."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from flwr.app import Context, RecordDict

from clients.app import app as client_app
from clients.node import TRUST_KEY
from fedpriv.apps import GARBAGE_THRESHOLDS
from fedpriv.config import RunConfig, to_flower
from fedpriv.errors import InputError
from fedpriv.learning.data import release_memory
from fedpriv.learning.training.independence import FEATURES, READING, TRAINING, unfailing
from fedpriv.learning.training.local_update import ClientUpdate, Execute, TrainedModel, UpdateTask
from fedpriv.learning.training.stacked import clients_at_once, execute_one_by_one, execute_stacked
from fedpriv.learning.training.workbench import forget_changed, workbench
from fedpriv.runs.show import check_installed
from server.app import make_app
from server.checkpoint import with_base_dtype
from server.observer import Follow, Observer, RunProgress
from simulations.engines.flower_private import task_identity
from simulations.engines.grid import LocalGrid
from simulations.engines.ray_actors import RayExecutor

RUN_ID = 1
# Flower's server is node 1.
_FIRST_NODE_ID = 2


def run(
    config: RunConfig, observer: Observer, *, tapped: Callable[[Execute], Execute] = lambda execute: execute
) -> None:
    """Run the federation; its results are in `config.out`.

    Args:
        config: of the run.
        observer: is told what is going on.
        tapped: gives what takes the place of the engine, such as one that listens to it.

    Raises:
        InputError: something in the configuration or the data cannot be used.
    """
    check_installed(config.track)
    forget_changed(config)
    config = with_base_dtype(config)
    with _cycles_looked_for_seldom(), task_identity(RUN_ID), _executor(config, observer) as execute:
        grid = LocalGrid(SimulatedNodes(config), tapped(execute), client_app, execute.begins, execute.ends)
        make_app(observer)(grid, server_context(config))


@contextmanager
def _cycles_looked_for_seldom() -> Iterator[None]:
    """Within this context Python looks for cycles less often, and not among what there was before: libraries stay."""
    before, is_ours = gc.get_threshold(), not gc.get_freeze_count()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    if is_ours:  # what others froze must stay so
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()
        gc.set_threshold(*before)


@contextmanager
def _executor(config: RunConfig, observer: Observer) -> Iterator[_Followed]:
    """The function that trains a round's clients; engines differ in it alone."""
    observer.progressed(RunProgress(what="loading model and data"))
    model = workbench(config).model
    if config.engine == "ray":
        observer.progressed(RunProgress(what="starting Ray"))
        with RayExecutor(config) as ray, _following(model, ray, observer.progressed) as execute:
            ray.tell = execute.tell
            yield execute
        return
    if config.engine == "stacked" and clients_at_once(model) == 1:
        observer.notice(
            f"engine = stacked: memory_limit_mb = {config.memory_limit_mb} holds one client at a time; the run "
            "continues in-process"
        )
    one_by_one = config.engine == "in-process" or clients_at_once(model) == 1
    train = partial(execute_one_by_one if one_by_one else execute_stacked, model)
    with _following(model, train, observer.progressed) as execute:
        yield execute


class SimulatedNodes(Mapping[int, Context]):
    """{node: its context}, made when it is asked for: nodes keep nothing there, and there may be very many.

    The simulation's user owns all data, so the nodes trust the run's configuration.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._run_config = to_flower(config)
        self._nodes = range(_FIRST_NODE_ID, _FIRST_NODE_ID + len(workbench(config).data.clients))

    def __getitem__(self, node_id: int) -> Context:
        if node_id not in self._nodes:
            raise KeyError(node_id)
        partition = node_id - _FIRST_NODE_ID
        return Context(
            RUN_ID,
            node_id,
            {"partition-id": partition, "num-partitions": len(self._nodes), TRUST_KEY: True},
            RecordDict(),
            self._run_config,
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


def server_context(config: RunConfig) -> Context:
    """The server's node."""
    return Context(RUN_ID, 1, {}, RecordDict(), to_flower(config))


class _Followed:
    """An `Execute` whose follower is told how many of the round's client steps are done.

    Args:
        execute: trains the tasks.
        follow: is told, until it raises; models tell while they compute records, where an error would be a record's.
    """

    def __init__(self, execute: Execute, follow: Follow) -> None:
        self._execute, self._follow = execute, unfailing(follow)
        self._totals: dict[str, float] = {}
        self._done = Counter[str]()
        self._round = self._num_expected = 0
        self._learned: set[bool | None] = set()

    def begins(self, num: int) -> None:
        """Expect so many tasks, in one call or several."""
        self._num_expected = num
        self._done = Counter()

    def __call__(self, tasks: Sequence[UpdateTask]) -> list[ClientUpdate | Exception]:
        """Train the tasks, which are all of one round; of those that are still to come, each is taken to be as long."""
        factor = max(self._num_expected, len(tasks)) / len(tasks)
        num_records = factor * sum(len(task.data) for task in tasks)
        steps = factor * sum(task.spec.local_steps for task in tasks)
        own = {TRAINING: steps, READING: num_records, FEATURES: num_records}
        self._totals = {what: self._done[what] + round(num) for what, num in own.items()}
        self._round = tasks[0].round
        try:
            updates = self._execute(tasks)
        finally:
            self._totals = {}
            self._num_expected -= len(tasks)
            if self._num_expected <= 0:
                self._done = Counter()
                release_memory()  # or the passes of each round leave further holes
        self._learned |= {update.learned for update in updates if isinstance(update, ClientUpdate)}
        return updates

    def ends(self) -> None:
        """Refuse to go on if nothing was learned, in the round that has ended or before.

        Raises:
            InputError: all that was drawn had no gradient, so further rounds would be noise alone too.
        """
        if False in self._learned and True not in self._learned:
            raise InputError(
                f"round {self._round}: is noise alone, since none of the records that were drawn has a gradient; "
                "`fedpriv data check` shows what the model reads of texts and labels"
            )

    def tell(self, what: str, done: float, total: float) -> None:
        """Pass on what a model tells: during a round, of all of its clients together; at other times, as it is told.

        Clients, or stacks of them, are told of one after the other. A stack that fails is trained again, client by
        client, and counts from where it began. Records that were read in an earlier round are not read again, so in a
        round with other clients the records that are read may end below their total.
        """
        before, of_round = self._done[what], self._totals.get(what, total)
        round_ = self._round if what == TRAINING else None
        self._follow(RunProgress(what=what, done=before + done, total=of_round, round=round_))
        if what in self._totals and done == total:
            self._done[what] += int(total)


@contextmanager
def _following(model: TrainedModel, execute: Execute, follow: Follow) -> Iterator[_Followed]:
    """Within this context the model tells the follower what it does, and so does what it trains."""
    followed = _Followed(execute, follow)
    model.tell = followed.tell
    try:
        yield followed
    finally:
        del model.tell
