"""The settings of a coordinator's or node's folder: a frozen dataclass stored as TOML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fedpriv import config
from fedpriv.errors import InputError

Settings = TypeVar("Settings")


def read_settings(settings_type: type[Settings], path: Path, **extra: Any) -> Settings:
    """The settings in a file.

    Args:
        settings_type: a pydantic dataclass.
        path: TOML with its fields.
        extra: fields that the file does not contain.

    Raises:
        InputError: the file is missing, or a key or value in it is wrong; one line that names it.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; make the folder with `init` first")
    return validated(settings_type, config.read(path), prefix=f"{path}: ", **extra)


def validated(settings_type: type[Settings], values: Mapping[str, Any], *, prefix: str = "", **extra: Any) -> Settings:
    """The settings with these values; error messages start with the prefix.

    Raises:
        InputError: a value is missing or wrong; one line that names it.
    """
    try:
        return settings_type(**values, **extra)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # our own validators name key and value themselves
            raise InputError(prefix + first["msg"].removeprefix("Value error, ")) from None
        key = str(first["loc"][0])
        value = f" = {values[key]!r}" if key in values else ""
        raise InputError(f"{prefix}{key}{value}: {first['msg'].lower()}") from None


def split_address(address: str, *, name: str = "address") -> tuple[str, int]:
    """Host and port of HOST:PORT, where an IPv6 address is in brackets.

    Args:
        address: HOST:PORT.
        name: what error messages call it.

    Raises:
        InputError: the address has another form.
    """
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (colon and bare and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise InputError(f"{name} = {address!r}: must be HOST:PORT, for instance fl.example.org:9093")
    if (":" in bare) != host.startswith("["):
        raise InputError(f"{name} = {address!r}: an IPv6 address must be in brackets, as in [::1]:9093")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, where an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
