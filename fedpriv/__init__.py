"""Federated LoRA fine-tuning of language models under differential privacy.

Packages that a program uses most: `config`, `data`, `adapters`, `training`, `mechanisms`, `accounting`, `ledger`,
`aggregation` and `secure_aggregation` for a federation; `variants`, `dedup` and `serving` for its models; `plan`,
`audit` and `integral` to judge one.
"""

import logging
import os
import warnings
from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

__version__ = "0.2.0"

# Threads of torch's pool that spin while they wait take cores that others need, and the pool's own threads too. So they
# spin briefly, unless the user says how they wait. GNU's OpenMP reads this when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Where bitsandbytes is installed, peft imports it, and it warns of a missing kernel that is not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# In a notebook without ipywidgets, tqdm warns that its bars will be text; nothing here shows one.
warnings.filterwarnings("ignore", message="IProgress not found")

if TYPE_CHECKING:
    from fedpriv import accounting as accounting
    from fedpriv import adapters as adapters
    from fedpriv import aggregation as aggregation
    from fedpriv import audit as audit
    from fedpriv import config as config
    from fedpriv import data as data
    from fedpriv import dedup as dedup
    from fedpriv import integral as integral
    from fedpriv import ledger as ledger
    from fedpriv import lmo as lmo
    from fedpriv import mechanisms as mechanisms
    from fedpriv import plan as plan
    from fedpriv import runs as runs
    from fedpriv import secure_aggregation as secure_aggregation
    from fedpriv import serving as serving
    from fedpriv import training as training
    from fedpriv import variants as variants
    from fedpriv import vault as vault
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
