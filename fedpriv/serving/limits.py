"""How much a server takes on at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fedpriv.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a server's engine; all >= 1.

    Attributes:
        memory_bytes: of the variants in memory.
        waiting: requests that no pass has begun with.
        rows: of a pass.
        pass_tokens: of a pass, with padding; a longer text has a pass of its own.
        client_tokens: of a pass, with padding, that are of one client with a name; a longer text may come first alone.
        cached_tokens: whose keys and values are kept, with padding; no prompt and answer may have more.
        turn_tokens: that an answer gets before it makes room for others that wait.

    Raises:
        InputError: one is smaller.
    """

    memory_bytes: int = 2 * 10**9
    waiting: int = 256
    rows: int = 32
    pass_tokens: int = 2048
    client_tokens: int = 512
    cached_tokens: int = 16_384
    turn_tokens: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise InputError(f"{field.name} = {getattr(self, field.name)}: must be at least 1")
