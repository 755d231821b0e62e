"""Variants on disk: a folder with one safetensors file, and a `variant.json` with its cost and provenance.

The description also has the digest of that file, so that tensors which changed since then are refused wherever they
are read. It guards against damage, not against anyone who can write the folder.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.numpy
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.files import remove_files, replace_file, replaced_file, sha256_of
from fedpriv.models.variants.blocks import tensors_in
from fedpriv.models.variants.composition import Guarantee, History, Upload, publication_cost
from fedpriv.privacy.accounting import events
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.law import Accountant

VERSION = 1

FILE = "variant.json"

_DIGEST = "tensors_sha256"

ADAPTER_CONFIG = "adapter_config.json"
"""The file in a variant's folder in which peft keeps an adapter's settings"""

TENSORS = "adapter_model.safetensors"
"""The file in a variant's folder in which peft keeps an adapter's tensors"""

# Of a prompt to an adapter that says nothing of it.
_TOKENS = 2048

# Peft's, and that of `fedpriv.learning.adapters.lora`, which would load torch.
_USE_FILES = (ADAPTER_CONFIG, "fedpriv.json")


@dataclass(frozen=True, kw_only=True)
class Described:
    """The description of a variant in its `variant.json`.

    Attributes:
        name: unique among the variants that are deduplicated together.
        architecture: variants of one architecture have tensors of the same names and shapes.
        utility: accuracy on the validation set, in [0, 1]; None if it has not been measured.
        epsilon_bound: by how much epsilon may rise.
        utility_bound: by how much utility may drop.
        deltas: {data set: delta at which its epsilon is stated}.
        history: the uploads that it descends from, or the events of its training.
        tags: of the task; used to cluster variants.
        files: {`adapter_config.json` or `fedpriv.json`: its keys and values}, of an adapter; a store keeps them too.
    """

    name: str
    architecture: str
    utility: float | None
    epsilon_bound: float
    utility_bound: float
    deltas: Mapping[str, float]
    history: History
    tags: frozenset[str] = field(default_factory=frozenset)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def guarantee(self, accountant: Accountant = "pld") -> Guarantee:
        """The cost of publishing the variant as it is, to the data set that it costs most."""
        return publication_cost([self.history], self.deltas, accountant=accountant).guarantee


def write(folder: Path, described: Described, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write a variant; the description comes last, so that a folder that has one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_files(folder, [FILE])  # that of other tensors
    with replaced_file(folder / "model.safetensors") as file:
        safetensors.numpy.save_file(dict(tensors), file.name)
    describe(folder, described)


def describe(folder: Path, described: Described) -> None:
    """Write the description of a variant, with the digest of its tensors if they have been written."""
    files = _tensor_files(folder)
    digest = {_DIGEST: sha256_of(files[0])} if len(files) == 1 else {}
    replace_file(folder / FILE, f"{json.dumps({**to_json(described), **digest})}\n".encode(), mode=None)


def read(folder: Path) -> Described:
    """The description of a variant; InputError if the file is missing, or was not written by `describe`."""
    path = folder / FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return from_json(fields, {name: _use_of(folder / name) for name in _USE_FILES if (folder / name).is_file()})
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; a variant is described there") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: not a variant's description ({type(error).__name__}: {error})") from None


def read_tensors(folder: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a variant, checked against the digest in its description, if that has one.

    Raises:
        InputError: the folder holds no safetensors file, several of them, a damaged one, or one that was changed after
            it was described.
    """
    files = _tensor_files(folder)
    if len(files) != 1:
        raise InputError(f"{folder}: holds {len(files)} safetensors files; a variant has exactly one")
    try:
        content = files[0].read_bytes()
        tensors, digest = tensors_in(content), hashlib.sha256(content).hexdigest()
    except (OSError, ValueError) as error:
        raise InputError(f"{files[0]}: cannot be read ({error})") from None
    if _stated_digest(folder / FILE) not in (None, digest):
        raise InputError(
            f"{files[0]}: is damaged or was changed, its SHA-256 is not the {_DIGEST} of {FILE}; restore the file, or "
            f"remove {_DIGEST} there if the change is meant"
        )
    return tensors


def architecture(model: str, tensors: Mapping[str, NDArray[Any]]) -> str:
    """The architecture of adapters: their model, and a digest of shapes, which are equal where blocks may be shared."""
    shapes = {name: tensors[name].shape for name in sorted(tensors)}
    return f"{model} {hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]}"


def foreign(
    folder: Path, ancestors: frozenset[Upload] | None, deltas: Mapping[str, float], *, model: str = ""
) -> tuple[Described, str]:
    """The description of an adapter that plain peft wrote, and why it cannot be served; empty if it can.

    Args:
        ancestors: see `History`.
        deltas: {data set of these: its delta}.
        model: the base; empty for the one that the adapter names.

    Raises:
        InputError: there is no adapter, or it is damaged.
    """
    settings = _use_of(folder / ADAPTER_CONFIG)
    base, tensors = model or str(settings.get("base_model_name_or_path") or ""), read_tensors(folder)
    files: dict[str, Mapping[str, Any]] = {ADAPTER_CONFIG: settings}
    if (folder / _USE_FILES[1]).is_file():
        files[_USE_FILES[1]], reason = _use_of(folder / _USE_FILES[1]), ""
    elif not (reason := _why_not_served(settings, base)):
        try:
            files[_USE_FILES[1]] = _convention(base)
        except InputError as error:
            reason = str(error)
    name = folder.resolve().name
    described = Described(
        name=name,
        architecture=architecture(base, tensors),
        utility=None,
        epsilon_bound=0.0,
        utility_bound=0.0,
        deltas=deltas,
        history=History(name=name, ancestors=ancestors),
        tags=frozenset({base}),
        files=files,
    )
    return described, reason


