"""LoRA adapters on a frozen base: attach, read, write, save and load. On disk they are ordinary peft adapters.

Of some, the only trained part is a small matrix R between two frozen factors of the weight itself: B R A (LoRA-XS). In
the model, the module of B holds R and B one after the other, so whatever calls it gets B R. What is saved has B R in
the place of B. Nodes derive the factors from the same frozen weight by the same code, so R alone travels. Two machines
get the same singular vectors up to their signs, which are fixed here, and up to rotations among those of equal singular
values, which are refused. An R of a smaller rank is the leading block of a larger one whose other entries are zero, and
needs the factors' leading vectors alone.

Two papers do otherwise. LoRA-XS (Balazy et al. 2024) scales a factor by the singular values, so the same noise would
count more in some directions. Fed-SB (Singhal et al. 2025) takes the factors from gradients of records, which under
differential privacy would be a release.
"""

import copy
import json
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LNTuningConfig, LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils.constants import CONFIG_NAME, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.error import NoMatchingPeftModuleError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedpriv.config import Trains
from fedpriv.errors import InputError
from fedpriv.files import replace_file, replaced_file
from fedpriv.learning.adapters import pooling
from fedpriv.learning.adapters._arithmetic import (
    INNER_SUFFIX,
    OUTER_SUFFIX,
    Adapter,
    Factors,
    Merged,
    as_one_adapter,
    as_ordinary,
    factors_of,
)
from fedpriv.learning.adapters._base_models import BaseModel, load_base, quiet_transformers
from fedpriv.learning.adapters._locations import check_weights, public_name, weights_digests

# Two singular values that differ by less, relative to the largest one, leave their vectors to a machine's rounding. It
# moves vectors by its size over the difference: in float64, some 1e-13 for a large matrix, by no more than float32's.
_LEAST_GAP = 1e-6

CONVENTION_FILE = "fedpriv.json"

# The names of what gives an encoder's attention its queries and values, in models of which peft knows none.
_ATTENTION = (("query", "value"), ("q", "v"), ("q_lin", "v_lin"), ("query_proj", "value_proj"), ("Wqkv",), ("in_proj",))

# peft's kinds of adapters that `save` writes; others may name files and models of their own.
_WRITTEN = ("LORA", "LN_TUNING")

# The parts of a layer's parameter names that stay at their initial value.
_FROZEN = {
    "lora-b": (".lora_A.",),
    "lora-r": (".lora_A.", OUTER_SUFFIX),
    "head": (".lora_A.", ".lora_B."),
    "biases": (".ln_tuning_layers.default.weight",),
}


@torch.no_grad()
def _put_between(model: nn.Module, factors: Mapping[str, Factors]) -> None:
    """Give LoRA layers of a peft model frozen (B, A), float32 [out, n] and [k, in], and a zero R between them."""
    for name, (left, right) in factors.items():
        layer: Any = model.get_submodule(name)
        inner = nn.Linear(right.shape[0], left.shape[1], bias=False)
        nn.init.zeros_(inner.weight)
        layer.lora_A["default"] = _linear(right)
        layer.lora_B["default"] = nn.Sequential(OrderedDict(R=inner, B=_linear(left)))


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.copy_(weight)
    return layer


