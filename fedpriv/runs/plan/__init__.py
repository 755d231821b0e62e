"""Plans: what a run could learn, needs in memory, and sends, told before it starts from public numbers alone.

A client that trains GPT-2 with LoRA of rank 8 sends so many bytes each round:

>>> from fedpriv.runs.plan import count, model_shape
>>> count(model_shape("gpt2"), rank=8).bytes_per_upload
1179648
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.runs.plan.budget import ClientCost as ClientCost
    from fedpriv.runs.plan.budget import Plan as Plan
    from fedpriv.runs.plan.budget import Setting as Setting
    from fedpriv.runs.plan.budget import alternatives as alternatives
    from fedpriv.runs.plan.budget import fitted as fitted
    from fedpriv.runs.plan.budget import plan as plan
    from fedpriv.runs.plan.communication import Communication as Communication
    from fedpriv.runs.plan.communication import ModelShape as ModelShape
    from fedpriv.runs.plan.communication import PaperRow as PaperRow
    from fedpriv.runs.plan.communication import compare_paper as compare_paper
    from fedpriv.runs.plan.communication import count as count
    from fedpriv.runs.plan.communication import model_shape as model_shape
    from fedpriv.runs.plan.memory import MemoryPlan as MemoryPlan
    from fedpriv.runs.plan.memory import MemorySetting as MemorySetting
    from fedpriv.runs.plan.memory import largest_batch as largest_batch
    from fedpriv.runs.plan.memory import memory_plan as memory_plan
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
