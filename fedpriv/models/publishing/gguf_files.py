"""A saved language model as files of llama.cpp and Ollama: its LoRA, a whole model, and a Modelfile.

Each file says what the run published and no more: of a GGUF base, tokenizer and license are copied; sizes and weights
are those of the model as it was trained. The same variant gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFType,
    GGUFWriter,
    Keys,
    LlamaFileType,
    quantize,
)
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.learning.adapters import gguf_file
from fedpriv.models.publishing import _modelfile
from fedpriv.models.publishing._card_texts import GgufForm, Precision
from fedpriv.models.publishing._gguf_metadata import add_sizes, add_tokenizer
from fedpriv.models.publishing._gguf_tensors import adapter_tensors, architecture_of, model_tensors
from fedpriv.models.publishing.export import merged, whole_folder
from fedpriv.models.publishing.saved import LoadedVariant, SavedVariant

ADAPTER, MODEL = "adapter.gguf", "model.gguf"

_NUMBERS: dict[Precision, tuple[GGMLQuantizationType, LlamaFileType]] = {
    "float16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An export of GGUF files.

    Attributes:
        files: their names, and those of what lies with them.
        has_template: whether the Modelfile has the chat template; else the model's own, in the GGUF file, is left to
            Ollama.
    """

    files: tuple[str, ...]
    has_template: bool


def check(saved: SavedVariant) -> None:
    """Refuse a variant that is no language model.

    Raises:
        InputError: it is a classifier, whose head llama.cpp has not.
    """
    if saved.task != "CAUSAL_LM":
        raise InputError(f"gguf: {saved.name} is a classifier, and --gguf is for language models; leave it out")


def export(loaded: LoadedVariant, out: Path, *, form: GgufForm = "gguf", precision: Precision = "float16") -> Exported:
    """Write a language model for llama.cpp and Ollama; the folder is complete or not there.

    Args:
        loaded: the variant; its adapter is merged into its base, so it is of no further use.
        out: the folder; must not exist.
        form: both files, or one of them.
        precision: of the whole model's matrices. Vectors and the LoRA are in float32.

    Raises:
        InputError: the folder exists, or llama.cpp or a file of its cannot express the variant.
        OSError: it cannot be written.
    """
    check(loaded.saved)
    with whole_folder(out, loaded.saved, form) as folder:
        if form != "gguf-model":
            _write_adapter(loaded, folder / ADAPTER)
        content, has_template = _modelfile.modelfile(loaded, has_model=form != "gguf-adapter")
        (folder / _modelfile.FILE).write_text(content, encoding="utf-8")
        if form != "gguf-adapter":
            _write_model(loaded, folder / MODEL, precision)
    return Exported(files=tuple(sorted(path.name for path in out.iterdir())), has_template=has_template)


def _write_adapter(loaded: LoadedVariant, path: Path) -> None:
    alpha, tensors = adapter_tensors(loaded.peft_model)
    writer = _writer(loaded, GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, alpha)
    _write(writer, path, tensors, GGMLQuantizationType.F32)


def _write_model(loaded: LoadedVariant, path: Path, precision: Precision) -> None:
    kind, file_type = _NUMBERS[precision]
    file = gguf_file(loaded.saved.model)
    source = None if file is None else GGUFReader(file)
    writer = _writer(loaded, GGUFType.MODEL)
    writer.add_file_type(file_type)
    if source is not None and (license := source.get_field(Keys.General.LICENSE)) is not None:
        writer.add_license(license.contents())
    add_sizes(writer, loaded.peft_model.config)
    add_tokenizer(writer, loaded, source)
    _write(writer, path, model_tensors(merged(loaded)), kind)


def _writer(loaded: LoadedVariant, kind: str) -> GGUFWriter:
    """A writer of a file that names what it is made of."""
    saved = loaded.saved
    writer = GGUFWriter(None, MODEL_ARCH_NAMES[architecture_of(loaded.peft_model.config)])
    writer.add_type(kind)
    writer.add_name(f"{saved.base} {saved.name}")
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, saved.base)
    return writer


def _write(writer: GGUFWriter, path: Path, tensors: Mapping[str, Tensor], kind: GGMLQuantizationType) -> None:
    """Write the file, one tensor at a time in the format of the file."""
    kinds = {name: kind if values.dim() > 1 else GGMLQuantizationType.F32 for name, values in tensors.items()}
    for name, values in tensors.items():
        if kinds[name] is GGMLQuantizationType.F16 and values.abs().max() > torch.finfo(torch.float16).max:
            raise InputError(f"precision = float16: {name} has a value beyond 65504; give --precision bfloat16")
        num_bytes = values.numel() * GGML_QUANT_SIZES[kinds[name]][1]
        writer.add_tensor_info(name, values.shape, np.dtype(np.float32), num_bytes, raw_dtype=kinds[name])
    with closing(writer):
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, values in tensors.items():
            writer.write_tensor_data(quantize(values.contiguous().numpy(), kinds[name]))
