"""Frozen LoRA factors that suit what the layers read, from texts of random tokens alone.

Such texts are public, so every holder makes the same factors from the frozen weights, and no record is read.

Where a language model chooses between given answers, what it has to learn is a linear function of what a late layer
reads. So A whitens the layer's inputs, each column of B moves the logit of one of the answers' tokens, and R between
them is the weight matrix of a logistic regression, whose gradients are of about unit length.

Where B alone is trained, a random A reads little of what tells one input from another: its rows become the directions
in which the layer's inputs vary most.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, cycle, islice, pairwise
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.learning.adapters import Factors
from fedpriv.learning.data.chat import RESPONSE_MASK, ChatFormat

# Prompts whose states are whitened, and those of them whose gradients say what moves a logit: on SST-2's film reviews
# with SmolLM2-135M 128, 256 and 512 of the former gave 0.824, 0.830 and 0.833;
# docs/appendices/recipe_trials.md says in which trial.
_NUM_PROMPTS = 256
_NUM_SLOPES = 32
_PROMPT_TOKENS = (4, 40)

# Texts of random tokens whose states the leading directions are of, and their tokens. The first states are left out:
# in many language models they are hundreds of times as long as the others, and the same for all texts.
_NUM_TEXTS = 32
_TEXT_TOKENS = 36
_FIRST_STATES = 4

# What records' whitened states are longer than those of public prompts by: 1.4 on SST-2.
_LONGER = 1.4

# Added to the variances that are divided by, as a share of their mean: directions that public prompts hardly vary in
# are not blown up.
_RIDGE = 0.03
# The same for products of the logits' gradients, which are alike for tokens of like meaning.
_SLOPE_RIDGE = 1e-3


def readout_factors(
    model: Any, tokenizer: Any, chat: ChatFormat, answers: Sequence[str], *, max_length: int
) -> dict[str, Factors]:
    """{LoRA layer of a model: (B, A)}: A float32 [in, in] whitens its inputs, B float32 [out, tokens] moves logits.

    With x the layer's inputs at the places that predict a response, C the mean of x x^T over public prompts and c its
    mean variance, A = a (C + 0.03 c I)^(-1/2), with a for which the median of |A x| is sqrt(n) / 1.4. A record's loss
    is the mean over the n tokens of its response, so its curvature is then that of a head that reads unit vectors,
    even if records are 1.4 times as long as the public prompts. With J the mean gradient of the logits of the answers'
    tokens by the layer's outputs, B = J^T (J J^T)^-1, so that a step of one along a column of B moves that token's
    logit by one. A is the symmetric root, which rounding moves by no more than it moves C.

    Args:
        model: a causal peft model whose LoRA layers do nothing yet, in float32.
        answers: at least two texts.

    Raises:
        InputError: nothing tells two answers apart at this length, or a layer has no part in the answer.
    """
    layers = _lora_layers(model)
    rows = _public_records(tokenizer, chat, answers, max_length)
    responses = [_response(row) for row in rows[: len(answers)]]
    if len(set(responses)) < len(responses):
        raise InputError(f"answers = {', '.join(answers)}: the same tokens at max_length = {max_length}; use more")
    tokens = spoken_tokens(responses)
    inputs: dict[str, list[Tensor]] = {name: [] for name in layers}
    slopes: dict[str, list[Tensor]] = {name: [] for name in layers}
    for number, row in enumerate(rows):
        # Where a response ends, too: R moves what is said there as well, and states are others there.
        places = [place for place, learned in enumerate(row[RESPONSE_MASK][1:]) if learned]
        with _watched(layers) as seen, torch.set_grad_enabled(number < _NUM_SLOPES):
            logits = model(input_ids=torch.tensor([row["input_ids"]], device=model.device)).logits[0, places].sum(0)
            if logits.requires_grad:
                outputs = [output for _, output in seen.values()]
                of_tokens = [torch.autograd.grad(logits[token], outputs, retain_graph=True) for token in tokens]
                for name, of_layer in zip(seen, zip(*of_tokens, strict=True), strict=True):
                    slopes[name].append(torch.stack([gradient[0, places].mean(0) for gradient in of_layer]))
        for name, (states, _) in seen.items():
            inputs[name].append(states[0, places])
    length = math.sqrt(np.mean([sum(row[RESPONSE_MASK]) for row in rows])) / _LONGER
    return {
        name: _factors(name, layer.scaling["default"], torch.cat(inputs[name]), slopes[name], length)
        for name, layer in layers.items()
    }


def leading_directions(model: Any, tokenizer: Any, *, max_length: int) -> dict[str, Tensor]:
    """{LoRA layer of a model: A}: float32 [rank, in], the directions in which the layer's inputs are largest.

    With x the layer's inputs on random tokens, C the mean of x x^T, (v_k, lambda_k) its leading eigenpairs and c its
    mean variance, row k is sqrt(c / (3 (lambda_k + 0.03 c))) v_k, with its largest entry positive. A x then has the
    mean square that peft's random A gives it, so rates suit both.

    Args:
        model: a peft model whose LoRA layers do nothing yet, in float32.

    Raises:
        InputError: a layer reads fewer directions than A has rows, or nothing but zeros.

    Source: Paischer et al. 2024 (EVA), who take the directions from the first records, which under DP would be a
    release of its own.
    """
    layers = _lora_layers(model)
    length = min(_TEXT_TOKENS, max_length)
    texts = np.random.default_rng(0).choice(_ordinary_tokens(tokenizer), (_NUM_TEXTS, length))
    tokens = torch.tensor(texts, device=model.device)
    found: dict[str, Tensor] = {}

    def watch(name: str, layer: Any, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        # At once, since the inputs of all layers of a large model together take gigabytes.
        states = inputs[0].detach()[:, min(_FIRST_STATES, length - 1) :].flatten(0, 1)
        found[name] = _leading(name, layer.r["default"], states)

    forward = inspect.signature(model.get_base_model().forward).parameters
    with _hooked(layers, watch), torch.no_grad():
        model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            **({"logits_to_keep": 1} if "logits_to_keep" in forward else {}),
        )
    return {name: found[name] for name in layers}


def _leading(name: str, rank: int, inputs: Tensor) -> Tensor:
    """A of a layer with inputs [places, in]; see `leading_directions`."""
    states = inputs.double()
    variance = float((states**2).mean())
    if rank > min(states.shape):
        raise InputError(f"rank = {rank}: {name} reads {min(states.shape)} directions; use at most so many")
    if not variance > 0:
        raise InputError(f"target_modules, layers: {name} reads nothing but zeros; use another layer")
    leading, directions = _principal(states, rank)
    signs = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True)).sign()
    scales = (variance / (3 * (leading + _RIDGE * variance))).sqrt()
    rows: Tensor = scales.unsqueeze(1) * signs * directions
    return rows.float().cpu()


def _principal(states: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The leading eigenvalues of the mean of x x^T, [rank], and its eigenvectors, orthonormal rows [rank, in].

    Those of the smaller of both matrices of products of the states [places, in]: several times as fast as a
    decomposition of these.
    """
    is_wide = states.shape[0] < states.shape[1]
    values, vectors = torch.linalg.eigh(states @ states.T if is_wide else states.T @ states)
    values, vectors = values[-rank:].flip(0).clamp(min=0) / len(states), vectors[:, -rank:].flip(1)
    return values, (torch.linalg.qr(states.T @ vectors)[0] if is_wide else vectors).T


