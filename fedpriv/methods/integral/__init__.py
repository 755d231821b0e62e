"""Integrally private models: those that many disjoint data sets could have produced (Varshney and Torra 2023).

Four models of two weights, trained on disjoint records; three of them agree within 0.05:

>>> import numpy as np
>>> from fedpriv.methods.integral import select
>>> models = np.array([[0.50, 1.00], [0.52, 1.02], [0.90, 0.10], [0.51, 0.99]])
>>> records = [np.arange(10 * model, 10 * model + 10) for model in range(4)]
>>> best = select(models, records, epsilon=0.05)[0]
>>> best.recurrence, best.anonymity.k, best.mean.round(2)
(3, 3, array([0.51, 1.  ]))
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.methods.integral._networks import HIDDEN as HIDDEN
    from fedpriv.methods.integral._networks import OPTIMIZERS as OPTIMIZERS
    from fedpriv.methods.integral._networks import PrivateSchedule as PrivateSchedule
    from fedpriv.methods.integral._networks import TrainingSchedule as TrainingSchedule
    from fedpriv.methods.integral._networks import batch_order as batch_order
    from fedpriv.methods.integral._networks import from_vectors as from_vectors
    from fedpriv.methods.integral._networks import num_parameters as num_parameters
    from fedpriv.methods.integral._networks import perceptron as perceptron
    from fedpriv.methods.integral._networks import to_vector as to_vector
    from fedpriv.methods.integral._networks import train_privately as train_privately
    from fedpriv.methods.integral._networks import train_stacked as train_stacked
    from fedpriv.methods.integral._selection import Advice as Advice
    from fedpriv.methods.integral._selection import Anonymity as Anonymity
    from fedpriv.methods.integral._selection import Cluster as Cluster
    from fedpriv.methods.integral._selection import Indices as Indices
    from fedpriv.methods.integral._selection import Linkage as Linkage
    from fedpriv.methods.integral._selection import Measure as Measure
    from fedpriv.methods.integral._selection import Subsamples as Subsamples
    from fedpriv.methods.integral._selection import advice as advice
    from fedpriv.methods.integral._selection import anonymity as anonymity
    from fedpriv.methods.integral._selection import disjoint_subsamples as disjoint_subsamples
    from fedpriv.methods.integral._selection import select as select
    from fedpriv.methods.integral._selection import statement as statement
    from fedpriv.methods.integral.procedure import Data as Data
    from fedpriv.methods.integral.procedure import Recommendation as Recommendation
    from fedpriv.methods.integral.procedure import SelectionSettings as SelectionSettings
    from fedpriv.methods.integral.procedure import recommend as recommend
    from fedpriv.methods.integral.tabular import prepare as prepare
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
