"""The page of a run or a sweep while it goes on: what its folder shows, sent to a browser piece by piece."""
