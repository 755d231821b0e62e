"""A federation of a module of the user's own: its passes, its tests and its records, as a run's engines use them.

The function that builds the module is a program's, so such a run stays in this process. The run's configuration names
the module by a digest, by which a resumed run refuses another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedpriv.config import OWN_MODEL, RunConfig
from fedpriv.errors import InputError
from fedpriv.files import replaced_file
from fedpriv.learning.adapters import Adapter, Merged, lora
from fedpriv.learning.data import FederatedData
from fedpriv.learning.data.apart import check_apart
from fedpriv.learning.data.federated import check_sizes
from fedpriv.learning.data.tensors import Batch, TensorItem, TensorRecords, tensor_records
from fedpriv.learning.training._caches import FeatureCache, PrefixCache
from fedpriv.learning.training._passes import Predictions
from fedpriv.learning.training.evaluation import Evaluation, confusion_matrix
from fedpriv.learning.training.independence import TESTING, Tell, silent
from fedpriv.learning.training.own_models import OwnModel
from fedpriv.learning.training.workbench import Workbench

TENSORS = "model.safetensors"
"""The file in a variant's folder with the trained tensors, by the names of the module's parameters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnFederation:
    """A module of the user's own, and the records that it is trained and tested on.

    Attributes:
        model: tried.
        initial: its trained tensors as they were built.
        clients: {name of a holder: its records}, by partition id.
        test: the server's test set; None without one.
    """

    model: OwnModel
    initial: Adapter
    name: str
    clients: Mapping[str, TensorRecords]
    test: TensorRecords | None

    @staticmethod
    def of(build: Callable[[], Any], data: Any, test_data: Any = None, *, seed: int) -> OwnFederation:
        """The federation of a model and records that a program gave.

        Args:
            build: returns an `OwnModel`. It is called once, with torch's generator at the seed, and what it reads is
                public, since the model is.
            data: the records of each holder, a sequence or {name: records}, as `tensor_records` takes them.
            test_data: the server's own, likewise; None for none.

        Raises:
            InputError: the model cannot be trained, or records do not fit it; one line says which.
        """
        if isinstance(build, nn.Module):
            raise InputError(
                f"model = {type(build).__name__}: must be a function that builds an OwnModel, so that the run's seed "
                "decides its values"
            )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = build()
        if not isinstance(model, OwnModel):
            raise InputError(f"model: its function returned a {type(model).__name__}; must return an OwnModel")
        for name, parameter in model.parameters.items():
            if parameter.dtype != torch.float32:
                raise InputError(f"model: {name} is {parameter.dtype}; trained parameters must be torch.float32")
        clients = {name: _fitting(model, records, f"data, {name}") for name, records in _named(data).items()}
        return OwnFederation(
            model=model,
            initial=lora.read_parameters(model.parameters),
            name=OWN_MODEL + model.digest(),
            clients=clients,
            test=None if test_data is None else _fitting(model, test_data, "test_data"),
        )


def _named(data: Any) -> Mapping[str, Any]:
    """{name of a holder: its records}."""
    if isinstance(data, Mapping) and data:
        return {str(name): records for name, records in data.items()}
    if isinstance(data, Sequence) and data:
        return {f"client {client}": records for client, records in enumerate(data)}
    raise InputError(
        f"data: a {type(data).__name__} with no records of a holder; a model of your own takes a sequence with the "
        "records of each holder, or {name: records}"
    )


def _contents(sets: Iterable[TensorRecords]) -> Iterator[bytes]:
    """The content of each record of each set."""
    return (records.part([index]).content for records in sets for index in range(len(records)))


def _fitting(model: OwnModel, given: Any, name: str) -> TensorRecords:
    """The records, which have the form of the model's public ones."""
    records = tensor_records(given, name=name)
    try:
        model.check_fits(records.batch)
    except InputError as error:
        raise InputError(f"{name}: {str(error).removeprefix('records: ')}") from None
    return records


