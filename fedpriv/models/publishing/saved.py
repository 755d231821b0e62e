"""A saved variant, in its run's folder, in a store or on its own; its model, and the model's answers to texts.

Texts of like lengths share a pass, so another text changes an answer by no more than rounding.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, get_args

import safetensors.numpy
import torch

from fedpriv.config import RunConfig
from fedpriv.errors import InputError, first_line
from fedpriv.learning.adapters import check_weights, load_base, lora, public_name
from fedpriv.learning.adapters.pooling import normalizes
from fedpriv.learning.data import TextData, records
from fedpriv.learning.data.chat import RESPONSE_MASK, ChatFormat
from fedpriv.learning.data.records import TextReading, collate, num_tokens, tokenize, usable
from fedpriv.learning.training import Tokens, batches, ends_of_turn, greedy_answers, predictions
from fedpriv.learning.training.evaluation import text_of
from fedpriv.models.variants import is_store
from fedpriv.models.variants.blocks import Tensors
from fedpriv.models.variants.folders import ADAPTER_CONFIG, TENSORS, VariantFolders
from fedpriv.models.variants.store import Store
from fedpriv.runs import RunFolder, files

GLOBAL = "global"
_Task = Literal["SEQ_CLS", "CAUSAL_LM"]

# Texts of a pass.
_ROWS = 16

NO_LIMIT = 2**30
"""The most tokens of a prompt, which is not cut: one that is too long is refused."""


@dataclass(frozen=True, kw_only=True)
class SavedVariant:
    """A variant on disk, in a folder of its own or in a store alone; its weights are not read yet.

    Attributes:
        folder: with its files; None where only a store has it.
        kept: reads it, by its name.
        run: its run; None for a variant that was copied elsewhere.
        model: where its base is, as `load_base` takes it.
        task: `SEQ_CLS` or `CAUSAL_LM`.
        settings: what its adapter_config.json says.
        convention: what its fedpriv.json says.
    """

    name: str
    folder: Path | None
    kept: VariantFolders | Store
    run: RunFolder | None
    model: str
    task: _Task
    settings: dict[str, Any]
    convention: dict[str, Any]
    reading: TextReading

    @property
    def config(self) -> RunConfig | None:
        """The configuration of the run; None without one."""
        return self.run.settings if self.run else None

    @property
    def base(self) -> str:
        """The name of its base elsewhere, see `public_name`: a file may name a path instead."""
        return public_name(self.convention["base_model"])

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes in order; none of a causal model."""
        return tuple(map(str, self.convention["labels"]))

    @property
    def pooling(self) -> str:
        """One of `fedpriv.learning.adapters.pooling.CONVENTIONS`."""
        return str(self.convention["pooling"])

    @cached_property
    def sources(self) -> list[str]:
        """The variant itself, and all of the run's whose values it may hold; an error if it is missing or damaged."""
        return self.kept.sources(self.name)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedVariant:
    """A variant's model in float32, in eval mode: the base with the adapter, pooled as in training."""

    saved: SavedVariant
    peft_model: Any
    tokenizer: Any
    device: torch.device


def names_in(run: Path) -> list[str]:
    """The variants in a run's folder that are complete, `global` first."""
    found = sorted(path.parent.name for path in (run / files.VARIANTS).glob(f"[!.]*/{lora.CONVENTION_FILE}"))
    return sorted(found, key=lambda name: name != GLOBAL)


def all_in(run: Path) -> list[SavedVariant]:
    """The variants in a run's folder that are complete, `global` first; InputError if one of its files is damaged."""
    folder = RunFolder(run)
    return [_in_folder(run / files.VARIANTS / name, folder, "") for name in names_in(run)]


