"""The data, tokenised records and model that a process needs for training and evaluation, loaded once."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from fedpriv.config import ON_NODES, Fact, RunConfig
from fedpriv.errors import InputError
from fedpriv.learning.adapters import (
    Adapter,
    BaseModel,
    LoraSettings,
    Merged,
    attach,
    last_targets,
    leading_block,
    load_base,
    model_state,
    quantise,
    save,
)
from fedpriv.learning.data import DataSource, FederatedData, TextData, federated
from fedpriv.learning.data.chat import ChatFormat
from fedpriv.learning.data.identity import DataDigests, accounts, digests_of_files
from fedpriv.learning.data.records import (
    Encode,
    Encoder,
    Records,
    TextReading,
    check_max_length,
    encoder_of,
    tokenize,
    usable,
    with_choices,
)
from fedpriv.learning.data.text import at_most, unpacked_choices, with_right
from fedpriv.learning.training._admission import admit, check_learns, check_weights, in_format, public_record
from fedpriv.learning.training._passes import RECORDS_OF_A_STEP
from fedpriv.learning.training.evaluation import Evaluation, evaluate
from fedpriv.learning.training.independence import num_cores, refusing
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.rehearsal import random_records
from fedpriv.learning.training.stacked import local_update
from fedpriv.privacy.mechanisms.sources import SeededSource

log = logging.getLogger(__name__)

# The tokens of so many clients stay, or of those asked in four rounds; of more, the first go, which are seldom asked.
_LEAST_KEPT = 1000

# The last workbench, by what it depends on; with `base_dtype = auto` also by what that came to.
_last: dict[Hashable, Workbench] = {}
# The one that was last asked for.
_asked: dict[tuple[int, int], tuple[Workbench, RunConfig, DataSource | None]] = {}
_own: dict[str, Callable[[RunConfig], Workbench]] = {}

_NUM_LABELS = 8


def load_model(
    config: RunConfig, *, labels: tuple[str, ...], alone: bool = False, num_workers: int = 1
) -> tuple[BaseModel, TrainingModel]:
    """The frozen base with its tokenizer, and the same base with an adapter, on the configured device.

    Args:
        alone, num_workers: as for `TrainingModel`.

    Raises:
        InputError: the model, an adapter setting or the device cannot be used, or no text can be learned from.
    """
    base = load_frozen(config, config.model, task=config.task, labels=labels, normalize=config.normalize_features)
    # Models without learned positions state no limit; tokenizers without a limit state a huge number.
    positions = getattr(base.model.config, "max_position_embeddings", None)
    longest = min(positions or config.max_length, base.tokenizer.model_max_length)
    if config.max_length > longest:
        raise InputError(f"max_length = {config.max_length}: model {config.model!r} takes at most {longest}")
    encoder = encoder_of(config)
    if isinstance(encoder, ChatFormat):
        encoder.check(base.tokenizer, model=config.model, max_length=config.max_length)
    else:
        check_max_length(base.tokenizer, config.max_length, pairs=bool(config.text_pair_column))
    rule = config.rule
    settings = LoraSettings(
        rank=config.rank,
        alpha=config.alpha,
        target_modules=config.target_modules,
        layers=config.layers,
        task=config.task,
        trains="head" if config.train == "head" else rule.trains,
        orthonormal=rule.orthonormal,
    )
    attached = partial(attach, base, seed=config.seed)
    if config.factors != "weights":
        base.model.to(_device(config.device))  # which computes what the factors are made of
        from fedpriv.learning.training.public_factors import (  # deferred: few runs need them
            leading_directions,
            readout_factors,
        )

        public = {"tokenizer": base.tokenizer, "max_length": config.max_length}
    if config.factors == "answers":
        chat = TextReading.of(config).chat
        attached = partial(attached, factors=partial(readout_factors, chat=chat, answers=config.answers, **public))
        settings = replace(settings, target_modules=config.target_modules or last_targets(base))
    if config.factors == "inputs":
        attached = partial(attached, rows=partial(leading_directions, **public))
    model = ready(config, attached(settings), alone=alone, num_workers=num_workers)
    with refusing(model.peft_model.config.model_type):
        check_learns(model, public_record(base, config, num_labels=len(labels)))
    return base, model


def load_frozen(config: RunConfig, model: str, *, task: str, labels: tuple[str, ...], normalize: bool) -> BaseModel:
    """A frozen base in float32, or in 4 bits on the configured device; InputError if model or device cannot be used."""
    quantised = config.base_dtype == "nf4"
    dtype: Any = "auto" if quantised else torch.float32
    base = load_base(model, task=task, labels=labels, seed=config.seed, normalize=normalize, dtype=dtype)
    check_weights(base)
    if base.longest is not None and config.max_length > base.longest:
        raise InputError(
            f"max_length = {config.max_length}: model {model!r} reads {base.longest} tokens at most, as max_seq_length "
            f"in its sentence_bert_config.json says; use {base.longest}"
        )
    if quantised:
        quantise(base.name, base.model, _device(config.device))
    return base


def ready(config: RunConfig, peft_model: Any, *, alone: bool = False, num_workers: int = 1) -> TrainingModel:
    """A base with an adapter, from `load_frozen`, on its device, in its format, and admitted, or else an InputError."""
    peft_model = peft_model.to(_device(config.device))
    build = partial(
        TrainingModel,
        peft_model,
        memory_limit=config.memory_limit_mb * 2**20,
        prefix_cache=config.prefix_cache,
        activation_checkpointing=config.activation_checkpointing,
        max_length=config.max_length,
        alone=alone,
        num_workers=num_workers,
    )
    with refusing(peft_model.config.model_type):
        model = in_format(peft_model, config.base_dtype, build)
        admit(model)
    return model


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device = {name!r}: this machine has {torch.cuda.device_count()} GPUs; use cpu or auto")
    return device


class Workbench:
    """Data and model of a run. A process has one for all clients that it simulates and for the server's evaluation.

    On a node with records of its own, nothing reads them before `client` asks for them: a model, and whatever else
    precedes a charge, must not depend on them.

    Args:
        source: where this node's own records are, if the run's data are on its nodes.

    Attributes:
        label_names: the classes, in the order of their indices; empty for causal models.
        base: the frozen base with its tokenizer.
        model: the base with an adapter; every user sets the adapter first.
        initial: the trained tensors that a run starts from, drawn from the configuration's seed.
        num_clients: of the run, wherever their data are.
        read_for: id of the data set for which a node's own records were read; empty if they were not.
        files: {file: digest} of what the data were read from, where the run names them.
        content_note: on a node's own records, as its ledger has it; empty if they were not read.
        coin_key: decides which records are set aside: the run's seed, or a secret of the node's for records of its own.
    """

    def __init__(self, config: RunConfig, source: DataSource | None = None) -> None:
        self.config, self._source = config, source
        self.files = {} if source else digests_of_files(config)
        own_names = config.labels if config.task == "SEQ_CLS" else ()
        self.label_names = own_names if source else self.data.label_names
        self.base, self.model = load_model(
            config, labels=self.label_names, alone=source is not None, num_workers=num_cores() if source else 1
        )
        self.initial = self.model.initial
        self.num_clients = len(self.data.clients) if config.data != ON_NODES else config.num_clients
        self._clients: dict[int, Records] = {}
        self.read_for = self.content_note = ""
        self.coin_key = str(config.seed_of_data).encode()

    def started(self, config: RunConfig) -> Workbench:
        """The same data and model, for a run that starts with as much of R as its configuration trains."""
        own = copy.copy(self)
        if config.trained_rank is not None:
            own.initial = leading_block(self.model.initial, config.trained_rank)
        return own

    @cached_property
    def data(self) -> FederatedData:
        """The clients' records and the server's test set, which may be empty."""
        return federated.load_own(self.config, self._source) if self._source else federated.load(self.config)

    @cached_property
    def accounts(self) -> tuple[str, ...]:
        """The account that a ledger keeps for each client; empty where nodes hold the records."""
        return accounts(self.config, self.data.client_names) if self.config.data != ON_NODES else ()

    @cached_property
    def digests(self) -> DataDigests | None:
        """The digests of the data; None where nodes hold the records."""
        return DataDigests.of(self.config, self.data, self.files) if self.config.data != ON_NODES else None

    @cached_property
    def test(self) -> Records:
        """The server's test set, tokenised; InputError if nothing can be predicted in any of its records."""
        data, answers = self.data.test, self.config.answers
        if answers and len(data):
            known = [(answers.index(own) if own in answers else -1, answers) for own in data.pairs or ()]
            found = with_choices(data, known, self._tokenized, len(answers))
        else:
            found = self.tokenize_tested(data)
        if len(found) and not any(map(usable, found.items())):
            raise InputError(
                f"{'test_data' if self.config.test_data else 'data'}: none of the {len(found)} test records can be "
                f"learned from at max_length = {self.config.max_length}; an empty response cannot"
            )
        return found

    @cached_property
    def no_records(self) -> Records:
        """An empty set, for an update that is noise alone, or whose records are yet to be read."""
        return self.tokenize(TextData((), ()))

    @cached_property
    def features(self) -> tuple[str, ...]:
        """The names of a record's features."""
        pairs, max_length = bool(self.config.text_pair_column), self.config.max_length
        return self.encoder.names(self.base.tokenizer, pairs=pairs, max_length=max_length)

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder that turns records into tokens."""
        return encoder_of(self.config)

    def client(self, client: int, encode: Encode | None = None) -> Records:
        """The tokenised records that the client trains on, by its index in `data.clients`."""
        if client not in self._clients:
            found = self.tokenize(self._split(client)[0], encode)
            self._warn(client, found)
            self._clients[client] = found
            if self.config.clients_per_round and len(self._clients) > max(
                _LEAST_KEPT, 4 * self.config.clients_per_round
            ):
                del self._clients[next(iter(self._clients))]
        return self._clients[client]

    def _warn(self, client: int, records: Records) -> None:
        """Log, on the machine of the records, what of them no model can learn."""
        unusable = 0 if records.unusable is None else int(records.unusable.sum())
        most = self.config.max_length
        cut = 0 if self.config.task == "SEQ_CLS" else records.num_cut(self._end)
        full = records.num_full(most) - cut if isinstance(self.encoder, ChatFormat) else 0
        for number, what in (
            (unusable, "have nothing to train on"),
            (cut, f"are cut to {most} tokens"),
            (full, f"fill all {most} tokens, so their prompts may be cut; fedpriv data check counts those that are"),
        ):
            if number:
                log.warning("client %d: %d of %d records %s", client, number, len(records), what)

    @cached_property
    def _end(self) -> int | None:
        """The token that ends a causal model's record."""
        if not isinstance(self.encoder, ChatFormat):
            end: int | None = self.base.tokenizer.eos_token_id
            return end
        return self.encoder.end(self.base.tokenizer)

    def evaluate(self, *, keep_features: bool = False) -> Evaluation:
        """The quality of the model, with its current adapter, on the server's test set; see `evaluate`."""
        return evaluate(self.model, self.test, keep_features=keep_features)

    def save(self, path: Path, adapter: Adapter, merged: Merged) -> None:
        """Write the model with this adapter into a variant's folder, in the form in which others can use it."""
        reading = TextReading.of(self.config).to_json()
        labels = self.data.label_names
        save(self.model.peft_model, self.base, path, adapter=adapter, merged=merged, labels=labels, reading=reading)

    def content(self, client: int) -> bytes:
        """Bytes that differ where the client's records do, and that no run decides on a node; they stay there."""
        return repr(self.data.clients[client]).encode()

    def forget_records(self) -> None:
        """Read a node's own records again when they are next asked for."""
        self.__dict__.pop("data", None)
        self._clients.clear()
        self.read_for = self.content_note = ""

    def has_tokens(self, client: int) -> bool:
        """Whether the records that the client trains on are in memory."""
        return client in self._clients

    def set_aside(self, client: int) -> TextData:
        """The client's records for private evaluation, which are never trained on."""
        return self._split(client)[1]

    def _split(self, client: int) -> tuple[TextData, TextData]:
        data = self.data.clients[client]
        if self._source:  # whose replies have time for so many
            data = at_most(data, self._source.most_of_a_person, self.coin_key)
        if self.config.evaluation_noise_multiplier is None:
            train, aside = data, data.part([])
        else:
            train, aside = federated.held_out(data, fraction=self.config.test_fraction, key=self.coin_key)
        if self._source is None:
            return train, aside
        return federated.answered(train, self.config), federated.answered(aside, self.config)

    def tokenize_tested(self, data: TextData) -> Records:
        """The records in tokens, with their choices if they have any, to test the model on."""
        if not self.config.choice_columns:
            return self.tokenize(data)
        choices = list(map(unpacked_choices, data.pairs or ()))
        return with_choices(
            with_right(data), choices, partial(self._tokenized, are_choices=True), self.config.max_choices
        )

    def tokenize(self, data: TextData, encode: Encode | None = None) -> Records:
        """The records in tokens, as the run reads them, to train on."""
        return self._tokenized(with_right(data) if self.config.choice_columns else data, encode)

    def _tokenized(self, data: TextData, encode: Encode | None = None, *, are_choices: bool = False) -> Records:
        found = tokenize(
            data,
            self.base.tokenizer,
            label_names=self.label_names,
            # Without any padding models leave out the mask, and compute in another way: a node's clock could tell it.
            max_length=self.config.max_length - are_choices,
            vocabulary=self.base.model.get_input_embeddings().num_embeddings,
            encode=encode or self.encoder.encode,
            names=self.features,
        )
        return replace(found, are_choices=True) if are_choices else found


