"""The start of a classification head: class means of the features, from one noised release of every client.

The mean of the head's rows is the mean of all features: no prediction depends on it, and clients read it there.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedpriv.learning.adapters import Adapter
from fedpriv.learning.adapters.pooling import BIAS_SCALE
from fedpriv.learning.aggregation._fedavg import GlobalModel

# A class counts as at least this share of an even one's records, and as twice the noise of its count.
_SMALLEST_SHARE = 0.25

# Scores by class means are small: they are scaled until each weight's noise has this standard deviation, and by no more
# than the factor. Chosen on training records of the embedded corpus that were held back:
# docs/appendices/recipe_trials.md.
_NOISE_AT_START = 0.25
_LARGEST_FACTOR = 20.0


def is_of_head(name: str) -> bool:
    """Whether an adapter's tensor of this name is the head's, and neither LoRA's nor a weight or bias beside these."""
    return ".lora_" not in name and ".ln_tuning_layers." not in name


def head_of(adapter: Mapping[str, Tensor]) -> tuple[str, str | None]:
    """The names of the head's weight and of its bias, if any; ValueError if the head is not a single linear layer."""
    names = [name for name in adapter if is_of_head(name)]
    weights = [name for name in names if adapter[name].dim() == 2]
    biases = [name for name in names if adapter[name].dim() == 1]
    if len(weights) != 1 or len(biases) > 1 or len(names) != len(weights) + len(biases):
        raise ValueError(f"head: {', '.join(names) or 'none'}: must be one linear layer")
    return weights[0], biases[0] if biases else None


def started(model: GlobalModel, aggregated: Adapter, *, noise: float) -> GlobalModel:
    """The global model with a head that scores each class by its records' mean features, less all classes' mean.

    The scores are scaled as far as their noise allows. With a bias, the mean of all features is added to every row.

    Counts come from the features' constant coordinate alone, which is noised like the others, so nothing but the
    release is used. A class of few records has a mean of noise, so its count is at least a public number.

    Args:
        aggregated: the weighted average of the uploads: what they add to the model's head is, per class, the sum of
            its records' features over the number of all records, with noise; a bias adds `BIAS_SCALE` squared for each.
        noise: standard deviation of the noise in each feature's sum over the number of all records, >= 0.

    Raises:
        ValueError: the head is not a single linear layer.
    """
    weight, bias = head_of(model.adapter)
    sums = aggregated[weight].double() - model.adapter[weight].double()
    floor = max(_SMALLEST_SHARE / len(sums), 2 * noise / BIAS_SCALE)
    shares = torch.full((len(sums),), 1 / len(sums), dtype=torch.float64)
    if bias is not None:
        shares = (aggregated[bias].double() - model.adapter[bias].double()) / BIAS_SCALE**2
    means = sums / shares.clamp_min(floor).unsqueeze(1)
    noise_of_means = noise * len(sums)
    factor = min(_LARGEST_FACTOR, _NOISE_AT_START / noise_of_means) if noise else _LARGEST_FACTOR
    scores = factor * (means - means.mean(dim=0))
    head = {weight: scores.float()}
    if bias is not None:
        head = {weight: (scores + _centre(sums, noise)).float()}
        head[bias] = torch.zeros_like(model.adapter[bias])  # the constant coordinate is the same in every class
    return replace(model, adapter={name: head.get(name, tensor) for name, tensor in model.adapter.items()})


def recentred(model: GlobalModel, before: GlobalModel) -> GlobalModel:
    """The same model with the mean of its head's rows as before a round, which adds but noise to it; see `head_of`."""
    weight, _ = head_of(model.adapter)
    rows, earlier = model.adapter[weight].double(), before.adapter[weight].double()
    moved = (rows - rows.mean(dim=0) + earlier.mean(dim=0)).float()
    return replace(model, adapter={**model.adapter, weight: moved})


def _centre(sums: Tensor, noise: float) -> Tensor:
    """[inputs] The mean of all features, shortened by what noise is expected to add to its length.

    Source: James and Stein 1961, the positive part.
    """
    mean = sums.sum(dim=0)
    of_noise, squares = sums.numel() * noise**2, float(mean.square().sum())
    return mean * max(0.0, 1 - of_noise / squares) if squares else mean