def find(path: Path, *, variant: str = "", model: str = "") -> SavedVariant:
    """The variant in a folder of its own, or else in a store.

    Args:
        path: of a finished run, of a store, or of one variant; a run's or store's folder with a variant's name after
            it is that variant, whether or not there is such a folder.
        variant: which of the run's or the store's; empty for `global`.
        model: the base; empty for the one that the run, or else the variant, names.

    Raises:
        InputError: there is no such variant, or its files are damaged.
        StoreError: the store is damaged.
    """
    run, folder, store = path, path, path
    if (path / files.CONFIG).is_file():
        name, known = variant or GLOBAL, names_in(path)
        folder, store = path / files.VARIANTS / name, path / files.STORE
        if name in known:
            return _in_folder(folder, RunFolder(path), model)
        if files.read_config(path).is_own_model:
            raise InputError(
                f"{path}: the run's model is a program's own; load the model.safetensors of a variant into its module"
            )
    elif (path / lora.CONVENTION_FILE).is_file():
        if variant:
            raise InputError(f"variant = {variant!r}: {path} is one variant already; give the folder of its run")
        return _in_folder(path, RunFolder(path.resolve().parent.parent), model)
    elif is_store(path):
        name, known, run = variant or GLOBAL, [], path.resolve().parent
    else:
        holder = path.parent.parent if path.parent.name == files.VARIANTS else path.parent
        if variant or path.exists() or not ((holder / files.CONFIG).is_file() or is_store(holder)):
            raise InputError(f"{path}: neither the folder of a run, with {files.CONFIG}, nor of a variant, nor a store")
        return find(holder, variant=path.name, model=model)
    if is_store(store):
        stored = Store(store, read_only=True)
        if name in stored.names:
            return _in_store(stored, name, RunFolder(run), model)
        known += [other for other in stored.names if other not in known]
    raise InputError(f"variant = {name!r}: {folder.parent} has {', '.join(known[:20]) or 'none'}")


def of(reader: VariantFolders | Store, name: str, run: RunFolder, *, model: str = "") -> SavedVariant:
    """The variant of a run, or what else it lies in, that a reader has under a name; an error if it is damaged."""
    if isinstance(reader, VariantFolders):
        return _in_folder(reader.path / name, run, model)
    return _in_store(reader, name, run, model)


def _in_folder(folder: Path, run: RunFolder, model: str) -> SavedVariant:
    settings, convention = files.read_values(folder / ADAPTER_CONFIG), lora.read_convention(folder)
    own = folder.resolve()
    return _saved(VariantFolders(own.parent), own.name, folder, run, model, settings, convention)


def _in_store(store: Store, name: str, run: RunFolder, model: str) -> SavedVariant:
    described = store.describe(name)
    if described is None or not {ADAPTER_CONFIG, lora.CONVENTION_FILE} <= described.files.keys():
        raise InputError(
            f"variant = {name!r}: {store.path} does not say how it is used, so it is no adapter; `fedpriv dedup "
            f"restore` gives its tensors"
        )
    where = store.path / name / lora.CONVENTION_FILE
    convention = lora.checked_convention(described.files[lora.CONVENTION_FILE], where)
    return _saved(store, name, None, run, model, dict(described.files[ADAPTER_CONFIG]), convention)


def _saved(
    kept: VariantFolders | Store,
    name: str,
    folder: Path | None,
    run: RunFolder,
    model: str,
    settings: dict[str, Any],
    convention: dict[str, Any],
) -> SavedVariant:
    where = folder or kept.path / name
    config = run.settings if (run.path / files.CONFIG).is_file() else None
    return SavedVariant(
        name=name,
        folder=folder,
        kept=kept,
        run=run if config else None,
        model=model or (config.model if config else _base_of(where, convention)),
        task=_task_of(where, settings),
        settings=settings,
        convention=convention,
        reading=TextReading.of(config) if config else _reading_of(where, convention),
    )


