"""Classifiers of any encoder: a backbone, a pooling of its token states into one vector, and one linear head.

Transformers has a head of its own for each architecture: some read a pooler or a first token that training never used,
some have several layers. `apply` puts one forward pass in the place of all of them. The transformers class and all
parameter names stay as they are, so plain peft can load an adapter once `apply` made the model's head fit;
`fedpriv.learning.adapters.load` does both.

A convention names the pooling: `mean`, `cls`, `max` or `last` (token). With `unit-` before it, the vector is brought to
the length `STATE_SCALE`, so that a record's gradient with respect to the head is bounded. By `model` the transformers
class computes as it is: decoders, and a checkpoint's own head of several layers.

A folder of sentence-transformers says how its encoder pools, how long its texts may be and what precedes them.
`described` reads that; no code of a folder is run.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import cached_file

_UNIT = "unit-"
# {pooling: what sentence-transformers before 6 calls it}.
KINDS = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens", "last": "lasttoken"}
CONVENTIONS = ("model", *KINDS, *(_UNIT + kind for kind in KINDS))

# A record's features are its pooled state at unit length with one constant coordinate, at unit length again. The head's
# bias stands for the constant: in units of `BIAS_SCALE` it is that coordinate's weight.
# docs/appendices/recipe_trials.md says why 0.3.
_CONSTANT = 0.3
STATE_SCALE = 1 / math.hypot(1, _CONSTANT)
BIAS_SCALE = _CONSTANT * STATE_SCALE

# More tokens than an encoder has positions for, and more characters than a prompt needs.
_MOST_TOKENS, _MOST_PROMPT = 2**17, 1000


def convention_of(model: Any, described: str = "", *, normalize: bool, is_whole: bool) -> str:
    """The convention by which a classification model is trained.

    Args:
        described: the pooling that its folder names; empty if it names none: then an encoder takes the mean over all
            tokens, a decoder the last one.
        normalize: whether the pooled vector has a fixed length.
        is_whole: whether the checkpoint brings all weights of its head, which are kept unless `normalize`.

    Raises:
        ValueError: `normalize` is set, and the backbone does not give one state for each token.
    """
    is_decoder = hasattr(model, "score")
    if model.config.is_encoder_decoder:
        if normalize:
            raise ValueError("it is an encoder with a decoder, whose states are no text's; use an encoder alone")
        return "model"
    if not normalize and ((is_decoder and not described) or (is_whole and linear_head(model) is None)):
        return "model"
    return _UNIT * normalize + (described or ("last" if is_decoder else "mean"))


def normalizes(convention: str) -> bool:
    """Whether the pooled vector has a fixed length by this convention."""
    return convention.startswith(_UNIT)


def unit_states(states: Tensor) -> Tensor:
    """The vectors, [..., hidden], at length `STATE_SCALE`, float32; a vector of zeros stays one."""
    return F.normalize(states.float(), dim=-1) * STATE_SCALE


def masked_mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of [batch, tokens, hidden] over the real tokens of a mask, or all without, float32 [batch, hidden]."""
    states = states.float()
    if mask is None:
        return states.mean(dim=1)
    weights = mask.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1.0)


def _pooled(states: Tensor, mask: Tensor | None, kind: str) -> Tensor:
    """[batch, hidden] One vector of each text's states, [batch, tokens, hidden], wherever the padding is."""
    if kind == "mean":
        return masked_mean(states, mask)
    states = states.float()
    if mask is None:
        mask = torch.ones(states.shape[:2], dtype=torch.int64, device=states.device)
    if kind == "max":
        return states.masked_fill(mask.unsqueeze(-1) == 0, -math.inf).amax(dim=1)
    places = torch.arange(states.shape[1], device=states.device) * mask.to(torch.int64)
    chosen = mask.argmax(dim=1) if kind == "cls" else places.argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), chosen]


def pools(model: Any) -> bool:
    """Whether `apply` made the model pool a text's states into one vector."""
    return getattr(model, "pooling_convention", "model") != "model"


def vectors(model: Any, *, attention_mask: Tensor | None = None, **inputs: Any) -> tuple[Tensor, Any]:
    """The vectors that the head of a model that `pools` reads, float32 [batch, hidden], and the backbone's output."""
    given = {name: value for name, value in inputs.items() if value is not None}
    output = model.base_model(attention_mask=attention_mask, **given, return_dict=True)
    pooled = _pooled(output.last_hidden_state, attention_mask, model.pooling_convention.removeprefix(_UNIT))
    return unit_states(pooled) if normalizes(model.pooling_convention) else pooled, output


def _forward(model: Any, input_ids: Any = None, *, labels: Any = None, return_dict: Any = None, **inputs: Any) -> Any:
    """The forward pass of a classification model that `pools`."""
    read, output = vectors(model, input_ids=input_ids, **inputs)
    logits = getattr(model, model.head_name)(read)
    loss = None if labels is None else model.loss_function(labels, pooled_logits=logits, config=model.config)
    return SequenceClassifierOutput(loss, logits, output.get("hidden_states"), output.get("attentions"))


