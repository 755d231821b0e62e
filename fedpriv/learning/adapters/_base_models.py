"""Frozen base models from a local folder, a GGUF file, the bundled models or the Hugging Face Hub, in this order.

A GGUF file is converted once into an ordinary folder, which everything else then reads: transformers takes 6 to 20
seconds to read such a file. The folder is kept in the cache, named by the SHA-256 of the file and the version of
transformers. It holds the dequantised weights in float32, to the bit. A folder there is used if it belongs to this
user, nobody else may enter it, and its files have the digest that was noted when it was made. So neither damage nor
another user who can write the cache goes unseen; anyone who can act as this user, or as root, could change this program
as well.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers.normalizers import Lowercase, Prepend
from tokenizers.normalizers import Sequence as Normalizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from fedpriv.errors import InputError, first_line
from fedpriv.files import new_folder, sha256_of
from fedpriv.learning.adapters import _locations as locations
from fedpriv.learning.adapters import pooling
from fedpriv.learning.adapters._locations import model_digest, quiet_hub

log = logging.getLogger(__name__)

# Configuration, weights and tokenizer; no code, and no pickled weights.
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")

# Hidden files are no part of a model's folder.
_DIGEST_FILE = ".sha256"
_MAGIC = b"GGUF"
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class BaseModel:
    """A frozen base with its tokenizer and pooling convention.

    Attributes:
        name: as the user gave it.
        model: the transformers model, in eval mode, no parameter trainable.
        tokenizer: the transformers tokenizer, with a padding token.
        new_modules: modules missing from the checkpoint, which must be trained and saved with the adapter.
        pooling: one of `fedpriv.learning.adapters.pooling.CONVENTIONS`.
        longest: tokens of the longest text that it was made for; None if nothing says so.
    """

    name: str
    model: Any
    tokenizer: Any
    new_modules: tuple[str, ...]
    pooling: str
    longest: int | None = None


def model_folder(name: str) -> Path:
    """The folder with a model's files, fetched from the Hub if there is none on this machine: no code, no pickles.

    Args:
        name: a folder, a GGUF file, a bundled model, or a name on the Hugging Face Hub.

    Raises:
        InputError: there is no such model.
    """
    place = resolve(name)
    return Path(resolve(place if Path(place).is_dir() else _fetched(name)))


def _fetched(name: str) -> str:
    import huggingface_hub

    try:
        with quiet_hub():
            return huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES))
    except Exception as error:  # the library raises errors of many types
        reason = first_line(error)
        raise InputError(f"model = {name!r}: neither a folder nor a model that the Hub gives ({reason})") from None


def resolve(name: str) -> str:
    """The place of a model's files: the path of a folder, or the name on the Hugging Face Hub.

    The model of a GGUF file is in a folder of the cache, which the first call for this file makes.

    Raises:
        InputError: the folder does not exist, or has no config.json or no safetensors weights; or a GGUF file cannot be
            read.
    """
    found = locations.locate(name)
    if found is None:
        return name
    if found.is_dir():
        return str(found)
    with quiet_transformers():
        return str(_folder_of_gguf(found, name))


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a model comes from, None for a model of another kind; InputError if it is missing."""
    found = locations.locate(name)
    return found if found is not None and found.is_file() else None


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, named as for `load_base`, whose weights are not read; InputError if there is none."""
    location = resolve(name)
    try:
        with quiet_transformers():
            return _tokenizer(location, pooling.described(location))
    except (OSError, ValueError) as error:
        raise InputError(f"model = {name!r}: its tokenizer cannot be loaded ({first_line(error)})") from None


def _tokenizer(location: str, says: pooling.SelfDescription) -> Any:
    """The tokenizer, which puts the prompt before every text by itself, so that every reader of texts does.

    An empty text gets none, and one with the name of a special token in it gets another behind that.
    """
    tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False)
    steps = [Prepend(says.prompt)] * bool(says.prompt) + [Lowercase()] * says.lowers
    if not steps:
        return tokenizer
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"a {type(tokenizer).__name__} can put no prompt before texts")
    own = tokenizer.backend_tokenizer.normalizer
    tokenizer.backend_tokenizer.normalizer = Normalizers([*steps, *([own] if own else [])])
    names = ("model_max_length", "model_input_names", "padding_side", "truncation_side")
    kept = {name: getattr(tokenizer, name) for name in names}
    # Of this class, since others make their normalizer anew when they are read again.
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **tokenizer.special_tokens_map, **kept)


def load_base(
    name: str,
    *,
    task: str,
    labels: Sequence[str] = (),
    num_labels: int = 0,
    seed: int = 0,
    normalize: bool = False,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
) -> BaseModel:
    """The frozen base model, with SDPA attention.

    A new head is initialised from the seed, so equal seeds give equal models; with `normalize`, see `freeze`. A
    classifier's head for another number of labels than its checkpoint's is a new one. A checkpoint's own head has its
    rows put in the order of the labels, which are matched by name with its `id2label`, in capitals or not; if none
    matches, as with `LABEL_0`, they stay as they are.

    Args:
        name: local folder, path of a GGUF file, `all-MiniLM-L6-v2`, `SmolLM2-135M-Instruct` or a name on the Hub.
        task: `SEQ_CLS` or `CAUSAL_LM`.
        labels: for `SEQ_CLS`, the classes in order.
        num_labels: their number, >= 2, where they have no names.
        normalize: whether the head reads vectors of a fixed length.
        dtype: of the weights; `auto` is the checkpoint's own.

    Raises:
        InputError: the model cannot be obtained, does not suit the task, or cannot be normalised; or its head is for
            some of the labels and for others.
    """
    location, num_labels = resolve(name), len(labels) or num_labels
    loader = AutoModelForSequenceClassification if task == "SEQ_CLS" else AutoModelForCausalLM
    options = {"num_labels": num_labels, "ignore_mismatched_sizes": True} if task == "SEQ_CLS" else {}
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            says = pooling.described(location) if task == "SEQ_CLS" else pooling.SelfDescription()
            torch.manual_seed(seed)
            model, info = loader.from_pretrained(
                location,
                output_loading_info=True,
                use_safetensors=True,
                trust_remote_code=False,
                dtype=dtype,
                **options,
            )
            tokenizer = _tokenizer(location, says)
    except (ImportError, OSError, ValueError) as error:  # it may ask for a package that is not here
        raise InputError(f"model = {name!r}: cannot be loaded for {task} ({first_line(error)})") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    resized = {key: tuple(shape) for key, _, shape in info["mismatched_keys"]}
    if other := sorted(key for key, shape in resized.items() if shape[0] != num_labels):
        raise InputError(f"model = {name!r}: its weights do not fit its config.json ({other[0]})")
    missing = {*info["missing_keys"], *resized}
    base = freeze(name, model, tokenizer, missing=missing, task=task, normalize=normalize, says=says)
    if labels and not base.new_modules:
        _put_in_order(base, labels)
    return base


def _put_in_order(base: BaseModel, labels: Sequence[str]) -> None:
    """Give the rows of a checkpoint's own head the order of the labels, or refuse one that names some and others."""
    model, known = base.model, [str(base.model.config.id2label.get(row)) for row in range(len(labels))]
    form = str if set(known) == set(labels) else str.casefold
    places = {form(name): row for row, name in enumerate(known)}
    rows = [places[form(label)] for label in labels if form(label) in places]
    if not rows or rows == list(range(len(labels))):
        return
    inside = f"{model.base_model_prefix}."
    heads = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and not n.startswith(inside)]
    last = [head for head in heads if head.out_features == len(labels)][-1:]
    if sorted(rows) != list(range(len(labels))) or not last:
        raise InputError(
            f"labels = {', '.join(labels)}: model {base.name!r} has a head for {', '.join(known)}, which cannot be "
            "matched with them; give both the same names (id2label in config.json), or the data others altogether"
        )
    with torch.no_grad():
        for parameter in last[0].parameters():
            parameter.copy_(parameter[rows])
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {label: row for row, label in enumerate(labels)}


