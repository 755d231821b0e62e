"""Exact per-sample gradients of every trainable layer from one forward and one backward pass.

Every trainable leaf `nn.Linear` is hooked: its input x and the gradient g of its output give the gradient of record n
as the sum over tokens of g x^T. For an `nn.Embedding` x is the token's row of the identity, so g is added to the row
that the token names. Other layers, those of `FUNCTIONS`, are pulled back once more, each record by itself. Autograd
computes gradients of outputs only, so the frozen base costs as much as in plain LoRA training, and no weight gradient
of the whole batch is ever formed.

Layers may be computed again in the backward pass, so that a pass keeps the input of each layer alone. Unlike
transformers' gradient checkpointing this needs no train mode, and gradients within a layer can be collected while that
layer alone is in memory.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache

from fedpriv.learning.adapters import INNER_SUFFIX

Run = Callable[[Tensor], Tensor]
"""A layer's hidden states after it, from those before it."""

Backward = Callable[[Run, Tensor, Tensor], Tensor | None]
"""Runs a layer with gradients enabled, on its input, and returns the gradient of this input from that of the output;
None if the input needs none."""

PerSample = dict[str, Tensor]

_Activations = dict[str, tuple[Tensor, Tensor]]
"""{module name: (input, output)} of one forward pass, or of one layer that is run again."""

# (layer, input [rows, ...], weight, bias or None) -> output.
_Function = Callable[[Any, Tensor, Any, Any], Tensor]


def _convolution(layer: Any, x: Tensor, weight: Any, bias: Any) -> Tensor:
    return layer._conv_forward(x, weight, bias)  # type: ignore[no-any-return]  # it knows every mode of padding


FUNCTIONS: Mapping[type[nn.Module], _Function] = {
    nn.Linear: lambda layer, x, weight, bias: F.linear(x, weight, bias),
    nn.Embedding: lambda layer, x, weight, bias: F.embedding(x, weight, layer.padding_idx),
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.GroupNorm: lambda layer, x, weight, bias: F.group_norm(x, layer.num_groups, weight, bias, layer.eps),
    nn.LayerNorm: lambda layer, x, weight, bias: F.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps),
}
"""{kind of layer: its forward pass, as a function of its parameters}, of all that have per-sample gradients."""

# What computes as much as a kind that has none, or whose statistics are others' too.
_INSTEAD: Mapping[type[nn.Module], str] = {
    nn.modules.batchnorm._BatchNorm: "use GroupNorm in its place",
    nn.modules.instancenorm._InstanceNorm: "use GroupNorm with a group for each channel in its place",
    nn.modules.conv._ConvTransposeNd: "use Upsample and a convolution in its place",
    nn.MultiheadAttention: "use Linear layers and scaled_dot_product_attention in its place",
    nn.RNNBase: "use Conv1d or Linear layers over the sequence in its place",
}


class _Recomputed(torch.autograd.Function):
    """A layer that keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, _anchor: Tensor, run: Run, backward: Backward) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.run, ctx.run_backward = run, backward
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (hidden,) = ctx.saved_tensors
        with torch.enable_grad():
            # Its own leaf: what is computed now belongs to this layer alone.
            again = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
            return ctx.run_backward(ctx.run, again, gradients[0]), None, None, None


@contextmanager
def recomputing(blocks: Sequence[nn.Module], anchor: Tensor, backward: Backward) -> Iterator[None]:
    """Within this context the blocks run without gradients, and once more in the backward pass.

    Args:
        blocks: layers that take hidden states, [rows, tokens, width], as their first argument and return them alone or
            first in a tuple; each is called at most once.
        anchor: a tensor that requires a gradient; that of the losses with respect to it leads through all blocks.
        backward: called once for each block, the last one first.

    Raises:
        ValueError: a block is given something else that needs a gradient, which would get lost.
    """
    for block in blocks:
        vars(block)["forward"] = _forward_of(block, block.forward, anchor, backward)  # taken back below
    try:
        yield
    finally:
        for block in blocks:
            del vars(block)["forward"]


def _forward_of(
    block: nn.Module, original: Callable[..., Any], anchor: Tensor, backward: Backward
) -> Callable[..., Any]:
    def forward(hidden: Tensor, *args: Any, **options: Any) -> Any:
        # A cache of keys and values would get them twice.
        args, options = tree_map(_without_cache, (args, options), is_leaf=lambda x: isinstance(x, Cache))
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args, options))):
            kind = type(block).__name__
            raise ValueError(f"activation_checkpointing = true: a {kind} takes trained inputs with its hidden states")
        others: list[tuple[Any, ...]] = []

        def run(x: Tensor) -> Tensor:
            output = original(x, *args, **options)
            if not isinstance(output, tuple):
                return output  # type: ignore[no-any-return]
            others[:] = [output[1:]]
            return output[0]  # type: ignore[no-any-return]

        first = _Recomputed.apply(hidden, anchor, run, backward)  # type: ignore[no-untyped-call]
        return (first, *others[0]) if others else first

    return forward


def _without_cache(value: Any) -> Any:
    return None if isinstance(value, Cache) else value


@dataclass(frozen=True)
class TrainableLayer:
    """A trainable leaf layer, with the names of its weight and its bias; None for one that is frozen or missing."""

    module: Any
    weight: str | None
    bias: str | None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """{parameter name: parameter} of those that are trained."""
        named = zip((self.weight, self.bias), self.weight_and_bias, strict=True)
        return {name: parameter for name, parameter in named if name is not None and parameter is not None}

    @property
    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Both, trained or frozen; None if there is no bias."""
        return self.module.weight, getattr(self.module, "bias", None)


