"""Frozen base models from a local folder, a GGUF file, the bundled models or the Hugging Face Hub, in this order."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fedpriv.adapters import gguf_models, heads, locations, pooling
from fedpriv.errors import InputError
from fedpriv.hub import quiet_hub


@dataclass(frozen=True)
class BaseModel:
    """A frozen base with its tokenizer and pooling convention.

    Attributes:
        name: as the user gave it.
        model: the transformers model, in eval mode, no parameter trainable.
        tokenizer: the transformers tokenizer, with a padding token.
        new_modules: modules missing from the checkpoint, which must be trained and saved with the adapter.
        pooling: one of `fedpriv.adapters.pooling.CONVENTIONS`.
    """

    name: str
    model: Any
    tokenizer: Any
    new_modules: tuple[str, ...]
    pooling: str


def resolve(name: str) -> str:
    """Where the model's files are: the path of a folder, or the name on the Hugging Face Hub.

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
        return str(gguf_models.folder_of(found, name))


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, named as for `load_base`; its weights are not read.

    Raises:
        InputError: the tokenizer cannot be obtained.
    """
    location = resolve(name)
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(location, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(f"model = {name!r}: its tokenizer cannot be loaded ({str(error).splitlines()[0]})") from None


def load_base(
    name: str,
    *,
    task: str,
    num_labels: int = 0,
    seed: int = 0,
    normalize: bool = False,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
) -> BaseModel:
    """The frozen base model, with SDPA attention.

    A new head is initialised from the seed, so equal seeds give equal models; with `normalize`, see `freeze`. A
    classifier's head for another number of labels than its checkpoint's is a new one.

    Args:
        name: local folder, path of a GGUF file, `all-MiniLM-L6-v2`, `SmolLM2-135M-Instruct` or a name on the Hub.
        task: `SEQ_CLS` or `CAUSAL_LM`.
        num_labels: for `SEQ_CLS`, >= 2.
        seed: of the new head.
        normalize: whether the head reads vectors of a fixed length.
        dtype: of the weights; `auto` is the checkpoint's own.

    Raises:
        InputError: the model cannot be obtained, does not suit the task, or cannot be normalised.
    """
    location = resolve(name)
    loader = AutoModelForSequenceClassification if task == "SEQ_CLS" else AutoModelForCausalLM
    options = {"num_labels": num_labels, "ignore_mismatched_sizes": True} if task == "SEQ_CLS" else {}
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, info = loader.from_pretrained(
                location,
                output_loading_info=True,
                use_safetensors=True,
                trust_remote_code=False,
                dtype=dtype,
                **options,
            )
            tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"model = {name!r}: cannot be loaded for {task} ({reason})") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    resized = {key: tuple(shape) for key, _, shape in info["mismatched_keys"]}
    if other := sorted(key for key, shape in resized.items() if shape[0] != num_labels):
        raise InputError(f"model = {name!r}: its weights do not fit its config.json ({other[0]})")
    return freeze(name, model, tokenizer, missing={*info["missing_keys"], *resized}, task=task, normalize=normalize)


def freeze(
    name: str, model: Any, tokenizer: Any, *, missing: Any = (), task: str, normalize: bool = False
) -> BaseModel:
    """The model as a frozen base: in eval mode, nothing trainable, encoders with mean pooling.

    With `normalize`, the head reads vectors of a fixed length (`fedpriv.adapters.pooling`), is new whether or not the
    checkpoint has one, and starts at zero: a random start, of a norm of about 0.4, would be noise alone. It is one
    linear layer, also where the model's own head has several (`fedpriv.adapters.heads`).

    Raises:
        InputError: `normalize` is set, and the head is not one linear layer and cannot be replaced by one.
    """
    if normalize and (task != "SEQ_CLS" or not heads.can_be_linear(model)):
        raise InputError(
            f"model = {name!r}: normalised features need a classifier whose head is one linear layer or is known to be "
            f"replaceable by one, and that of a {type(model).__name__} is neither; use recipe = dp-lora-paper"
        )
    convention = pooling.convention(model, normalize=normalize) if task == "SEQ_CLS" else "model"
    pooling.apply(model, convention)
    new = {_zero_head(model)} if normalize else {key.split(".")[0] for key in missing} - {model.base_model_prefix}
    model.eval().requires_grad_(False)
    return BaseModel(name, model, tokenizer, tuple(sorted(new)), convention)


def _zero_head(model: Any) -> str:
    """The name of the classification model's linear head, which is all zeros from now on."""
    found = heads.linear_head(model)
    assert found is not None  # `pooling.apply` makes sure
    heads.zero(found[1])
    return found[0]


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
