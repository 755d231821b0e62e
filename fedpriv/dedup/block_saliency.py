"""How much each block of a model matters: the saliency of its weights, aggregated over the block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedpriv.dedup.blocks import Layout
from fedpriv.dedup.saliency import Saliency
from fedpriv.errors import InputError

# Functions of the absolute values of one block, float64 [values], values >= 1. Means instead of sums, so that a last
# block that is mostly padding is judged by its own values.
AGGREGATIONS: dict[str, Callable[[npt.NDArray[np.float64]], float]] = {
    "l2": lambda values: float(np.sqrt(np.mean(np.square(values)))),
    "l1": lambda values: float(np.mean(values)),
    "linf": lambda values: float(np.max(values)),
    "q75": lambda values: float(np.quantile(values, 0.75)),
}


def block_saliency(
    blocks: npt.NDArray[np.floating], num_values: npt.NDArray[np.integer], aggregation: str = "l2"
) -> npt.NDArray[np.float64]:
    """The saliency of each block, float64 [blocks], over the values that are not padding.

    Args:
        blocks: [blocks, block size], saliencies cut into blocks like the weights; padding is at the end of a row.
        num_values: [blocks], how many values of each row are not padding, in [1, block size].
        aggregation: of absolute values: `l2` root mean square, `l1` mean, `linf` maximum, `q75` third quartile.

    Raises:
        InputError: the aggregation is unknown.
        ValueError: num_values does not match the blocks.

    Source: Guan et al. 2025, section 5.4.1 and Table 6.
    """
    if aggregation not in AGGREGATIONS:
        raise InputError(f"aggregation = {aggregation!r}: known are {', '.join(AGGREGATIONS)}")
    num_blocks, block_size = blocks.shape
    if num_values.shape != (num_blocks,) or not ((num_values >= 1) & (num_values <= block_size)).all():
        raise ValueError(f"num_values: must be {num_blocks} numbers in [1, {block_size}]")
    aggregate = AGGREGATIONS[aggregation]
    pairs = zip(blocks, num_values, strict=True)
    return np.array([aggregate(np.abs(row[:num].astype(np.float64))) for row, num in pairs], dtype=np.float64)


def by_block(saliency: Saliency, layout: Layout, aggregation: str = "l2") -> npt.NDArray[np.float64]:
    """The saliency of each block of a model with this layout, float64 [layout.num_blocks].

    Args:
        saliency: of at least the tensors that the layout cuts into blocks.
        layout: of the model.
        aggregation: as for `block_saliency`.

    Raises:
        InputError: the aggregation is unknown, or a tensor has no saliency of its shape.
    """
    result = np.zeros(layout.num_blocks)
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    for name, positions in layout.blocked.items():
        if name not in saliency or saliency[name].shape != shapes[name]:
            raise InputError(f"tensor {name!r}: has no saliency of shape {list(shapes[name])}")
        values = saliency[name].ravel()
        num_values = np.full(len(positions), layout.block_size)
        num_values[-1] -= len(positions) * layout.block_size - len(values)
        blocks = np.pad(values, (0, layout.block_size - int(num_values[-1]))).reshape(len(positions), -1)
        result[positions.start : positions.stop] = block_saliency(blocks, num_values, aggregation)
    return result
