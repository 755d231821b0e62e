"""Small networks: the paper's four architectures, their weights as one vector, their figures, and their alignment.

Permuting a hidden layer's neurons together with the next layer's columns does not change what a network computes. So
two networks are compared only after one has been brought, layer by layer, into the order that best fits the other.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedpriv.errors import InputError
from fedpriv.learning.training import PoissonSampler
from fedpriv.learning.training.private_sums import add_clipped, clipped_sums, noised_sum
from fedpriv.methods.integral._selection import Indices
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.mechanisms.sources import RandomSource

HIDDEN: dict[str, tuple[int, ...]] = {
    "dnn-1": (5, 10, 5),
    "dnn-2": (1024,),
    "dnn-3": (10, 20, 10),
    "dnn-4": (5, 10, 20, 10, 5),
}
"""Widths of the hidden layers. Source: Varshney and Torra 2023, section 4."""

_ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU, nn.Identity)

# Passes over the layers; each lowers the distance, and a few were enough in every case seen.
_MAX_PASSES = 20

# How many costs of pairs of neurons are held in memory at once.
_COSTS_AT_ONCE = 2**24

_Permutations = list[Tensor]
_Layers = list[tuple[Tensor, Tensor]]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
"""Optimizers by name, each at PyTorch's defaults."""

Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Logits, [networks, batch, classes], from stacked weights and their batches, [networks, batch, ...]."""

# How many values of per-sample gradients are held in memory at once.
_GRADIENTS_AT_ONCE = 2**23


def is_perceptron(network: nn.Module) -> bool:
    """Whether the network is a Sequential of elementwise activations and distinct linear layers."""
    modules = list(network) if isinstance(network, nn.Sequential) else []
    linear = [module for module in modules if type(module) is nn.Linear]
    return (
        len(linear) > 0
        and len({id(layer) for layer in linear}) == len(linear)
        and all(type(module) in (nn.Linear, *_ELEMENTWISE) for module in modules)
    )


def perceptron(architecture: str, num_features: int, num_classes: int, *, seed: int) -> nn.Sequential:
    """A fully connected network with ReLU between its layers and one logit per class.

    Args:
        architecture: a key of `HIDDEN`.
        num_features: >= 1.
        num_classes: >= 2.
        seed: of the initial weights, which follow PyTorch's default for linear layers.

    Raises:
        InputError: the architecture is unknown.
    """
    if architecture not in HIDDEN:
        raise InputError(f"architecture = {architecture!r}: must be one of {', '.join(HIDDEN)}")
    widths = (num_features, *HIDDEN[architecture], num_classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def num_parameters(network: nn.Module) -> int:
    """The number of weights and biases."""
    return sum(value.numel() for value in network.parameters())


def to_vector(network: nn.Module) -> Tensor:
    """All weights, [values], a copy in the order of `named_parameters`."""
    return torch.cat([value.detach().flatten() for value in network.parameters()])


def from_vectors(network: nn.Module, vectors: Tensor) -> dict[str, Tensor]:
    """{name: [..., *shape]}, views into [..., values]: weights of one or many networks in the order of `to_vector`."""
    named = dict(network.named_parameters())
    pieces = torch.split(vectors, [value.numel() for value in named.values()], dim=-1)
    return {
        name: piece.view(*piece.shape[:-1], *value.shape)
        for (name, value), piece in zip(named.items(), pieces, strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class NetworkMetrics:
    """Metrics of one network on one set of records.

    Attributes:
        loss: mean cross-entropy, nats.
        accuracy: in [0, 1]; equal to the micro-averaged F1 score.
        f1: macro-averaged F1 score, in [0, 1]; low for a model that predicts only one class.
    """

    loss: float
    accuracy: float
    f1: float


def metrics(network: nn.Module, vector: Tensor, features: Tensor, labels: Tensor) -> NetworkMetrics:
    """Loss, accuracy and F1, on at least one record, of the network with these weights."""
    with torch.no_grad():
        logits = functional_call(network, from_vectors(network, vector.to(features)), (features,))
    return _of_predictions(float(F.cross_entropy(logits, labels)), logits.argmax(dim=1), labels)


def majority_class(train_labels: Tensor, labels: Tensor) -> NetworkMetrics:
    """Metrics of the constant prediction of the training records' class distribution."""
    counts = torch.bincount(train_labels, minlength=int(labels.max()) + 1).double()
    logits = (counts / counts.sum()).log()
    guess = torch.full_like(labels, int(counts.argmax()))
    return _of_predictions(float(-logits[labels].mean()), guess, labels)


