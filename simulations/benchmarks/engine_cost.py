"""The cost of an engine without any training: the in-process grid against Flower's own Ray engine.

    python -m simulations.benchmarks.engine_cost [--clients 10 100] [--rounds 10]

Both arms run the same ServerApp (Flower's FedAvg, no evaluation) and the same ClientApp, which sends back the 1 MB
array that it received. The rival is `flwr.simulation.run_simulation` with one core per client, started and ended as a
user would, so its time includes Ray's. The in-process grid has nothing to start. A last figure, fedpriv's own apps with
empty training, shows what guard, charge, ledger, accounts and report cost.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Sequence

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Otherwise Flower joins the cluster that Ray last used on this machine, even one that no longer exists.
os.environ["RAY_ADDRESS"] = "local"

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from simulations.benchmarks._measuring import claim, seconds_of
from simulations.engines.flower_private import task_identity
from simulations.engines.grid import LocalGrid

NUM_VALUES = 262_144  # float32: 1 MB
TARGETS = {10: 30.0, 100: 25.0}


def make_client_app() -> ClientApp:
    """A ClientApp that sends back what it received."""
    app = ClientApp()

    @app.train()
    def train(message: Message, _context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1.0})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    return app


def make_server_app(num_clients: int, rounds: int) -> ServerApp:
    """A ServerApp with Flower's FedAvg over all clients."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, _context: Context) -> None:
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=num_clients)
        arrays = ArrayRecord([np.zeros(NUM_VALUES, dtype=np.float32)])
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds)

    return app


def in_process(num_clients: int, rounds: int) -> None:
    """A run on the in-process grid."""
    contexts = {
        node: Context(1, node, {"partition-id": node - 2}, RecordDict(), {}) for node in range(2, num_clients + 2)
    }
    with task_identity(1):
        grid = LocalGrid(contexts, None, make_client_app())
        make_server_app(num_clients, rounds)(grid, Context(1, 1, {}, RecordDict(), {}))


def flower_ray(num_clients: int, rounds: int) -> None:
    """A run on Flower's Ray engine."""
    run_simulation(
        server_app=make_server_app(num_clients, rounds),
        client_app=make_client_app(),
        num_supernodes=num_clients,
        backend_config={"client_resources": {"num_cpus": 1}},
    )


def own_apps(num_clients: int, rounds: int) -> float:
    """Seconds of fedpriv's own apps on the in-process grid, from registration to the report, with empty training."""
    from clients.app import app as client_app
    from fedpriv.config import parse
    from fedpriv.learning.training.local_update import ClientUpdate, UpdateTask
    from fedpriv.learning.training.workbench import workbench
    from server.app import make_app
    from server.observer import LogObserver
    from simulations.engines import federation

    with tempfile.TemporaryDirectory() as folder:
        config = parse(
            {
                "partition": "iid",
                "num_clients": num_clients,
                "rounds": rounds,
                "batch_size": 8,
                "comparison": False,
                "baselines": False,
                "out": folder,
            }
        )
        bench = workbench(config)
        for client in range(num_clients):
            bench.client(client)

        def untrained(tasks: Sequence[UpdateTask]) -> list[ClientUpdate | Exception]:
            return [
                ClientUpdate(
                    adapter=task.adapter,
                    event=task.event,
                    num_records=task.sampler.num_registered,
                )
                for task in tasks
            ]

        bench.test = bench.test.part(range(8))  # the server's evaluation is not part of the engine
        started = time.perf_counter()
        with task_identity(1):
            grid = LocalGrid(federation.SimulatedNodes(config), untrained, client_app)
            make_app(LogObserver())(grid, federation.server_context(config))
        return time.perf_counter() - started


def main() -> None:
    """Print a line for each number of clients, and its claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=sorted(TARGETS))
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    for name in ("flwr", "ray"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for num_clients in arguments.clients:
        ours = statistics.median(seconds_of(in_process, num_clients, arguments.rounds) for _ in range(3))
        own = own_apps(num_clients, arguments.rounds)
        rival = seconds_of(flower_ray, num_clients, arguments.rounds)
        print(
            f"{num_clients} clients, {arguments.rounds} rounds of 1 MB: Flower on Ray {rival:.2f} s, in-process "
            f"{ours:.3f} s, ratio {rival / ours:.1f}; fedpriv's own apps with ledger and report {own:.2f} s"
        )
        text = f"engine cost, {num_clients} clients, Flower on Ray / in-process"
        claim(text, at_least=TARGETS.get(num_clients), ratio=rival / ours)


if __name__ == "__main__":
    main()
