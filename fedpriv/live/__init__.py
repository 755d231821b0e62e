"""The page of a run or a sweep while it goes on: what its folder shows, sent to a browser piece by piece.

A page can be read before there is anything to see; `fedpriv watch` serves it:

>>> from pathlib import Path
>>> from fedpriv.live.pages import LivePage
>>> pieces = LivePage(Path("runs/tomorrow")).read()
>>> print(pieces["head"].strip(), "Nothing here yet" in pieces["notes"])
<h1>tomorrow</h1> True
"""
