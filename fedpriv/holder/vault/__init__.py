"""The vault between a data holder's records and a coordinator: the holder's policy, and the guard that enforces it.

An instruction with less noise than the holder allows is refused before anything is computed:

>>> from fedpriv import RunConfig
>>> from fedpriv.privacy.accounting import SubsampledGaussian
>>> from fedpriv.learning.training import UpdateSpec
>>> from fedpriv.holder.vault import NodeLimits, RefusedError, check_limits
>>> event = SubsampledGaussian(noise_multiplier=0.1, sampling_probability=0.05)
>>> try:
...     check_limits(UpdateSpec.of(RunConfig(recipe="per-sample")), event, 1, NodeLimits())
... except RefusedError as refusal:
...     print(refusal)
noise_multiplier: its effective value 0.1 is below this node's minimum 0.3
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.holder.vault._charging import AlreadyReleasedError as AlreadyReleasedError
    from fedpriv.holder.vault._charging import Choice as Choice
    from fedpriv.holder.vault._charging import NodePolicy as NodePolicy
    from fedpriv.holder.vault._charging import RefusedError as RefusedError
    from fedpriv.holder.vault._charging import RetiredError as RetiredError
    from fedpriv.holder.vault._charging import charge as charge
    from fedpriv.holder.vault._charging import choose_rule as choose_rule
    from fedpriv.holder.vault._charging import refused as refused
    from fedpriv.holder.vault._charging import registered_data_set as registered_data_set
    from fedpriv.holder.vault._charging import rule_note as rule_note
    from fedpriv.holder.vault._charging import store_reply as store_reply
    from fedpriv.holder.vault._guard import check_limits as check_limits
    from fedpriv.holder.vault.settings import NodeLimits as NodeLimits
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
