"""ROC curves of membership attacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy.typing as npt
from matplotlib.figure import Figure

from fedpriv.audit.membership import roc


def plot_roc(attacks: Mapping[str, npt.ArrayLike], members: npt.ArrayLike, path: Path) -> None:
    """Write the ROC curves of all attacks, on logarithmic axes to show low false positive rates.

    Args:
        attacks: {name: scores [records]}.
        members: bool [records].
        path: of the PNG or SVG file.
    """
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, scores in attacks.items():
        axes.plot(*roc(scores, members), label=name, drawstyle="steps-post")
    axes.plot([1e-4, 1], [1e-4, 1], color="grey", linestyle=":", label="chance")
    axes.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(1e-3, 1))
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.legend()
    figure.savefig(path, dpi=120)
