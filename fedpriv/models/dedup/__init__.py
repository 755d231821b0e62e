"""Deduplication of model variants by shared blocks, within bounds on utility and privacy.

A search replaces as many of a model's 64 blocks as validation allows, here the 40 least salient:

>>> from fedpriv.models.dedup import ALGORITHMS
>>> result = ALGORITHMS["drd"](64, lambda replaced: max(replaced) < 40, min_batch=4)
>>> len(result.replaced), result.num_validations
(40, 13)
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.models.dedup._base_selection import MAX_DISTANCE as MAX_DISTANCE
    from fedpriv.models.dedup._base_selection import Fairness as Fairness
    from fedpriv.models.dedup._base_selection import Strategy as Strategy
    from fedpriv.models.dedup._blocks import MINHASH_STEP as MINHASH_STEP
    from fedpriv.models.dedup._in_order import BlockSearchResult as BlockSearchResult
    from fedpriv.models.dedup.algorithms import ALGORITHMS as ALGORITHMS
    from fedpriv.models.dedup.pipeline import deduplicate as deduplicate
    from fedpriv.models.dedup.planning import DedupSettings as DedupSettings
    from fedpriv.models.dedup.planning import plan as plan
    from fedpriv.models.dedup.validation import Evaluator as Evaluator
    from fedpriv.models.dedup.work import Outcome as Outcome
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
