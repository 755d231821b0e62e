"""A run's folder: the code that writes and reads it, its figures, and the pages that show them.

`RunFolder` is one look at a folder, in which every file is read once. The figures of a run are declared in
`fedpriv.runs.figures`, for the terminal, the report, trackers, the model card and Python alike. What
bounds a risk is rounded up, and no epsilon is shown without its delta:

>>> from fedpriv.runs import format_bytes, format_epsilon
>>> print(format_epsilon(1.8213, 1e-5), format_bytes(1_230_000), sep="; ")
ε = 1.83 at δ = 1e-5; 1.23 MB
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.runs._folder import LANGUAGE_KEYS as LANGUAGE_KEYS
    from fedpriv.runs._folder import RunFolder as RunFolder
    from fedpriv.runs._rows import USABLE as USABLE
    from fedpriv.runs._rows import ClientRow as ClientRow
    from fedpriv.runs._rows import RoundRow as RoundRow
    from fedpriv.runs._rows import Sample as Sample
    from fedpriv.runs._rows import StoredAnswer as StoredAnswer
    from fedpriv.runs._rows import column_types as column_types
    from fedpriv.runs._rows import parse_epsilon as parse_epsilon
    from fedpriv.runs._rows import read_rows as read_rows
    from fedpriv.runs._status import ClientStatus as ClientStatus
    from fedpriv.runs._status import RunStatus as RunStatus
    from fedpriv.runs._status import account_parts as account_parts
    from fedpriv.runs._status import resume_command as resume_command
    from fedpriv.runs._status import spent_on_view as spent_on_view
    from fedpriv.runs._status import status_of as status_of
    from fedpriv.runs._writer import ClientTotals as ClientTotals
    from fedpriv.runs._writer import RunWriter as RunWriter
    from fedpriv.runs._writer import environment as environment
    from fedpriv.runs.figures import format_bound as format_bound
    from fedpriv.runs.figures import format_bytes as format_bytes
    from fedpriv.runs.figures import format_delta as format_delta
    from fedpriv.runs.figures import format_epsilon as format_epsilon
    from fedpriv.runs.files import is_alive as is_alive
    from fedpriv.runs.files import marked_alive as marked_alive
    from fedpriv.runs.files import refuse_second as refuse_second
    from fedpriv.runs.show import write_report as write_report
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
