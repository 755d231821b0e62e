"""The bytes that a federation with a LoRA setting sends, counted from the model's shape without its weights.

The count covers the values of the A and B matrices. It excludes a classification head, which a run with
`task = SEQ_CLS` trains and sends too, and the overhead of file formats and transport.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from fedpriv.errors import InputError
from fedpriv.learning.adapters import BaseModel, quiet_transformers, resolve
from fedpriv.learning.adapters.lora import default_targets

_PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024}
    | {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "bert-base": {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 30522, "hidden_size": 768}
    | {"intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    | {"max_position_embeddings": 512, "type_vocab_size": 2},
    "llama-7b": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000}
    | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    # ChatGLM2 itself needs code from the Hub. GLM has the same blocks, but with separate query, key and value: adapters
    # on these three have another number of values than one on ChatGLM2's fused query_key_value.
    "chatglm2-6b": {"model_type": "glm", "architectures": ["GlmForCausalLM"], "vocab_size": 65024, "hidden_size": 4096}
    | {"intermediate_size": 13696, "num_hidden_layers": 28, "num_attention_heads": 32, "num_key_value_heads": 2}
    | {"head_dim": 128, "attention_bias": True, "tie_word_embeddings": False}
    | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
_ATTENTION = {
    "gpt2": ("c_attn", "attn.c_proj"),
    "bert-base": ("query", "key", "value", "attention.output.dense"),
    "llama-7b": ("q_proj", "k_proj", "v_proj"),
    "chatglm2-6b": ("q_proj", "k_proj", "v_proj"),
}
# Model: table, then method or rank, overhead and reduction ratio in percent, as Liu et al. (DP-LoRA) print them.
_PAPER = {
    "llama-7b": "5: vanilla-fl 6.7B -, cmfl 1.79B 26.8, t-fedavg 1.18B 17.7, 1024 2.43B 36.27, 512 1.35B 20.15, "
    "256 0.93B 13.88, 128 0.65B 9.70, 64 0.49B 7.31, 16 0.31B 4.63, 4 0.17B 2.53",
    "chatglm2-6b": "5: vanilla-fl 6.2B -, cmfl 1.95B 31.4, t-fedavg 1.41B 22.9, 1024 2.94B 47.4, 512 1.76B 28.4, "
    "256 0.83B 13.4, 128 0.52B 9.3, 64 0.47B 7.6, 16 0.31B 4.9, 4 0.15B 2.4",
    "gpt2": "18: vanilla-fl 127.4M -, 512 101.3M 79.5, 256 82.1M 64.4, 128 69.5M 54.6, 64 58.6M 46.0, 32 58.0M 45.5",
    "bert-base": "19: vanilla-fl 110.8M -, 512 83.7M 75.5, 256 69.9M 63.1, 128 54.5M 49.2, 64 48.1M 43.4, "
    "32 46.6M 42.0",
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The properties of a model that the count needs.

    Attributes:
        total_parameters: of all parameters, tied ones counted once.
        hidden_size: n of the paper's formula.
        layers: {dotted name: (inputs, outputs)} of every linear layer, including a head.
        default_targets: peft's default for the model type; empty if it has none.
    """

    name: str
    total_parameters: int
    hidden_size: int
    layers: dict[str, tuple[int, int]]
    default_targets: tuple[str, ...]

    def adapted(self, targets: Sequence[str]) -> list[tuple[int, int]]:
        """(inputs, outputs) of the linear layers whose dotted name is a target or ends in one, as peft matches them.

        Raises:
            InputError: a target is not a linear layer, or there is no target.
        """
        known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in self.layers}))
        for target in targets:
            if not any(f".{name}".endswith(f".{target}") for name in self.layers):
                raise InputError(f"targets = {target}: not in {self.name}; its linear layers are {known}")
        if not targets:
            raise InputError(f"targets: peft has no default for {self.name}; its linear layers are {known}")
        endings = tuple(f".{target}" for target in targets)
        return [shape for name, shape in self.layers.items() if f".{name}".endswith(endings)]


