"""Errors that a user can fix: one line with the name, the value and what would be right."""


class InputError(ValueError):
    """A configuration key, file, column or record cannot be used; command lines print it and exit with 2."""


class TooFewClientsError(RuntimeError):
    """Fewer clients answered a round than the run needs; command lines print it and exit with 1."""


class DiskFullError(RuntimeError):
    """A run cannot write its folder or ledger for want of space; command lines print it and exit with 1."""


class LedgerError(RuntimeError):
    """A ledger cannot be used, so nothing may be released; command lines print it and exit with 1."""


class StoreError(RuntimeError):
    """A store of variants is damaged, in use or not writable; command lines print it and exit with 1."""


class FlowerError(RuntimeError):
    """Flower failed or refused; command lines print it and exit with 1."""
