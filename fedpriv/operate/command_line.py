"""Command lines of a deployment: the settings of a folder, errors and exit codes, and systemd units.

Settings are a frozen dataclass stored as TOML. A unit is text, and takes from its service all that the service does not
need.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError

from fedpriv import config
from fedpriv.errors import FlowerError, InputError, LedgerError
from fedpriv.files import new_folder, write_new
from fedpriv.operate.processes import UTF8
from fedpriv.privacy.ledger import reader
from fedpriv.texts import VERSION, escape_what_a_terminal_lacks, printable

Settings = TypeVar("Settings")

# Those below are root's.
_FIRST_FREE_PORT = 1024
_CAPABILITIES = "CapabilityBoundingSet", "AmbientCapabilities"

_SQLITE = b"SQLite format 3\0"

UnitFolder = Annotated[Path | None, typer.Option("--out", help="Folder for the files; without it they are printed.")]


# What none of these services does. No PrivateDevices: a GPU is a device.
_HARDENING = """\
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateMounts=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
LockPersonality=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
UMask=0077"""


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
    values = config.read(path)
    check_version(path, values)
    return validated(settings_type, values, prefix=f"{path}: ", **extra)


def check_version(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse, with an InputError, a file of another version than 1, which one that names none has."""
    if (version := values.get("version", 1)) != 1:
        raise InputError(
            f"{path}: is version {version!r}; this is fedpriv {VERSION}, which reads 1: use the fedpriv "
            "that wrote it, or make it again"
        )


def validated(settings_type: type[Settings], values: Mapping[str, Any], *, prefix: str = "", **extra: Any) -> Settings:
    """The settings with these values; an InputError after the prefix names one that is missing or wrong."""
    try:
        return settings_type(**values, **extra)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # our own validators name key and value themselves
            raise InputError(prefix + first["msg"].removeprefix("Value error, ")) from None
        key = str(first["loc"][0])
        value = f" = {values[key]!r}" if key in values else ""
        if isinstance(values.get(key), dict):  # a section of the file
            key = ".".join(map(str, first["loc"]))
            value = "" if first["type"] == "missing" else f" = {first['input']!r}"
        raise InputError(f"{prefix}{key}{value}: {first['msg'].lower()}") from None


def run_command_line(app: typer.Typer, name: str) -> None:
    """Run a command line: a user's mistake gives one line on stderr and exit code 2, any other failure exit code 1."""
    escape_what_a_terminal_lacks()
    try:
        app(prog_name=name)
    except ValueError as error:
        typer.echo(f"error: {printable(error)}", err=True)
        sys.exit(2)
    except (FlowerError, LedgerError, OSError) as error:
        typer.echo(f"error: {printable(error)}", err=True)
        sys.exit(1)


def compare(told: Collection[str], asked: Mapping[str, str], known: Collection[str] = ()) -> None:
    """Refuse what people have not compared by telephone.

    Without `told`, on a terminal, the person there is asked.

    Args:
        told: fingerprints as somebody has read them out.
        asked: {who reads it out: fingerprint that is to be compared}.
        known: other fingerprints that may be told.

    Raises:
        InputError: names what was not confirmed, or a fingerprint that stands for nothing here.
    """
    given = {text.strip().upper() for text in told}
    if strange := given - {*asked.values(), *known}:
        raise InputError(f"--fingerprint = {min(strange)}: nothing here has it; one may be forged, so ask again")
    for who, own in asked.items():
        if given or not sys.stdin.isatty():
            if own not in given:
                raise InputError(f"--fingerprint: let {who} read it to you; here it is {own}")
        elif not typer.confirm(f"Does {who} read you {own}?"):
            raise InputError(f"{who}: is not confirmed, so nothing is done; ask for the file again")


def back_up(folder: Path, out: Path, *, leaves_out: Collection[str], elsewhere: Collection[Path] = ()) -> int:
    """Copy a kit's folder, also while it is in use, into a new one for its owner alone; return the number of files.

    What tells of charges is copied before the ledgers, so that no copy of these lacks what the others show.

    Args:
        folder: of a node or coordinator.
        out: the new folder.
        leaves_out: patterns of paths within the folder, such as `*.log*`; of a folder, all that is in it goes.
        elsewhere: files outside of the folder, which stand in the copy by their names.

    Raises:
        InputError: out exists, or lies in the folder.
        LedgerError: a ledger is broken.
    """
    if out.absolute().is_relative_to(folder.absolute()):
        raise InputError(f"--out = {out}: lies in {folder}; give a folder elsewhere, on another disk at best")
    names = {
        path: str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
    }
    names = {path: name for path, name in names.items() if not any(fnmatch(name, each) for each in leaves_out)}
    names |= {path: path.name for path in elsewhere if path.is_file()}
    databases = set(filter(_is_database, names))
    # Those of a database's own: its copy has a head of its own, and what its log holds.
    left = {
        path.with_name(path.name + suffix) for path in databases for suffix in ("-wal", "-shm", "-journal", ".head")
    }
    with new_folder(out) as new:
        for inner in folder.iterdir():
            if inner.is_dir() and not inner.is_symlink():  # also one of which nothing is kept
                (new / inner.name).mkdir(mode=0o700)
        # A head before its file: it may be behind, and never ahead.
        for path in sorted(names.keys() - left, key=lambda path: (path in databases, path.suffix != ".head", path)):
            copy = new / names[path]
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path in databases and path.with_name(f"{path.name}.head").exists():
                with reader.reading(path) as db:
                    reader.write_copy(db, copy)
            elif path in databases:
                with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(copy)) as target:
                    db.backup(target)
                copy.chmod(0o600)
            else:
                with suppress(FileNotFoundError):  # deleted meanwhile, as older checkpoints are
                    shutil.copy2(path, copy)
    return len(names.keys() - left)


