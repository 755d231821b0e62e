"""The error for what a user can mend: one line with the name, the value and what would be right."""


class InputError(ValueError):
    """A configuration key, file, column or record that cannot be used; command lines print it and exit with 2."""


class TooFewClientsError(RuntimeError):
    """Fewer clients answered a round than the run needs; command lines print it and exit with 1."""


class LedgerError(RuntimeError):
    """A ledger that cannot be used, so that nothing may be released; command lines print it and exit with 1."""


class StoreError(RuntimeError):
    """A store of variants that is damaged, in use or cannot be written; command lines print it and exit with 1."""
