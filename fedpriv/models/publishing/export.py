"""A saved variant as a whole model that loads without fedpriv, in float32.

A classifier that pools becomes a folder of sentence-transformers: the encoder with the adapter merged, the pooling, a
length of one where training did so, and the head. The encoder is in a folder below, so that no pipeline of transformers
takes the whole for a classifier of its own, with a random head. Everything else becomes a folder of transformers.

No classifier of transformers pools by the mean and scales the result, but layers of one do, for encoders in which a
LayerNorm follows each sum. `_arranged` doubles the width: LayerNorm maps [h, h] to its result twice, so the encoder
computes as before. One more layer attends to all tokens alike and adds c times their mean m, and -c m to the second
copy. For a large c the state h of the token itself no longer counts, and LayerNorm brings [c m, -c m], whose mean is 0,
to a fixed length: it becomes [m, -m] / ||m||, times a constant. Where vectors keep their lengths, all is so small that
LayerNorm's epsilon alone divides. With c = 2^30 either equals the true vector to some 1e-7. The class's own head, of
two layers with an activation f, computes the linear one: f(x) - f(-x) is x for ReLU and GELU, and 2x for tanh at x near
0. Attention over position alone, as MPNet has it, is 0 in the new heads.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import GenerationConfig

from fedpriv.errors import InputError
from fedpriv.files import new_folder
from fedpriv.learning.adapters import pooling, quiet_transformers
from fedpriv.learning.adapters.pooling import STATE_SCALE, normalizes
from fedpriv.models.publishing import card
from fedpriv.models.publishing.card import Form
from fedpriv.models.publishing.saved import LoadedVariant, SavedVariant, ends_of

_NAMES = "sentence_transformers.models"
_IDENTITY = "torch.nn.modules.linear.Identity"

# {type of encoder: the two layers of its class's own head, which reads the first token's state}. Those of `_EXACT` have
# ReLU or GELU between them, the others tanh.
_HEADS = {
    "bert": ("bert.pooler.dense", "classifier"),
    "distilbert": ("pre_classifier", "classifier"),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "electra", "mpnet"), ("classifier.dense", "classifier.out_proj")
    ),
}
_EXACT = ("electra", "distilbert")
# The names of attention's linear layers.
_VALUES, _ASKING = ("value", "v", "v_lin"), ("query", "key", "q", "k", "q_lin", "k_lin")


def form_of(saved: SavedVariant) -> Form:
    """The form in which a variant is exported; InputError if neither library can express it."""
    if saved.task == "CAUSAL_LM" or saved.pooling == "model":
        return "transformers"
    if saved.reading.pairs:
        raise InputError(
            "text_pair_column: sentence-transformers reads single texts; use --transformers, fedpriv predict, or "
            "fedpriv.learning.adapters.load"
        )
    return "sentence-transformers"


def export(loaded: LoadedVariant, out: Path, form: Form | None = None) -> Form:
    """Write a variant as a whole model; the folder is complete or not there.

    Args:
        loaded: the variant; its adapter is merged into its base, so it is of no further use.
        out: the folder; must not exist.
        form: `transformers` or what `form_of` says; None for the latter.

    Returns:
        What it is a folder of.

    Raises:
        InputError: the folder exists, or the variant cannot be expressed.
        OSError: it cannot be written.
    """
    form = form or form_of(loaded.saved)
    if form == "transformers" and loaded.saved.pooling != "model":
        _check_arranged(loaded)
    if loaded.saved.task == "SEQ_CLS":
        loaded.tokenizer.padding_side = "right"  # as in training: positions count from the beginning
    with whole_folder(out, loaded.saved, form) as folder:
        if form == "sentence-transformers":
            _write_sentences(loaded, folder)
        else:
            _write_transformers(loaded, folder)
            loaded.tokenizer.save_pretrained(folder)
    return form


def check_new(out: Path) -> None:
    """Refuse a folder or file that exists."""
    if out.exists() or out.is_symlink():
        raise InputError(f"out = {str(out)!r}: exists; name a new folder")


@contextmanager
def whole_folder(out: Path, saved: SavedVariant, form: Form) -> Iterator[Path]:
    """A new folder to fill with an export, which gets the card; anyone may read it, and it is complete or not there.

    InputError if it exists, OSError if it cannot be written.
    """
    check_new(out)
    try:
        with new_folder(out) as folder, quiet_transformers():
            yield folder
            (folder / card.FILE).write_text(_readme(saved, form), encoding="utf-8")
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
    except SafetensorError as error:
        raise OSError(f"{out}: cannot be written ({error})") from None


def _readme(saved: SavedVariant, form: Form) -> str:
    if saved.run is not None and saved.run.is_finished:
        return card.text(saved, form=form)
    return "\n".join(
        [
            f"# An export of {saved.name}",
            "",
            *card.lines_of_use(saved, form),
            "",
            "What it cost its data holders, the card of the adapter says that it was made of.",
            "",
        ]
    )


def merged(loaded: LoadedVariant) -> Any:
    """The transformers model with the adapter in its weights and labels in its configuration; takes the variant."""
    model = loaded.peft_model.merge_and_unload()
    # Adapters of whole weights leave a head in its wrapper.
    wrapped = [(name, module) for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    for name, module in wrapped:
        model.set_submodule(name, module.modules_to_save["default"])
    return model


def _write_transformers(loaded: LoadedVariant, folder: Path) -> None:
    ends = sorted(ends_of(loaded)) if loaded.saved.task == "CAUSAL_LM" else []
    model = merged(loaded)
    if loaded.saved.pooling != "model":
        model = _arranged(model, loaded.saved.pooling)
    if loaded.saved.task == "SEQ_CLS":
        loaded.tokenizer.model_max_length = loaded.saved.reading.max_length  # at which a pipeline cuts
    if ends:
        # Greedy, as `fedpriv predict` answers, whatever the base's own settings are.
        model.generation_config = GenerationConfig(
            do_sample=False,
            bos_token_id=model.generation_config.bos_token_id,
            eos_token_id=ends,
            pad_token_id=loaded.tokenizer.pad_token_id,
            max_new_tokens=loaded.saved.reading.max_new_tokens,
        )
    model.save_pretrained(folder)


def _write_sentences(loaded: LoadedVariant, folder: Path) -> None:
    saved, model = loaded.saved, merged(loaded)
    encoder, (_, head) = model.base_model, cast("tuple[str, nn.Linear]", pooling.linear_head(model))
    encoder.config.id2label, encoder.config.label2id = model.config.id2label, model.config.label2id
    unit, kind = normalizes(saved.pooling), saved.pooling.rpartition("-")[2]
    width_out, width_in = head.weight.shape
    modes = {f"pooling_mode_{name}": own == kind for own, name in pooling.KINDS.items()}
    dense = {"in_features": width_in, "out_features": width_out, "bias": True, "activation_function": _IDENTITY}
    parts = {
        "Transformer": {"max_seq_length": saved.reading.max_length, "do_lower_case": False},
        "Pooling": {"word_embedding_dimension": width_in, **modes},
        **({"Normalize": {}} if unit else {}),
        "Dense": dense,
    }
    modules = []
    for number, (name, values) in enumerate(parts.items()):
        path = folder / f"{number}_{name}"
        modules.append({"idx": number, "name": str(number), "path": path.name, "type": f"{_NAMES}.{name}"})
        path.mkdir()
        if name == "Transformer":
            encoder.save_pretrained(path)
            loaded.tokenizer.save_pretrained(path)
        if values:
            _write_json(path / ("config.json" if number else "sentence_bert_config.json"), values)
    weight = (head.weight.double() * (STATE_SCALE if unit else 1.0)).float()
    bias = torch.zeros(width_out) if head.bias is None else head.bias
    tensors = {"linear.weight": weight.detach().contiguous(), "linear.bias": bias.detach().contiguous()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "modules.json", modules)


def _check_arranged(loaded: LoadedVariant) -> None:
    """Refuse a classifier that no class of transformers computes, by the name of what it lacks."""
    family, kind = loaded.peft_model.config.model_type, loaded.saved.pooling.rpartition("-")[2]
    if family not in _HEADS or kind not in ("mean", "cls"):
        raise InputError(
            f"transformers: no weights make its own classifier of a {family} pool by {kind} into a linear head; leave "
            "--transformers out for a folder of sentence-transformers"
        )
    if (num := len(loaded.saved.labels)) > (room := loaded.peft_model.config.hidden_size):
        raise InputError(f"transformers: {num} labels, and its own head has room for {room}; leave --transformers out")


@torch.no_grad()
def _arranged(model: Any, convention: str) -> Any:
    """A model of the same class, twice as wide and one layer longer, whose own forward pass gives the same logits."""
    config, unit, cls = copy.deepcopy(model.config), normalizes(convention), convention.endswith("cls")
    width, layers = config.hidden_size, config.num_hidden_layers
    if getattr(config, "embedding_size", None) == width:
        config.embedding_size *= 2
    config.hidden_size, config.num_attention_heads = 2 * width, 2 * config.num_attention_heads
    config.num_hidden_layers = layers + 1
    (first, last), head = _HEADS[config.model_type], cast("tuple[str, nn.Linear]", pooling.linear_head(model))[1]
    with torch.random.fork_rng(devices=[]):
        wide = type(model)(config).eval()
    for name, module in wide.base_model.named_modules():
        if f".{layers}." not in f".{name}." and next(module.parameters(recurse=False), None) is not None:
            _double(module, model.base_model.get_submodule(name), name.rpartition(".")[2])
    *before, added = next(m for m in wide.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers + 1)
    norms = [module for module in added.modules() if isinstance(module, nn.LayerNorm)]
    linears = {name: module for name, module in added.named_modules() if isinstance(module, nn.Linear)}
    value = next(module for name, module in linears.items() if name.rpartition(".")[2] in _VALUES)
    writes, epsilon = list(linears.values())[3], norms[0].eps  # the fourth writes what attention found
    for parameter in [p for linear in linears.values() for p in linear.parameters()]:
        parameter.zero_()
    scale = 1.0 if unit else epsilon**0.5 * 2.0 ** (-17 if cls else -47)
    final = [module for module in before[-1].modules() if isinstance(module, nn.LayerNorm)][-1]
    for parameter in final.parameters():
        parameter.mul_(scale)
        if cls:
            parameter[width:].neg_()
    if not cls:
        value.weight[width:, :width] = torch.eye(width)
        writes.weight[:, width:] = torch.cat([torch.eye(width), -torch.eye(width)]) * 2.0**30
    norms[0].weight.fill_(1.0 if unit else epsilon**0.5)
    norms[1].weight.fill_((1 + epsilon) ** 0.5 * STATE_SCALE / width**0.5 if unit else 2.0**17)
    _as_two_layers(wide.get_submodule(first), wide.get_submodule(last), head, small=config.model_type not in _EXACT)
    return wide


def _double(wide: Any, own: Any, name: str) -> None:
    """Give a module of twice the width what a module has: its output twice, or for attention's heads once, then 0."""
    once = name in (*_VALUES, *_ASKING, "relative_attention_bias")
    for key, parameter in wide.named_parameters(recurse=False):
        values, target = getattr(own, key), parameter
        for axis, length in enumerate(values.shape):
            if target.shape[axis] != length:
                reads = axis == 1 and isinstance(wide, nn.Linear)
                more = torch.zeros_like(values) if once or reads else values
                values = torch.cat([values, more], dim=axis)
        target.copy_(values)


def _as_two_layers(first: Any, last: Any, head: nn.Linear, *, small: bool) -> None:
    """Make two layers with an activation between them compute the linear head on the first half of a vector."""
    num, width = head.weight.shape
    scale = 2.0**-16 if small else 1.0
    for parameter in (*first.parameters(), *last.parameters()):
        parameter.zero_()
    first.weight[: 2 * num, :width] = torch.cat([head.weight, -head.weight]) * scale
    last.weight[:, : 2 * num] = torch.cat([torch.eye(num), -torch.eye(num)], dim=1) / (2 * scale if small else 1.0)
    if head.bias is not None:
        last.bias.copy_(head.bias)


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
