"""Studies: models that are trained, measured and checked to show what a part of the library does.

`python -m simulations.studies.NAME` runs one; what all of them share is in `harness`.
"""
