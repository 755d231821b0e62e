"""The history of what a node's operator decides: who changed which file, when and how, chained by hashes.

`history.jsonl` in the node's folder has a line for each change of a file of settings, approvals or peers. A command
notes what it changes. What else has changed since the last line was changed by hand, or by a command that was killed;
the vault, or the next command, notes it as found. A line holds the values that changed, so the values before a change
by hand are known without a copy of the file.

A history never stops a node: where a change cannot be noted, the log says so, and `doctor` what is wrong. Like a
ledger, it has a head, by which lines that are missing at the end are noticed; who can write both files can replace
both, unless the head's digest is kept elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pwd
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fedpriv.errors import LedgerError
from fedpriv.files import owner_for, replace_file, sync_folder
from fedpriv.privacy.ledger import head_file
from fedpriv.privacy.ledger.entries import chained_digest
from fedpriv.privacy.ledger.reader import NODE
from fedpriv.texts import printable

log = logging.getLogger(__name__)

# vault.toml, policy.toml, approved-models.toml, node.toml and application.toml, which tells of new keys; and the rest.
_DECIDED = ("*.toml", "approved-fabs", "coordinator.pub", "peers/*.pub")

_FOUND = "found by "


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Noted:
    """A change of a file, as one line of the history.

    Attributes:
        number: 1, 2, 3, ...
        time: UTC, ISO 8601: of the command, or when the change was found.
        uid: of the Unix user who ran the command, or found the change.
        user: its name; empty if it has none.
        command: that made the change, such as `approve-peers`; or `found by` what found it.
        file: its path within the folder.
        old: SHA-256 of its content before; None if it did not exist.
        new: SHA-256 of its content since; None if it was deleted.
        values: {key: [before, since]} of a TOML file's keys, or of another file's lines; None where there is no such
            key. Empty for a file that cannot be read as TOML.
        digest: SHA-256 of the previous line's digest and everything above, in hex.
    """

    number: int
    time: str
    uid: int
    user: str
    command: str
    file: str
    old: str | None
    new: str | None
    values: dict[str, tuple[Any, Any]]
    digest: str = ""

    def chained_digest(self, previous: str) -> str:
        """The digest that this line must have, given that of the previous one."""
        return chained_digest(previous, {name: value for name, value in asdict(self).items() if name != "digest"})

    def lines(self) -> Iterator[str]:
        """Lines that tell an operator of the change; values are JSON, and control characters escaped."""
        kind = "is new" if self.old is None else "is deleted" if self.new is None else "is changed"
        by_hand = ", by hand or by a command that was killed" if self.command.startswith(_FOUND) else ""
        told = [f"{self.time}  {self.user} ({self.uid})  {self.command}: {self.file} {kind}{by_hand}"]
        told.append(f"    SHA-256 {self.old or 'none'} -> {self.new or 'none'}")
        told += [f"    {key}: {_shown(before)} -> {_shown(since)}" for key, (before, since) in self.values.items()]
        yield from map(printable, told)


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def path_in(folder: Path) -> Path:
    """The file of a node's history."""
    return folder / "history.jsonl"


