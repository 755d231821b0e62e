"""The pages that show a run: terminal, report, live page, notebook, and MLflow, TensorBoard or Weights & Biases.

A tracker is told by a process of its own, which follows the run's folder and reads the tables there. So it knows
nothing that is not released, and whatever becomes of it or of the tracker's server, the run goes on. `tracker` says
what is logged, as pure functions of the tables, and what a tracker must do; one file each does it. `following` starts
the process and is its program.

>>> from fedpriv.runs.show._tracker import configuration, parameters, round_points
>>> parameters(configuration({"model": "/home/anna/my-model", "rank": 4, "labels": ["yes", "no"], "out": "/srv/run"}))
{'model': 'my-model', 'rank': 4, 'labels': 'yes, no'}
>>> round_points([{"round": 3, "test_accuracy": 0.75, "epsilon_local_max": float("inf")}])
[MetricPoint(metric='test/accuracy', value=0.75, round=3)]
"""
