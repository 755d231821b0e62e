"""Approvals of code that may run on a machine: the SHA-256 of each app bundle (FAB) that its operator has approved."""

import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
import tomllib
import zipfile
from collections.abc import Iterator, Set
from io import BytesIO
from pathlib import Path

from fedpriv.errors import FlowerError, InputError
from fedpriv.files import read_text, replace_file
from fedpriv.operate.flower import environment, program_folder

# Flower's own, whose lines an operator reads.
log = logging.getLogger("flwr")

# Two tasks of one bundle may begin at once.
_INSTALLING = threading.Lock()

_DIGEST = re.compile(r"[0-9a-f]{64}")


def approved(file: Path) -> frozenset[str]:
    """The digests in a file, one per line, after `#` a comment; InputError if it is missing, or a line is neither."""
    if not file.is_file():
        raise InputError(f"{file}: no such file; make the folder with `init` first")
    lines = [line.partition("#")[0].strip() for line in read_text(file).splitlines()]
    for number, text in enumerate(lines, start=1):
        if text and not _DIGEST.fullmatch(text):
            raise InputError(f"{file}: line {number} = {text!r}: must be a SHA-256 of 64 lowercase hex digits")
    return frozenset(filter(None, lines))


def is_approved(content: bytes, file: Path) -> bool:
    """Whether a bundle's bytes are approved; a file that cannot be read approves nothing."""
    digest = hashlib.sha256(content).hexdigest()
    try:
        is_known = digest in approved(file)
    except (OSError, ValueError) as error:
        log.error("approved-fabs: %s", error)
        return False
    if not is_known:
        log.error("refused: the bundle %s is not approved; review it, then add it to %s", digest, file)
    return is_known


def approve(file: Path, digest: str) -> bool:
    """Allow the bundle with this digest, and return whether it is new; InputError for a bad digest or file."""
    if not _DIGEST.fullmatch(digest):
        raise InputError(f"FAB_HASH = {digest!r}: must be a SHA-256 of 64 lowercase hex digits")
    if digest in approved(file):
        return False
    text = read_text(file)
    with file.open("a", encoding="utf-8") as opened:
        opened.write(f"{'' if text.endswith(chr(10)) or not text else chr(10)}{digest}\n")
    return True


def install(content: bytes, folder: Path) -> None:
    """Make a folder hold a bundle's files and nothing else; it executes what it finds there, and compares nothing.

    Files that are right stay as they are, so that other tasks of the same bundle go on.

    Args:
        content: an approved bundle.
        folder: where Flower installs it.

    Raises:
        InputError: a file of the bundle would lie outside the folder.
    """
    with zipfile.ZipFile(BytesIO(content)) as bundle:
        names = [name for name in bundle.namelist() if not name.endswith("/") and Path(name).parts[0] != ".info"]
        files = {folder / name: bundle.read(name) for name in names}
    if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise InputError(f"{outside[0]!r}: must be a path within the bundle")
    folders = {parent for file in files for parent in file.parents}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _INSTALLING, tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as removed:
        for path in [folder, *_within(folder, folders)]:
            is_right = (
                path.is_dir()
                if path in folders
                else path in files and path.is_file() and path.read_bytes() == files[path]
            )
            if os.path.lexists(path) and (path.is_symlink() or not is_right):
                # At once: a task that runs may be writing there.
                path.rename(Path(tempfile.mkdtemp(dir=removed), path.name))
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                replace_file(path, text)


def _within(folder: Path, folders: Set[Path]) -> Iterator[Path]:
    """The paths in a folder: of these folders all, of others and of links no more than their own path."""
    for path in folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ():
        yield path
        if path in folders:
            yield from _within(path, folders)


def bundle_digest(app: Path) -> str:
    """SHA-256 of `bundle_of` a folder of a Flower app."""
    return hashlib.sha256(bundle_of(app)).hexdigest()


def bundle_of(app: Path) -> bytes:
    """The bundle that `flwr run` would send from this folder of an app as it is now; FlowerError if there is none."""
    with tempfile.TemporaryDirectory(prefix="fedpriv-bundle-") as made:
        folder = Path(made)
        for file in _bundled(app):
            copy = folder / "app" / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(app / file, copy)
        done = subprocess.run(
            [str(program_folder() / "flwr"), "build", "--app", str(folder / "app")],
            cwd=folder,
            env=environment(folder / "flower"),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        bundles = list(folder.glob("*.fab"))
        if done.returncode or len(bundles) != 1:
            raise FlowerError(f"flwr build: {' '.join((done.stderr or done.stdout).split())}")
        return bundles[0].read_bytes()


def _bundled(app: Path) -> Iterator[Path]:
    """The files, links aside, that Flower asks for when it bundles an app; it would look through a clone's .venv too.

    None but those that decide what is bundled if the app's settings cannot be read, of which Flower then tells.
    """
    try:
        settings = tomllib.loads(read_text(app / "pyproject.toml"))
        patterns = settings["tool"]["flwr"]["app"].get("fab-include", ["**/*"])
        found = [file for pattern in patterns for file in app.glob(pattern)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        found = []
    whole = app.resolve()
    for name in dict.fromkeys(file.relative_to(app) for file in (app / "pyproject.toml", app / ".gitignore", *found)):
        if (app / name).is_file() and (app / name).resolve() == whole / name:
            yield name


def note_on(checkout: Path) -> str:
    """A line on bundled files that differ from the last commit; empty if none does, or without git or a repository."""
    if shutil.which("git") is None or not (checkout / ".git").exists():
        return ""
    done = subprocess.run(
        ["git", "status", "--porcelain", "--", "clients", "server", "pyproject.toml", "README.md", "LICENSE"],
        cwd=checkout,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    files = [line[3:] for line in done.stdout.splitlines()]
    return f"note: {len(files)} bundled files differ from the last commit, starting with {files[0]}" if files else ""