class OwnTrainingModel:
    """An own model as local updates and evaluations use it; see `TrainedModel`.

    Args:
        own: tried.
        initial: the tensors that the run starts from.
        memory_limit: bytes for the clients of a stack.
    """

    base_dtype_name = "float32"
    """The format of what is trained; that of the frozen layers is the module's own."""
    alone = False
    num_workers = 1
    head: str | None = None
    features: FeatureCache | None = None
    cache: PrefixCache | None = None
    recomputed: Sequence[nn.Module] = ()
    tell: Tell = staticmethod(silent)

    def __init__(self, own: OwnModel, initial: Adapter, *, memory_limit: int) -> None:
        self._own, self.initial, self.memory_limit = own, initial, memory_limit
        self.device, self.layers, self.parameters = own.device, own.layers, own.parameters
        self.adapter_names = {name: name for name in own.parameters}
        self.num_frozen_values = own.num_frozen_values
        self.num_classes = self._num_classes()

    @property
    def head_tensors(self) -> set[str]:
        """None: there is no head whose inputs are kept."""
        return set()

    @property
    def can_evaluate(self) -> bool:
        """Whether it is known how right the model is on a record."""
        return self._own.evaluate is not None or self.num_classes is not None

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Refuse, with a ValueError, tensors that are not the model's, and a module changed since it was tried."""
        if shapes != {name: parameter.shape for name, parameter in self.parameters.items()}:
            raise ValueError("adapter: its tensors are not those of the model, in name or shape")
        self._own.check_unchanged()

    def check_merged(self, merged: Merged) -> None:
        """Refuse additions to frozen weights, with a ValueError."""
        if merged:
            raise ValueError("merged: nothing is added to the frozen weights of a model of your own")

    def merge(self, merged: Merged) -> None:
        """Leave the frozen weights as they are; see `check_merged`."""
        self.check_merged(merged)

    def passes(self, items: Sequence[TensorItem], num_values: int | None = None) -> Iterator[list[int]]:
        """The positions of the records in passes of as many as the model takes, in their order."""
        for begin in range(0, len(items), self._own.rows):
            yield list(range(begin, min(begin + self._own.rows, len(items))))

    def objectives(self, items: Sequence[TensorItem], objective: str, *, cached: bool) -> Tensor:
        """[records] The losses of the records; ValueError if the objective is another one."""
        if objective != "loss":
            raise ValueError(f"objective = {objective!r}: a model of your own has losses alone")
        return self._own.losses_of(self._batch(items))

    def predictions(self, items: Sequence[TensorItem], *, cached: bool) -> Predictions:
        """The predictions of the records."""
        return self._predicted(self._batch(items))[0]

    @torch.no_grad()
    def evaluate(self, records: TensorRecords) -> Evaluation:
        """How right the model is on public records, of which there must be some, and how large its losses are."""
        items = records.items()
        if not items:
            raise ValueError("evaluation needs at least one record")
        hits, losses, answers = [], [], []
        for together in self.passes(items):
            found, classes = self._predicted(self._batch([items[position] for position in together]))
            hits.append(found.hits.double().cpu())
            losses.append(found.losses.double().cpu())
            if classes is not None:
                answers.append(torch.stack([each.cpu() for each in classes]))
            self.tell(TESTING, together[-1] + 1, len(items))
        return Evaluation(
            accuracy=float(torch.cat(hits).mean()),
            loss=float(torch.cat(losses).mean()),
            confusion=self._confusion(answers),
        )

    def _confusion(self, answers: Sequence[Tensor]) -> Any:
        if not answers or self.num_classes is None:
            return None
        truth, predicted = np.concatenate([each.numpy() for each in answers], axis=1)
        return confusion_matrix(truth, predicted, self.num_classes)

    def _batch(self, items: Sequence[TensorItem]) -> Batch:
        """The records as a pass, those of one set at a time."""
        pieces = [list(group) for _, group in groupby(items, key=lambda item: id(item[0]))]
        return self._own.together([(piece[0][0].batch, [index for _, index in piece]) for piece in pieces])

    def _predicted(self, batch: Batch) -> tuple[Predictions, tuple[Tensor, Tensor] | None]:
        """The predictions of a batch; and the true and the likeliest class of each record, where there are classes."""
        with _CrossEntropies() as seen:
            losses = self._own.losses_of(batch)
        classes = seen.classes_of(losses)
        if self._own.evaluate is not None:
            hits = self._own.evaluate(batch).float()
            if hits.shape != losses.shape or not bool(((hits >= 0) & (hits <= 1)).all()):
                raise InputError(
                    f"evaluate: returns shape {list(hits.shape)} for {len(losses)} records; must be "
                    f"[{len(losses)}], each in [0, 1]"
                )
            classes = None
        elif classes is not None:
            hits = (classes[0] == classes[1]).float()
        else:
            hits = torch.full_like(losses, torch.nan)
        return Predictions(losses=losses, hits=hits, num_targets=torch.ones_like(losses, dtype=torch.int64)), classes

    @torch.no_grad()
    def _num_classes(self) -> int | None:
        """The number of classes among which the losses' cross-entropy chooses; None if they are something else."""
        with _CrossEntropies() as seen:
            _, classes = self._predicted(self._own.public)
        return None if classes is None else seen.num_classes


