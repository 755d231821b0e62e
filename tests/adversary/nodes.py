"""Nodes with data of their own, and a coordinator that asks them what it likes and keeps what comes back.

All that knows how a node is set up, and how a question travels, is here.
"""

import csv
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import tomli_w
from torch import Tensor

from fedpriv.config import ON_NODES, RunConfig, Scalar, parse, to_flower
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder
from fedpriv.holder.vault.settings import FILE, ApprovedModel, VaultSettings, models_text
from fedpriv.holder.wire import frame, kinds
from fedpriv.holder.wire.frame import FrameError, Request, Response
from fedpriv.learning.adapters._locations import model_digest
from fedpriv.learning.training import workbench as workbench_module
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.views import default_delta
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.entries import CHARGED
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from tests.tiny import LABELS
from tests.vaults import UNTIMED

Row = tuple[str, ...]
"""A record: its text and its label and, at a node of persons, whom it is about."""

Arrays = Mapping[str, Mapping[str, Tensor | np.ndarray]]
"""{record's name: {array's name: array}}"""


@dataclass(frozen=True)
class Node:
    """A data holder's node.

    Attributes:
        folder: of its files.
    """

    folder: Path

    @property
    def settings(self) -> VaultSettings:
        """What its operator wrote."""
        return VaultSettings.read(self.folder)

    @property
    def records(self) -> Path:
        """The table of its records."""
        return self.folder / "records.csv"


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """What a coordinator sends.

    Attributes:
        kind: of the request.
        config: the run's configuration, in Flower's form.
        fields: the instruction of a train message.
        arrays: of a train message.
        own: what the node alone is told.
    """

    kind: str
    config: Mapping[str, Scalar]
    fields: Mapping[str, Scalar] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    own: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def request(self) -> Request:
        """As the node gets it."""
        arrays = {part: {name: np.asarray(a) for name, a in named.items()} for part, named in self.arrays.items()}
        return Request.of(self.kind, self.config, fields=self.fields, arrays=arrays, own=self.own)


@dataclass(frozen=True)
class Answer:
    """All that leaves a node for one question.

    Attributes:
        frame: its bytes.
    """

    frame: bytes

    @property
    def response(self) -> Response:
        """What the bytes say."""
        return Response(self.frame)

    @property
    def code(self) -> int:
        """Of an error, or 0."""
        return self.response.code

    def __repr__(self) -> str:
        response = self.response
        named = response.arrays.get(kinds.ADAPTER, {})
        arrays = {name: float(array.astype(float).sum()) for name, array in named.items()}
        return f"Answer({response.code}, {response.reason!r}, {response.fields}, sums of arrays = {arrays})"


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """The holder's table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label", "person")[: max(map(len, rows), default=2)], *rows])


def make_node(
    folder: Path,
    rows: Sequence[Row],
    *,
    num_registered: int | None,
    models: Mapping[str, Path],
    budget_epsilon: float | None = 1000.0,
    limits: Mapping[str, float] | None = None,
    settings: Mapping[str, object] = UNTIMED,
) -> Node:
    """A node that its operator has set up on these records.

    Args:
        folder: for its files; made.
        rows: its records.
        num_registered: N_k, equal in neighbouring worlds; None if the holder has not registered the data yet.
        models: {name: folder} that the operator has approved.
        budget_epsilon: of the data, or None for a node without.
        limits: the operator's policy where it differs from the default.
        settings: further ones of the vault; by default it measures no times.
    """
    folder.mkdir(parents=True)
    node = Node(folder)
    write_rows(node.records, rows)
    values = {"partition_id": 0, "name": "St. Anna", "data": str(node.records), "labels": list(LABELS)}
    if budget_epsilon is not None:
        values["budget_epsilon"] = budget_epsilon
    (folder / FILE).write_text(tomli_w.dumps({**values, **settings}))
    approved = (ApprovedModel(name=n, folder=str(path), digest=model_digest(path)) for n, path in models.items())
    (folder / "approved-models.toml").write_text(models_text(tuple(approved)))
    (folder / "policy.toml").write_text(tomli_w.dumps(dict(limits or {})))
    for path, content in zip((node.settings.key, keys.public_path(node.settings.key)), _key_pair(), strict=True):
        path.write_bytes(content)
    if num_registered is not None:
        register_data(node, num_registered)
    return node


@cache
def _key_pair() -> tuple[bytes, bytes]:
    """The private and the public file of a vault's key, the same for all nodes, so that two of them answer alike."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vault.key"
        keys.make_key_pair(path)
        return path.read_bytes(), keys.public_path(path).read_bytes()


def register_data(node: Node, num_records: int, *, note: str | None = None) -> None:
    """What the holder does when it registers the data in its table; the id is random, but for the comparison of two."""
    with Ledger(node.settings.ledger) as ledger:
        ledger.register("0", num_records, default_delta(num_records), data_set=f"{ledger.last[0]:032x}", note=note)


def restart() -> None:
    """Nothing stays in memory."""
    workbench_module.forget()


def run_config(**changes: object) -> RunConfig:
    """An honest run over nodes with data of their own, but for the changes."""
    return parse(
        {
            "model": "tiny",
            "data": ON_NODES,
            "test_data": "test.csv",
            "labels": ",".join(LABELS),
            "num_clients": 1,
            "layers": "last-1",
            "rank": 2,
            "rounds": 3,
            "local_steps": 1,
            "batch_size": 6,
            "clip_norm": 0.05,
            "noise_multiplier": 1.0,
            "max_length": 32,
            **changes,
        }
    )


def registering(config: RunConfig, **changes: Scalar) -> Question:
    """The question for a registration in this run; the coordinator may change its configuration as it likes."""
    return Question(kind=frame.REGISTER, config={**to_flower(config), **changes})


def training(
    config: RunConfig,
    adapter: Mapping[str, Tensor],
    *,
    round_: int = 1,
    run: str = "run",
    fields: Mapping[str, Scalar] | None = None,
    own: Mapping[str, Scalar] | None = None,
    **changes: Scalar,
) -> Question:
    """The question for one local update.

    Args:
        config: of the run.
        adapter: the broadcast.
        round_: from 1.
        run: its name.
        fields: of the instruction, where it differs from the run's configuration.
        own: what the node alone is told.
        changes: of the configuration that the node is told.
    """
    return Question(
        kind=frame.TRAIN,
        config={**to_flower(config), **changes},
        fields={**kinds.pack_instruction(run, round_, UpdateSpec.of(config)), **(fields or {})},
        arrays={kinds.ADAPTER: adapter},
        own=own or {},
    )


def ask(node: Node, question: Question, holder: Holder | None = None) -> Answer:
    """Send the question through the node's frames; all that comes back. Without a holder, the vault starts now."""
    try:
        received = Request.unpacked(question.request.packed())
    except FrameError as error:
        return Answer(Response.of(code=frame.REFUSED, reason=f"refused: {error}").frame)
    return Answer(answer(received, holder or Holder.of(node.settings)).frame)


def num_charges(node: Node) -> int:
    """How many releases the node's ledger has charged."""
    with reading(node.settings.ledger) as db:
        return sum(entry.phase == CHARGED for entry in db.entries())


def spent(node: Node) -> float:
    """The epsilon that the node's ledger has on its last data set."""
    if not node.settings.ledger.exists():
        return 0.0
    with reading(node.settings.ledger) as db:
        data_set = db.data_sets()[-1]
        return epsilon_of([release.event for release in db.releases(data_set.id)], data_set.delta).epsilon
