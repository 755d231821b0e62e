"""Errors that a user can fix: one line with the name, the value and what would be right. And one that nobody can."""

import errno

# In the messages of libraries that raise RuntimeError when an allocation fails.
_OUT_OF_MEMORY = ("allocate memory", "out of memory", "not enough memory", "bad_alloc", "bad allocation")


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


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type where it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def is_memory_failure(error: BaseException | None) -> bool:
    """Whether this error, or one that it followed, says that memory ran out: then no record alone has caused it."""
    if error is None:
        return False
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY))
        or is_memory_failure(error.__cause__ or error.__context__)
    )