def _why_not_served(settings: Mapping[str, Any], base: str) -> str:
    """Why an adapter with these settings of peft is kept and not served; empty if it may be."""
    if not base:
        return "it names no base_model_name_or_path; give --model"
    if settings.get("task_type") != "CAUSAL_LM":
        return f"task_type = {settings.get('task_type')!r}: only language models are served that plain peft trained"
    odd = ("use_dora", "use_rslora", "alpha_pattern", "rank_pattern", "modules_to_save", "lora_bias")
    found = [key for key in odd if settings.get(key)]
    found += ["bias"] if settings.get("bias", "none") != "none" else []
    found += ["peft_type"] if settings.get("peft_type") != "LORA" else []
    return f"{found[0]} = {settings.get(found[0])!r}: plain LoRA alone is served" if found else ""


def _convention(base: str) -> dict[str, Any]:
    """The `fedpriv.json` of a language model's adapter from elsewhere; InputError if its base is not here."""
    from fedpriv.learning.adapters import check_model, load_tokenizer, public_name, weights_digests
    from fedpriv.learning.data.records import TextReading

    check_model(base)
    reading = TextReading(max_length=_TOKENS, instructs=bool(getattr(load_tokenizer(base), "chat_template", None)))
    known = {"base_model": public_name(base), "base_weights": weights_digests(base), "pooling": "model"}
    return {"version": 1, **known, "labels": [], "reading": reading.to_json()}


def num_bytes(folder: Path) -> int:
    """The bytes of a variant's tensors, as the heads of their files say; OSError if a file cannot be read."""
    total = 0
    for file in _tensor_files(folder):
        with file.open("rb") as opened:  # a head begins with its own length, in eight bytes
            total += file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
    return total


def _use_of(path: Path) -> dict[str, Any]:
    """The keys and values of a file that says how a variant is used."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold keys and values, holds a {type(values).__name__}")
    return values


def _tensor_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _stated_digest(path: Path) -> Any:
    """The digest in a description; None where there is no description, or one of no tensors."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get(_DIGEST)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: not a variant's description ({type(error).__name__}: {error})") from None


def to_json(described: Described) -> dict[str, Any]:
    """The content of a `variant.json`, as plain values; the files of its use have their own."""
    history = described.history
    uploads = None
    if history.ancestors is not None:
        uploads = [
            {"data_set": u.data_set, "run": u.run, "round": u.round, "request": u.request, "event": _text(u.event)}
            for u in sorted(history.ancestors, key=lambda u: u.key)
        ]
    return {
        "version": VERSION,
        "name": described.name,
        "architecture": described.architecture,
        "tags": sorted(described.tags),
        "utility": described.utility,
        "epsilon_bound": described.epsilon_bound,
        "utility_bound": described.utility_bound,
        "deltas": dict(described.deltas),
        "holders_per_person": history.holders,
        "uploads": uploads,
        "events": {id_: [_text(event) for event in of_data_set] for id_, of_data_set in history.events.items()},
    }


def from_json(fields: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> Described:
    """The description in the content of a `variant.json`, with the files that say how it is used, or an error."""
    if fields["version"] != VERSION:
        raise ValueError(f"version = {fields['version']!r}: this fedpriv reads version {VERSION}")
    uploads = fields["uploads"]
    history = History(
        name=fields["name"],
        ancestors=uploads if uploads is None else frozenset(map(_upload, uploads)),
        events={id_: tuple(map(events.from_json, texts)) for id_, texts in fields["events"].items()},
        holders=int(fields["holders_per_person"]),
    )
    return Described(
        name=fields["name"],
        architecture=fields["architecture"],
        tags=frozenset(fields["tags"]),
        utility=None if fields["utility"] is None else float(fields["utility"]),
        epsilon_bound=float(fields["epsilon_bound"]),
        utility_bound=float(fields["utility_bound"]),
        deltas={id_: float(delta) for id_, delta in fields["deltas"].items()},
        history=history,
        files=files,
    )


def _upload(fields: Mapping[str, Any]) -> Upload:
    return Upload(**{**fields, "event": events.from_json(fields["event"])})


@lru_cache(maxsize=65536)
def _text(event: Event) -> str:
    """The event as JSON, kept: every variant of a run lists the uploads of all its clients."""
    return events.to_json(event)


class VariantFolders:
    """Variants in a folder each, under their folders' names; `path`, which holds them, may be missing.

    It reads as a `fedpriv.models.variants.Store` does: whatever takes a name raises an InputError or a StoreError if
    there is no such variant, or it is damaged, and `memory_bytes` an OSError if a file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def names(self) -> list[str]:
        """See `Store`; a folder with a description is whole, since the description is written last."""
        return sorted(path.parent.name for path in self.path.glob(f"[!.]*/{FILE}"))

    def describe(self, name: str) -> Described:
        return read(self.path / name)

    def tensors(self, name: str) -> dict[str, NDArray[Any]]:
        return read_tensors(self.path / name)

    def memory_bytes(self, name: str) -> int:
        return num_bytes(self.path / name)

    def sources(self, name: str) -> list[str]:
        """See `Store`; a variant in a folder of its own holds its own values alone."""
        return [name]

    def is_chosen_privately(self, name: str) -> bool:
        return False

    def unproven(self, name: str) -> str:
        return ""