def model_shape(name: str) -> ModelShape:
    """The shape of a model, given its name. No weights are read or allocated.

    Args:
        name: a local folder with a config.json, else one of `PRESETS`, else a model on the Hub, from which only the
            configuration is fetched.

    Raises:
        InputError: there is no such model, or transformers cannot build it from its configuration.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir() and name in _PRESETS:
        return _preset_shape(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(f"model = {name!r}: this folder has no config.json")
    location = str(folder) if folder.is_dir() else resolve(name)
    try:
        with quiet_transformers():
            return _shape_of(AutoConfig.from_pretrained(location, trust_remote_code=False), name)
    except Exception as error:  # a foreign configuration may cause any error in transformers or torch
        reason = textwrap.shorten(str(error) or type(error).__name__, 120)
        raise InputError(f"model = {name!r}: {reason} (no network needed: {', '.join(_PRESETS)})") from None


def _preset_shape(name: str) -> ModelShape:
    """The shape of one of `_PRESETS`; if peft has no default targets for it, they are query, key and value."""
    shape = _shape_of(AutoConfig.for_model(**_PRESETS[name]), name)
    return replace(shape, default_targets=shape.default_targets or _ATTENTION[name])


def _shape_of(config: Any, name: str) -> ModelShape:
    """The shape of the model that a transformers configuration describes; messages call it by the given name."""
    model = _meta_model(config)
    linear = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    try:
        defaults = default_targets(BaseModel(name, model, None, (), "model"))
    except InputError:
        defaults = ()
    return ModelShape(
        name=name,
        total_parameters=sum(parameter.numel() for parameter in model.parameters()),
        hidden_size=config.get_text_config().hidden_size,
        # GPT-2's Conv1D keeps its weight as [inputs, outputs].
        layers={n: tuple(m.weight.shape[:: 1 if isinstance(m, Conv1D) else -1]) for n, m in linear.items()},
        default_targets=defaults,
    )


def _meta_model(config: Any) -> Any:
    """The model that a configuration describes, on torch's meta device, which allocates nothing.

    It has its head if the configuration's first architecture is a causal model or a sequence classifier, else none.
    """
    architecture = (config.architectures or [""])[0]
    loader = AutoModel
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        loader = AutoModelForCausalLM
    elif architecture.endswith("ForSequenceClassification"):
        loader = AutoModelForSequenceClassification
    with quiet_transformers(), torch.device("meta"):
        return loader.from_config(config)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The bytes that clients send; they receive as many.

    Attributes:
        total_parameters, target_parameters: of the whole model, and of the adapted weight matrices themselves.
        trainable_parameters: r * (inputs + outputs), summed over these: what a client sends per round.
        parameters_up, bytes_up, bytes_down: over all clients and rounds.
        formula_parameters: the paper's T K L r 2n, with L adapted matrices and hidden size n, for comparison with
            parameters_up; the two are equal if all matrices are n x n.
        reduction_ratio: trainable over total parameters; reduction_percent is the same in percent.
    """

    model: str
    rank: int
    targets: tuple[str, ...]
    num_clients: int
    num_rounds: int
    bytes_per_value: int
    total_parameters: int
    num_matrices: int
    hidden_size: int
    target_parameters: int
    trainable_parameters: int
    bytes_per_upload: int
    parameters_up: int
    bytes_up: int
    bytes_down: int
    formula_parameters: int
    formula_is_exact: bool
    reduction_ratio: float
    reduction_percent: float


