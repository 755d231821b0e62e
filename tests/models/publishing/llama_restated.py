"""A Llama computed from the fields and tensors of GGUF files alone, as llama.cpp computes it: an oracle.

It shares no code with what writes the files, and rotates each value against its neighbour, so it needs no permutation.
"""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

Array = np.ndarray[Any, Any]


class File:
    """The fields and tensors of a GGUF file; a tensor [out, in] has its rows first."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = {t.name: dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
        self.kinds = {t.name: t.tensor_type.name for t in reader.tensors}


def logits(base: Path, tokens: list[int], adapter: Path | None = None) -> Array:
    """[tokens, vocabulary] of a Llama, with a LoRA or without."""
    file = File(base)
    lora = File(adapter) if adapter is not None else None
    sizes = {name.removeprefix("llama."): value for name, value in file.fields.items() if name.startswith("llama.")}
    weights = file.tensors

    def times(name: str, inputs: Array) -> Array:
        found = inputs @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)
        if lora is not None and f"{name}.weight.lora_a" in lora.tensors:
            right, left = lora.tensors[f"{name}.weight.lora_a"], lora.tensors[f"{name}.weight.lora_b"]
            found = found + lora.fields["adapter.lora.alpha"] / left.shape[1] * (inputs @ right.T @ left.T)
        return found

    def normed(name: str, inputs: Array) -> Array:
        mean = (inputs**2).mean(axis=-1, keepdims=True)
        return inputs / np.sqrt(mean + sizes["attention.layer_norm_rms_epsilon"]) * weights[f"{name}.weight"]

    def heads(values: Array, number: int) -> Array:
        return values.reshape(len(tokens), number, -1)

    def rotated(values: Array) -> Array:
        width = sizes["rope.dimension_count"]
        frequencies = sizes["rope.freq_base"] ** (-np.arange(0, width, 2) / width)
        frequencies = frequencies / weights.get("rope_freqs.weight", np.ones(width // 2))
        turned = np.exp(1j * np.arange(len(tokens))[:, None] * frequencies)[:, None, :]
        pairs = (values[..., 0::2] + 1j * values[..., 1::2]) * turned
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(values.shape)

    states = weights["token_embd.weight"][tokens]
    number, shared = sizes["attention.head_count"], sizes["attention.head_count"] // sizes["attention.head_count_kv"]
    later = np.triu(np.ones((len(tokens), len(tokens)), dtype=bool), k=1)
    for block in range(sizes["block_count"]):
        at = f"blk.{block}."
        inputs = normed(f"{at}attn_norm", states)
        query = rotated(heads(times(f"{at}attn_q", inputs), number))
        key = rotated(heads(times(f"{at}attn_k", inputs), number // shared)).repeat(shared, axis=1)
        value = heads(times(f"{at}attn_v", inputs), number // shared).repeat(shared, axis=1)
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(query.shape[-1])
        scores[:, later] = -np.inf
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        read = np.einsum("hqk,khd->qhd", shares / shares.sum(axis=-1, keepdims=True), value)
        states = states + times(f"{at}attn_output", read.reshape(len(tokens), -1))
        inputs = normed(f"{at}ffn_norm", states)
        gate = times(f"{at}ffn_gate", inputs)
        states = states + times(f"{at}ffn_down", gate / (1 + np.exp(-gate)) * times(f"{at}ffn_up", inputs))
    return normed("output_norm", states) @ weights.get("output.weight", weights["token_embd.weight"]).T