def trainable_layers(model: nn.Module, kinds: Collection[type[nn.Module]] = (nn.Linear,)) -> dict[str, TrainableLayer]:
    """The trainable layers of a model, by module name.

    Args:
        model: a peft model, or any module whose trainable leaves are of the kinds.
        kinds: of layers that may be trained, of `FUNCTIONS`. An embedding may be tied to layers that a model does not
            show, so one who admits it must compare the gradients with those of autograd.

    Raises:
        ValueError: a trainable parameter does not support per-sample gradients (names it), is an untied output
            embedding, or more than one adapter is active.
    """
    active = getattr(model, "active_adapters", ["default"])
    if len(active) != 1:
        raise ValueError(f"adapters {', '.join(active)} are active: per-sample gradients need exactly one")
    _refuse_output_embeddings(model)
    owners = {
        id(parameter): (name, module)
        for name, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
    }
    layers: dict[str, TrainableLayer] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        name, module = owners[id(parameter)]
        if type(module) not in kinds:
            *others, last = (kind.__name__ for kind in kinds)
            known = f"{', '.join(others)} and {last}" if others else last
            fitting = (text for kind, text in _INSTEAD.items() if len(kinds) > 1 and isinstance(module, kind))
            raise ValueError(
                f"{names[id(parameter)]}: a trainable parameter of a {type(module).__name__}, which has no per-sample "
                f"gradient here; freeze it, or {next(fitting, f'train {known} layers alone')}"
            )
        if isinstance(module, nn.Embedding):
            for option in ("max_norm", "scale_grad_by_freq"):
                if value := getattr(module, option):
                    raise ValueError(
                        f"{name}: {option} = {value} lets a record's tokens change those of others; leave it out"
                    )
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            raise ValueError(
                f"{name}: has hooks or a forward pass of its own, which its per-sample gradient would miss"
            )
        layers[name] = TrainableLayer(
            module=module,
            weight=names[id(module.weight)] if module.weight.requires_grad else None,
            bias=names[id(bias)]
            if (bias := getattr(module, "bias", None)) is not None and bias.requires_grad
            else None,
        )
    return layers


def _refuse_output_embeddings(model: nn.Module) -> None:
    """Refuse a trainable lm_head: peft would copy it, untie it from the input embeddings, and train the wrong model."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if head is not None and any(parameter.requires_grad for parameter in head.parameters()):
        raise ValueError("modules_to_save = lm_head: it is tied to the input embeddings; leave it frozen")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The parameters of several clients whose records share one pass of the frozen base.

    Attributes:
        parameters: {parameter name: [clients, *shape]}.
        owners: int64 [batch], the client of each record.
    """

    parameters: Mapping[str, Tensor]
    owners: Tensor


@contextmanager
def recorded(
    layers: Mapping[str, TrainableLayer], stack: Stack | None, wanted: Collection[str] = ()
) -> Iterator[_Activations]:
    """Within this context each record uses its own client's parameters, and the wanted layers are recorded."""
    activations: _Activations = {}

    def forward_of(name: str, layer: TrainableLayer) -> Callable[[Tensor], Tensor]:
        plain: Callable[..., Tensor] = type(layer.module).forward
        block = _block_of(layer, stack)

        def forward(x: Tensor) -> Tensor:
            x = x if block is None else x[..., : block[1]]
            output = plain(layer.module, x) if stack is None else _stacked(name, layer, x, stack)
            # Without gradients it is the first run of a layer that is run again.
            if name in wanted and torch.is_grad_enabled():
                # The parameters need no gradient of their own: only that of the output is computed.
                output = output if output.requires_grad else output.requires_grad_()
                if name in activations:
                    raise ValueError(f"{name}: called twice in one forward pass, so its gradients would mix")
                activations[name] = (x.detach(), output)
            return output if block is None else F.pad(output, (0, layer.module.weight.shape[0] - block[0]))

        return forward

    # A pass may be tried within another one: what that has set is put back below.
    before = [(layer.module, vars(layer.module).get("forward")) for layer in layers.values()]
    for name, layer in layers.items():
        vars(layer.module)["forward"] = forward_of(name, layer)
    try:
        yield activations
    finally:
        for module, forward in before:
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward


