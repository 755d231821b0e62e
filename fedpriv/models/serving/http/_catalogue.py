"""The names that a server answers to: its variants, the base and aliases; and who may use which of them."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedpriv.errors import InputError
from fedpriv.models.serving.http.refusals import unknown_model
from fedpriv.models.serving.http.tokens import Token
from fedpriv.models.serving.requests import BASE

if TYPE_CHECKING:
    from fedpriv.models.serving.scheduler import Scheduler

PUBLIC_BASE: Mapping[str, Any] = {
    "is_base": True,
    "note": "the public base model: no holder's record went into it, and reading it costs nobody anything",
}
"""The card of the base; it has no epsilon, since there is nobody whom one would protect."""

_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Catalogue:
    """The names of one server.

    A token may use an alias if it may use the variant that the alias stands for: another name opens nothing.

    Args:
        serving: has the variants.
        aliases: {alias: the variant that it stands for}.

    Raises:
        InputError: an alias is malformed or a variant's name, or stands for none of the variants.
    """

    def __init__(self, serving: Scheduler, aliases: Mapping[str, str]) -> None:
        self._serving, self._aliases = serving, dict(aliases)
        self._created = int(time.time())
        for alias, variant in aliases.items():
            if not _ALIAS.fullmatch(alias):
                raise InputError(f"alias = {alias!r}: must be letters, digits, '.', '_' and '-', at most 64")
            if alias in serving.names:
                raise InputError(f"alias = {alias!r}: is the name of a variant; give another")
            if variant not in serving.names:
                raise InputError(f"alias = {f'{alias}={variant}'!r}: there is no variant {variant!r}")

    def resolve(self, token: Token, name: str) -> str:
        """The variant that a name stands for.

        Raises:
            RefusalError: it stands for none, or the token may not use it; the two look the same.
        """
        variant = self._aliases.get(name, name)
        if not self.may(token, variant):
            raise unknown_model(name)
        return variant

    def may(self, token: Token, variant: str) -> bool:
        """Whether a variant is loaded and the token may use it."""
        return token.allows(variant) and variant in self._serving.names

    def allowed(self, token: Token) -> list[str]:
        """The variants that the token may use, in order."""
        return [name for name in self._serving.names if token.allows(name)]

    def entries(self, token: Token) -> list[dict[str, Any]]:
        """These variants and their aliases, as OpenAI's API lists models."""
        aliases = [alias for alias, variant in self._aliases.items() if self.may(token, variant)]
        return [self.entry(name) for name in (*self.allowed(token), *aliases)]

    def entry(self, name: str) -> dict[str, Any]:
        """A variant or an alias, as OpenAI's API lists models."""
        found = {"id": name, "object": "model", "created": self._created, "owned_by": "fedpriv"}
        if self.is_base(name):
            found["is_base"] = True
        if name in self._aliases:
            found["alias_of"] = self._aliases[name]
        return found

    def is_base(self, name: str) -> bool:
        """Whether this is the base itself."""
        return name == BASE and self._serving.has_base
