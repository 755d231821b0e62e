"""The files in which a node's operator decides, which no coordinator sees or changes.

`vault.toml` holds the settings, `policy.toml` the limits on what a coordinator may ask for, `peers/` the public keys of
the holders with which the node adds up, and `approved-models.toml` the models that it runs, each with its digest. A
model names its tokenizer, and a tokenizer can be written such that it fails on texts of a coordinator's choosing, so
neither may come from a run's configuration. That names an approved model, or nothing is computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from fedpriv import config as configuration
from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.learning.adapters import model_digest
from fedpriv.learning.data import DataSource
from fedpriv.operate.command_line import read_settings, validated
from fedpriv.privacy.accounting.views import PlannedView
from fedpriv.privacy.ledger import keys

FILE = "vault.toml"
PEER_SUFFIX = ".pub"

CLOSED = "closed: this node takes part in nothing until its operator has looked at it"

_PEER_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_MODELS_HEADER = "# The models that this node runs; `approve-model` adds them. A run names one of them.\n"

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class VaultSettings:
    """The settings of a vault, and the paths of its files.

    Attributes:
        version: of vault.toml.
        folder: absolute path.
        partition_id: which client of a run the node is.
        name: for display, visible to the coordinator.
        data: file with the records; None stands for a hospital of the embedded synthetic corpus.
        text_column, label_column, text_pair_column: of the file; empty if there is none.
        prompt_column, response_column, messages_column: of instruction data, in place of the columns above.
        choice_columns: with the choices of each record, one of which response_column names; by `labels`, if given.
        person_column: whom each record is about. With it the node protects persons, registers so many of them, and
            refuses runs of another unit.
        max_records_per_person: that the vault keeps of a person, chosen by a secret of its own, and the most that a run
            may ask for.
        separator: of a CSV file; with `auto` its header decides, and a TSV file has tabs.
        encoding: of a CSV or JSONL file.
        table_checks: the answer to a likely mistake in the records, when they are registered: `refuse` or `warn`.
        labels: the classes in the order that all holders agreed on; empty for causal models, unless those answer with
            one of a few texts for each class.
        budget_epsilon: that all runs together may spend; required for records of the node's own.
        delta: for the budget; None stands for 1 / (10 N_k), at most 1e-5.
        budget_view: what the budget counts: `local`, what the server could learn from this node's uploads if it saw
            each, or `aggregate`, what it learns from sums under secure aggregation.
        min_survivors: t; the node takes part in no sum of fewer uploads.
        colluding_clients: c; the node takes part only where the noise of so many others is not counted. That of one
            never is: every participant reads the sum and knows its own noise.
        ledger_file: None stands for ledger.sqlite in the folder.
        memory_limit_mb: for passes, as many at once as the node has cores, and as much again for the prefix cache.
        device: that trains: `cpu`, or a GPU, such as `cuda:0`, on which nobody has run a node yet.
        reply_seconds: between a charge and its reply, so that no clock tells how long the records took; None derives
            them from measurements on synthetic records.
        max_records: records, or persons, for which derived times are enough; None stands for N_k.
        keep_tokens: whether the records' tokens are kept in the folder from one start to the next.
        counter_file: a file on another disk that keeps the receipts of charges, so that a ledger that was restored is
            noticed; None keeps none but in the folder.
        other_runs: the answer to a run that differs from those that the operator agreed to, by the invitation or by
            `approve-run`, if there are any: `ask` waits for that, `refuse` does not, `allow` leaves it to policy.toml.
        require_secure_sums: whether uploads leave as parts of sums under masks alone, in whatever run.
        client_user: name or number of the user whose processes may ask the vault; empty stands for the vault's own.
    """

    version: Literal[1] = 1
    folder: Path
    partition_id: Annotated[int, Field(ge=0)]
    name: Annotated[str, Field(min_length=1, max_length=100)]
    data: Path | None = None
    text_column: str = "text"
    label_column: str = "label"
    text_pair_column: str = ""
    prompt_column: str = ""
    response_column: str = ""
    messages_column: str = ""
    choice_columns: tuple[str, ...] = ()
    person_column: str = ""
    max_records_per_person: Annotated[int, Field(ge=1)] = 8
    separator: configuration.Separator = "auto"
    encoding: configuration.Encoding = "utf-8"
    table_checks: configuration.TableChecks = "refuse"
    labels: tuple[str, ...] = ()
    budget_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    budget_view: PlannedView = "local"
    min_survivors: Annotated[int, Field(ge=3)] = 3
    colluding_clients: Annotated[int, Field(ge=0)] = 0
    ledger_file: Path | None = None
    memory_limit_mb: Annotated[int, Field(ge=1)] = 1024
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    reply_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_records: Annotated[int, Field(ge=1)] | None = None
    keep_tokens: bool = True
    counter_file: Path | None = None
    other_runs: Literal["ask", "refuse", "allow"] = "ask"
    require_secure_sums: bool = False
    client_user: str = ""

    @staticmethod
    def read(folder: Path) -> VaultSettings:
        """The settings in a node's folder.

        Raises:
            InputError: there are no settings, or invalid ones.
        """
        return read_settings(VaultSettings, folder / FILE, folder=folder.absolute())

    @property
    def source(self) -> DataSource:
        """The place of the node's own records, and their columns."""
        names = DataSource.__dataclass_fields__.keys() & type(self).__dataclass_fields__.keys()
        given = {name: getattr(self, name) for name in names} | {"data": str(self.data)}
        choice_names = self.labels if self.choice_columns else ()
        return DataSource(**given, choice_names=choice_names, most_of_a_person=self.max_records_per_person)

    @property
    def ledger(self) -> Path:
        """The node's own ledger."""
        return self.ledger_file or self.folder / "ledger.sqlite"

    @property
    def policy(self) -> Path:
        """The file with the limits on what a coordinator may request."""
        return self.folder / "policy.toml"

    @property
    def models(self) -> Path:
        """The file with the models that the node runs."""
        return self.folder / "approved-models.toml"

    @property
    def agreed(self) -> Path:
        """The file with the runs that the operator agreed to, each as `terms_of` has it."""
        return self.folder / "agreed-runs.toml"

    @property
    def waiting(self) -> Path:
        """The file with the last run that differs from these and waits for `approve-run`."""
        return self.folder / "waiting-run.json"

    @property
    def peers(self) -> Path:
        """The folder with the public keys of the holders with which the node adds up, as PARTITION-ID.pub."""
        return self.folder / "peers"

    @property
    def key(self) -> Path:
        """The vault's private key, which signs all that the node says: registrations, its part in sums, receipts.

        No other process reads it; Flower's SuperNode has one of its own.
        """
        return self.folder / "vault.key"

    @property
    def earlier_keys(self) -> Path:
        """The public lines of keys that signed for the node before, one a line; their receipts count."""
        return keys.public_path(self.key).with_suffix(keys.EARLIER)

    @property
    def receipts(self) -> Path:
        """The receipts of the node's charges, one a line."""
        return self.folder / "receipts.jsonl"

    @property
    def coordinator(self) -> Path:
        """The public line of the coordinator's key; with it, a run goes on only if it shows what became of uploads."""
        return self.folder / "coordinator.pub"

    @property
    def inclusions(self) -> Path:
        """The coordinator's records of what became of this node's uploads, one a line."""
        return self.folder / "inclusions.jsonl"

    @property
    def receipts_of_peers(self) -> Path:
        """The newest receipts of the holders with which the node adds up, one a line."""
        return self.folder / "receipts-of-peers.jsonl"

    @property
    def events(self) -> Path:
        """The log of what the node did, one event per line."""
        return self.folder / "events.jsonl"

    @property
    def log(self) -> Path:
        """The last lines that the vault said between a charge and its answer, in a file of one size."""
        return self.folder / "vault.log"

    @property
    def closed(self) -> Path:
        """The file that closes the node while it exists; it says why."""
        return self.folder / "closed"

    @property
    def tokens(self) -> Path:
        """The file that keeps the records' tokens; it says as much as the records do."""
        return self.folder / "tokens.safetensors"

    @property
    def socket(self) -> Path:
        """The Unix socket that the vault listens on."""
        return self.folder / "vault.sock"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class NodeLimits:
    """Limits on what a coordinator may ask for; the node's policy file overrides them key by key.

    Attributes:
        min_effective_noise_multiplier: noise relative to the sensitivity under the clipping rule.
        max_effective_noise_multiplier: of the same. A release with more costs next to nothing, and could be asked for
            again and again for the sake of a side channel, or of what it costs the node to compute it.
        max_releases: charges on a data set, whatever each costs; one of which nothing was released counts too. At the
            largest noise one costs epsilon 0.0019 at delta 1e-5, and 10,000 cost 0.34.
        max_sampling_probability: of q. A full batch, q = 1, is no less private: what it costs is charged.
        max_local_steps: noisy steps in a round.
        max_rounds: rounds in a run.
        min_clip_norm: of C; far below it, clipping would work on rounding errors.
        max_clip_norm: of C; a larger one would hardly clip anything.
        max_learning_rate: of the local optimizer.
        max_broadcast_value: magnitude of any value that the server sends; also finite.
        max_length: tokens of a record.
    """

    min_effective_noise_multiplier: _Positive = 0.3
    max_effective_noise_multiplier: _Positive = 1000.0
    max_releases: _Count = 10_000
    max_sampling_probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_local_steps: _Count = 100
    max_rounds: _Count = 1000
    min_clip_norm: _Positive = 1e-4
    max_clip_norm: _Positive = 100.0
    max_learning_rate: _Positive = 1000.0
    max_broadcast_value: _Positive = 1e4
    max_length: _Count = 512

    @staticmethod
    def read(path: Path) -> NodeLimits:
        """The limits in a policy file: TOML with any of these keys; the others keep their defaults.

        Raises:
            InputError: one line that names the file, and the key and value that are wrong.
        """
        return validated(NodeLimits, configuration.read(path), prefix=f"{path}: ")


