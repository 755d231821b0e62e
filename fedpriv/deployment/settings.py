"""The settings of a coordinator's or node's folder: a frozen record that a TOML file holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fedpriv import config
from fedpriv.errors import InputError

Settings = TypeVar("Settings")


def read_settings(kind: type[Settings], path: Path, **more: Any) -> Settings:
    """The settings of a file.

    Args:
        kind: a pydantic dataclass.
        path: TOML with its fields.
        more: fields that the file does not hold.

    Raises:
        InputError: the file is missing, or a key or value in it is wrong; one line that names it.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; make the folder with `init` first")
    return checked(kind, config.read(path), where=f"{path}: ", **more)


def checked(kind: type[Settings], values: Mapping[str, Any], *, where: str = "", **more: Any) -> Settings:
    """The settings with these values.

    Raises:
        InputError: a value is missing or wrong; one line that names it.
    """
    try:
        return kind(**values, **more)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # a validator of ours names key and value itself
            raise InputError(where + first["msg"].removeprefix("Value error, ")) from None
        key = str(first["loc"][0])
        value = f" = {values[key]!r}" if key in values else ""
        raise InputError(f"{where}{key}{value}: {first['msg'].lower()}") from None


def split_address(address: str, *, name: str = "address") -> tuple[str, int]:
    """Host and port of HOST:PORT, an IPv6 address in brackets; errors call it by the name.

    Raises:
        InputError: it is none.
    """
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (colon and bare and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise InputError(f"{name} = {address!r}: must be HOST:PORT, for instance fl.example.org:9093")
    if (":" in bare) != host.startswith("["):
        raise InputError(f"{name} = {address!r}: an IPv6 address must stand in brackets, as in [::1]:9093")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
