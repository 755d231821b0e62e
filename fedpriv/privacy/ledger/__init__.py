"""The ledger of a data set: every release is charged on disk before it is computed, and no entry is ever removed.

>>> from pathlib import Path
>>> from tempfile import TemporaryDirectory
>>> from fedpriv.privacy.accounting import Release, SubsampledGaussian, epsilon_of
>>> from fedpriv.privacy.ledger import Charge, Key, Ledger
>>> event = SubsampledGaussian(noise_multiplier=1.0, sampling_probability=0.05)
>>> with TemporaryDirectory() as folder, Ledger(Path(folder, "ledger.sqlite")) as ledger:
...     data_set = ledger.register("hospital", num_records=1200, delta=1e-5)
...     for step in (1, 2):
...         key = Key(run="trial", client="hospital", round=step, request=f"request {step}")
...         release = Release(event=event, rho_bar=1.0)
...         ledger.charge([Charge(key=key, data_set=data_set.id, release=release, noise_source="secure")])
...     history = [release.event for release in ledger.releases(data_set.id)]
>>> print(f"epsilon {epsilon_of(history, data_set.delta).epsilon:.3f} for {history[0].count} releases")
epsilon 1.183 for 2 releases
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.privacy.ledger.accounts import Accounts as Accounts
    from fedpriv.privacy.ledger.entries import Charge as Charge
    from fedpriv.privacy.ledger.entries import DataSet as DataSet
    from fedpriv.privacy.ledger.entries import Key as Key
    from fedpriv.privacy.ledger.ledger import Ledger as Ledger
    from fedpriv.privacy.ledger.reader import reading as reading
    from fedpriv.privacy.ledger.statement import entries_frame as entries_frame
    from fedpriv.privacy.ledger.statement import spending as spending
    from fedpriv.privacy.ledger.statement import spending_frame as spending_frame
    from fedpriv.privacy.ledger.statement import statement_text as statement_text
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
