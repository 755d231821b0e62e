"""A whole federation on this machine: server and nodes in this process, clients trained by the chosen engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from flwr.app import Context, RecordDict

from clients.app import app as client_app
from clients.node import TRUST_KEY
from fedpriv.config import RunConfig, to_flower
from fedpriv.runs.show.following import check_installed
from fedpriv.training.local_update import Execute
from fedpriv.training.stacked import clients_at_once, execute_one_by_one, execute_stacked
from fedpriv.training.workbench import workbench
from server.app import make_app
from server.checkpoint import with_base_dtype
from server.observer import Observer, RunProgress
from simulations.engines.flower_private import task_identity
from simulations.engines.grid import LocalGrid
from simulations.engines.progress import following
from simulations.engines.ray_actors import RayExecutor

RUN_ID = 1
# Flower's server is node 1.
_FIRST_NODE_ID = 2


def run(config: RunConfig, observer: Observer) -> None:
    """Run the federation; its results are in `config.out`.

    Raises:
        InputError: something in the configuration or the data cannot be used.
    """
    check_installed(config.track)
    config = with_base_dtype(config)
    with task_identity(RUN_ID), _executor(config, observer) as execute:
        make_app(observer)(LocalGrid(contexts(config), execute, client_app), server_context(config))


@contextmanager
def _executor(config: RunConfig, observer: Observer) -> Iterator[Execute]:
    """What trains a round's clients: all that engines differ in."""
    observer.progressed(RunProgress(what="loading model and data"))
    model = workbench(config).model
    if config.engine == "ray":
        observer.progressed(RunProgress(what="starting Ray"))
        with RayExecutor(config) as ray, following(model, ray, observer.progressed) as execute:
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
    with following(model, train, observer.progressed) as execute:
        yield execute


def contexts(config: RunConfig) -> list[Context]:
    """The nodes of the simulation. Whoever simulates owns all data, so they trust the run's configuration."""
    run_config, num_clients = to_flower(config), len(workbench(config).data.clients)
    return [
        Context(
            RUN_ID,
            _FIRST_NODE_ID + client,
            {"partition-id": client, "num-partitions": num_clients, TRUST_KEY: True},
            RecordDict(),
            run_config,
        )
        for client in range(num_clients)
    ]


def server_context(config: RunConfig) -> Context:
    """The server's node."""
    return Context(RUN_ID, 1, {}, RecordDict(), to_flower(config))
