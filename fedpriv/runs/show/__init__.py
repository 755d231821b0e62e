"""The pages that show a run: terminal, report, notebook, and MLflow, TensorBoard or Weights & Biases.

A tracker is told in a thread, which reads the run's folder. So it knows nothing that is not released, and whatever
becomes of it or of the tracker's server, the run goes on. `_tracker` says what is logged, as pure functions of the
tables, and what a tracker must do; one file each does it, and `_tracking` has them told.

>>> from fedpriv.runs.show._tracker import configuration, parameters, round_points
>>> parameters(configuration({"model": "/home/anna/my-model", "rank": 4, "labels": ["yes", "no"], "out": "/srv/run"}))
{'model': 'my-model', 'rank': 4, 'labels': 'yes, no'}
>>> round_points([{"round": 3, "test_accuracy": 0.75, "epsilon_local_max": float("inf")}])
[MetricPoint(metric='test/accuracy', value=0.75, round=3)]
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.runs.show._progress_page import PageWriter as PageWriter
    from fedpriv.runs.show._progress_page import kept_page as kept_page
    from fedpriv.runs.show._progress_page import sweep_page as sweep_page
    from fedpriv.runs.show._report_page import write_paper as write_paper
    from fedpriv.runs.show._report_page import write_report as write_report
    from fedpriv.runs.show._result import Run as Run
    from fedpriv.runs.show._result import open_run as open_run
    from fedpriv.runs.show._result import page_part as page_part
    from fedpriv.runs.show._sweeps import watch as watch
    from fedpriv.runs.show._tables import TextTable as TextTable
    from fedpriv.runs.show._tables import accuracy_table as accuracy_table
    from fedpriv.runs.show._tables import changes as changes
    from fedpriv.runs.show._tables import client_table as client_table
    from fedpriv.runs.show._tables import joining_table as joining_table
    from fedpriv.runs.show._tables import language_table as language_table
    from fedpriv.runs.show._tables import views_text as views_text
    from fedpriv.runs.show._terminal import plain_table as plain_table
    from fedpriv.runs.show._terminal import show_status as show_status
    from fedpriv.runs.show._tracker import check_installed as check_installed
    from fedpriv.runs.show._tracker import run_name as run_name
    from fedpriv.runs.show._trackers import TRACKERS as TRACKERS
    from fedpriv.runs.show._tracking import SweepTeller as SweepTeller
    from fedpriv.runs.show._tracking import tracked as tracked
    from fedpriv.runs.show._tracking import tracked_run as tracked_run
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
