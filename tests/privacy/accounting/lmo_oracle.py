"""LMO noise by independent means: densities part by part, divergences by quadrature, vectors by brute force."""

import numpy as np
from scipy.signal import fftconvolve
from scipy.special import logsumexp

from fedpriv.privacy.accounting.lmo_parameters import ExponentialPart, GammaPart, LmoParameters, UniformPart

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


def uniform(low, high):
    return LmoParameters(combination="mixture", uniform=UniformPart(weight=1, low=low, high=high))


def gamma(shape, scale):
    return LmoParameters(combination="mixture", gamma=GammaPart(weight=1, shape=shape, scale=scale))


def random_parameters(generator, order, sensitivity=1.0):
    """Random parts in either combination, such that the order lies inside the domain."""
    end = 1 / ((order - 1) * sensitivity)
    weights = generator.dirichlet([1, 1, 1])
    weights[generator.random(3) < 0.3] = 0
    weights = weights / weights.sum() if weights.sum() else np.array([0.0, 0.0, 1.0])
    low = generator.uniform(0, 1.0)
    return LmoParameters(
        combination=generator.choice(["mixture", "linear"]).item(),
        gamma=GammaPart(weight=weights[0], shape=generator.uniform(0.3, 5), scale=end * generator.uniform(0.02, 0.98)),
        exponential=ExponentialPart(weight=weights[1], rate=1 / (end * generator.uniform(0.02, 0.98))),
        uniform=UniformPart(weight=weights[2], low=low, high=low + generator.uniform(0.01, 2)),
    )


def log_density(parameters, x):
    """log of the density at |x|: E[u e^(-ux)] / 2, part by part; linear combinations of u by the product rule."""
    x = np.abs(np.asarray(x, dtype=float))
    parts = [(part.weight, *_transform(part, x, parameters.combination)) for part in parameters.parts.values()]
    if parameters.combination == "mixture":
        return logsumexp([np.log(weight) + first for weight, _, first in parts], axis=0) - np.log(2)
    product = np.sum([transform for _, transform, _ in parts], axis=0)
    return product + logsumexp([np.log(weight) + first - log for weight, log, first in parts], axis=0) - np.log(2)


def _transform(part, x, combination):
    """Logs of E[e^(-ux)] and E[u e^(-ux)] of one part, taken at weight * x in a linear combination."""
    x = part.weight * x if combination == "linear" else x
    if isinstance(part, GammaPart):
        base = np.log1p(part.scale * x)
        return -part.shape * base, np.log(part.shape * part.scale) - (part.shape + 1) * base
    if isinstance(part, ExponentialPart):
        base = np.log(part.rate) - np.log(part.rate + x)
        return base, 2 * base - np.log(part.rate)
    u = (part.low + part.high) / 2 + (part.high - part.low) / 2 * _NODES
    terms = -np.multiply.outer(x, u) + np.log(_WEIGHTS / 2)
    return logsumexp(terms, axis=-1), logsumexp(terms + np.log(u), axis=-1)


def exact_divergence(parameters, order, shift):
    """Renyi divergence between the noise and the shifted noise, from its density, so without revealing u."""
    inside = shift * (1 + _NODES) / 2
    between = np.sum(_WEIGHTS * shift / 2 * _ratio(parameters, order, inside, shift - inside))
    v = np.linspace(-25, 45, 701)
    y = np.exp(v)
    sides = _ratio(parameters, order, y, y + shift) + _ratio(parameters, order, y + shift, y)
    return np.log(between + np.trapezoid(sides * y, v)) / (order - 1)


def _ratio(parameters, order, x, shifted):
    first, second = log_density(parameters, x), log_density(parameters, shifted)
    # Far out the logs are so large that their difference is mere rounding; the density there is negligible.
    power = np.where(first > -1e4, order * first + (1 - order) * second, -np.inf)
    return np.exp(power)


def composed_losses(parameters, shifts, points=4096):
    """Losses and probabilities of noise + shifts against noise, u hidden, from the density; every loss rounded down.

    Points of a quadrature stand for the line, and coordinates are composed one by one, so the divergences that follow
    are lower bounds up to the quadrature's error.
    """
    tail = np.exp(np.linspace(-25, 45, 3001))
    losses, masses = [], []
    for shift in shifts:
        nodes = shift * (np.arange(2000) + 0.5) / 2000
        x = np.concatenate([-tail[::-1], nodes, shift + tail])
        side = tail * (70 / 3000)  # of the trapezoids in log x
        weights = np.concatenate([side[::-1], np.full(2000, shift / 2000), side])
        with_shift = log_density(parameters, x - shift)
        mass = weights * np.exp(with_shift)
        # Far out the difference is mere rounding, as below.
        losses.append(np.where(mass > 1e-30, with_shift - log_density(parameters, x), 0.0))
        masses.append(mass)
    step = sum(np.abs(each).max() for each in losses) / points
    total, low = np.ones(1), 0
    for loss, mass in zip(losses, masses, strict=True):
        cells = np.floor(loss / step).astype(int)
        total = fftconvolve(total, np.bincount(cells - cells.min(), mass))
        low += cells.min()
    return step * (low + np.arange(len(total))), total


def best_split(curve, dimension):
    """The largest sum of `curve[t_i]` over multiples t_i of 1 / (len - 1) that sum to 1, for 1 to `dimension` terms."""
    best = [curve.copy()]
    for _ in range(dimension - 1):
        last = best[-1]
        best.append(np.array([np.max(last[: n + 1][::-1] + curve[: n + 1]) for n in range(len(curve))]))
    return [values[-1] for values in best]
