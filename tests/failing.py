"""A function in the place of another that fails in a test."""

from collections.abc import Callable
from typing import NoReturn

DISK_IS_FULL = OSError(28, "No space left on device")


def failing(error: Exception) -> Callable[..., NoReturn]:
    """Raises the error whenever it is called."""

    def fail(*_arguments: object, **_options: object) -> NoReturn:
        raise error

    return fail
