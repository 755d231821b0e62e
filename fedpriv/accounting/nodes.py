"""Nodes that stand in for the values of thousands of clients, which then need fewer curves than there are clients."""

from __future__ import annotations

import numpy as np

from fedpriv.accounting.law import Array


def nodes_of(values: Array, at_most: int) -> Array:
    """The distinct values or, if there are too many, a geometric grid from the smallest to the largest."""
    distinct = np.unique(values)
    if len(distinct) <= at_most:
        return distinct
    grid = np.geomspace(distinct[0], distinct[-1], at_most)
    grid[0], grid[-1] = distinct[0], distinct[-1]
    return grid


def rounded(values: Array, nodes: Array, *, up: bool) -> Array:
    """The smallest node that is not below (or the largest that is not above) each value."""
    index = np.searchsorted(nodes, values) if up else np.searchsorted(nodes, values, side="right") - 1
    return np.asarray(nodes[index])
