"""The means to run a federation across machines, for coordinator and data holder: keys, approvals, checks."""
