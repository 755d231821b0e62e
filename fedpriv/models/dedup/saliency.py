"""Measure how much each weight of a model matters, in one pass over a data set, and each block of its weights."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.exports import Registry
from fedpriv.models.variants.blocks import BlockLayout

Batch = Mapping[str, Tensor]
"""{input: [records, ...]}, such as `fedpriv.learning.data.records.collate` makes."""

Loss = Callable[[nn.Module, Batch], Tensor]
"""One loss for each record of a batch, float [records]."""

Saliency = dict[str, npt.NDArray[np.float32]]
"""{tensor name: [*the tensor's shape], >= 0}; only the order of the values is meaningful."""
Measure = Callable[..., Saliency]
"""Measures a model on batches by a loss, its parameters of some names or all."""

# Functions of the absolute values of one block, float64 [values], values >= 1. Means instead of sums, so that a last
# block that is mostly padding is judged by its own values.
AGGREGATIONS: dict[str, Callable[[npt.NDArray[np.float64]], float]] = {
    "l2": lambda values: float(np.sqrt(np.mean(np.square(values)))),
    "l1": lambda values: float(np.mean(values)),
    "linf": lambda values: float(np.max(values)),
    "q75": lambda values: float(np.quantile(values, 0.75)),
}


def magnitude(model: nn.Module) -> Saliency:
    """|W| for every parameter; needs no data."""
    return {name: _array(parameter.detach().abs()) for name, parameter in model.named_parameters()}


def wanda(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> Saliency:
    """|W_ij| times the norm of input j for the weights of `nn.Linear`; magnitude for every other parameter.

    The norm is the root mean square over all records and tokens, padding included, instead of the root of the sum:
    this keeps the order within a layer, and keeps values comparable with the magnitudes of the other tensors,
    regardless of the size of the data set.

    Args:
        loss: runs the model; its values are not used.

    Raises:
        InputError: there are no records, or an activation is not finite.

    Source: Sun et al. 2024a, equation 1.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    squares: dict[str, Tensor] = {}
    rows: dict[str, int] = {}

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        name = names[id(module.weight)]
        flat = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).double()
        squares[name] = squares.get(name, 0) + flat.square().sum(dim=0)
        rows[name] = rows.get(name, 0) + len(flat)

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(record) for module in linear]
    try:
        with _evaluation(model, ()), torch.no_grad():
            num_records = sum(len(loss(model, batch)) for batch in batches)
    finally:
        for hook in hooks:
            hook.remove()
    _check_records(num_records)
    result = magnitude(model)
    for name, total in squares.items():
        result[name] = result[name] * _array((total / rows[name]).sqrt())
    return _finite(result)


def fisher(model: nn.Module, batches: Iterable[Batch], loss: Loss, names: Collection[str] | None = None) -> Saliency:
    """The mean of squared per-sample gradients: the diagonal of the empirical Fisher information.

    Args:
        model: run in evaluation mode, one record at a time.
        names: the parameters to consider, frozen or not; None for all.

    Raises:
        InputError: there are no records, a name is unknown, or a gradient is not finite.

    Source: Liu et al. 2021.
    """
    return _mean(model, _records(batches), loss, names, torch.square)


def gradient(model: nn.Module, batches: Iterable[Batch], loss: Loss, names: Collection[str] | None = None) -> Saliency:
    """The absolute value of the gradient of the mean loss over all records, however they are batched.

    Args:
        names: the parameters to consider, frozen or not; None for all.

    Raises:
        InputError: there are no records, a name is unknown, or a gradient is not finite.

    Source: Guan et al. 2025, section 4.3.3, "gradient magnitude".
    """
    return _mean(model, batches, loss, names, lambda of_batch: of_batch)


def _mean(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    names: Collection[str] | None,
    of_batch: Callable[[Tensor], Tensor],
) -> Saliency:
    """The absolute value of what a function of each batch's summed gradients is in the mean over all records."""
    with _evaluation(model, names) as parameters:
        totals = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        num_records = 0
        for batch in batches:
            losses = loss(model, batch)
            for name, value in _gradients(losses.sum(), parameters).items():
                totals[name] += of_batch(value)
            num_records += len(losses)
    _check_records(num_records)
    return _finite({name: _array(total.abs() / num_records) for name, total in totals.items()})


_MEASURES: dict[str, Measure] = {
    "gradient": gradient,
    "magnitude": lambda model, batches, loss, names=None: magnitude(model),
    "wanda": lambda model, batches, loss, names=None: wanda(model, batches, loss),
    "fisher": fisher,
}
MEASURES = Registry("saliency", _MEASURES)


@contextmanager
def _evaluation(model: nn.Module, names: Collection[str] | None) -> Iterator[dict[str, Tensor]]:
    """The named parameters, the only ones that require gradients, in evaluation mode; restores both on exit."""
    parameters = dict(model.named_parameters())
    unknown = set(names or ()) - set(parameters)
    if unknown:
        raise InputError(f"parameter {min(unknown)!r}: the model has none of that name")
    modes = {module: module.training for module in model.modules()}
    needed = {name: parameter.requires_grad for name, parameter in parameters.items()}
    try:
        model.eval()
        for name, parameter in parameters.items():
            parameter.requires_grad_(names is None or name in names)
        yield {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    finally:
        for module, mode in modes.items():
            module.training = mode
        for name, parameter in parameters.items():
            parameter.requires_grad_(needed[name])


def _records(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Each record as a batch of its own, so that its gradient cannot depend on another record."""
    for batch in batches:
        for index in range(len(next(iter(batch.values())))):
            yield {name: value[index : index + 1] for name, value in batch.items()}


def _gradients(total: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of a scalar with respect to each parameter; zero if it does not depend on the parameter."""
    values = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters.items(), values, strict=True)
    return {name: torch.zeros_like(parameter) if value is None else value for (name, parameter), value in pairs}


def _array(values: Tensor) -> npt.NDArray[np.float32]:
    return values.detach().float().cpu().numpy()


def _check_records(num_records: int) -> None:
    if num_records == 0:
        raise InputError("saliency: the data set holds no record")


def _finite(saliency: Saliency) -> Saliency:
    """The saliency, refused if a value is not finite, because sorting such values would be meaningless."""
    for name, values in saliency.items():
        if not np.isfinite(values).all():
            raise InputError(f"saliency of {name}: not finite; the model's loss or activations overflow on this data")
    return saliency


def by_block(saliency: Saliency, layout: BlockLayout, aggregation: str = "l2") -> npt.NDArray[np.float64]:
    """The saliency of each block of a model with this layout, float64 [layout.num_blocks], without its padding.

    Args:
        saliency: of at least the tensors that the layout cuts into blocks.
        aggregation: of absolute values: `l2` root mean square, `l1` mean, `linf` maximum, `q75` third quartile.

    Raises:
        InputError: the aggregation is unknown, or a tensor has no saliency of its shape.

    Source: Guan et al. 2025, section 5.4.1 and Table 6.
    """
    if aggregation not in AGGREGATIONS:
        raise InputError(f"aggregation = {aggregation!r}: known are {', '.join(AGGREGATIONS)}")
    aggregate, result = AGGREGATIONS[aggregation], np.zeros(layout.num_blocks)
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    for name, positions in layout.blocked.items():
        if name not in saliency or saliency[name].shape != shapes[name]:
            raise InputError(f"tensor {name!r}: has no saliency of shape {list(shapes[name])}")
        values = np.abs(saliency[name].ravel())
        own = np.split(values, range(layout.block_size, len(values), layout.block_size))
        result[positions.start : positions.stop] = [aggregate(block.astype(np.float64)) for block in own]
    return result
