"""Integrally private models: those that many disjoint data sets could have produced (Varshney and Torra 2023).

Four models of two weights, trained on disjoint records; three of them agree within 0.05:

>>> import numpy as np
>>> from fedpriv.integral import select
>>> models = np.array([[0.50, 1.00], [0.52, 1.02], [0.90, 0.10], [0.51, 0.99]])
>>> records = [np.arange(10 * model, 10 * model + 10) for model in range(4)]
>>> best = select(models, records, epsilon=0.05)[0]
>>> best.recurrence, best.anonymity.k, best.mean.round(2)
(3, 3, array([0.51, 1.  ]))
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.integral._networks import HIDDEN as HIDDEN
    from fedpriv.integral._networks import from_vectors as from_vectors
    from fedpriv.integral._networks import num_parameters as num_parameters
    from fedpriv.integral._networks import perceptron as perceptron
    from fedpriv.integral._networks import to_vector as to_vector
    from fedpriv.integral._selection import Anonymity as Anonymity
    from fedpriv.integral._selection import Cluster as Cluster
    from fedpriv.integral._selection import Linkage as Linkage
    from fedpriv.integral._selection import Measure as Measure
    from fedpriv.integral._selection import anonymity as anonymity
    from fedpriv.integral._selection import select as select
    from fedpriv.integral._selection import statement as statement
    from fedpriv.integral._subsamples import Advice as Advice
    from fedpriv.integral._subsamples import Indices as Indices
    from fedpriv.integral._subsamples import Subsamples as Subsamples
    from fedpriv.integral._subsamples import advice as advice
    from fedpriv.integral._subsamples import disjoint_subsamples as disjoint_subsamples
    from fedpriv.integral._training import OPTIMIZERS as OPTIMIZERS
    from fedpriv.integral._training import PrivateSchedule as PrivateSchedule
    from fedpriv.integral._training import TrainingSchedule as TrainingSchedule
    from fedpriv.integral._training import batch_order as batch_order
    from fedpriv.integral._training import train_privately as train_privately
    from fedpriv.integral._training import train_stacked as train_stacked
    from fedpriv.integral.procedure import Data as Data
    from fedpriv.integral.procedure import Recommendation as Recommendation
    from fedpriv.integral.procedure import SelectionSettings as SelectionSettings
    from fedpriv.integral.procedure import recommend as recommend
    from fedpriv.integral.tabular import prepare as prepare
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
