"""Bearer tokens: a TOML file holds for each its digest, never the token, and the variants that it may use.

[[token]]
name = "clinic"
sha256 = "9f86d0..."
variants = ["global", "round-*"]
metrics = false
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PATTERN = re.compile(r"[A-Za-z0-9._=+*?\[\]!-]{1,100}")


@dataclass(frozen=True, kw_only=True)
class Token:
    """The rights of the bearer of a token.

    Attributes:
        sha256: of the token, in hexadecimal digits.
        variants: names, or patterns with `*`, `?` and `[...]`, of the variants that it may use.
        metrics: whether it may read /metrics, which tells how much all others ask.

    Raises:
        InputError: one of them is malformed.
    """

    name: str
    sha256: str
    variants: tuple[str, ...]
    metrics: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(f"name = {self.name!r}: must be letters, digits, '.', '_' and '-', at most 64")
        if not _DIGEST.fullmatch(self.sha256):
            raise InputError(f"sha256 of token {self.name!r}: must be 64 hexadecimal digits in lower case")
        for pattern in self.variants:
            if not _PATTERN.fullmatch(pattern):
                raise InputError(f"variants = {pattern!r}: must be a variant's name, or a pattern such as 'round-*'")

    def allows(self, variant: str) -> bool:
        """Whether it may use the variant."""
        return any(fnmatchcase(variant, pattern) for pattern in self.variants)


# Who asks a server without tokens.
ANYONE = Token(name="anyone", sha256="0" * 64, variants=("*",), metrics=True)


class Tokens:
    """The tokens in a file, which may be read again while the server runs (see `read`); None lets anyone do all."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._tokens = () if path is None else read(path)

    @property
    def are_required(self) -> bool:
        """Whether a client needs one."""
        return self._path is not None

    def reload(self) -> int:
        """Read the file again (see `read`) and return the number of tokens; if it is wrong, those of before stay."""
        if self._path is not None:
            self._tokens = read(self._path)
        return len(self._tokens)

    def bearer(self, authorization: Sequence[bytes]) -> Token | None:
        """The token of a request; all digests are compared, in constant time.

        Args:
            authorization: the values of the headers of that name. Several say nothing: who would be meant?
        """
        if not self.are_required:
            return ANYONE
        scheme, _, secret = authorization[0].partition(b" ") if len(authorization) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(secret.strip()).hexdigest()
        found = [token for token in self._tokens if hmac.compare_digest(token.sha256, digest)]
        return found[0] if found and scheme.lower() == b"bearer" else None


def read(path: Path) -> tuple[Token, ...]:
    """The tokens in a file; InputError if it is missing, malformed, open to others, or has a name or digest twice."""
    tokens = tuple(_token(path, entry) for entry in _entries(path))
    for values in ([token.name for token in tokens], [token.sha256 for token in tokens]):
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise InputError(f"{path}: two tokens have {twice[0]!r}; names and digests are unique")
    return tokens


def add_new(path: Path, name: str, variants: Sequence[str], *, metrics: bool = False) -> str:
    """A new random token, whose digest is added to the file; it is written nowhere else.

    Args:
        path: of the file, which is created if it is missing; what else stands there stays as it is.

    Raises:
        InputError: see `Token` and `read`; or the file has a token of that name.
    """
    import tomli_w

    from fedpriv.files import read_text, replace_file

    existing = read(path) if path.exists() else ()
    if name in {token.name for token in existing}:
        raise InputError(f"name = {name!r}: {path} has a token of that name; give another, or delete its entry")
    secret = f"fedpriv-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    token = Token(name=name, sha256=digest, variants=tuple(variants), metrics=metrics)
    before = read_text(path) if path.exists() else ""
    # As one `[[token]]`, which may follow others; tomli_w would write a short list of tables as an inline array.
    entry = f"[[token]]\n{tomli_w.dumps(asdict(token))}"
    separator = "" if not before or before.endswith("\n") else "\n"
    replace_file(path, f"{before}{separator}{entry}".encode(), mode=0o600)
    return secret


def _entries(path: Path) -> list[dict[str, Any]]:
    """The tables of a file that only its owner can open."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                mode = stat.S_IMODE(status.st_mode)
                raise InputError(f"{path}: mode {mode:04o} lets others at the tokens; run chmod 600 on it")
            values = tomllib.loads(file.read().decode("utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; it should hold tokens") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid TOML ({error})") from None
    entries = values.pop("token", [])
    if values or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{path}: must hold [[token]] tables and nothing else")
    return entries


def _token(path: Path, entry: dict[str, Any]) -> Token:
    """A token from its table; its digest is never repeated."""
    types = {"name": str, "sha256": str, "variants": list, "metrics": bool}
    if odd := sorted(set(entry) - set(types)):
        raise InputError(f"{path}: a token has {odd[0]!r}; it may have {', '.join(types)}")
    for key, kind in types.items():
        if not isinstance(entry.get(key, False if kind is bool else None), kind):
            raise InputError(f"{path}: {key} of a token must be a {kind.__name__}")
    if not all(isinstance(pattern, str) for pattern in entry["variants"]):
        raise InputError(f"{path}: variants of token {entry['name']!r} must be names")
    return Token(**{**entry, "variants": tuple(entry["variants"])})
