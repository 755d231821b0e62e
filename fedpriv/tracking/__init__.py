"""A run's figures in MLflow, TensorBoard or Weights & Biases, as they are released.

A process of its own follows the run's folder and reads the tables there, so it knows nothing that is not released, and
whatever becomes of it or of the tracker's server, the run goes on. `logged` says what is logged, as pure functions of
the tables; `protocol` what a tracker must do; one file each does it; `follower` reads the folder; `process` is the
process and `following` its other side, in the program that runs the federation.

>>> from fedpriv.tracking.logged import configuration, parameters, round_points
>>> parameters(configuration({"model": "/home/anna/my-model", "rank": 4, "labels": ["yes", "no"], "out": "/srv/run"}))
{'model': 'my-model', 'rank': 4, 'labels': 'yes, no'}
>>> round_points([{"round": 3, "test_accuracy": 0.75, "epsilon_local_max": float("inf")}])
[Point(metric='test/accuracy', value=0.75, round=3)]
"""
