"""Federations on this machine: both sides in one process, or on a Ray cluster.

>>> from fedpriv import run, sweep                                            # doctest: +SKIP
>>> result = run(rounds=10, target_epsilon=4.0, out="results/first")              # doctest: +SKIP
>>> result.clients[["num_records", "epsilon_local", "delta"]]                     # doctest: +SKIP
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from simulations.api import run as run
    from simulations.api import sweep as sweep
    from simulations.keys import RunKeys as RunKeys
    from simulations.keys import SweepKeys as SweepKeys
    from simulations.sweeps.result import FinishedSweep as FinishedSweep
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
