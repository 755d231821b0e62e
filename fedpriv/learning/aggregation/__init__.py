"""Aggregation rules: how the clients' uploads become the next global model. `RULES` names them.

>>> import torch
>>> from fedpriv.learning.aggregation import RULES, weighted_average, weights_by_size
>>> weights = weights_by_size({0: 300, 1: 100})
>>> weights
{0: 0.75, 1: 0.25}
>>> uploads = [{"lora_B": torch.tensor([4.0, 0.0])}, {"lora_B": torch.tensor([0.0, 8.0])}]
>>> weighted_average(uploads, list(weights.values()))
{'lora_B': tensor([3., 2.])}
>>> RULES["fedex-lora"].linear
False
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.learning.aggregation._cmfl import pack_signs as pack_signs
    from fedpriv.learning.aggregation._cmfl import unpack_signs as unpack_signs
    from fedpriv.learning.aggregation._fedavg import GlobalModel as GlobalModel
    from fedpriv.learning.aggregation._fedavg import ternary_codes as ternary_codes
    from fedpriv.learning.aggregation._fedavg import weighted_average as weighted_average
    from fedpriv.learning.aggregation._fedavg import weights_by_size as weights_by_size
    from fedpriv.learning.aggregation._head_start import head_of as head_of
    from fedpriv.learning.aggregation._head_start import is_of_head as is_of_head
    from fedpriv.learning.aggregation._head_start import recentred as recentred
    from fedpriv.learning.aggregation._head_start import started as started
    from fedpriv.learning.aggregation._products import fresh_start as fresh_start
    from fedpriv.learning.aggregation.rules import RULES as RULES
    from fedpriv.learning.aggregation.rules import Rule as Rule
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