def workbench(config: RunConfig, source: DataSource | None = None) -> Workbench:
    """The workbench of this configuration; runs that need the same model and data share one, with its caches.

    Raises:
        InputError: the model is a program's own, and this process has none of this name; or files of a node's model
            change while they are read.
    """
    if (id(config), id(source)) in _asked:  # every client of a simulated round asks with the same objects
        return _asked[id(config), id(source)][0]
    if (key := _key(config, source)) not in _last:
        forget()
        bench = _made(config, source)
        if _key(config, source) != key:
            raise InputError(f"model = {config.model!r}: its files changed while they were read")
        settled = replace(config, base_dtype=bench.model.base_dtype_name)
        _last[key] = _last[_key(settled, source)] = bench
    _asked.clear()
    # With the objects, so that no others get their ids.
    _asked[id(config), id(source)] = _last[key], config, source
    return _last[key]


def _key(config: RunConfig, source: DataSource | None) -> Hashable:
    keys = set(config.keys_with(Fact.RELOADS)) - set(config.keys_with(Fact.OUTSIDE))
    # A node checks the files of its model whenever it is asked, and so has the model of these very files.
    state = model_state(Path(config.model)) if source else ()
    return frozenset((key, getattr(config, key)) for key in keys), source, state


def _made(config: RunConfig, source: DataSource | None) -> Workbench:
    if not config.is_own_model:
        return Workbench(config, source)
    if config.model not in _own or source:
        raise InputError(
            f"model = {config.model!r}: was made by a program, which alone has it; run, or resume, it there with "
            "fedpriv.run(model=..., data=...)"
        )
    return _own[config.model](config)