def read(folder: Path) -> list[Noted]:
    """The lines of a node's history, in order; an empty list if it has none yet.

    Raises:
        LedgerError: a line was edited, moved or lost, the head is missing, or a file cannot be read.
    """
    path, previous = path_in(folder), head_file.EMPTY_CHAIN
    try:
        # Before the lines: it may name one that is appended now.
        head = head_file.read_beside(path)
        texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path}: cannot be read ({error})") from None
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = Noted(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            raise LedgerError(f"{path}: broken chain: line {number} is damaged") from None
        if line.number != number or line.digest != line.chained_digest(previous):
            raise LedgerError(f"{path}: broken chain: line {number} was changed, or one before it is missing")
        previous = line.digest
        lines.append(line)
    _check_head(head, lines, path)
    return lines


def _check_head(text: str, lines: list[Noted], path: Path) -> None:
    """Refuse lines of which some are missing at the end. A crash leaves the head behind them, never ahead."""
    name, head = head_file.head_path(path).name, head_file.parse(text)
    if head is None:
        if lines or text.strip("\0"):
            raise LedgerError(f"{path}: {name} is missing or unreadable, so lines may be missing at the end")
        return
    digests = [head_file.EMPTY_CHAIN, *(line.digest for line in lines)]
    if head[0] > len(lines) or digests[head[0]] != head[1]:
        raise LedgerError(f"{path}: broken chain: ends at line {len(lines)}, but {name} has seen line {head[0]}")


def summary(folder: Path) -> str:
    """One line on a node's history, and on what it lacks.

    Raises:
        LedgerError: as `read`; or a file that it tells of cannot be read.
    """
    lines = read(folder)
    try:
        ahead = ", ".join(change[0] for change in _changes(lines, _contents(folder)))
    except OSError as error:
        raise LedgerError(f"{error.filename}: {error.strerror}") from None
    found = f"{len(lines)} changes, chain intact, head {lines[-1].digest}" if lines else "none yet"
    return printable(f"{found}; the next start notes that there are changes of {ahead}" if ahead else found)


@contextmanager
def noting(folder: Path, command: str) -> Iterator[None]:
    """Note what the block changes as made by this command, and what had changed before as found by it."""
    note(folder, _FOUND + command)
    try:
        yield
    finally:
        note(folder, command)


def watch(folder: Path) -> Callable[[], None]:
    """A function that notes what has changed since it was called last; it costs little where nothing has."""
    seen: dict[str, bytes] = {}

    def look() -> None:
        nonlocal seen
        with _never_fatal():
            if (now := _contents(folder)) != seen:
                seen = now  # noted or not: a full disk is told once
                note(folder, f"{_FOUND}vault")

    return look


def note(folder: Path, command: str) -> None:
    """Note every file that is not as the last lines have it, durably; nothing that goes wrong stops the caller.

    Args:
        folder: of the node; any other has no history.
        command: see `Noted`.
    """
    with _never_fatal():
        if not (folder / NODE).is_file():
            return
        with _locked(path_in(folder)) as head:
            lines = read(folder)
            if new := list(_appended(lines, folder, command)):
                _write(folder, [*lines, *new], head)


@contextmanager
def _never_fatal() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever is wrong with the history, it decides nothing
        log.error("a change of settings or approvals is not noted: %s; `doctor` says what is wrong", error)


def _appended(lines: list[Noted], folder: Path, command: str) -> Iterator[Noted]:
    """The lines to append."""
    uid, now = os.getuid(), datetime.now(UTC).isoformat(timespec="milliseconds")
    user = _name_of(uid)
    previous = lines[-1].digest if lines else head_file.EMPTY_CHAIN
    for number, (file, old, new, values) in enumerate(_changes(lines, _contents(folder)), start=len(lines) + 1):
        line = Noted(
            number=number,
            time=now,
            uid=uid,
            user=user,
            command=command,
            file=file,
            old=old,
            new=new,
            values=values,
        )
        previous = line.chained_digest(previous)
        yield replace(line, digest=previous)


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


_Change = tuple[str, str | None, str | None, dict[str, tuple[Any, Any]]]


def _changes(lines: list[Noted], contents: Mapping[str, bytes]) -> Iterator[_Change]:
    """File, digests and values, before and since, of each file that is not as the last lines have it."""
    digests: dict[str, str | None] = {}
    values: dict[str, dict[str, Any]] = {}
    for line in lines:
        digests[line.file] = line.new
        values.setdefault(line.file, {}).update({key: since for key, (_, since) in line.values.items()})
    for file in sorted({*digests, *contents}):
        content = contents.get(file)
        new = None if content is None else hashlib.sha256(content).hexdigest()
        if digests.get(file) != new:
            yield file, digests.get(file), new, _differences(values.get(file, {}), _values(file, content or b""))


def _differences(before: dict[str, Any], since: dict[str, Any] | None) -> dict[str, tuple[Any, Any]]:
    """{key: values before and since}; none if those since cannot be read."""
    pairs = {} if since is None else {key: (before.get(key), since.get(key)) for key in sorted({*before, *since})}
    return {key: pair for key, pair in pairs.items() if json.dumps(pair[0]) != json.dumps(pair[1])}


def _contents(folder: Path) -> dict[str, bytes]:
    """{path within the folder: content} of the files in which the operator decides."""
    files = [path for pattern in _DECIDED for path in folder.glob(pattern) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _values(file: str, content: bytes) -> dict[str, Any] | None:
    """{key: value} of a TOML file, or {line: true} of another one; None if it cannot be read."""
    try:
        text = content.decode("utf-8-sig")
        if file.endswith(".toml"):
            return dict(_flat("", json.loads(json.dumps(tomllib.loads(text), default=str))))
    except (ValueError, RecursionError):
        return None
    return {line: True for line in text.splitlines() if line.strip() and not line.startswith("#")}


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys of all sections, each behind the names of its sections."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield prefix + key, value


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """A descriptor of the history's head, which no other process has at the same time.

    Raises:
        LedgerError: another process keeps it for too long.
        OSError: it cannot be opened.
    """
    head, owner = head_file.opened(path), owner_for(path.parent)
    try:
        if owner is not None:
            os.fchown(head, owner.uid, owner.gid)
        head_file.lock(head, path)
        yield head
    finally:
        os.close(head)


def _write(folder: Path, lines: list[Noted], head: int) -> None:
    """Replace the file as a whole, so that no crash leaves half a line, and then its head."""
    path = path_in(folder)
    if not path.exists():
        head_file.begin(head, path)
    text = "".join(f"{json.dumps(asdict(line))}\n" for line in lines)
    replace_file(path, text.encode(), mode=0o600, owner=owner_for(folder))
    sync_folder(path)
    head_file.write(head, lines[-1].number, lines[-1].digest)