_NOISE = ("noise_multiplier", "start_noise_multiplier", "lora_noise_multiplier")
_TERMS = (
    *("purpose", "until", "model", "task", "labels", "unit", "max_records_per_person", "holders_per_person"),
    *("secure_aggregation", "colluding_clients", "client_weights", "privacy_view", "target_epsilon", "target_risk"),
    *("rounds", "local_steps", "batch_size", "sampling_probability", "lora_sampling_probability", "lora_rounds"),
    *("train", "head_start", "noise_on", "mechanism", "mechanism_parameters", "clipping", "clip_norm", *_NOISE),
    *("noise_schedule", "evaluation_noise_multiplier", "max_choices", "test_fraction"),
)


def terms_of(run: RunConfig) -> dict[str, configuration.Scalar]:
    """{key: value} of a run that its holders agree to: whom it protects and how, what it asks, what for, until when.

    Noise that follows from a target, and what `train = auto` decides, are derived when a run begins and left out.
    """
    derived = {*(_NOISE if run.has_target else ())}
    derived |= {*(RunConfig.keys_with(configuration.Fact.BY_TRAIN) if run.train == "auto" else ())}
    values = configuration.to_flower(run)
    return {key: values[key] for key in _TERMS if key not in derived}


def agreed_runs(path: Path) -> list[dict[str, configuration.Scalar]]:
    """The terms of the runs in a file, the last agreement first; none if there is no file.

    Raises:
        InputError: the file is malformed.
    """
    runs = configuration.read(path).get("run", []) if path.is_file() else []
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise InputError(f"{path}: must hold [[run]] tables and nothing else; `approve-run` writes them")
    return runs[::-1]