def _factors(name: str, scaling: float, inputs: Tensor, slopes: Sequence[Tensor], length: float) -> Factors:
    """(B, A) of a layer that multiplies B R A by its scaling.

    Args:
        name: of the layer, for errors.
        scaling: > 0.
        inputs: [places, in].
        slopes: J of single prompts, [tokens, out] each.
        length: the median of |A x|.
    """
    whitening = _inverse_root(inputs.double())
    whitening *= length / (inputs.double() @ whitening).norm(dim=1).median()
    slope = torch.stack(list(slopes)).double().mean(0)
    products = slope @ slope.T
    products.diagonal().add_(_SLOPE_RIDGE * products.diagonal().mean())
    if not bool(products.diagonal().gt(0).all()):
        raise InputError(f"target_modules, layers: {name} does not move the answers' logits; use a later layer")
    return (torch.linalg.solve(products, slope).T / scaling).float().cpu(), whitening.float().cpu()


def _inverse_root(states: Tensor) -> Tensor:
    """(C + 0.03 c I)^(-1/2), float64 [in, in], of float64 [places, in]; see `readout_factors`."""
    _, singular, right = torch.linalg.svd(states, full_matrices=False)
    variances, ridge = singular**2 / len(states), _RIDGE * float((states**2).mean())
    outside = ridge**-0.5
    inside = (variances + ridge).rsqrt() - outside
    identity = torch.eye(states.shape[1], dtype=states.dtype, device=states.device)
    root: Tensor = (right.T * inside) @ right + outside * identity
    return root


@contextmanager
def _watched(layers: Mapping[str, Any]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """{layer: (inputs, outputs)} of the passes within, float32 [1, tokens, width]; gradients begin at the outputs."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str, _module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output = output.detach().requires_grad_(torch.is_grad_enabled())
        seen[name] = (inputs[0].detach(), output)
        return output

    with _hooked(layers, watch):
        yield seen


@contextmanager
def _hooked(layers: Mapping[str, Any], hook: Callable[..., Tensor | None]) -> Iterator[None]:
    """Call a forward hook, with a layer's name before what PyTorch gives it, for each of these layers."""
    handles = [layer.register_forward_hook(partial(hook, name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _public_records(tokenizer: Any, chat: ChatFormat, answers: Sequence[str], max_length: int) -> list[dict[str, Any]]:
    """Prompts of random tokens with the answers in turn, as `ChatFormat.encode` gives them, the same everywhere."""
    generator = np.random.default_rng(0)
    ordinary = _ordinary_tokens(tokenizer)
    number = max(_NUM_PROMPTS, len(answers))
    lengths = generator.integers(*_PROMPT_TOKENS, size=number)
    prompts = [tokenizer.decode(generator.choice(ordinary, length).tolist()) for length in lengths]
    rows = chat.encode(tokenizer, prompts, list(islice(cycle(answers), number)), max_length)
    if None in rows[: len(answers)]:
        raise InputError(f"answers = {answers[rows.index(None)]}: cannot be put in the chat at {max_length} tokens")
    return [row for row in rows if row is not None]


def _lora_layers(model: Any) -> dict[str, Any]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


def _ordinary_tokens(tokenizer: Any) -> list[int]:
    return sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))


def _response(row: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(token for token, learned in zip(row["input_ids"], row[RESPONSE_MASK], strict=True) if learned)


def spoken_tokens(responses: Sequence[Sequence[int]]) -> list[int]:
    """The tokens of the responses, ascending, without what ends them, unless one of them begins another."""
    bodies = [tuple(response[:-1]) for response in responses]
    # A text that begins others stands right before one of them.
    begins = any(other[: len(one)] == one for one, other in pairwise(sorted(bodies)))
    return sorted({*chain.from_iterable(responses if begins else bodies)})