def _factors_of_weights(model: nn.Module) -> dict[str, Factors]:
    """{LoRA layer: (B, A)}: singular vectors of its weight, up to LoRA's rank; InputError if they are not unique."""
    return {name: _of_weight(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


def _of_weight(name: str, layer: Any) -> Factors:
    if "default" not in layer.lora_A:
        raise InputError(f"target_modules: {name} is no linear layer, and R lies between factors of a weight matrix")
    weight = layer.get_base_layer().weight
    try:
        return _singular_factors(weight.T if layer.fan_in_fan_out else weight, min(layer.r["default"], *weight.shape))
    except ValueError as error:
        raise InputError(f"{name}: {error}") from None


def _singular_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(B, A) = (U, V^T) of the `rank` largest singular values of [out, in], orthonormal; ValueError if two are close.

    The largest entry of each row of A is positive.

    Source: Balazy et al. 2024 (LoRA-XS), who scale one of the factors by the singular values.
    """
    u, values, v = torch.linalg.svd(weight.double().cpu(), full_matrices=False)
    bounded = torch.cat([values, values.new_zeros(1)])
    if not (bounded[:rank] - bounded[1 : rank + 1] > _LEAST_GAP * values[0]).all():
        raise ValueError(f"rank = {rank}: two of the weight's largest singular values are equal, so any basis would do")
    left, right = u[:, :rank], v[:rank]
    signs = right.gather(1, right.abs().argmax(dim=1, keepdim=True)).sign()
    return (left * signs.T).float(), (right * signs).float()


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The parameters that are trained on top of the frozen base.

    Attributes:
        rank: r >= 1.
        alpha: the product B A is scaled by alpha / rank.
        target_modules: names of linear layers; empty for peft's default for the model type.
        layers: `all`, `last-N`, or indices such as `4,5`.
        task: `SEQ_CLS` or `CAUSAL_LM`; with the former, the classification head is trained too.
        trains: `lora`: A and B; `lora-b`: B only, with A frozen at its random initial value; `lora-r`: a matrix R
            between B and A, which are frozen; `head`: neither, so that only a classification head is trained;
            `weights`: the layers' full weight matrices and biases instead, in which case rank and alpha are ignored;
            `biases`: the latter alone.
        orthonormal: whether the rows of A are made orthonormal at the start, keeping what they span.
    """

    rank: int = 8
    alpha: float = 16.0
    target_modules: tuple[str, ...] = ()
    layers: str = "all"
    task: str = "SEQ_CLS"
    trains: Trains = "lora"
    orthonormal: bool = False


def attach(
    base: BaseModel,
    settings: LoraSettings,
    *,
    seed: int = 0,
    factors: Callable[[PeftModel], Mapping[str, Factors]] = _factors_of_weights,
    rows: Callable[[PeftModel], Mapping[str, Tensor]] | None = None,
) -> PeftModel:
    """The base with a new adapter that leaves its function unchanged: B or R zero, or copies of weights.

    Args:
        factors: the frozen factors of each LoRA layer, between which an R lies; by default singular vectors.
        rows: A of each LoRA layer, where B alone is trained; by default peft's random one.

    Raises:
        InputError: the model lacks a target module or layer, or has no full weights that can be trained, or a layer has
            fewer inputs than an orthonormal A has rows, or no unique singular vectors.
    """
    configured = _weights_config if settings.trains in ("weights", "biases") else _lora_config
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = get_peft_model(base.model, configured(base, settings)).eval()
        except NoMatchingPeftModuleError:  # layers that share their weights have no numbers of their own
            raise InputError(f"layers = {settings.layers!r}: not in model {base.name!r}; use layers = all") from None
        if settings.trains == "lora-r":
            _put_between(model, factors(model))
        elif rows and settings.trains == "lora-b":
            _put_rows(model, rows(model))
    for name, parameter in model.named_parameters():
        if settings.orthonormal and ".lora_A." in name:
            _make_orthonormal(name, parameter)
        if any(part in name for part in _FROZEN.get(settings.trains, ())):
            parameter.requires_grad_(False)
    return model


@torch.no_grad()
def _put_rows(model: PeftModel, rows: Mapping[str, Tensor]) -> None:
    for name, values in rows.items():
        model.get_submodule(name).lora_A["default"].weight.copy_(values)


@torch.no_grad()
def _make_orthonormal(name: str, rows: nn.Parameter) -> None:
    rank, width = rows.shape
    if rank > width:
        raise InputError(f"rank = {rank}: {name} has {width} inputs, so no more orthonormal rows; use at most {width}")
    rows.copy_(torch.linalg.qr(rows.double().T).Q.T)


def _lora_config(base: BaseModel, settings: LoraSettings) -> LoraConfig:
    names = settings.target_modules or default_targets(base)
    targets = [m for n, m in base.model.named_modules() if n.rsplit(".", 1)[-1] in names]
    if not targets:
        linear = (nn.Linear, Conv1D)
        known = {n.rsplit(".", 1)[-1] for n, m in base.model.named_modules() if isinstance(m, linear)}
        raise InputError(
            f"target_modules = {','.join(names)}: not in model {base.name!r}; its linear layers are "
            f"{', '.join(sorted(known))}"
        )
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=list(names),
        layers_to_transform=_layer_indices(settings.layers, base.model.config.num_hidden_layers),
        modules_to_save=list(base.new_modules) or None,
        # GPT-2 stores its weights transposed; peft would only warn if this were left out.
        fan_in_fan_out=isinstance(targets[0], Conv1D),
        task_type=settings.task,
    )


def _weights_config(base: BaseModel, settings: LoraSettings) -> LNTuningConfig:
    """Full weights as an adapter: peft's LN tuning trains a copy of any layer, of whatever kind."""
    path, layers = _blocks(base)
    chosen = _layer_indices(settings.layers, len(layers))
    names = [
        f"{path}.{index}.{name}"
        for index in (range(len(layers)) if chosen is None else chosen)
        for name, module in layers[index].named_modules()
        if isinstance(module, nn.Linear)
        and (settings.trains == "weights" or module.bias is not None)
        and (not settings.target_modules or name.rsplit(".", 1)[-1] in settings.target_modules)
    ]
    if not names:
        raise InputError(
            f"model {base.name!r}: none of the chosen layers' target_modules is a linear layer with {settings.trains}, "
            "and others are not trained here; use a rule that trains LoRA"
        )
    return LNTuningConfig(target_modules=names, modules_to_save=list(base.new_modules) or None, task_type=settings.task)


def default_targets(base: BaseModel) -> tuple[str, ...]:
    """The linear layers that peft adapts by default in a model of this type, or else the projections of its attention.

    Raises:
        InputError: peft has no default for it, or a pattern instead of a list, and no layer has a usual name.
    """
    model_type = base.model.config.model_type
    known = {"nomic_bert": ["q_proj", "v_proj"], **TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING}
    if (names := known.get(model_type)) is None:
        inside = {name.rsplit(".", 1)[-1] for name, m in base.model.named_modules() if isinstance(m, nn.Linear)}
        names = next((usual for usual in _ATTENTION if inside.issuperset(usual)), None)
    if names is None or isinstance(names, str):
        raise InputError(f"target_modules: peft has no list of defaults for a {model_type} model; name the layers")
    return tuple(names)


def last_targets(base: BaseModel) -> tuple[str, ...]:
    """The name of the linear layer through which a block of this model ends: what writes its last contribution."""
    blocks = _blocks(base)[1]
    linear = (nn.Linear, Conv1D)
    return tuple(name.rsplit(".", 1)[-1] for name, m in blocks[-1].named_modules() if isinstance(m, linear))[-1:]


def _blocks(base: BaseModel) -> tuple[str, nn.ModuleList]:
    """The list of a model's layers and its name."""
    num_layers = base.model.config.num_hidden_layers
    for name, module in base.model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name, module
    raise InputError(f"model {base.name!r}: has no list of {num_layers} layers whose weights could be trained")


def _layer_indices(layers: str, num_layers: int) -> list[int] | None:
    """peft's layers_to_transform; None means all."""
    if layers == "all":
        return None
    if layers.startswith("last-"):
        chosen = list(range(num_layers - int(layers.removeprefix("last-")), num_layers))
    else:
        chosen = [int(index) for index in layers.split(",")]
    if min(chosen) < 0 or max(chosen) >= num_layers:
        raise InputError(f"layers = {layers!r}: the model has {num_layers} layers, 0 to {num_layers - 1}")
    return chosen


def trainable(model: PeftModel) -> dict[str, nn.Parameter]:
    """The trainable parameters, by the names under which peft stores them."""
    # The parameters themselves, not what state_dict() makes of them: tensors without memory have no address. Embeddings
    # are never trained, and "auto" might ask the Hub about them.
    tensors = get_peft_model_state_dict(model, state_dict=dict(model.named_parameters()), save_embedding_layers=False)
    return {name: p for name, p in tensors.items() if p.requires_grad}


def read(model: PeftModel) -> Adapter:
    """A copy of the adapter's tensors, float32."""
    return read_parameters(trainable(model))


def write(model: PeftModel, adapter: Mapping[str, Tensor]) -> None:
    """Set the adapter's tensors; ValueError if names or shapes differ from the model's."""
    write_parameters(trainable(model), adapter)


def read_parameters(parameters: Mapping[str, nn.Parameter]) -> Adapter:
    """`read`, given the result of `trainable`: finding the parameters again costs as much as a training step."""
    return {name: p.detach().to("cpu", torch.float32, copy=True) for name, p in parameters.items()}


def write_parameters(parameters: Mapping[str, nn.Parameter], adapter: Mapping[str, Tensor]) -> None:
    """`write`, given the result of `trainable`; an R of a smaller rank is the leading block of the model's."""
    if parameters.keys() != adapter.keys():
        unmatched = sorted(parameters.keys() ^ adapter.keys())
        raise ValueError(f"adapter: tensors {', '.join(unmatched)} are on one side only")
    with torch.no_grad():
        for name, parameter in parameters.items():
            given = adapter[name]
            target = parameter[tuple(map(slice, given.shape))] if name.endswith(INNER_SUFFIX) else parameter
            if target.shape != given.shape:
                actual, expected = tuple(given.shape), tuple(parameter.shape)
                raise ValueError(f"adapter: {name} has shape {actual}, the model's is {expected}")
            if target.shape != parameter.shape:
                parameter.zero_()
            target.copy_(given)


def save(
    model: PeftModel,
    base: BaseModel,
    directory: Path,
    *,
    adapter: Mapping[str, Tensor] | None = None,
    merged: Merged | None = None,
    labels: tuple[str, ...] = (),
    reading: Mapping[str, Any] | None = None,
) -> None:
    """Write an adapter in peft's format, together with `fedpriv.json`: base, pooling, labels, and how texts are read.

    The files are those of peft's `save_pretrained` except the model card, see `fedpriv.models.publishing.card`. The
    base is named as on the Hub, or by the last part of its path.

    Args:
        model: a model with an adapter of the same kind.
        directory: created if it does not exist; links to files in it, as in a cache, are replaced and not followed.
        adapter: the trained tensors by peft's names; None takes the model's own. The frozen tensors of the model's
            adapter are added.
        merged: what aggregation has added to the frozen weights; the saved adapter includes it, at a higher rank.
        labels: the classes in order.
        reading: how texts become tokens, see `fedpriv.learning.data.records`; None where that is not known.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.copy(model.active_peft_config)
    config.inference_mode = True
    config.base_model_name_or_path = public_name(base.name)
    # Embeddings are never trained; "auto" might ask the Hub for a base that is known by its folder's name alone.
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    stored = {name: tensor.detach().cpu() for name, tensor in own.items()}
    tensors = as_one_adapter(as_ordinary({**stored, **(adapter or {})}), merged or {})
    if isinstance(config, LoraConfig):
        rank = next(right.shape[0] for _, right in factors_of(tensors).values())
        config.lora_alpha, config.r = config.lora_alpha * rank / config.r, rank
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replaced_file(directory / "adapter_model.safetensors") as file:
        save_file(contiguous, file.name, metadata={"format": "pt"})
    with tempfile.TemporaryDirectory(dir=directory) as made:
        config.save_pretrained(made)
        Path(made, CONFIG_NAME).replace(directory / CONFIG_NAME)
    convention = {
        "version": 1,
        "base_model": public_name(base.name),
        "base_weights": weights_digests(base.name),
        "pooling": base.pooling,
        "labels": list(labels),
        "reading": None if reading is None else dict(reading),
    }
    replace_file(directory / CONVENTION_FILE, f"{json.dumps(convention, indent=2)}\n".encode(), mode=None)


def shaped(base: BaseModel, settings: Mapping[str, Any]) -> PeftModel:
    """The base with an adapter of the settings in an adapter's own `adapter_config.json`, whose values are random."""
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        own = {**settings, "inference_mode": False, "base_model_name_or_path": None}
        return get_peft_model(base.model, PeftConfig.from_peft_type(**own)).eval()


def load(base: Any, directory: Path | str) -> PeftModel:
    """The base with a saved adapter, with the same pooling as in training, labels in words, in eval mode.

    Args:
        base: a model's name as in the configuration, a `BaseModel` that pools as in training, or a transformers model
            with the head for its task, as `from_pretrained` returns it. A model object is modified: the adapter is
            attached to it.

    Raises:
        InputError: the directory holds no fedpriv adapter, or one of another version or kind, or the base cannot be
            loaded, has other weights than in training, or pools in another way.
    """
    path, convention = Path(directory) / CONVENTION_FILE, read_convention(Path(directory))
    settings = PeftConfig.from_pretrained(directory)
    if settings.peft_type not in _WRITTEN or not (path.parent / "adapter_model.safetensors").is_file():
        raise InputError(
            f"{path.parent}: needs adapter_model.safetensors of type {' or '.join(_WRITTEN)}; pickles are never read"
        )
    if isinstance(base, str):
        name, normalize = base, pooling.normalizes(convention["pooling"])
        base = load_base(name, task=settings.task_type, labels=convention["labels"], normalize=normalize)
        check_weights(name, convention["base_weights"])
    if isinstance(base, BaseModel):
        if base.pooling != convention["pooling"]:
            raise InputError(f"{path}: pooling = {convention['pooling']}, but the base's is {base.pooling}")
        model = base.model
    else:
        model = base.eval()
        pooling.apply(model, convention["pooling"])
    if labels := convention["labels"]:
        model.config.id2label = dict(enumerate(labels))
        model.config.label2id = {label: index for index, label in enumerate(labels)}
    with quiet_transformers():
        return PeftModel.from_pretrained(model, directory).eval()


def read_convention(directory: Path) -> dict[str, Any]:
    """The content of a folder's `fedpriv.json`, which describes its adapter; InputError if this cannot be used."""
    path = directory / CONVENTION_FILE
    try:
        convention = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: missing; for an adapter of other origin use PeftModel.from_pretrained") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    return checked_convention(convention, path)


def checked_convention(convention: Any, path: Path) -> dict[str, Any]:
    """The content of a `fedpriv.json`; InputError if it is damaged or of another version."""
    version = convention.get("version") if isinstance(convention, dict) else None
    if version != 1:
        raise InputError(f"{path}: version {version!r}; this fedpriv reads version 1")
    kinds = {"labels": list, "base_model": str, "base_weights": dict}
    is_whole = all(isinstance(convention.get(key), kind) for key, kind in kinds.items())
    if not is_whole or convention.get("pooling") not in pooling.CONVENTIONS:
        known = ", ".join(pooling.CONVENTIONS)
        raise InputError(f"{path}: damaged; it needs pooling, one of {known}, labels, base_model and base_weights")
    return dict(convention)


def is_causal(model: Any) -> bool:
    """Whether a peft model predicts tokens, not classes."""
    return bool(model.active_peft_config.task_type == "CAUSAL_LM")
