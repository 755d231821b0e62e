"""Federated LoRA fine-tuning of language models under differential privacy.

Its wings, each a package: `privacy` (accounting, mechanisms, ledger), `config`, `learning` (data, adapters, training,
aggregation), `holder` (vault, sums, flower), `methods` (audit, lmo, integral), `runs` (plan, show) and `models`
(variants, dedup, serving, publishing). `cli` and `operate` are those of the command lines.
"""

import logging
import os
import warnings
from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports
from fedpriv.texts import VERSION

__version__ = VERSION

# Threads of torch's pool that spin while they wait take cores that others need, and the pool's own threads too. So they
# spin briefly, unless the user says how they wait. GNU's OpenMP reads this when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Where bitsandbytes is installed, peft imports it, and it warns of a missing kernel that is not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# In a notebook without ipywidgets, tqdm warns that its bars will be text; nothing here shows one.
warnings.filterwarnings("ignore", message="IProgress not found")

if TYPE_CHECKING:
    from fedpriv import config as config
    from fedpriv import holder as holder
    from fedpriv import learning as learning
    from fedpriv import methods as methods
    from fedpriv import models as models
    from fedpriv import privacy as privacy
    from fedpriv import runs as runs
    from fedpriv.apps import run as run
    from fedpriv.apps import sweep as sweep
    from fedpriv.config import RunConfig as RunConfig
    from fedpriv.errors import DiskFullError as DiskFullError
    from fedpriv.errors import InputError as InputError
    from fedpriv.errors import LedgerError as LedgerError
    from fedpriv.errors import StoreError as StoreError
    from fedpriv.errors import TooFewClientsError as TooFewClientsError
    from fedpriv.runs.show import Run as Run
    from fedpriv.runs.show import open_run as open_run
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
