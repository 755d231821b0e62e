"""Records: tables and corpora, who holds which part of them, and the batches that a model is trained on.

The embedded corpus, messages to five hospitals, is made up and needs no network:

>>> from fedpriv import RunConfig
>>> from fedpriv.data import load
>>> data = load(RunConfig())
>>> {name: len(records) for name, records in zip(data.client_names, data.clients)}
{'St. Anna': 1200, 'Northgate': 1000, 'Lakeside': 800, 'Riverside': 600, 'Marienhof': 400}
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.data.checks import describe as describe
    from fedpriv.data.federated import load as load
    from fedpriv.data.records import Records as Records
    from fedpriv.data.records import collate as collate
    from fedpriv.data.records import tokenize as tokenize
    from fedpriv.data.tables import load_table as load_table
    from fedpriv.data.text import FederatedData as FederatedData
    from fedpriv.data.text import TextData as TextData
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
