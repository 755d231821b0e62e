"""Single pieces of fedpriv for a Flower app, as mods: its ledger, and client-level noise.

It is the only room that imports Flower. `docs/flower.md` shows each piece in an app.

Flower's LocalDpMod with the classical bound for (1, 1e-5), and what a round through it costs:

>>> from flwr.clientapp.mod import LocalDpMod
>>> from fedpriv.privacy.accounting import epsilon_of
>>> from fedpriv.holder.flower import local_dp_event
>>> mod = LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=1.0, delta=1e-5)
>>> for rounds in (1, 10):
...     print(f"{rounds} rounds: epsilon {epsilon_of([local_dp_event(mod, rounds)], 1e-5).epsilon:.3f}")
1 rounds: epsilon 0.752
10 rounds: epsilon 2.691
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.holder.flower.releases import Account as Account
    from fedpriv.holder.flower.releases import LedgerMod as LedgerMod
    from fedpriv.holder.flower.releases import UpdateMod as UpdateMod
    from fedpriv.holder.flower.releases import local_dp_event as local_dp_event
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
