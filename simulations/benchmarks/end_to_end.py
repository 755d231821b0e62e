"""Whole federations, compared with the same apps under Flower's own Ray engine.

    python -m simulations.benchmarks.end_to_end [--setting minilm|tiny] [--rounds 10]

Setting `minilm`: 50 clients of 80 messages of the embedded corpus, 5 local steps of 8 expected records a round, MiniLM
with LoRA in the last two layers. Setting `tiny`: 100 clients of 40 messages, a BERT of 2 layers and width 64 with LoRA
in all layers. Ours is the stacked engine. The rival runs the unchanged ServerApp and ClientApp by `run_simulation`, one
core per Ray actor: the same mathematics, guard, ledger and report, one client at a time in each actor, with and without
the prefix cache, its frozen base in float32; ours is in the default format. Everything is seeded (`simulate = true`),
so all arms train the same models but for rounding; times are of whole runs in fresh processes, including Ray's start
and end and loading the model.

The parts of an arm's time are wall-clock seconds of the process with the server; `messages` includes waiting for the
workers of Ray, whose own parts are added up over their processes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Otherwise Flower joins the cluster that Ray last used on this machine, even one that no longer exists.
os.environ["RAY_ADDRESS"] = "local"

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from clients.app import app as client_app
from fedpriv.config import RunConfig, Scalar, parse, to_flower
from fedpriv.learning.data import hospital
from server.app import make_app
from server.observer import LogObserver
from simulations.benchmarks import _parts
from simulations.benchmarks._measuring import claim, fresh_process
from simulations.engines import federation
from simulations.tiny_bert import make_tiny_bert

# {setting: {rival: target}}
TARGETS = {
    "minilm": {"flower": 4.0, "flower without prefix cache": 5.0},
    "tiny": {"flower": 5.0},
}


class Configured(ClientApp):
    """The ClientApp with the run's configuration, which `run_simulation` cannot pass.

    Args:
        run_config: of the run.
        folder: where each worker notes the seconds of its parts.
    """

    def __init__(self, run_config: dict[str, Scalar], folder: Path) -> None:
        super().__init__()
        self._run_config, self._folder = run_config, folder

    def __call__(self, message: Message, context: Context) -> Message:
        """The app's reply."""
        # Flower refuses a context that comes back changed.
        configured = Context(context.run_id, context.node_id, context.node_config, context.state, self._run_config)
        clock = _parts.of_process()
        replied = client_app(message, configured)
        (self._folder / f"{os.getpid()}.json").write_text(json.dumps(clock.seconds))
        return replied


def configuration(setting: str, folder: Path, rounds: int) -> RunConfig:
    """The configuration of a run."""
    values: dict[str, Any] = {
        "partition": "iid",
        "num_clients": 50,
        "rounds": rounds,
        "local_steps": 5,
        "batch_size": 8,
        "noise_multiplier": 1.0,
        "simulate": True,
        "comparison": False,
        "baselines": False,
        "out": str(folder / "run"),
    }
    if setting == "tiny":
        words = [word for message in hospital.generate()[0] for word in message.text.lower().split()]
        values |= {"num_clients": 100, "layers": "all", "model": str(make_tiny_bert(folder / "tiny-bert", words))}
    return parse(values)


def flower(config: RunConfig, folder: Path) -> None:
    """The run under Flower's Ray engine, whose workers note the seconds of their parts in the folder."""
    os.environ["FEDPRIV_TRUST_RUN_CONFIG"] = "1"
    run_config = to_flower(config)
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        context.run_config.update(run_config)
        make_app(LogObserver())(grid, context)

    run_simulation(
        server_app=server,
        client_app=Configured(run_config, folder),
        num_supernodes=config.num_clients,
        backend_config={"client_resources": {"num_cpus": 1}},
    )


def one_arm(arm: str, setting: str, rounds: int) -> dict[str, Any]:
    """Seconds and final accuracy of one run, and the seconds of its parts."""
    for name in ("flwr", "ray"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(setting, Path(folder), rounds)
        if arm.startswith("flower"):
            config = parse({**to_flower(config), "base_dtype": "float32", "prefix_cache": not arm.endswith("cache")})
        if arm == "ray":
            config = parse({**to_flower(config), "engine": "ray"})
        noted = Path(folder) / "workers"
        noted.mkdir()
        with _parts.measured() as clock:
            started = time.perf_counter()
            if arm.startswith("flower"):
                flower(config, noted)
            else:
                federation.run(config, LogObserver())
            seconds = time.perf_counter() - started
        summary = json.loads((Path(config.out) / "summary.json").read_text())
        workers = sum((Counter(json.loads(file.read_text())) for file in noted.iterdir()), Counter())
    return {"seconds": seconds, "accuracy": summary["accuracy"], "parts": clock.seconds, "workers": workers}


def main() -> None:
    """Print a line for each arm, and the claims of each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=sorted(TARGETS), nargs="+", default=sorted(TARGETS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(one_arm(arguments.arm, arguments.setting[0], arguments.rounds)))
        return
    for setting in arguments.setting:
        measured = {}
        for arm in ("stacked", "ray", *TARGETS[setting]):
            options = ("--arm", arm, "--setting", setting, "--rounds", arguments.rounds)
            found = measured[arm] = fresh_process("end_to_end", *options)
            print(f"{setting}, {arm}: {found['seconds']:.1f} s, accuracy {found['accuracy']:.4f}")
            print(f"    {_parts.shown(found['parts'], found['seconds'])}", flush=True)
            if found["workers"]:
                print(f"    the workers of Ray: {_parts.shown(found['workers'])}", flush=True)
        for arm, target in TARGETS[setting].items():
            ratio = measured[arm]["seconds"] / measured["stacked"]["seconds"]
            claim(f"end to end, {setting}, {arm} / stacked", at_least=target, ratio=ratio)


if __name__ == "__main__":
    main()