def differences(
    asked: Mapping[str, configuration.Scalar], agreed: Sequence[Mapping[str, configuration.Scalar]]
) -> list[str]:
    """How a run's terms differ from the most similar of those that were agreed to; empty if they are among them."""

    def differing(run: Mapping[str, configuration.Scalar]) -> list[str]:
        keys = [key for key in {**asked, **run} if asked.get(key) != run.get(key)]
        return [f"{key} = {json.dumps(asked.get(key))}, agreed was {json.dumps(run.get(key))}" for key in keys]

    return min(map(differing, agreed), key=len, default=[])


def approved_peers(folder: Path) -> dict[int, str]:
    """{partition id: public line} of the holders that the operator approved, ascending; empty without a folder.

    Read whenever an attempt at a sum begins, so that an approval, and its end, hold from the next attempt on. The key
    of a SuperNode approves nobody: programs other than the vault have a copy.

    Args:
        folder: holds a file PARTITION-ID.pub for each of them.

    Raises:
        InputError: a file is no public key, or is not named by a partition id.
    """
    return {int(path.stem): line for path, line in _peer_lines(folder) if keys.kind_of(line) == keys.VAULT}


def keys_of_supernodes(folder: Path) -> list[Path]:
    """The files among them that hold the key of a SuperNode; raises like `approved_peers`."""
    return [path for path, line in _peer_lines(folder) if keys.kind_of(line) != keys.VAULT]


def _peer_lines(folder: Path) -> list[tuple[Path, str]]:
    """Each file and the public line in it, in the order of the partition ids."""
    found = list(folder.glob(f"*{PEER_SUFFIX}"))
    for path in found:
        if not _PEER_ID.fullmatch(path.stem):
            raise InputError(f"{path}: must be named PARTITION-ID{PEER_SUFFIX}, such as 2{PEER_SUFFIX}")
    return [(path, keys.read_public_line(path, None)) for path in sorted(found, key=lambda path: int(path.stem))]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ApprovedModel:
    """A model that an operator has approved.

    Attributes:
        name: by which a run's configuration asks for it.
        folder: with its weights, configuration and tokenizer.
        digest: SHA-256 of all files there, from `model_digest`.
    """

    name: str
    folder: str
    digest: str


def read_models(path: Path) -> tuple[ApprovedModel, ...]:
    """The models that a file approves; none if there is no such file.

    Raises:
        InputError: the file is malformed.
    """
    if not path.is_file():
        return ()
    entries = configuration.read(path).get("model", [])
    try:
        return tuple(ApprovedModel(**entry) for entry in entries)
    except (TypeError, ValidationError):
        raise InputError(f"{path}: each [[model]] needs name, folder and digest, and nothing else") from None


def models_text(models: tuple[ApprovedModel, ...]) -> str:
    """The content of the file that approves these models."""
    return _MODELS_HEADER + (tomli_w.dumps({"model": [asdict(model) for model in models]}) if models else "")


def approved_model(name: str, models: tuple[ApprovedModel, ...]) -> ApprovedModel | None:
    """The approved model of this name or digest; None if there is none."""
    return next((model for model in models if name in (model.name, model.digest)), None)


def is_unchanged_model(model: ApprovedModel) -> bool:
    """Whether the files in an approved model's folder are still those that were approved."""
    try:
        return model_digest(Path(model.folder)) == model.digest
    except (InputError, OSError):
        return False
