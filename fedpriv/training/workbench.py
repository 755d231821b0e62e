"""What a process needs to train and to evaluate: the data, the tokenised records and the model, loaded once."""

from __future__ import annotations

from functools import lru_cache

from fedpriv.adapters import BaseModel, LoraSettings, attach, load_base, read
from fedpriv.config import RunConfig
from fedpriv.data import federated
from fedpriv.data.records import Records, tokenize
from fedpriv.data.text import FederatedData, TextData
from fedpriv.errors import InputError
from fedpriv.training.model import TrainingModel


class Workbench:
    """Data and model of a run. A process has one for all clients that it plays, and for the server's tests.

    Attributes:
        data: who holds what.
        base: the frozen base with its tokenizer.
        model: the base with an adapter; whoever uses it sets the adapter first.
        initial: the adapter that a run starts from, from the configuration's seed.
    """

    def __init__(self, config: RunConfig) -> None:
        self.data: FederatedData = federated.load(config)
        self.base: BaseModel = load_base(
            config.model, task=config.task, num_labels=len(self.data.label_names), seed=config.seed
        )
        settings = LoraSettings(
            rank=config.rank,
            alpha=config.alpha,
            target_modules=config.target_modules,
            layers=config.layers,
            task=config.task,
        )
        # Models without learned positions state no limit, and tokenizers without one a number beyond all texts.
        positions = getattr(self.base.model.config, "max_position_embeddings", None)
        longest = min(positions or config.max_length, self.base.tokenizer.model_max_length)
        if config.max_length > longest:
            raise InputError(f"max_length = {config.max_length}: model {config.model!r} takes at most {longest}")
        self.model = TrainingModel(
            attach(self.base, settings, seed=config.seed),
            memory_limit=config.memory_limit_mb * 2**20,
            prefix_cache=config.prefix_cache,
        )
        self.initial = read(self.model.peft_model)
        self._max_length = config.max_length
        self._clients: dict[int, Records] = {}
        self.test = self._tokenize(self.data.test)

    def client(self, client: int) -> Records:
        """The client's tokenised records, by partition id."""
        if client not in self._clients:
            self._clients[client] = self._tokenize(self.data.clients[client])
        return self._clients[client]

    def _tokenize(self, data: TextData) -> Records:
        return tokenize(data, self.base.tokenizer, label_names=self.data.label_names, max_length=self._max_length)


def workbench(config: RunConfig) -> Workbench:
    """The workbench of this configuration; a run and its comparison share one, and so its caches."""
    return _workbench(config.without_noise)


@lru_cache(maxsize=1)
def _workbench(config: RunConfig) -> Workbench:
    return Workbench(config)
