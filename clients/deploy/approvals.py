"""Which code may run on the node: the SHA-256 of each bundle that its operator has looked at."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

from clients.deploy.folder import Node
from fedpriv.deployment.flower import FlowerError, environment, program_folder
from fedpriv.errors import InputError

# Of this checkout, whose bundle `flwr run` sends.
ROOT = Path(__file__).resolve().parents[2]

_DIGEST = re.compile(r"[0-9a-f]{64}")


def approved(file: Path) -> frozenset[str]:
    """The digests of a file, one a line; what follows `#` is a comment.

    Raises:
        InputError: the file is missing, or a line holds something else.
    """
    if not file.is_file():
        raise InputError(f"{file}: no such file; make the folder with `init` first")
    found = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    for number, text in enumerate(found, start=1):
        if text and not _DIGEST.fullmatch(text):
            raise InputError(f"{file}: line {number} = {text!r}: must be a SHA-256 of 64 lowercase hex digits")
    return frozenset(filter(None, found))


def approve(node: Node, digest: str) -> bool:
    """Whether the digest is new: from now on the bundle may run on this node.

    Raises:
        InputError: it is no SHA-256 in hex.
    """
    if not _DIGEST.fullmatch(digest):
        raise InputError(f"FAB_HASH = {digest!r}: must be a SHA-256 of 64 lowercase hex digits")
    if digest in approved(node.approved):
        return False
    text = node.approved.read_text()
    with node.approved.open("a") as file:
        file.write(f"{'' if text.endswith(chr(10)) or not text else chr(10)}{digest}\n")
    return True


def bundle_digest(checkout: Path = ROOT) -> str:
    """SHA-256 of the bundle that `flwr run` would send from this checkout as it is now.

    Raises:
        FlowerError: it cannot be bundled.
    """
    with tempfile.TemporaryDirectory(prefix="fedpriv-bundle-") as folder:
        done = subprocess.run(
            [str(program_folder() / "flwr"), "build", "--app", str(checkout)],
            cwd=folder,
            env=environment(Path(folder) / "flower"),
            capture_output=True,
            text=True,
            check=False,
        )
        bundles = list(Path(folder).glob("*.fab"))
        if done.returncode or len(bundles) != 1:
            raise FlowerError(f"flwr build: {' '.join((done.stderr or done.stdout).split())}")
        return hashlib.sha256(bundles[0].read_bytes()).hexdigest()


def uncommitted(checkout: Path = ROOT) -> list[str]:
    """Bundled files that differ from the last commit; none where the checkout is none of git's."""
    done = subprocess.run(
        ["git", "status", "--porcelain", "--", "clients", "server", "pyproject.toml", "README.md", "LICENSE"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    return [line[3:] for line in done.stdout.splitlines()]
