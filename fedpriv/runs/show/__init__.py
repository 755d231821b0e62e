"""Reports: the page of a run, its plots and tables, and the way numbers are shown.

What bounds a risk is rounded up, and no epsilon is shown without its delta:

>>> from fedpriv.runs.show import format_bytes, format_epsilon
>>> print(format_epsilon(1.8213, 1e-5), format_bytes(1_230_000), sep="; ")
ε = 1.83 at δ = 1e-5; 1.23 MB
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.runs.show.report_page import write_report as write_report
    from fedpriv.runs.show.tables import format_bound as format_bound
    from fedpriv.runs.show.tables import format_bytes as format_bytes
    from fedpriv.runs.show.tables import format_delta as format_delta
    from fedpriv.runs.show.tables import format_epsilon as format_epsilon
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
