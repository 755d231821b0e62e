"""The cost of exact noise: discrete Gaussian values over floating-point Gaussian ones, both from a secure source.

    python -m simulations.benchmarks.discrete_gaussian [--mechanism lmo]

With `--mechanism lmo` it is that of LMO noise of three parts, of which the Gamma variables take most of the time.

Both arms are their mechanism as a federation calls it, for one client: words of the cipher, noise, sum and grid. They
alternate, and the ratio is of the medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from fedpriv.privacy.mechanisms.registry import MECHANISMS, NoiseRequest
from fedpriv.privacy.mechanisms.sources import SecureSource
from simulations.benchmarks._measuring import alternate, claim

TARGET = 3.0
# {mechanism: the noise in words, its parameters}
ARMS = {
    "discrete-gaussian": ("exact discrete Gaussian noise", ""),
    "lmo": (
        "LMO noise of three parts",
        '{"combination": "linear", "gamma": {"weight": 1, "shape": 4, "scale": 0.02}, '
        '"exponential": {"weight": 1, "rate": 200}, "uniform": {"weight": 1, "low": 0.2, "high": 0.5}}',
    ),
}


def arm(name: str, num_values: int, noise_multiplier: float) -> Callable[[], None]:
    """One release by the mechanism with this name."""
    request = NoiseRequest(
        noise_multiplier=noise_multiplier,
        clip_norm=0.8,
        dimension=num_values,
        sampling_probabilities=(0.1,),
        parameters=ARMS[name][1] if name in ARMS else "",
    )
    sums, sources = torch.linspace(-1, 1, num_values, dtype=torch.float64).unsqueeze(0), [SecureSource()]

    def release() -> None:
        MECHANISMS[name].add_noise(sums, request, sources)

    return release


def main() -> None:
    """Print milliseconds of each arm, and the claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanism", choices=ARMS, default="discrete-gaussian")
    parser.add_argument("--values", type=int, default=28_000)
    parser.add_argument("--repeats", type=int, default=400)
    given = parser.parse_args()
    arms = {name: arm(name, given.values, 1.5) for name in ("gaussian", given.mechanism)}
    medians = {name: statistics.median(each) for name, each in alternate(arms, given.repeats).items()}
    for name, median in medians.items():
        print(f"{name:20} {1000 * median:.3f} ms for {given.values} values")
    ratio = medians[given.mechanism] / medians["gaussian"]
    text = f"{ARMS[given.mechanism][0]} over floating-point Gaussian noise, secure source"
    claim(text, at_most=TARGET, ratio=ratio)


if __name__ == "__main__":
    main()
