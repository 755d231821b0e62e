"""A saved variant as a whole model that loads without fedpriv, in float32.

An encoder with mean pooling becomes a folder of sentence-transformers: the encoder with the adapter merged, the mean of
its tokens, their length brought to one where training did so, and the head. Everything else whose function transformers
itself has becomes a folder of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
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
_ACTIVATION = "torch.nn.modules.activation"

_Part = tuple[str, dict[str, Any], dict[str, Tensor]]
"""A module of sentence-transformers: its kind, its configuration and its tensors."""


def form_of(saved: SavedVariant) -> Form:
    """The form in which a variant is exported; InputError if neither library can express it."""
    if saved.task == "CAUSAL_LM" or saved.pooling == "model":
        return "transformers"
    if saved.pooling == "unit-model":
        raise InputError(
            "pooling = unit-model: neither transformers nor sentence-transformers scales what this model's own pooling "
            "gives; use fedpriv predict or fedpriv serve, or train with normalize_features = false"
        )
    if saved.reading.pairs:
        raise InputError(
            "text_pair_column: sentence-transformers reads single texts; "
            "use fedpriv predict, or fedpriv.learning.adapters.load"
        )
    return "sentence-transformers"


def export(loaded: LoadedVariant, out: Path) -> Form:
    """Write a variant as a whole model; the folder is complete or not there.

    Args:
        loaded: the variant; its adapter is merged into its base, so it is of no further use.
        out: the folder; must not exist.

    Returns:
        What it is a folder of.

    Raises:
        InputError: the folder exists, or the variant cannot be expressed.
        OSError: it cannot be written.
    """
    form = form_of(loaded.saved)
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
    """A folder to fill with an export, which gets the card; anyone may read it, and it is complete or not there.

    Args:
        out: the folder; must not exist.

    Raises:
        InputError: the folder exists.
        OSError: it cannot be written.
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
    """The transformers model with the adapter in its weights and the labels in its configuration.

    Args:
        loaded: the variant, which is of no further use.
    """
    model = loaded.peft_model.merge_and_unload()
    # Adapters of whole weights leave a head in its wrapper.
    wrapped = [(name, module) for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    for name, module in wrapped:
        model.set_submodule(name, module.modules_to_save["default"])
    return model


def _write_transformers(loaded: LoadedVariant, folder: Path) -> None:
    ends = sorted(ends_of(loaded)) if loaded.saved.task == "CAUSAL_LM" else []
    model = merged(loaded)
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
    encoder, width = model.base_model, model.config.hidden_size
    encoder.config.id2label, encoder.config.label2id = model.config.id2label, model.config.label2id
    encoder.save_pretrained(folder)
    _write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": saved.reading.max_length, "do_lower_case": False}
    )
    pooled = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    unit = normalizes(saved.pooling)
    parts: list[_Part] = [("Pooling", pooled, {}), *([("Normalize", {}, {})] if unit else []), *_head(model, unit=unit)]
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{_NAMES}.Transformer"}]
    for number, (kind, values, tensors) in enumerate(parts, start=1):
        path = f"{number}_{kind}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": f"{_NAMES}.{kind}"})
        (folder / path).mkdir()
        if tensors:
            save_file(tensors, folder / path / "model.safetensors", metadata={"format": "pt"})
        if values:
            _write_json(folder / path / "config.json", values)
    _write_json(folder / "modules.json", modules)


def _head(model: Any, *, unit: bool) -> list[_Part]:
    """The layers that follow the pooled vector."""
    found = pooling.linear_head(model)
    if found is not None:
        weight = found[1].weight.double() * (STATE_SCALE if unit else 1.0)
        return [_layer(weight.float(), found[1], _IDENTITY)]
    kind = model.config.model_type
    if kind == "distilbert":
        first, last, between = model.pre_classifier, model.classifier, "ReLU"
    elif kind in pooling.REPLACED:
        first, last = model.classifier.dense, model.classifier.out_proj
        between = "GELU" if kind == "electra" else "Tanh"
    else:
        raise InputError(f"model: the head of a {type(model).__name__} is not known to export; use fedpriv predict")
    return [_layer(first.weight, first, f"{_ACTIVATION}.{between}"), _layer(last.weight, last, _IDENTITY)]


def _layer(weight: Tensor, of: nn.Linear, activation: str) -> _Part:
    bias = torch.zeros(len(weight)) if of.bias is None else of.bias
    width_out, width_in = weight.shape
    values = {"in_features": width_in, "out_features": width_out, "bias": True, "activation_function": activation}
    return "Dense", values, {"linear.weight": weight.detach().contiguous(), "linear.bias": bias.detach().contiguous()}


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
