"""Local training: Poisson samples, exact per-sample gradients, clipping, and the update that a client uploads.

>>> import torch
>>> from fedpriv.training import clipped_rows, per_sample_gradients, trainable_layers
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
    from fedpriv.training.clipping import clipped_rows as clipped_rows
    from fedpriv.training.evaluation import Evaluation as Evaluation
    from fedpriv.training.evaluation import evaluate as evaluate
    from fedpriv.training.local_update import ClientUpdate as ClientUpdate
    from fedpriv.training.local_update import Execute as Execute
    from fedpriv.training.local_update import UpdateSpec as UpdateSpec
    from fedpriv.training.local_update import UpdateTask as UpdateTask
    from fedpriv.training.local_update import planned_event as planned_event
    from fedpriv.training.model import TrainingModel as TrainingModel
    from fedpriv.training.per_sample import per_sample_gradients as per_sample_gradients
    from fedpriv.training.per_sample import trainable_layers as trainable_layers
    from fedpriv.training.sampling import PoissonSampler as PoissonSampler
    from fedpriv.training.stacked import stacked_updates as stacked_updates
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
