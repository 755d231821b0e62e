"""The arm of BlazeFL: its own FedAvg, in one of its three modes, as its examples use it.

A user's part is the model, the records and the loop of rounds. Nothing slows it that need not: a thread keeps its
model, clients send the trained values alone, and records stay in memory. Processes are forked, which the CPU allows and
starts them fastest. Threads of Python's own build take turns, and BlazeFL recommends a free-threaded one.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blazefl.contrib import (
    FedAvgBaseClientTrainer,
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import deserialize_model, serialize_model
from torch.utils.data import DataLoader, TensorDataset

from simulations.benchmarks._peer_task import Classifier, read_task, tell

WORKERS = len(os.sched_getaffinity(0))


class BlazeClassifier(Classifier):
    """The model, of which BlazeFL sends `state_dict` and which it puts into training mode."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.trained = [value for value in self.parameters() if value.requires_grad]

    def state_dict(self) -> dict[int, torch.Tensor]:  # type: ignore[override]
        """The trained values."""
        return {number: value.data for number, value in enumerate(self.trained)}

    def train(self, mode: bool = True) -> BlazeClassifier:
        """Nothing: dropout stays off."""
        return self


@functools.cache
def model_of(folder: Path, thread: int | None) -> BlazeClassifier:
    """That of a thread, which trains one client after the other; the main thread's is read from files."""
    main = threading.main_thread().ident
    return BlazeClassifier(folder) if thread == main else copy.deepcopy(model_of(folder, main))


@dataclass(frozen=True)
class Task:
    """BlazeFL's model selector and partitioned dataset, which go to its processes with each client."""

    folder: Path

    def select_model(self, model_name: str) -> BlazeClassifier:
        """The model of this thread."""
        return model_of(self.folder, threading.get_ident())

    def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: Any) -> Any:
        """A client's batches, in another order each round."""
        data = TensorDataset(*read_task(self.folder)["clients"][cid])
        return DataLoader(data, batch_size=batch_size, shuffle=True, generator=generator)

    def set_dataset(self, type_: str, cid: int, dataset: Any) -> None:
        """Nothing: training leaves records as they are."""


class PrivateHandler(FedAvgBaseServerHandler):  # type: ignore[misc]
    """The server clips each client's update and adds noise to their sum."""

    def global_update(self, buffer: list[Any]) -> None:
        """A round's step."""
        before, clip_norm = serialize_model(self.model), read_task(self.dataset.folder)["clip_norm"]
        updates = torch.stack([package.model_parameters for package in buffer]) - before
        clipped = updates * (clip_norm / updates.norm(dim=1, keepdim=True)).clamp(max=1.0)
        noisy_sum = clipped.sum(dim=0) + clip_norm * torch.randn(len(before))
        deserialize_model(self.model, before + noisy_sum / len(buffer))


def main(folder: Path, rounds: int, private: bool, mode: str) -> None:
    """Print accuracy and peak memory."""
    task = read_task(folder)
    shared: dict[str, Any] = {
        **dict.fromkeys(("model_selector", "dataset"), Task(folder)),
        "model_name": "",
        "device": "cpu",
        "num_clients": len(task["clients"]),
        "batch_size": task["batch_size"],
        "seed": 0,
    }
    training = {"epochs": 1, "lr": task["learning_rate"]}
    handler = (PrivateHandler if private else FedAvgBaseServerHandler)(**shared, global_round=rounds, sample_ratio=1.0)
    handler.model = copy.deepcopy(handler.model)
    trainer = {
        "single": lambda: FedAvgBaseClientTrainer(**shared, **training),
        "threads": lambda: FedAvgThreadPoolClientTrainer(**shared, **training, num_parallels=WORKERS),
        "processes": lambda: FedAvgProcessPoolClientTrainer(
            **shared, **training, num_parallels=WORKERS, state_dir=folder / f"states-{private}"
        ),
    }[mode]()
    while not handler.if_stop():
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        for package in trainer.uplink_package():
            handler.load(package)
    rows, labels = task["test"]
    tell(handler.model.num_right(rows, labels) / len(labels))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "private", sys.argv[4])
