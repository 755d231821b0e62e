"""How long to wait before asking again for what may be there at any moment."""

from __future__ import annotations

_SHARE = 0.1
_SHORTEST_SECONDS = 0.05


def pause(waited: float, *, longest: float) -> float:
    """Seconds until the next question: a tenth of the time already waited, so what comes is seen at most that late.

    Args:
        waited: seconds since the wait began, >= 0.
        longest: that a pause may last, in seconds, >= 0.
    """
    return min(longest, max(_SHORTEST_SECONDS, _SHARE * waited))
