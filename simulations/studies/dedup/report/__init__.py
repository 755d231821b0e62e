"""The study's part of results/dedup.md: each table and figure of Guan et al. 2025 beside the same made here.

>>> from simulations.studies.dedup.report.markdown import beside, table
>>> print(table(("", "C.R. %, validations"), [("A1", beside((41.26, 99), (28.5, 44)))]))
|  | C.R. %, validations |
| --- | --- |
| A1 | 41.3, 99 (28.5, 44) |
"""
