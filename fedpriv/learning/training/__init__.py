"""Local training: Poisson samples, exact per-sample gradients, clipping, and the update that a client uploads.

>>> import torch
>>> from fedpriv.learning.training import clipped_rows, per_sample_gradients, trainable_layers
>>> model = torch.nn.Linear(2, 1, bias=False)
>>> records, targets = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 0.0, 0.0])
>>> gradients, losses = per_sample_gradients(
...     trainable_layers(model), lambda: (model(records).squeeze(1) - targets).square()
... )
>>> gradients["weight"].shape, losses.shape
(torch.Size([3, 1, 2]), torch.Size([3]))
>>> rows = clipped_rows(gradients["weight"].flatten(1), clip_norm=0.01, parts=[slice(0, 2)])
>>> bool((rows.norm(dim=1) <= 0.01).all())
True
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.learning.training._admission import in_format as in_format
    from fedpriv.learning.training._caches import Body as Body
    from fedpriv.learning.training._caches import FeatureCache as FeatureCache
    from fedpriv.learning.training._caches import find_prefix as find_prefix
    from fedpriv.learning.training._passes import batches as batches
    from fedpriv.learning.training._passes import predictions as predictions
    from fedpriv.learning.training.answers import ends_of_turn as ends_of_turn
    from fedpriv.learning.training.answers import greedy_answers as greedy_answers
    from fedpriv.learning.training.answers import with_adapter as with_adapter
    from fedpriv.learning.training.evaluation import Tokens as Tokens
    from fedpriv.learning.training.evaluation import require_rouge as require_rouge
    from fedpriv.learning.training.local_update import UpdateSpec as UpdateSpec
    from fedpriv.learning.training.model import TrainingModel as TrainingModel
    from fedpriv.learning.training.own_models import OwnModel as OwnModel
    from fedpriv.learning.training.own_models import private_step as private_step
    from fedpriv.learning.training.per_sample import per_sample_gradients as per_sample_gradients
    from fedpriv.learning.training.per_sample import trainable_layers as trainable_layers
    from fedpriv.learning.training.private_sums import PoissonSampler as PoissonSampler
    from fedpriv.learning.training.private_sums import UpdateNoise as UpdateNoise
    from fedpriv.learning.training.private_sums import clipped_rows as clipped_rows
    from fedpriv.learning.training.private_sums import noised_sum as noised_sum
    from fedpriv.learning.training.rehearsal import peak_of_pass as peak_of_pass
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