def count(
    shape: ModelShape,
    *,
    rank: int,
    targets: Sequence[str] = (),
    num_clients: int = 5,
    num_rounds: int = 50,
    bytes_per_value: int = 4,
) -> Communication:
    """The bytes that a federation sends if every client takes part in every round.

    Args:
        rank: of the adapter, >= 1.
        num_clients: >= 1.
        num_rounds: >= 1.
        bytes_per_value: >= 1; float32 has 4.
        targets: names of linear layers, or the ends of their dotted names; empty for peft's default.

    Raises:
        InputError: a number is below 1, or the model does not have a target.

    Source: Liu et al., section 4.4.
    """
    numbers = {"rank": rank, "clients": num_clients, "rounds": num_rounds, "bytes_per_value": bytes_per_value}
    for name, number in numbers.items():
        if number < 1:
            raise InputError(f"{name} = {number}: must be >= 1")
    chosen = tuple(targets) or shape.default_targets
    layers = shape.adapted(chosen)
    trainable = rank * sum(map(sum, layers))
    uploads = num_clients * num_rounds
    formula = uploads * len(layers) * rank * 2 * shape.hidden_size
    return Communication(
        model=shape.name,
        rank=rank,
        targets=chosen,
        num_clients=num_clients,
        num_rounds=num_rounds,
        bytes_per_value=bytes_per_value,
        total_parameters=shape.total_parameters,
        num_matrices=len(layers),
        hidden_size=shape.hidden_size,
        target_parameters=sum(inputs * outputs for inputs, outputs in layers),
        trainable_parameters=trainable,
        bytes_per_upload=trainable * bytes_per_value,
        parameters_up=uploads * trainable,
        bytes_up=uploads * trainable * bytes_per_value,
        bytes_down=uploads * trainable * bytes_per_value,
        formula_parameters=formula,
        formula_is_exact=formula == uploads * trainable,
        reduction_ratio=trainable / shape.total_parameters,
        reduction_percent=100 * trainable / shape.total_parameters,
    )


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A row of Table 5, 18 or 19 of the DP-LoRA paper next to our counts, in parameters of one client's upload.

    Attributes:
        table, method, rank: of the row; `vanilla-fl` includes what the paper calls origin. Only `dp-lora` has a rank.
        targets: the matrices that our counts assume to be adapted; the paper says self-attention.
        paper_parameters, paper_reduction_percent: as printed.
        exact_parameters, exact_reduction_percent: the sum of r * (inputs + outputs), and its percentage of all
            parameters; for `vanilla-fl` all parameters; None for other methods.
        formula_parameters: the paper's L r 2n.
        relative_deviation: formula_parameters / paper_parameters - 1.
        given_by_formula: whether that is at most 5 % in magnitude; None without a rank.
        exceeds_adapted_matrices: whether the printed overhead exceeds that of sending the adapted matrices in full.
        ratio_contradicts_overhead: whether no two values that round to the printed overhead and the printed origin
            have a ratio that rounds to the printed one; None if no ratio is printed.
    """

    table: int
    model: str
    method: str
    rank: int | None
    targets: tuple[str, ...]
    paper_parameters: float
    paper_reduction_percent: float | None
    exact_parameters: int | None
    exact_reduction_percent: float | None
    formula_parameters: int | None
    relative_deviation: float | None
    given_by_formula: bool | None
    exceeds_adapted_matrices: bool | None
    ratio_contradicts_overhead: bool | None


def compare_paper() -> list[PaperRow]:
    """Every row of the paper's Tables 5, 18 and 19 next to the counts that its rank gives.

    The paper adapts self-attention, so the counts assume query, key and value for Llama, as in the paper's example, and
    for ChatGLM2, and also the attention output for GPT-2 and BERT. Under this assumption no printed figure follows from
    its rank, by the formula or exactly. Nor does any other choice explain a model's column: with the linear layers of
    all blocks adapted, the exact counts match one figure, for BERT. The columns grow much more slowly than the rank, as
    if something else were sent as well. Even with a freely chosen constant added for each model, the count is off by up
    to 6 % for BERT and 11 % for GPT-2 (all of the attention), 26 % for Llama and 31 % for ChatGLM2 (all linear layers).
    """
    rows = []
    for model, printed in _PAPER.items():
        table, lines = printed.split(": ")
        entries = [line.split() for line in lines.split(", ")]
        shape = _preset_shape(model)
        rows += [_paper_row(int(table), shape, entries[0][1], *entry) for entry in entries]
    return rows


def finding(rows: Sequence[PaperRow]) -> str:
    """A sentence on how many of the rows follow from the paper's formula, and how many exceed the whole matrices."""
    given = [row.given_by_formula for row in rows if row.rank]
    whole = sum(bool(row.exceeds_adapted_matrices) for row in rows)
    return (
        f"{sum(map(bool, given))} of {len(given)} overheads that the paper prints follow from its formula, L r 2n, to "
        f"5 %; {whole} exceed the matrices sent whole."
    )


def _paper_row(table: int, shape: ModelShape, origin: str, method: str, overhead: str, ratio: str) -> PaperRow:
    """The row of one entry of _PAPER; a number as its method means `dp-lora` with that rank."""
    low, paper, high = _rounding_interval(overhead)
    contradiction = None
    if ratio != "-":
        smallest, _, largest = _rounding_interval(origin)
        lowest, _, highest = _rounding_interval(ratio)
        contradiction = highest < 100 * low / largest or lowest > 100 * high / smallest
    targets = _ATTENTION[shape.name] if method.isdecimal() else ()
    counted = count(shape, rank=int(method), targets=targets, num_clients=1, num_rounds=1) if targets else None
    exact = counted.trainable_parameters if counted else shape.total_parameters if method == "vanilla-fl" else None
    deviation = counted.formula_parameters / paper - 1 if counted else None
    return PaperRow(
        table=table,
        model=shape.name,
        method="dp-lora" if counted else method,
        rank=counted.rank if counted else None,
        targets=targets,
        paper_parameters=paper,
        paper_reduction_percent=None if ratio == "-" else float(ratio),
        exact_parameters=exact,
        exact_reduction_percent=None if exact is None else 100 * exact / shape.total_parameters,
        formula_parameters=counted.formula_parameters if counted else None,
        relative_deviation=deviation,
        given_by_formula=None if deviation is None else abs(deviation) <= 0.05,
        exceeds_adapted_matrices=paper > counted.target_parameters if counted else None,
        ratio_contradicts_overhead=contradiction,
    )


def _rounding_interval(printed: str) -> tuple[float, float, float]:
    """The smallest value that rounds to a printed number such as 2.43B or 36.27, the number itself, and the largest."""
    unit = {"B": 10**9, "M": 10**6}.get(printed[-1], 1)
    number = Decimal(printed.rstrip("BM"))
    half = Decimal(5).scaleb(int(number.as_tuple().exponent) - 1)
    return float((number - half) * unit), float(number * unit), float((number + half) * unit)