class _CrossEntropies(TorchFunctionMode):
    """Within this context, the logits and classes of a cross-entropy are noted."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(
        self, function: Any, kinds: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is F.cross_entropy and len(args) >= 2:
            self._calls.append((args[0], args[1], result))
        return result

    @property
    def num_classes(self) -> int:
        """The number of classes of the last cross-entropy."""
        return self._calls[-1][0].shape[-1]

    def classes_of(self, losses: Tensor) -> tuple[Tensor, Tensor] | None:
        """The true and the likeliest class of each record, if the losses are the one cross-entropy; else None."""
        if len(self._calls) != 1:
            return None
        logits, truth, found = self._calls[0]
        is_plain = logits.dim() == 2 and truth.dim() == 1 and not truth.is_floating_point()
        if not is_plain or found.shape != losses.shape or not (found is losses or torch.equal(found, losses)):
            return None
        return truth, logits.argmax(dim=1)


class OwnWorkbench(Workbench):
    """Model and records of a run of an own model. It has no tokens: what needs some is refused by the configuration.

    Raises:
        InputError: a holder has too few records, or nothing says how right the model is on the records that it is to be
            tested on.
    """

    model: OwnTrainingModel  # type: ignore[assignment]  # runs ask of it what `TrainedModel` says

    def __init__(self, config: RunConfig, federation: OwnFederation) -> None:
        check_sizes(config, {name: len(records) for name, records in federation.clients.items()})
        self.config, self._source, self._federation, self.files = config, None, federation, {}
        self.label_names = ()  # of texts; class sums are theirs
        limit = config.memory_limit_mb * 2**20
        self.model = OwnTrainingModel(federation.model, federation.initial, memory_limit=limit)
        self.initial, self.num_clients = federation.initial, len(federation.clients)
        self._clients = {}
        self.read_for = self.content_note = ""
        self.coin_key = str(config.seed_of_data).encode()
        if federation.test is not None and not config.protects_nobody:
            check_apart(config, list(_contents([federation.test])), _contents(federation.clients.values()))
        is_tested = federation.test is not None or config.evaluation_noise_multiplier is not None
        if is_tested and not self.model.can_evaluate:
            raise InputError(
                "evaluate: the losses are no cross-entropy over logits, so nothing says how right the model is on a "
                "record; give OwnModel evaluate=..., or no test_data"
            )

    @cached_property
    def data(self) -> FederatedData:
        """The clients' records and the server's test set, which may be empty."""
        federation, num_classes = self._federation, self.model.num_classes or 0
        clients = tuple(federation.clients.values())
        return FederatedData(
            clients=clients,  # type: ignore[arg-type]  # records of tensors, as the model reads them
            client_names=tuple(federation.clients),
            test=federation.test or clients[0].part([]),  # type: ignore[arg-type]
            label_names=tuple(map(str, range(num_classes))),
        )

    @cached_property
    def test(self) -> TensorRecords:  # type: ignore[override]
        """The server's test set."""
        return self.tokenize(self.data.test)

    @cached_property
    def no_records(self) -> TensorRecords:  # type: ignore[override]
        """An empty set, for an update that is noise alone, or whose records are yet to be read."""
        return self.tokenize(self.data.clients[0].part([]))

    def client(self, client: int, encode: object = None) -> TensorRecords:  # type: ignore[override]
        """The records that the client trains on."""
        read: dict[int, Any] = self._clients
        if client not in read:
            read[client] = self._split(client)[0]
        return self.tokenize(read[client])

    def tokenize(self, data: Any, encode: object = None) -> TensorRecords:  # type: ignore[override]
        """The records as they are: the model reads tensors."""
        records: TensorRecords = data
        return records

    def content(self, client: int) -> bytes:
        """Bytes that differ where the client's records do; they stay with their holder."""
        return self.tokenize(self.data.clients[client]).content

    def evaluate(self, **_: Any) -> Evaluation:
        """The quality of the model, with its current tensors, on the server's test set."""
        return self.model.evaluate(self.test)

    def save(self, path: Path, adapter: Adapter, merged: Merged) -> None:
        """Write the trained tensors into a variant's folder, by the names of the module's parameters."""
        path.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in adapter.items()}
        with replaced_file(path / TENSORS) as file:
            safetensors.torch.save_file(tensors, file.name, metadata={"format": "pt", "model": self._federation.name})