@contextmanager
def providing(model: str, make: Callable[[RunConfig], Workbench]) -> Iterator[None]:
    """Within this context the runs of this process find a program's own model, and its records, by the model's name."""
    _own[model] = make
    try:
        yield
    finally:
        del _own[model]
        forget()


def forget_changed(config: RunConfig) -> None:
    """Read a run's data again if their files have changed since this process read them."""
    now = digests_of_files(config)
    if any(bench.files.get(name, digest) != digest for bench in _last.values() for name, digest in now.items()):
        forget()


def forget() -> None:
    """Free the last workbench; the next one reads data and model again."""
    _last.clear()
    _asked.clear()


def records_per_second(at_least_seconds: float = 2.0) -> float:
    """Records that an update of the default model and its LoRA takes in a second, in one process of this machine.

    The records are random tokens, as long as the model reads them, and pass through all of its layers; real ones are
    shorter, and the states of frozen layers are kept.
    """
    config = RunConfig(prefix_cache=False, noise_multiplier=1.0, start_noise_multiplier=1.0, learning_rate=1.0)
    _, model = load_model(config, labels=tuple(map(str, range(_NUM_LABELS))))
    source = SeededSource(0)
    spec = UpdateSpec.of(config)
    task = UpdateTask(
        adapter=model.initial,
        data=random_records(model, [config.max_length] * RECORDS_OF_A_STEP, num_labels=_NUM_LABELS),
        spec=spec,
        round=1,
        sampler=spec.sampler(RECORDS_OF_A_STEP, source),
        noise=source,
    )
    local_update(model, task)
    num_updates, started = 0, time.perf_counter()
    while time.perf_counter() - started < at_least_seconds:
        local_update(model, task)
        num_updates += 1
    return num_updates * RECORDS_OF_A_STEP / (time.perf_counter() - started)
