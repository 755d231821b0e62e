"""What a process needs to train and to evaluate: the data, the tokenised records and the model, loaded once."""

from __future__ import annotations

from functools import lru_cache

import torch

from fedpriv.adapters import BaseModel, LoraSettings, attach, load_base
from fedpriv.aggregation.rules import RULES
from fedpriv.config import ON_NODES, RunConfig
from fedpriv.data import federated
from fedpriv.data.records import Records, tokenize
from fedpriv.data.text import FederatedData, Holding, TextData
from fedpriv.errors import InputError
from fedpriv.training.model import TrainingModel


def load_model(config: RunConfig, *, num_labels: int) -> tuple[BaseModel, TrainingModel]:
    """The frozen base with its tokenizer, and the same base with an adapter, on the configured device.

    Raises:
        InputError: the model, an adapter setting or the device cannot be used.
    """
    base = load_base(config.model, task=config.task, num_labels=num_labels, seed=config.seed)
    # Models without learned positions state no limit, and tokenizers without one a number beyond all texts.
    positions = getattr(base.model.config, "max_position_embeddings", None)
    longest = min(positions or config.max_length, base.tokenizer.model_max_length)
    if config.max_length > longest:
        raise InputError(f"max_length = {config.max_length}: model {config.model!r} takes at most {longest}")
    settings = LoraSettings(
        rank=config.rank,
        alpha=config.alpha,
        target_modules=config.target_modules,
        layers=config.layers,
        task=config.task,
        trains=RULES[config.aggregation].trains,
    )
    model = TrainingModel(
        attach(base, settings, seed=config.seed).to(_device(config.device)),
        memory_limit=config.memory_limit_mb * 2**20,
        prefix_cache=config.prefix_cache,
    )
    return base, model


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device = {name!r}: {torch.cuda.device_count()} GPUs are here; use cpu or auto")
    return device


class Workbench:
    """Data and model of a run. A process has one for all clients that it plays, and for the server's tests.

    Args:
        config: of the run.
        holding: where this node has its records, where the run's data are on its nodes.

    Attributes:
        data: who holds what.
        base: the frozen base with its tokenizer.
        model: the base with an adapter; whoever uses it sets the adapter first.
        initial: the trained tensors that a run starts from, from the configuration's seed.
        num_clients: how many clients the run has, wherever their data are.
    """

    def __init__(self, config: RunConfig, holding: Holding | None = None) -> None:
        self.data: FederatedData = federated.load_holding(config, holding) if holding else federated.load(config)
        self.base, self.model = load_model(config, num_labels=len(self.data.label_names))
        self.initial = self.model.initial
        self.num_clients = len(self.data.clients) if config.data != ON_NODES else config.num_clients
        self._max_length = config.max_length
        self._clients: dict[int, Records] = {}
        self.test = self._tokenize(self.data.test)

    def client(self, client: int) -> Records:
        """The client's tokenised records, by its place in `data.clients`."""
        if client not in self._clients:
            self._clients[client] = self._tokenize(self.data.clients[client])
        return self._clients[client]

    def _tokenize(self, data: TextData) -> Records:
        return tokenize(data, self.base.tokenizer, label_names=self.data.label_names, max_length=self._max_length)


def workbench(config: RunConfig, holding: Holding | None = None) -> Workbench:
    """The workbench of this configuration; a run and its comparison share one, and so its caches."""
    return _workbench(config.without_noise, holding)


@lru_cache(maxsize=1)
def _workbench(config: RunConfig, holding: Holding | None) -> Workbench:
    return Workbench(config, holding)
