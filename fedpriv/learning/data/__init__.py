"""Records: tables and corpora, who holds which part of them, and the batches that a model is trained on.

The embedded corpus, messages to five hospitals, is made up and needs no network:

>>> from fedpriv import RunConfig
>>> from fedpriv.learning.data import load
>>> data = load(RunConfig())
>>> {name: len(records) for name, records in zip(data.client_names, data.clients)}
{'St. Anna': 1200, 'Northgate': 1000, 'Lakeside': 800, 'Riverside': 600, 'Marienhof': 400}
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.learning.data._checks import Mended as Mended
    from fedpriv.learning.data._checks import describe as describe
    from fedpriv.learning.data._checks import describe_instructions as describe_instructions
    from fedpriv.learning.data._checks import other_language as other_language
    from fedpriv.learning.data._checks import subwords as subwords
    from fedpriv.learning.data._checks import write_mended as write_mended
    from fedpriv.learning.data._mistakes import CheckedColumns as CheckedColumns
    from fedpriv.learning.data._mistakes import Finding as Finding
    from fedpriv.learning.data._mistakes import Roles as Roles
    from fedpriv.learning.data._mistakes import looks_like_persons as looks_like_persons
    from fedpriv.learning.data._mistakes import mistakes as mistakes
    from fedpriv.learning.data._mistakes import refused as refused
    from fedpriv.learning.data._rows import FORMATS as FORMATS
    from fedpriv.learning.data._rows import suffix_of as suffix_of
    from fedpriv.learning.data._tables import OwnRecord as OwnRecord
    from fedpriv.learning.data._tables import Table as Table
    from fedpriv.learning.data._tables import read_strictly as read_strictly
    from fedpriv.learning.data._tables import read_table as read_table
    from fedpriv.learning.data._tables import release_memory as release_memory
    from fedpriv.learning.data._tables import write_lines as write_lines
    from fedpriv.learning.data.federated import load as load
    from fedpriv.learning.data.records import Records as Records
    from fedpriv.learning.data.records import collate as collate
    from fedpriv.learning.data.records import tokenize as tokenize
    from fedpriv.learning.data.tensors import TensorRecords as TensorRecords
    from fedpriv.learning.data.text import ROLES as ROLES
    from fedpriv.learning.data.text import DataSource as DataSource
    from fedpriv.learning.data.text import FederatedData as FederatedData
    from fedpriv.learning.data.text import TextData as TextData
    from fedpriv.learning.data.text import turns_of as turns_of
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