def apply(model: Any, convention: str) -> None:
    """Make the classification model pool by the given convention from now on, into one linear head.

    A head of several layers is replaced by one of zeros, `classifier`; no random number is drawn. ValueError if the
    convention is unknown.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"pooling = {convention!r}: must be one of {', '.join(CONVENTIONS)}")
    if convention == "model":
        return
    if linear_head(model) is None:
        for name in [name for name, _ in model.named_children() if name != model.base_model_prefix]:
            delattr(model, name)
        # Without initialisation, which would draw from the global generator.
        model.classifier = nn.utils.skip_init(
            nn.Linear, model.config.hidden_size, model.num_labels, device=model.device
        )
        zero(model.classifier)
    model.pooling_convention, (model.head_name, _) = convention, cast("tuple[str, nn.Linear]", linear_head(model))
    model.forward = MethodType(_forward, model)


def linear_head(model: Any) -> tuple[str, nn.Linear] | None:
    """The name of a classification model's head and the head, if one linear layer is all that follows the encoder."""
    after = {name: module for name, module in model.named_children() if name != model.base_model_prefix}
    with_weights = [(name, module) for name, module in after.items() if next(module.parameters(), None) is not None]
    if len(with_weights) != 1 or type(with_weights[0][1]) is not nn.Linear:
        return None
    return with_weights[0]


def zero(head: nn.Linear) -> None:
    """Set the head's weight and bias to zero."""
    for parameter in head.parameters():
        nn.init.zeros_(parameter)


@dataclass(frozen=True)
class SelfDescription:
    """The contents of a folder's files of sentence-transformers, as far as they decide how texts are read.

    Attributes:
        pooling: one of `mean`, `cls`, `max` and `last`; empty if it names none.
        longest: tokens of its longest text; None without a limit.
        prompt: what precedes every text; empty for nothing.
        lowers: whether texts are put in small letters.
    """

    pooling: str = ""
    longest: int | None = None
    prompt: str = ""
    lowers: bool = False


def described(location: str) -> SelfDescription:
    """The description that a model's folder, or its repository on the Hub, gives of itself.

    The prompt is the one called `classification`, else the folder's default, else `query`.

    Args:
        location: as of `fedpriv.learning.adapters.resolve`.

    Raises:
        ValueError: it has another module than a transformer, one pooling and a normalisation, or a value that no such
            folder has; names the file.
    """
    modules = _read(location, "modules.json", [])
    if not modules:
        return SelfDescription()
    kinds = [str(each.get("type")) if isinstance(each, dict) else "" for each in modules]
    names = tuple(kind.rpartition(".")[2] for kind in kinds)
    whole = ("Transformer", "Pooling", "Normalize")
    if names not in (whole, whole[:2]) or not all(kind.startswith("sentence_transformers.") for kind in kinds):
        shown = ", ".join(map(repr, kinds))[:200]
        raise ValueError(f"modules.json has {shown}; only Transformer, Pooling and Normalize are read, in this order")
    place = modules[1].get("path")
    if modules[0].get("path") != "" or not isinstance(place, str) or not re.fullmatch(r"\w[\w-]*", place):
        raise ValueError("modules.json must have its Transformer in the folder itself, and its Pooling in one below")
    pooling = _read(location, f"{place}/config.json", {})
    settings = _read(location, "sentence_bert_config.json", {})
    own = _read(location, "config_sentence_transformers.json", {})
    longest, lowers = settings.get("max_seq_length"), settings.get("do_lower_case", False)
    if longest is not None and (type(longest) is not int or not 1 <= longest <= _MOST_TOKENS):
        raise ValueError(f"sentence_bert_config.json has max_seq_length = {longest!r:.50}, not 1 to {_MOST_TOKENS}")
    prompts = own.get("prompts") or {}
    by_name = prompts if isinstance(prompts, dict) else {"query": prompts}
    keys = ("classification", str(own.get("default_prompt_name")), "query")
    prompt = next((by_name[key] for key in keys if key in by_name), "")
    if not isinstance(prompt, str) or not prompt.isprintable() or len(prompt) > _MOST_PROMPT:
        raise ValueError("config_sentence_transformers.json has a prompt that is no short line; delete it")
    if pooling.get("include_prompt", True) is not True and prompt:
        raise ValueError(f"{place}/config.json leaves the prompt out of the pooling, which is not possible here")
    return SelfDescription(_kind_of(pooling, place), longest, prompt, lowers is True)


def _kind_of(settings: dict[str, Any], place: str) -> str:
    flags = {name: value for name, value in settings.items() if name.startswith("pooling_mode_")}
    modes = settings.get("pooling_mode", [name.removeprefix("pooling_mode_") for name in flags if flags[name]])
    modes = modes if isinstance(modes, list) else [modes]
    found = [kind for kind, old in KINDS.items() if modes in ([kind], [old])]
    if not found or any(type(flag) is not bool for flag in flags.values()):
        raise ValueError(f"{place}/config.json has pooling {str(modes)[:200]}; one of {', '.join(KINDS)} alone is read")
    return found[0]


def _read(location: str, file: str, default: Any) -> Any:
    missing = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    path = cached_file(location, file, **missing)
    if path is None:
        return default
    try:
        values = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError):
        values = None
    if type(values) is not type(default):
        raise ValueError(f"{file} is no JSON {'array' if default == [] else 'object'}")
    return values
