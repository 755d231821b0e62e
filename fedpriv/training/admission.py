"""Which models may train: those in which records cannot touch each other.

In fixed shapes most architectures qualify. Some do not: experts compute all tokens that are routed to them in one
product, whose shape depends on every record, and some approximations of attention normalise over the batch. Such models
run one record a pass. Others keep state between passes or draw random numbers; no shape helps against that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from fedpriv.data.records import BatchShape, Item
from fedpriv.errors import InputError
from fedpriv.training.losses import losses_and_hits
from fedpriv.training.model import TrainingModel
from fedpriv.training.per_sample import Stack, per_sample_gradients
from fedpriv.training.rehearsal import synthetic_records

log = logging.getLogger(__name__)

# tests/training/test_independence.py holds each of them to it, to the bit.
VERIFIED = frozenset(
    {
        "bert",
        "camembert",
        "convbert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "fnet",
        "gemma",
        "gemma2",
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "modernbert",
        "mpnet",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "roberta",
        "xlm-roberta",
    }
)

# A test on a few records can miss what depends on the data, so these are refused by name.
REFUSED = {
    "big_bird": "a short record switches its attention for all later ones",
    "bigbird_pegasus": "a short record switches its attention for all later ones",
    "longformer": "its passes fail depending on where records have global attention",
    "reformer": "it hashes with random numbers drawn in each pass",
    "xlnet": "its passes fail depending on the data",
}

# Experts are found by their configuration: whether a sum over routed tokens rounds differently depends on the data.
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# The longest synthetic records; a longer one takes the same way through a model.
_LONGEST = 64

# On a GPU, where passes have different numbers of rows, a share of a gradient's norm is rounding.
_GPU_TOLERANCE = 0.05


def admit(model: TrainingModel) -> None:
    """Let a model train if its records cannot touch each other; one whose records can in a pass runs them apart.

    Raises:
        InputError: they can even then; names the architecture, and some that would do.
    """
    kind = model.peft_model.config.model_type
    if kind in VERIFIED:
        return
    reason = REFUSED.get(kind) or _reason_to_refuse(model)
    if reason:
        raise InputError(f"model: a {kind} model cannot train here ({reason}); bert, roberta, gpt2 or llama can")
    if not model.records_share_passes:
        log.warning("%s models mix the records of a pass, so each record has a pass of its own: training is slow", kind)


def _reason_to_refuse(model: TrainingModel) -> str:
    """Empty if records of the model, in passes of their own if they must, cannot touch each other."""
    config = model.peft_model.config
    model.records_share_passes = not any(getattr(config, name, None) for name in _NUMBERS_OF_EXPERTS)
    try:
        if records_are_independent(model):
            return ""
        model.records_share_passes = False
        return "" if records_are_independent(model) else "one record's result depends on the others'"
    except Exception as error:  # whatever it is, synthetic records alone have caused it
        return str(error).splitlines()[0] if str(error) else type(error).__name__


def records_are_independent(model: TrainingModel) -> bool:
    """Whether removing, replacing and permuting synthetic records changes no bit of the others' gradients."""
    classes = 0 if model.peft_model.active_peft_config.task_type == "CAUSAL_LM" else model.peft_model.config.num_labels
    longest = min(_LONGEST, model.lengths.longest or _LONGEST)
    records, others = (synthetic_records(model, max_length=longest, num_labels=classes, seed=s) for s in (0, 1))
    everyone = list(range(len(records)))
    kept = everyone[::2]
    expected = _gradients(model, records.items(kept))
    permuted = _gradients(model, records.items(kept[::-1])).flip(0)
    joined = _gradients(model, records.items(everyone))[kept]
    replaced = _gradients(model, [((records if i in kept else others), i) for i in everyone])[kept]
    shortest = _gradients(model, records.items(kept[:1]))
    pairs = [(permuted, expected), (joined, expected), (replaced, expected), (shortest, expected[:1])]
    return all(_equal(model, one, other) for one, other in pairs)


def _equal(model: TrainingModel, one: Tensor, other: Tensor) -> bool:
    if model.device.type == "cpu":
        return torch.equal(one, other)
    return bool(((one - other).norm(dim=1) <= _GPU_TOLERANCE * other.norm(dim=1)).all())


def _gradients(model: TrainingModel, items: Sequence[Item]) -> Tensor:
    """[records, values] The records' gradients in the items' order, with parameters at which none of them vanishes."""
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: (p.detach().cpu() + 0.05 * torch.randn(p.shape, generator=generator)).unsqueeze(0).to(model.device)
        for name, p in model.peft_model.named_parameters()
        if p.requires_grad
    }
    rows: dict[int, Tensor] = {}
    for together in model.passes(items):
        batch = [items[position] for position in together.positions]
        owners = torch.zeros(together.shape.rows, dtype=torch.int64, device=model.device)

        def losses(batch: list[Item] = batch, shape: BatchShape = together.shape) -> Tensor:
            return losses_and_hits(*model.logits(batch, cached=False, shape=shape))[0]

        gradients, _ = per_sample_gradients(model.layers, losses, Stack(parameters=parameters, owners=owners))
        flat = torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)
        rows.update(zip(together.positions, flat, strict=False))  # dummies' rows come last
    return torch.stack([rows[position] for position in range(len(items))])