def _block_of(layer: TrainableLayer, stack: Stack | None) -> tuple[int, int] | None:
    """(rows, columns) of the leading block of the layer's R that the clients train; None where they train all of it."""
    if stack is None or layer.weight is None or not layer.weight.endswith(INNER_SUFFIX):
        return None
    _, rows, columns = stack.parameters[layer.weight].shape
    return None if (rows, columns) == tuple(layer.module.weight.shape) else (rows, columns)


def _stacked(name: str, layer: TrainableLayer, x: Tensor, stack: Stack) -> Tensor:
    """The layer's output with each record's own parameters, in float32 whatever precision the base uses."""
    if len(x) != len(stack.owners):
        raise ValueError(f"{name}: its input's first dimension is {len(x)}, not the batch's {len(stack.owners)}")
    fixed, fixed_bias = layer.weight_and_bias
    weight = fixed.unsqueeze(0) if layer.weight is None else stack.parameters[layer.weight]
    bias = fixed_bias.unsqueeze(0) if fixed_bias is not None else None
    bias = bias if layer.bias is None else stack.parameters[layer.bias]
    if isinstance(layer.module, nn.Embedding):
        return weight[(stack.owners if len(weight) > 1 else 0 * stack.owners).view(-1, *[1] * (x.dim() - 1)), x]
    if isinstance(layer.module, nn.Linear):
        return _linear(x.to(weight.dtype), weight, bias, stack.owners)
    rows, outputs = [], []
    for owner in stack.owners.unique().tolist():
        rows.append((stack.owners == owner).nonzero().squeeze(1))
        # A frozen one is everybody's.
        own = (None if each is None else each[min(owner, len(each) - 1)] for each in (weight, bias))
        outputs.append(FUNCTIONS[type(layer.module)](layer.module, x[rows[-1]].to(weight.dtype), *own))
    return torch.cat(outputs)[torch.cat(rows).argsort()]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, owners: Tensor) -> Tensor:
    """The linear layer on x [batch, ..., in], with weight [clients or 1, out, in] and bias [clients or 1, out]."""
    if len(weight) == 1 and (bias is None or len(bias) == 1):
        return F.linear(x, weight[0], bias[0] if bias is not None else None)
    flat = x.reshape(len(x), -1, x.shape[-1])
    own = weight[owners] if len(weight) > 1 else weight.expand(len(x), -1, -1)
    output = flat @ own.transpose(1, 2)
    if bias is not None:
        output = output + (bias[owners] if len(bias) > 1 else bias).unsqueeze(1)
    return output.reshape(*x.shape[:-1], output.shape[-1])


def per_sample_gradients(
    layers: Mapping[str, TrainableLayer],
    losses: Callable[[], Tensor],
    stack: Stack | None = None,
    *,
    trained: Collection[str] | None = None,
    recomputed: Sequence[nn.Module] = (),
) -> tuple[PerSample, Tensor]:
    """The gradient of every record's loss with respect to every trained parameter.

    Args:
        layers: from `trainable_layers`.
        losses: runs the forward pass and returns one loss per record, float [batch], batch >= 1; no record's loss may
            depend on another record.
        stack: the parameters of each record's client; None uses the model's own.
        trained: names of the parameters whose gradients are wanted; None for all of the layers'.
        recomputed: blocks of the model, in their order, that keep their inputs alone and run again in the backward
            pass: less memory, more time, the same bits.

    Returns:
        {parameter name: [batch, *parameter shape]}, and the losses, detached.

    Raises:
        ValueError: a layer is called twice, or its input is not [batch, ..., features].
    """
    names = {name for layer in layers.values() for name in (layer.weight, layer.bias) if name}
    wanted = layers if trained is None or names <= set(trained) else _only(layers, trained)
    blocks = _from_first_wanted(recomputed, wanted)
    anchor = torch.zeros((), requires_grad=True)
    collected = _Collected(wanted)

    def backward(run: Run, hidden: Tensor, gradient: Tensor) -> Tensor | None:
        activations.clear()
        output = run(hidden)
        of_input = collected.collect(activations, output, gradient, [hidden] if hidden.requires_grad else [])
        activations.clear()
        return of_input[0] if of_input else None

    with (
        recorded(layers, stack, wanted) as activations,
        recomputing(blocks, anchor, backward) if blocks else nullcontext(),
    ):
        values = losses()
        collected.num = len(values)
        collected.collect(dict(activations), values.sum(), None, [anchor] if blocks else [])
    result = collected.gradients
    for layer in wanted.values():  # a layer that the pass did not use has zero gradient
        for key, parameter in layer.parameters.items():
            if key not in result:
                shape = parameter.shape if stack is None else stack.parameters[key].shape[1:]
                result[key] = parameter.new_zeros((collected.num, *shape))
    return result, values.detach()