def _is_database(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def give_units(units: Sequence[Unit], out: Path | None) -> None:
    """Print units, or write them, all or none, and say how they are started; InputError if they cannot be written."""
    if out is None:
        typer.echo("\n".join(f"# {unit.name}.service\n{unit.text()}" for unit in units), nl=False)
        return
    for path in _write_units(units, out):
        typer.echo(f"wrote {path}")
    typer.echo(f"next: systemctl daemon-reload && systemctl enable --now {' '.join(unit.name for unit in units)}")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A service in the foreground, restarted when it fails.

    Attributes:
        description: one line.
        command: absolute path of a program, and its arguments.
        prepared_by: a command that root runs before each start; empty for none.
        variables: its environment, besides what systemd gives.
        writable: what it may write; the rest of the file system is read-only, or not seen.
        read_only: what within that it may only read.
        hidden: what it must not even read.
        networked: whether it has any network; without, Unix sockets are all that it reaches.
        port: that it listens on; below 1024, root alone could do so without a capability.
        after: further units to start first.
    """

    name: str
    description: str
    command: Sequence[str]
    prepared_by: Sequence[str] = ()
    folder: Path
    user: str
    variables: Mapping[str, str]
    writable: Sequence[Path]
    read_only: Sequence[Path] = ()
    hidden: Sequence[Path] = ()
    networked: bool = True
    port: int = _FIRST_FREE_PORT
    after: Sequence[str] = ()

    def text(self) -> str:
        """The unit's file; InputError if a path or a value holds a line break or another control character."""
        after = " ".join(["network-online.target" if self.networked else "local-fs.target", *self.after])
        lines = [
            *("[Unit]", f"Description={_escaped(self.description)}", f"After={after}"),
            *(["Wants=network-online.target"] if self.networked else []),
            *(f"Wants={name}" for name in self.after),
            "# A service that waits for somebody, for its registration for instance, is never given up.",
            "StartLimitIntervalSec=0",
            *("", "[Service]", "Type=exec"),
            *([f"ExecStartPre=+{_command_line(self.prepared_by)}"] if self.prepared_by else []),
            f"ExecStart={_command_line(self.command)}",
            f"WorkingDirectory={_escaped(str(self.folder))}",
            f"User={_escaped(self.user)}",
            *(f"Environment={_quoted(f'{name}={value}')}" for name, value in {**UTF8, **self.variables}.items()),
            *("Restart=on-failure", "RestartSec=10", "TimeoutStopSec=90", "KillMode=mixed"),
            # What is left must see and say that memory ran out: systemd would end it first, and start it as if new.
            *("OOMPolicy=continue", _HARDENING),
            *(f"{name}={'CAP_NET_BIND_SERVICE' * (self.port < _FIRST_FREE_PORT)}" for name in _CAPABILITIES),
            *([] if self.networked else ["PrivateNetwork=yes"]),
            f"RestrictAddressFamilies=AF_UNIX{' AF_INET AF_INET6' if self.networked else ''}",
            *(f"ReadWritePaths={_quoted(str(path))}" for path in self.writable),
            *(f"ReadOnlyPaths={_quoted(str(path))}" for path in self.read_only),
            *(f"InaccessiblePaths={_quoted(f'-{path}')}" for path in self.hidden),
            *("", "[Install]", "WantedBy=multi-user.target", ""),
        ]
        return "\n".join(lines)


def unit_name(service: str, folder: Path) -> str:
    """The name of a service's unit for a folder, of all its path: `fedpriv-superlink-srv-federation`."""
    return f"fedpriv-{service}-{re.sub(r'[^A-Za-z0-9_.]', '-', str(folder.absolute()).strip('/'))}"


def _write_units(units: Sequence[Unit], out: Path) -> list[Path]:
    """Write each unit as NAME.service, none of them if one cannot be written."""
    if not out.is_dir():
        raise InputError(f"--out = {out}: no such folder")
    files = {out / f"{unit.name}.service": unit.text().encode() for unit in units}
    for path in files:
        if path.exists():
            raise InputError(f"{path}: exists; give another folder, or move it away first")
    for path, content in files.items():
        write_new(path, content)
    return list(files)


def _command_line(arguments: Sequence[str]) -> str:
    return " ".join(_quoted(argument).replace("$", "$$") for argument in arguments)


def _quoted(text: str) -> str:
    escaped = _escaped(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _escaped(text: str) -> str:
    if not text.isprintable():
        raise InputError(f"{text!r}: holds a control character, which no unit can name")
    return text.replace("%", "%%")
