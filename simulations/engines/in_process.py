"""The in-process engine: server and all clients in this process, clients trained one at a time."""

from __future__ import annotations

from functools import partial

from flwr.app import Context, RecordDict

from clients.app import app as client_app
from clients.handler import TRUST_KEY
from fedpriv.config import RunConfig, to_flower
from fedpriv.training.stacked import execute_one_by_one
from fedpriv.training.workbench import workbench
from server.app import make_app
from server.coordinator import Observer
from simulations.engines.flower_private import task_identity
from simulations.engines.grid import LocalGrid

RUN_ID = 1
# Flower's server is node 1.
_FIRST_NODE_ID = 2


def run(config: RunConfig, observer: Observer) -> None:
    """Run the federation; its results are in `config.out`.

    Raises:
        InputError: something in the configuration or the data cannot be used.
    """
    bench = workbench(config)
    contexts = [_context(config, client, len(bench.data.clients)) for client in range(len(bench.data.clients))]
    execute = partial(execute_one_by_one, bench.model)
    with task_identity(RUN_ID):
        make_app(observer)(LocalGrid(contexts, execute, client_app), _server_context(config))


def _context(config: RunConfig, client: int, num_clients: int) -> Context:
    """A node of the simulation. Who simulates owns all data, so the nodes trust the run's configuration."""
    node_config = {"partition-id": client, "num-partitions": num_clients, TRUST_KEY: True}
    return Context(RUN_ID, _FIRST_NODE_ID + client, node_config, RecordDict(), to_flower(config))


def _server_context(config: RunConfig) -> Context:
    return Context(RUN_ID, 1, {}, RecordDict(), to_flower(config))
