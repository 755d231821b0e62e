"""How long to wait before asking again for what may be there at any moment."""

from __future__ import annotations

_SHARE = 0.1


def pause(waited: float, *, shortest: float, longest: float) -> float:
    """Seconds until the next question: a tenth of the time already waited, within bounds.

    What comes after a wait of t is therefore seen at 1.1 t or at t + `shortest`, unless `longest` cuts that short.

    Args:
        waited: seconds since the wait began, >= 0.
        shortest: that a pause lasts, in seconds.
        longest: the same; where the two conflict, it counts.
    """
    return min(longest, max(shortest, _SHARE * waited))
