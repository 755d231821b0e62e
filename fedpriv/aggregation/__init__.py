"""Aggregation rules: how the clients' uploads become the next global model. `RULES` names them.

>>> import torch
>>> from fedpriv.aggregation import RULES, weighted_average, weights_by_size
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
    from fedpriv.aggregation.fedavg import GlobalModel as GlobalModel
    from fedpriv.aggregation.fedavg import weighted_average as weighted_average
    from fedpriv.aggregation.fedavg import weights_by_size as weights_by_size
    from fedpriv.aggregation.rules import RULES as RULES
    from fedpriv.aggregation.rules import Rule as Rule
    from fedpriv.aggregation.server_optimizers import server_step as server_step
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