def load(saved: SavedVariant) -> LoadedVariant:
    """The variant's model, in float32 whatever format the run computed in.

    Raises:
        InputError: its files were changed; its base is not to be found, or has other weights than in training.
    """
    tensors = saved.kept.tensors(saved.name)  # against their digests
    with fitting(saved), tempfile.TemporaryDirectory() as name:
        normalize = normalizes(saved.pooling)
        base = load_base(saved.model, task=saved.task, labels=saved.labels, normalize=normalize)
        # Of these very values: peft would take another file of the variant's folder, or one of other formats.
        folder = Path(name)
        for file, values in ((ADAPTER_CONFIG, saved.settings), (lora.CONVENTION_FILE, saved.convention)):
            (folder / file).write_text(json.dumps(values), encoding="utf-8")
        (folder / TENSORS).write_bytes(tensor_file(tensors))
        model = lora.load(base, folder)
    return LoadedVariant(saved=saved, peft_model=model, tokenizer=base.tokenizer, device=torch.device("cpu"))


@contextmanager
def fitting(saved: SavedVariant) -> Iterator[None]:
    """Within this context the variant's base is loaded and gets its adapter; both are checked to belong together.

    Raises:
        InputError: the base is not to be found, has other weights than in training, or does not fit the adapter.
    """
    try:
        yield
    except InputError:
        raise
    except (RuntimeError, KeyError, ValueError) as error:  # of torch and peft, for tensors of other shapes or names
        reason = first_line(error)
        raise InputError(f"model = {saved.model!r}: adapter {saved.name} does not fit it ({reason})") from None
    # Of the files that were read, which a model of the Hub may have got only now.
    check_weights(saved.model, saved.convention["base_weights"])


def tensor_file(tensors: Tensors) -> bytes:
    """The file in which peft keeps an adapter's tensors."""
    return safetensors.numpy.save(tensors, metadata={"format": "pt"})


def _task_of(where: Path, settings: dict[str, Any]) -> _Task:
    task = settings.get("task_type")
    if task not in get_args(_Task):
        raise InputError(f"{where / ADAPTER_CONFIG}: task_type = {task!r}: must be SEQ_CLS or CAUSAL_LM")
    return cast("_Task", task)


def _base_of(folder: Path, convention: dict[str, Any]) -> str:
    name = convention.get("base_model")
    if not isinstance(name, str) or not name:
        raise InputError(f"{folder / lora.CONVENTION_FILE}: names no base_model; give --model")
    return name


def _reading_of(folder: Path, convention: dict[str, Any]) -> TextReading:
    where = folder / lora.CONVENTION_FILE
    if not isinstance(convention.get("reading"), dict):
        raise InputError(f"{where}: says nothing of max_length; give the folder of the variant's run")
    return TextReading.from_json(convention["reading"], where=str(where))


@torch.inference_mode()
def classify(
    loaded: LoadedVariant, texts: Sequence[str], pairs: Sequence[str] | None = None
) -> list[tuple[float, ...]]:
    """[texts] the probabilities of each label, in their order.

    Args:
        loaded: a classifier.
        texts: each cut to the run's `max_length` tokens.
        pairs: the second texts, for a model of pairs.

    Raises:
        InputError: the model reads pairs and there are none, or the other way round; or a text cannot be read.
    """
    reading = loaded.saved.reading
    if reading.pairs != (pairs is not None):
        right = "pairs of texts; give the second one too" if reading.pairs else "single texts, not pairs"
        raise InputError(f"model {loaded.saved.name}: reads {right}")
    found = tokenize(
        TextData(tuple(texts), (), None if pairs is None else tuple(pairs)),
        loaded.tokenizer,
        label_names=(),
        max_length=reading.max_length,
        vocabulary=loaded.peft_model.get_input_embeddings().num_embeddings,
        encode=reading.encoder.encode,
        names=reading.encoder.names(loaded.tokenizer, pairs=reading.pairs, max_length=reading.max_length),
    )
    items = found.items()
    for number, item in enumerate(items, start=1):
        if not usable(item):
            raise InputError(f"text {number}: the model's tokenizer cannot read it")
    answers: dict[int, tuple[float, ...]] = {}
    for together in batches([num_tokens(item) for item in items], lambda _: _ROWS):
        batch = collate([items[position] for position in together])
        for position, logits in zip(together, loaded.peft_model(**batch).logits, strict=True):
            if not logits.isfinite().all():
                raise InputError(f"text {position + 1}: {loaded.saved.name} gives no number; its weights are damaged")
            answers[position] = tuple(logits.double().softmax(dim=0).tolist())
    return [answers[position] for position in range(len(items))]