def freeze(
    name: str,
    model: Any,
    tokenizer: Any,
    *,
    missing: Any = (),
    task: str,
    normalize: bool = False,
    says: pooling.SelfDescription = pooling.SelfDescription(),  # noqa: B008  # frozen
) -> BaseModel:
    """The model as a frozen base: in eval mode, nothing trainable, and a classifier with a pooling and a linear head.

    With `normalize`, the head reads vectors of a fixed length (`fedpriv.learning.adapters.pooling`), is new whether or
    not the checkpoint has one, and starts at zero: a random start, of a norm of about 0.4, would be noise alone. A head
    of several layers that the checkpoint lacks is one linear layer too, and starts at zero. InputError if there is no
    classifier's backbone whose states could be pooled.
    """
    if normalize and task != "SEQ_CLS":
        raise InputError(f"model = {name!r}: normalised features need a classifier; use recipe = per-sample")
    convention, outside = "model", {key.split(".")[0] for key in missing} - {model.base_model_prefix}
    if task == "SEQ_CLS":
        try:
            convention = pooling.convention_of(model, says.pooling, normalize=normalize, is_whole=not outside)
        except ValueError as error:
            raise InputError(f"model = {name!r}: {error}; or recipe = per-sample") from None
        own = pooling.linear_head(model)
        pooling.apply(model, convention)
        if convention != "model" and (normalize or outside or own is None):
            outside = {model.head_name}
            if normalize:
                pooling.zero(getattr(model, model.head_name))
    model.eval().requires_grad_(False)
    return BaseModel(name, model, tokenizer, tuple(sorted(outside)), convention, says.longest)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers and peft while they load and save: notes about a new head, and progress bars."""
    log = transformers.utils.logging
    verbosity, bars_were_enabled = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with quiet_hub(), warnings.catch_warnings():
            # peft still uses the old name of this transformers property
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars_were_enabled:
            log.enable_progress_bar()


def _folder_of_gguf(file: Path, name: str) -> Path:
    """The folder with the model of a GGUF file, which is made when it is first asked for, and unchanged since."""
    with file.open("rb") as content:
        if content.read(len(_MAGIC)) != _MAGIC:
            raise InputError(f"model = {name!r}: is not a GGUF file")
    folder = cache_folder() / "gguf" / f"{sha256_of(file)}-{transformers.__version__}"
    if not folder.is_dir():
        _make(folder, file, name)
    _verify(folder)
    return folder


def _make(folder: Path, file: Path, name: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"model = {name!r}: needs the package gguf, which is missing; run `make llm`")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with new_folder(folder) as temporary:
            model, tokenizer = _read(file, temporary, name)
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            (temporary / _DIGEST_FILE).write_text(model_digest(temporary), encoding="utf-8")
    except OSError as error:
        if not folder.is_dir():  # else another process was faster
            raise InputError(
                f"model = {name!r}: cannot be converted in {folder.parent} ({error.strerror or error}); set "
                "FEDPRIV_CACHE to a folder with room"
            ) from None


def _read(file: Path, beside: Path, name: str) -> tuple[Any, Any]:
    """The model, in float32, and its tokenizer, from this file alone."""
    log.info("%s is converted once, into %s", name, beside.parent)
    # transformers' progress bars of this know no switch.
    with _alone(file, beside) as place, redirect_stderr(StringIO()):
        _check_metadata(file, name)
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                place,
                gguf_file=file.name,
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file.name, trust_remote_code=False)
        except Exception as error:  # a foreign file may cause any error in transformers
            raise InputError(
                f"model = {name!r}: transformers cannot read this GGUF file ({first_line(error)})"
            ) from None
    if info["missing_keys"]:
        raise InputError(f"model = {name!r}: lacks weights, {min(info['missing_keys'])} among them")
    # From now on it is a model as any other.
    del model.config.quantization_config
    model.hf_quantizer = None
    return model, tokenizer


@contextmanager
def _alone(file: Path, beside: Path) -> Iterator[Path]:
    """A folder where transformers finds nothing but this file: its neighbours must not decide what a model is."""
    place = beside / ".alone"
    place.mkdir()
    link = place / file.name
    link.symlink_to(file.resolve())
    try:
        yield place
    finally:
        link.unlink()
        place.rmdir()


def _check_metadata(file: Path, name: str) -> None:
    from gguf import GGUFReader

    try:
        fields = GGUFReader(file).fields
    except Exception as error:  # a damaged file causes errors of many types
        raise InputError(f"model = {name!r}: is a damaged GGUF file ({first_line(error)})") from None
    if _TOKENS not in fields:
        raise InputError(f"model = {name!r}: this GGUF file has no tokenizer; use one that has, or a model's folder")


def _verify(folder: Path) -> None:
    state = folder.stat()
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise InputError(f"{folder}: must belong to you alone (chmod 700), since a model is read from it; or delete it")
    try:
        is_unchanged = (folder / _DIGEST_FILE).read_text(encoding="utf-8") == model_digest(folder)
    except OSError:
        is_unchanged = False
    if not is_unchanged:
        raise InputError(f"{folder}: its files are not those that were converted from the GGUF file; delete it")


def cache_folder() -> Path:
    """The folder in which converted weights are kept."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedpriv"
    return Path(os.environ.get("FEDPRIV_CACHE") or default)