@dataclass
class _Collected:
    """Per-sample gradients as the backward pass comes to them: {parameter name: [rows, *parameter shape]}."""

    layers: Mapping[str, TrainableLayer]
    num: int = 0
    gradients: PerSample = field(default_factory=dict)

    def collect(
        self, activations: _Activations, value: Tensor, upstream: Tensor | None, others: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Collect the gradients of the layers that were recorded on the way to a value; return the other tensors'."""
        for name, (inputs, _) in activations.items():
            if inputs.shape[0] != self.num:
                raise ValueError(
                    f"{name}: its input's first dimension is {inputs.shape[0]}, not the batch's {self.num}"
                )
        outputs = [output for _, output in activations.values()]
        gradients = torch.autograd.grad(value, [*outputs, *others], upstream, allow_unused=True)
        for (name, (inputs, output)), gradient in zip(activations.items(), gradients, strict=False):
            g = torch.zeros_like(output) if gradient is None else gradient
            found = _layer_gradients(self.layers[name], inputs, g)
            if not found.keys().isdisjoint(self.gradients):
                raise ValueError(f"{name}: called twice in one forward pass, so its gradients would mix")
            self.gradients.update(found)
        return gradients[len(outputs) :]


def _from_first_wanted(blocks: Sequence[nn.Module], wanted: Mapping[str, TrainableLayer]) -> Sequence[nn.Module]:
    """The blocks from the first one with a wanted layer on: nothing before it has a gradient."""
    modules = {layer.module for layer in wanted.values()}
    for index, block in enumerate(blocks):
        if not modules.isdisjoint(block.modules()):
            return blocks[index:]
    return ()


def _only(layers: Mapping[str, TrainableLayer], trained: Collection[str]) -> dict[str, TrainableLayer]:
    """The layers with a trained parameter, without the names of the others."""
    chosen = {
        name: replace(
            layer,
            weight=layer.weight if layer.weight in trained else None,
            bias=layer.bias if layer.bias in trained else None,
        )
        for name, layer in layers.items()
    }
    return {name: layer for name, layer in chosen.items() if layer.weight or layer.bias}


def _layer_gradients(layer: TrainableLayer, x: Tensor, g: Tensor) -> PerSample:
    """Per-sample gradients of one layer from its input [batch, ..., in], or tokens, and that of its output, g."""
    if type(layer.module) not in (nn.Linear, nn.Embedding):
        return _pulled_back(layer, x.to(g.dtype), g)
    g = g.reshape(len(g), -1, g.shape[-1])
    if isinstance(layer.module, nn.Embedding):
        return {name: _row_gradients(layer.module, x.reshape(len(x), -1), g) for name in layer.parameters}
    x = x.to(g.dtype).reshape(len(x), -1, x.shape[-1])
    result = {}
    if layer.weight is not None:
        result[layer.weight] = torch.bmm(g.transpose(1, 2), x)
    if layer.bias is not None:
        result[layer.bias] = g.sum(dim=1)
    return result


def _pulled_back(layer: TrainableLayer, x: Tensor, g: Tensor) -> PerSample:
    """The gradients of the layer's own function by its parameters, of each record's input and output by themselves."""
    named = list(zip((layer.weight, layer.bias), layer.weight_and_bias, strict=True))

    def of_record(x: Tensor, g: Tensor) -> PerSample:
        def output(trained: PerSample) -> Tensor:
            weight, bias = (trained.get(name or "", parameter) for name, parameter in named)
            return FUNCTIONS[type(layer.module)](layer.module, x.unsqueeze(0), weight, bias)

        trained = {name: parameter.detach() for name, parameter in layer.parameters.items()}
        found: PerSample = torch.func.vjp(output, trained)[1](g.unsqueeze(0))[0]
        return found

    return torch.func.vmap(of_record)(x, g)


def _row_gradients(module: nn.Embedding, tokens: Tensor, g: Tensor) -> Tensor:
    """[batch, rows, width] The sum of g [batch, tokens, width] over the tokens [batch, tokens] that name each row."""
    if module.padding_idx is not None:
        g = g * (tokens != module.padding_idx).unsqueeze(2)
    total = g.new_zeros((len(tokens), module.num_embeddings, module.embedding_dim))
    return total.scatter_add_(1, tokens.unsqueeze(2).expand_as(g), g)  # raises where a token is out of range