def _of_predictions(loss: float, predicted: Tensor, labels: Tensor) -> NetworkMetrics:
    from sklearn.metrics import f1_score  # deferred: networks are trained without it

    accuracy = float((predicted == labels).double().mean())
    f1 = f1_score(labels.numpy(), predicted.numpy(), average="macro", zero_division=0, labels=np.unique(labels.numpy()))
    return NetworkMetrics(loss=loss, accuracy=accuracy, f1=float(f1))


def aligned(network: nn.Module, vectors: Tensor, reference: Tensor) -> Tensor:
    """The networks, [networks, values], each with its hidden neurons in the order that best fits the reference.

    Guarantee: each network computes the same function as before. A permutation of the reference's own hidden neurons
    is undone exactly if no two neurons of a layer have equal incoming weights. For other networks the order is a
    local optimum of the squared distance: finding the global one is a quadratic assignment problem, which is NP-hard.

    The first pass starts at the input and compares incoming weights; later passes compare incoming and outgoing
    weights, until nothing changes.

    Args:
        network: `nn.Sequential` of linear layers and elementwise activations.
        vectors: [networks, values].
        reference: [values].

    Raises:
        InputError: the network is of another kind.

    Source: Varshney and Torra 2023, section 2.2; Ainsworth et al. 2022 (Git Re-Basin), section 3.2, for the passes.
    """
    names = _linear_names(network)
    target = _layers(network, names, reference.double().unsqueeze(0))
    widest = max(weight.shape[1] for weight, _ in target)
    result = []
    for chunk in torch.split(vectors, max(1, _COSTS_AT_ONCE // widest**2)):
        orders = _orders(_layers(network, names, chunk.double()), target)
        result.append(_permuted(network, names, chunk, orders))
    return torch.cat(result)


def _permuted(network: nn.Module, names: Sequence[str], vectors: Tensor, orders: _Permutations) -> Tensor:
    """Each network with its hidden neurons in its own order, [networks, width] for each hidden layer."""
    result = vectors.clone()
    named = from_vectors(network, result)
    for depth, (name, (weight, bias)) in enumerate(zip(names, _layers(network, names, vectors), strict=True)):
        columns = weight if depth == 0 else _columns(weight, orders[depth - 1])
        # These are views of the result, so writing to them writes to it.
        named[f"{name}.weight"].copy_(columns if depth == len(orders) else _rows(columns, orders[depth]))
        if f"{name}.bias" in named:
            named[f"{name}.bias"].copy_(bias if depth == len(orders) else bias.gather(1, orders[depth]))
    return result


def _orders(layers: _Layers, target: _Layers) -> _Permutations:
    """The order of each hidden layer, [networks, width], that brings each network closest to the target."""
    from scipy.optimize import linear_sum_assignment  # deferred: networks are trained without it

    num = len(layers[0][0])
    orders = [torch.arange(weight.shape[1]).repeat(num, 1) for weight, _ in layers[:-1]]
    for attempt in range(_MAX_PASSES):
        changed = False
        for depth, current in enumerate(orders):
            costs = _incoming(layers, target, orders, depth)
            if attempt:
                costs = costs + _outgoing(layers, target, orders, depth)
            optimal = torch.from_numpy(np.stack([linear_sum_assignment(cost)[1] for cost in costs.numpy()]))
            # The current order is kept unless another is strictly better, so that the passes terminate.
            better = _cost(costs, optimal) < _cost(costs, current)
            orders[depth] = torch.where(better.unsqueeze(1), optimal, current)
            changed = changed or bool(better.any())
        if attempt and not changed:
            break
    return orders


def _cost(costs: Tensor, order: Tensor) -> Tensor:
    """Cost of each network's order, [networks]; costs [networks, target's neurons, own neurons]."""
    return costs.gather(2, order.unsqueeze(2)).sum(dim=(1, 2))


def _incoming(layers: _Layers, target: _Layers, orders: _Permutations, depth: int) -> Tensor:
    """|difference|^2 of incoming weights and bias, [networks, target's neurons, own neurons]."""
    weight, bias = layers[depth]
    weight = weight if depth == 0 else _columns(weight, orders[depth - 1])
    own = torch.cat([weight, bias.unsqueeze(2)], dim=2)
    return _distances(torch.cat([target[depth][0], target[depth][1].unsqueeze(2)], dim=2), own).square()


def _outgoing(layers: _Layers, target: _Layers, orders: _Permutations, depth: int) -> Tensor:
    """|difference|^2 of outgoing weights, [networks, target's neurons, own neurons]."""
    weight = layers[depth + 1][0]
    rows = weight if depth + 1 == len(orders) else _rows(weight, orders[depth + 1])
    return _distances(target[depth + 1][0].mT, rows.mT).square()


def _rows(matrices: Tensor, order: Tensor) -> Tensor:
    """Each matrix's rows in its own order; [networks, rows, columns]."""
    return matrices.gather(1, order.unsqueeze(2).expand_as(matrices))


def _columns(matrices: Tensor, order: Tensor) -> Tensor:
    """Each matrix's columns in its own order; [networks, rows, columns]."""
    return matrices.gather(2, order.unsqueeze(1).expand_as(matrices))


def _distances(rows: Tensor, others: Tensor) -> Tensor:
    """Distances of all pairs of rows, from differences: computed from products, equal rows would not give 0."""
    rows = rows.expand(len(others), -1, -1)
    distances: Tensor = torch.cdist(rows.contiguous(), others.contiguous(), compute_mode="donot_use_mm_for_euclid_dist")
    return distances


def _linear_names(network: nn.Module) -> list[str]:
    """Names of the linear layers, from input to output."""
    if not is_perceptron(network):
        raise InputError("network: only a Sequential of linear layers and elementwise activations can be aligned")
    return [name for name, module in network.named_children() if isinstance(module, nn.Linear)]


def _layers(network: nn.Module, names: Sequence[str], vectors: Tensor) -> _Layers:
    """(weight [networks, out, in], bias [networks, out]) of each linear layer; zeros where it has no bias."""
    named = from_vectors(network, vectors)
    weights = [named[f"{name}.weight"] for name in names]
    return [
        (weight, named.get(f"{name}.bias", weight.new_zeros(weight.shape[:2])))
        for name, weight in zip(names, weights, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class TrainingSchedule:
    """How each network is trained.

    Attributes:
        epochs: passes over its records, >= 1.
        batch_size: records per step, >= 1; the last batch of an epoch may be smaller.
        learning_rate: > 0.
        optimizer: `sgd` or `adam`, with PyTorch's defaults.
    """

    epochs: int = 20
    batch_size: int = 32
    learning_rate: float = 0.1
    optimizer: Literal["sgd", "adam"] = "sgd"

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise InputError(f"epochs = {self.epochs}, batch_size = {self.batch_size}: must be >= 1")
        if not 0 < self.learning_rate < float("inf"):
            raise InputError(f"learning_rate = {self.learning_rate}: must be finite and > 0")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer = {self.optimizer!r}: must be one of {', '.join(OPTIMIZERS)}")


def batch_order(size: int, schedule: TrainingSchedule, seed: int) -> list[list[Tensor]]:
    """The batches of each epoch, as indices into a subsample: one order for all networks.

    Any two networks then differ only by their records.
    """
    generator = np.random.default_rng(seed)
    epochs = [torch.from_numpy(generator.permutation(size)) for _ in range(schedule.epochs)]
    return [list(torch.split(order, schedule.batch_size)) for order in epochs]


def train_stacked(
    network: nn.Module,
    features: Tensor,
    labels: Tensor,
    records: Indices,
    schedule: TrainingSchedule,
    *,
    seed: int,
    keep: Collection[int] = (),
) -> dict[int, Tensor]:
    """{epoch: weights of all networks, [networks, values]}, all trained from the weights of `network`.

    Guarantee: each network's weights are, up to rounding, those of a plain training loop over its own records.

    Args:
        network: logits [batch, classes] of features [batch, ...]; no buffers, and no random layers.
        features: [records, ...].
        labels: int64 [records], classes from 0.
        records: int64 [networks, size], the rows of the data on which each network is trained.
        schedule: of the steps; their loss is the mean cross-entropy of a batch.
        seed: of the order of the batches.
        keep: epochs to return in addition to the last.

    Raises:
        InputError: the network has buffers, which a joint pass would mix.
    """
    if any(True for _ in network.buffers()):
        raise InputError("network: has buffers, such as those of batch normalisation; use a module without them")
    # On the device and in the dtype of the data, so that the caller chooses both.
    start = to_vector(network).to(features)
    values = start.repeat(len(records), 1)
    weights = {name: part.clone().requires_grad_() for name, part in from_vectors(network, values).items()}
    optimizer = OPTIMIZERS[schedule.optimizer](list(weights.values()), lr=schedule.learning_rate)
    rows = torch.from_numpy(records).to(features.device)
    forward = _forward(network, features)
    kept: dict[int, Tensor] = {}
    for epoch, batches in enumerate(batch_order(records.shape[1], schedule, seed), start=1):
        for batch_indices in batches:
            chosen = rows[:, batch_indices]
            # Several times as fast as features[chosen].
            batch = features.index_select(0, chosen.flatten()).view(*chosen.shape, *features.shape[1:])
            logits = forward(weights, batch)
            # The networks share no weights, so the gradient of the sum is each network's own.
            loss = F.cross_entropy(logits.flatten(0, 1), labels[chosen].flatten(), reduction="sum")
            loss = loss / len(batch_indices)
            for part, gradient in zip(weights.values(), torch.autograd.grad(loss, list(weights.values())), strict=True):
                part.grad = gradient
            optimizer.step()
        if epoch in keep or epoch == schedule.epochs:
            kept[epoch] = torch.cat([part.detach().flatten(1) for part in weights.values()], dim=1)
    return kept


def _forward(network: nn.Module, features: Tensor) -> Forward:
    """One forward pass of all networks: by plain products for perceptrons, and by the slower vmap for other modules."""
    if not is_perceptron(network) or features.dim() != 2:
        mapped: Forward = vmap(lambda own, batch: functional_call(network, dict(own), (batch,)))
        return mapped

    def forward(weights: Mapping[str, Tensor], batch: Tensor) -> Tensor:
        # Features first: this order makes backward passes through small products several times as fast.
        hidden = batch.mT
        for name, module in network.named_children():
            if not isinstance(module, nn.Linear):
                hidden = module(hidden)
            elif f"{name}.bias" in weights:
                hidden = torch.baddbmm(weights[f"{name}.bias"].unsqueeze(2), weights[f"{name}.weight"], hidden)
            else:
                hidden = torch.bmm(weights[f"{name}.weight"], hidden)
        return hidden.mT

    return forward


@dataclass(frozen=True, kw_only=True)
class PrivateSchedule:
    """How a network is trained under differential privacy.

    Attributes:
        steps: noisy steps, >= 1.
        expected_batch_size: B of Poisson sampling.
        learning_rate: of plain SGD on the noised sum divided by B.
        clip_norm: C, gradient units.
    """

    steps: int = 50
    expected_batch_size: int
    learning_rate: float = 0.5
    clip_norm: float = 1.0


def train_privately(
    network: nn.Module,
    features: Tensor,
    labels: Tensor,
    schedule: PrivateSchedule,
    *,
    noise_multiplier: float,
    source: RandomSource,
) -> tuple[Tensor, list[Event]]:
    """The weights after training, [values], and one event for each step.

    Guarantee: under add-or-remove adjacency, each step is one Gaussian mechanism on a Poisson sample with the sampling
    probability and noise multiplier of its event; everything else is post-processing. A seeded source gives no
    privacy.

    Args:
        network: with the initial weights; no layer may mix records.
        features: [records, ...]; their number is the registered one.
        labels: int64 [records].
        noise_multiplier: z >= 0.

    Source: Abadi et al. 2016, Algorithm 1.
    """
    vector = to_vector(network).to(features)
    size = schedule.expected_batch_size
    sampler = PoissonSampler(num_registered=len(labels), expected_batch_size=size, source=source)
    events = []
    for _ in range(schedule.steps):
        chosen = torch.tensor(sampler.draw(len(labels)), dtype=torch.int64)
        pieces = torch.split(chosen, max(1, _GRADIENTS_AT_ONCE // len(vector)))
        noised, event = noised_sum(
            (
                _per_sample(network, vector.unsqueeze(0), features[piece].unsqueeze(0), labels[piece].unsqueeze(0))[0]
                for piece in pieces
            ),
            vector,
            clip_norm=schedule.clip_norm,
            noise_multiplier=noise_multiplier,
            sampling_probability=sampler.sampling_probability,
            source=source,
        )
        events.append(event)
        vector = vector - schedule.learning_rate * noised / size
    return vector, events


def train_clipped_stacked(
    network: nn.Module, features: Tensor, labels: Tensor, records: Indices, schedule: PrivateSchedule
) -> Tensor:
    """The weights, [networks, values], that `train_privately` would give without noise and sampling.

    An intruder compares a private model with these: every step uses all records and clips each gradient.

    Args:
        records: int64 [networks, size], the rows of the data on which each network is trained.
    """
    rows = torch.from_numpy(records)
    start = to_vector(network).to(features)
    at_once = max(1, _GRADIENTS_AT_ONCE // (len(start) * records.shape[1]))
    return torch.cat(
        [_clipped(network, start, features[chunk], labels[chunk], schedule) for chunk in torch.split(rows, at_once)]
    )


def _clipped(network: nn.Module, start: Tensor, features: Tensor, labels: Tensor, schedule: PrivateSchedule) -> Tensor:
    """Clipped gradient descent of several networks; features [networks, size, ...], labels [networks, size]."""
    vectors = start.repeat(len(labels), 1)
    owners = torch.arange(len(labels)).repeat_interleave(labels.shape[1])
    for _ in range(schedule.steps):
        gradients = _per_sample(network, vectors, features, labels)
        totals = torch.zeros_like(vectors, dtype=torch.int64)
        add_clipped(totals, gradients.flatten(0, 1), owners, schedule.clip_norm, (slice(0, vectors.shape[1]),))
        sums = clipped_sums(totals, schedule.clip_norm).to(vectors.dtype)
        vectors = vectors - schedule.learning_rate * sums / labels.shape[1]
    return vectors


def _per_sample(network: nn.Module, vectors: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Per-sample gradients with respect to each network's weights, [networks, records, values]."""

    def loss(weights: Mapping[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(network, dict(weights), (record.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    of_records = vmap(grad(loss), in_dims=(None, 0, 0))
    gradients = vmap(of_records)(from_vectors(network, vectors), features, labels)
    return torch.cat([part.flatten(2) for part in gradients.values()], dim=2)
