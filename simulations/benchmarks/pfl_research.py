"""Whole federations, compared with pfl-research, which calls itself the fastest simulator, and with BlazeFL.

    python -m simulations.benchmarks.pfl_research --python PFL/bin/python --blazefl BLAZEFL/bin/python
        [--clients 100 1000] [--rounds 10]

The peers run in Pythons of their own, `python -m venv PFL && PFL/bin/pip install torch "pfl[pytorch]" transformers
peft` and, from Python 3.13 on, `BLAZEFL/bin/pip install torch transformers peft "blazefl[contrib,reproducibility] @
git+https://github.com/kitsuyaazuma/blazefl"`. Other packages there make their starts longer, since peft imports those
that it knows, and torch built for CUDA takes 300 MiB more. All train the same task on the same records: tiny BERT (2
layers, width 64), LoRA of rank 8 on query and value and the head; every client in every round, 40 records of 24 tokens
each (8 where there are 1,000 clients), one epoch of SGD in batches of 8. Not private, they average the clients'
updates. Private, each update is clipped and noise comes to the sum: with the peers at the server, with fedpriv in each
upload (`noise_on = "upload"`). A third arm of ours, `records`, clips every record's gradient, which they do not offer.
Times are those of whole processes, ours of `fedpriv run`, with the start, the report, and one test at the end; a claim
takes BlazeFL's fastest mode. Memory is that of the process itself, without the workers that BlazeFL starts. Labels are
drawn at random, so all accuracies are near a half.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch.nn.utils.rnn import pad_sequence

from fedpriv.config import parse
from fedpriv.learning.data.records import Records
from fedpriv.learning.training.workbench import workbench
from simulations.benchmarks._measuring import claim, fedpriv_run, fresh_process
from simulations.benchmarks.registered_clients import WORDS, write_records
from simulations.tiny_bert import make_tiny_bert

BATCH, NUM_TEST, CLIP_NORM, LEARNING_RATE = 8, 200, 1.0, 0.1
ARMS = {
    "not private": {"noise_on": "upload", "noise_multiplier": 0.0},
    "private": {"noise_on": "upload", "noise_multiplier": 1.0},
    "records": {"noise_on": "gradients", "noise_multiplier": 1.0},
}
# {peer: (its option, its arm, the modes in which it runs)}
PEERS = {
    "pfl-research": ("python", "_pfl_arm", [""]),
    "BlazeFL": ("blazefl", "_blazefl_arm", ["single", "threads", "processes"]),
}
# {peer: its time over ours, at least}, and our memory at most.
RATIOS, MEBIBYTES = {"pfl-research": 2.0, "BlazeFL": 1.0}, 600.0


def records_each(num_clients: int) -> int:
    """The number of records of a client."""
    return 40 if num_clients < 1000 else 8


def values_of(folder: Path, num_clients: int, rounds: int) -> dict[str, Any]:
    """The configuration of a run, less what its arm says."""
    each = records_each(num_clients)
    return {
        "model": str(folder / "tiny-bert"),
        "data": str(folder / "records.csv"),
        "recipe": "per-sample",
        "partition": "iid",
        "num_clients": num_clients,
        "test_fraction": NUM_TEST / (num_clients * each + NUM_TEST),
        "layers": "all",
        "rounds": rounds,
        "local_steps": each // BATCH,
        "batch_size": BATCH,
        "optimizer": "sgd",
        "learning_rate": LEARNING_RATE,
        "clip_norm": CLIP_NORM,
        "evaluate_every": rounds,
        "simulate": True,
        "comparison": False,
        "baselines": False,
    }


def ours(arm: str, folder: Path, num_clients: int, rounds: int) -> dict[str, Any]:
    """Seconds, accuracy and peak memory of one run."""
    values = values_of(folder, num_clients, rounds) | ARMS[arm]
    with tempfile.TemporaryDirectory() as out:
        found = fedpriv_run(f"{out}/run", [f"{key}={json.dumps(value)}" for key, value in values.items()])
        return {**found, "accuracy": json.loads(Path(out, "run", "summary.json").read_text())["accuracy"]}


def write_task(folder: Path, num_clients: int) -> None:
    """The model, and the records as both sides read them."""
    each = records_each(num_clients)
    write_records(folder / "records.csv", num_clients * each // 4)
    make_tiny_bert(folder / "tiny-bert", WORDS)
    config = parse(values_of(folder, num_clients, 1) | ARMS["private"])
    bench = workbench(config)
    parts = []
    for records in (*map(bench.client, range(num_clients)), bench.test):
        assert isinstance(records, Records)
        ids = pad_sequence([*records.features["input_ids"]], batch_first=True, padding_value=records.pad_token_id)
        parts.append((torch.stack([ids, (ids != records.pad_token_id).long()], dim=1), records.labels))
    task = {
        "clients": parts[:-1],
        "test": parts[-1],
        "labels": len(bench.label_names),
        "rank": config.rank,
        "alpha": config.alpha,
        "batch_size": BATCH,
        "learning_rate": LEARNING_RATE,
        "clip_norm": CLIP_NORM,
    }
    torch.save(task, folder / "task.pt")


def measured(arguments: argparse.Namespace, num_clients: int, folder: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Who, the arm and its figures, of one process after the other."""
    for arm in ARMS:
        yield "fedpriv", arm, ours(arm, Path(folder), num_clients, arguments.rounds)
    for peer, (option, module, modes) in PEERS.items():
        if python := vars(arguments)[option]:
            for arm, mode in itertools.product(("not private", "private"), modes):
                found = fresh_process(module, folder, arguments.rounds, arm, mode, python=python)
                yield f"{peer} {mode}".strip(), arm, found


def main() -> None:
    """Print a line for each arm and its claims for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="of the environment with pfl, which is left out otherwise")
    parser.add_argument("--blazefl", help="of the environment with BlazeFL, which is left out otherwise")
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    for num_clients in arguments.clients:
        seconds, peaks = {}, {}
        with tempfile.TemporaryDirectory() as folder:
            write_task(Path(folder), num_clients)
            for who, arm, found in measured(arguments, num_clients, folder):
                seconds[who, arm], peaks[who, arm] = found["seconds"], found["peak"] / 2**20
                print(
                    f"{num_clients} clients, {who}, {arm}: {found['seconds']:.1f} s, {peaks[who, arm]:.0f} MiB, "
                    f"accuracy {found['accuracy']:.3f}",
                    flush=True,
                )
        for arm in ("not private", "private"):
            for peer in PEERS:
                if theirs := [taken for (who, its), taken in seconds.items() if who.startswith(peer) and its == arm]:
                    ratio = min(theirs) / seconds["fedpriv", arm]
                    claim(f"{num_clients} clients, {arm}, {peer} / fedpriv", at_least=RATIOS[peer], ratio=ratio)
            text = f"{num_clients} clients, {arm}, peak memory of fedpriv"
            claim(text, at_most=MEBIBYTES, mebibytes=peaks["fedpriv", arm])


if __name__ == "__main__":
    main()