def generate(loaded: LoadedVariant, prompts: Sequence[str], *, max_new_tokens: int | None = None) -> list[str]:
    """[prompts] the model's most likely answers, token by token.

    Args:
        loaded: a causal model.
        prompts: put as in training: in the model's chat template, or as they stand.
        max_new_tokens: of an answer, >= 1; None for the run's.

    Raises:
        InputError: a prompt cannot be read, or leaves no room for an answer.
    """
    tokens = [prompt_tokens(loaded, prompt, number) for number, prompt in enumerate(prompts, start=1)]
    most, ends = max_new_tokens or loaded.saved.reading.max_new_tokens, ends_of(loaded)
    answers = [greedy_answers(loaded, [prompt], max_new_tokens=most, ends=ends)[0] for prompt in tokens]
    return [text_of(loaded.tokenizer, answer) for answer in answers]


@torch.inference_mode()
def choose(loaded: LoadedVariant, prompts: Sequence[str], choices: Sequence[Sequence[str]]) -> list[tuple[float, ...]]:
    """[prompts] the mean log-likelihood of each choice's tokens as the answer, its end of turn included.

    Args:
        loaded: a model of prompts with responses.
        choices: of each prompt.

    Raises:
        InputError: it is another model, or a prompt with a choice cannot be read, or leaves no room.
    """
    reading, most = loaded.saved.reading, getattr(loaded.peft_model.config, "max_position_embeddings", NO_LIMIT)
    if not reading.instructs:
        raise InputError(f"model {loaded.saved.name}: was not trained on prompts with responses, so it chooses none")
    found = []
    for number, (prompt, own) in enumerate(zip(prompts, choices, strict=True), start=1):
        scores = []
        for row in reading.chat.encode(loaded.tokenizer, [prompt] * len(own), own, NO_LIMIT):
            if row is None or len(row["input_ids"]) > most:
                raise InputError(f"text {number}: with one of its choices it is too long, or cannot be read")
            batch = {name: torch.tensor([tokens]) for name, tokens in row.items()}
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            logits = loaded.peft_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            scores.append(-float(predictions(logits.float(), batch).losses))
        found.append(tuple(scores))
    return found


def ends_of(loaded: LoadedVariant) -> frozenset[int]:
    """The tokens that end a causal model's answer."""
    return ends_in(loaded.saved.reading, loaded, loaded.tokenizer)


def ends_in(reading: TextReading, model: Any, tokenizer: Any) -> frozenset[int]:
    """The same of a causal model that is loaded otherwise."""
    turns = [(reading.chat.end(tokenizer),)] if reading.instructs else []
    return ends_of_turn(model, tokenizer, turns)


def chat_prompt(chat: ChatFormat, tokenizer: Any, text: str) -> Tokens | None:
    """The tokens that precede the response of a chat, as in training; None where they cannot be read."""
    (row,) = chat.encode(tokenizer, [text], ["x"], NO_LIMIT)
    return None if row is None else tuple(row["input_ids"][: row[RESPONSE_MASK].index(1)])


def prompt_tokens(loaded: LoadedVariant, prompt: str, number: int) -> Tokens:
    """The tokens of a causal model's prompt; InputError if it cannot be read, or leaves no room for an answer."""
    reading, tokenizer = loaded.saved.reading, loaded.tokenizer
    if reading.instructs:
        tokens = chat_prompt(reading.chat, tokenizer, prompt) or ()
    else:
        (row,) = records.encode(tokenizer, [prompt], None, NO_LIMIT)
        tokens = () if row is None else tuple(row["input_ids"])
    if not tokens:
        raise InputError(f"text {number}: the model's tokenizer or chat template cannot read it")
    most = getattr(loaded.peft_model.config, "max_position_embeddings", None)
    if most is not None and len(tokens) >= most:
        raise InputError(f"text {number}: has {len(tokens)} tokens, and the model takes fewer than {most}")
    return tokens
